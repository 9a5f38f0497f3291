"""A run in words: what happened and what left the nodes, and how, on what and by which files it ran."""

from __future__ import annotations

from fedstill.core.text_format import NOT_MEASURED, format_bytes, format_count, format_seconds, join_names
from fedstill.report import privacy_section
from fedstill.report.result import Result
from fedstill.report.run_files import AuditTotals
from fedstill.report.table_formats import Fact

SMALL_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def plain_sentence(result: Result, audit: AuditTotals | None = None, made_up: bool = False) -> str:
    """What happened, as far as the bytes by kind bear it out.

    ``made_up``: the server generated the inputs itself; ``audit`` tells which queries were about inputs.
    """
    count = len(result.nodes) or result.split.nodes
    if count is None:
        who = "Nodes, each with its own private data,"
    elif count == 1:
        who = "One node, with its own private data,"
    else:
        who = f"{count_word(count).capitalize()} nodes, each with its own private data,"

    central, asked = result.central, result.queries
    if central == "nodes" and asked == 0:
        return f"{who} trained {'its model' if count == 1 else 'their models'} alone. {_what_left(result)}"
    if asked is None:
        how = "by answering queries"
    elif asked == 0:
        how = "without answering any query"
    else:
        how = f"by answering {count_word(asked)} query{'' if asked == 1 else 's'}"
        how += _about_inputs(result, asked, audit, made_up)
    what, end = {
        "student": ("taught one central model", ""),
        "virtual": ("trained models of their own", "; the average of these was made only to be measured"),
        "ensemble": ("answer together, without any central model; they prepared this", ""),
        "nodes": ("trained models of their own", ""),
    }[central]
    return f"{who} {what} {how}{end}. {_what_left(result)}"


def _about_inputs(result: Result, asked: int, audit: AuditTotals | None, made_up: bool) -> str:
    sent = (result.bytes.by_kind or {}).get("inputs")
    if sent is None or not sent.down:
        return ""
    inputs = "inputs that the server made up" if made_up else "inputs that the server sent"
    names = result.queries_by_name
    if audit is not None:
        about = sum(names.get(name, 0) for name in audit.queries_with_inputs)
    else:
        about = asked if len(names) == 1 else 0
    if about == asked:
        return f" about {inputs}"
    if 0 < about < asked:
        return f", {count_word(about)} of them about {inputs}"
    return f", some of them about {inputs}"


def _what_left(result: Result) -> str:
    by_kind = result.bytes.by_kind
    if by_kind is None:
        return f"What left the nodes was {NOT_MEASURED}."
    left = {kind for kind, sums in by_kind.items() if sums.up}
    kinds = result.payload_kinds()
    # Kinds that carry neither a training example nor a model. Of any other kind, and of what a method that is
    # not ours says of its own, the page claims nothing.
    ours = {kind for kind in by_kind if kind in kinds and not kinds[kind].package}
    models = {kind for kind in ours if kinds[kind].category == "model"}
    responses = {kind for kind in ours & left if kinds[kind].is_output or kinds[kind].category == "query"}
    of_maps = {kind for kind in ours & left if kinds[kind].from_label_maps}
    if "private data" in left:
        return "The nodes' training data left them."
    if "label maps" in left and not left - responses - of_maps:
        return "No image and no model left a node, but the label maps of its images did."
    if left - responses - models:
        extra = " Parameters of models are among it." if left & models else ""
        return f"What left each node is listed below, kind by kind.{extra}"
    if left & models:
        sentence = f"No training data left a node, but {join_names(sorted(left & models))} of models did."
    elif not by_kind:
        sentence = "Nothing left a node."
    elif models:
        sentence = "No training data left a node; parameters of models were sent to the nodes."
    else:
        sentence = "No training data and no model left a node."
    noise = privacy_section.count_noise_text(result)
    count = f"how many ({noise})" if noise else "how many"
    if "label counts" in left:
        held = "examples of each class it holds"
        if result.kind == "time":
            held = "of its rows were followed through each interval"
        sentence += f" Beside its answers, each node told {count} {held}."
    elif "data sizes" in left:
        sentence += f" Each node told {count} examples it holds."
    if of := privacy_section.nodes_revealing_sizes(result):
        price = "from the price of what was learned, which has the share of records in a step"
        sentence += (
            f" How many {join_names(of)} {'hold' if of[1:] else 'holds'} in all follows exactly {price}."
        )
    return sentence


def count_word(count: int) -> str:
    return SMALL_NUMBERS[count] if 0 <= count < len(SMALL_NUMBERS) else f"{count:,}"


# --- how it ran ---------------------------------------------------------------------------------------------


def _engine(result: Result) -> str | None:
    threads = result.engine.threads
    parts = [result.engine.name, result.engine.device, result.engine.precision]
    if threads is not None:
        parts.append(format_count(threads, "thread"))
    return ", ".join(part for part in parts if part) or None


def _grouping(result: Result) -> list[str]:
    lines = []
    for phase, groups in result.engine.groups.items():
        sizes = [len(group) for group in groups]
        stacked = [size for size in sizes if size > 1]
        alone = sizes.count(1)
        parts = []
        if stacked:
            many = f"{count_word(len(stacked))} group{'' if len(stacked) == 1 else 's'}"
            parts.append(f"{sum(stacked):,} nodes stacked in {many}")
        if alone:
            parts.append(f"{format_count(alone, 'node')} one by one")
        if parts:
            in_rounds = phase == "distillation" and result.turn == "round"
            name = "rounds" if in_rounds else phase.replace("_", " ")
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def facts(result: Result) -> list[Fact]:
    """What else the result tells of the run; a run from Python records less."""
    spans = result.seconds
    seconds = {
        "local training": spans.local_training,
        "centralized": spans.centralized,
        "rounds" if result.turn == "round" else "distillation": spans.distillation,
    }
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    memory, date = result.peak_memory_mb, result.date or ""
    told = [
        Fact("Seed", None if result.seed is None else str(result.seed)),
        Fact("Date", date.replace("T", " ", 1).replace("+00:00", " UTC")),
        Fact("Machine", result.machine),
        Fact("Engine", _engine(result)),
        Fact("Nodes computed", "\n".join(_grouping(result))),
        Fact("Files", "\n".join(_files(result))),
        Fact("Versions", versions or result.fedstill),
        Fact(
            "Time",
            ", ".join(f"{of} {format_seconds(took)}" for of, took in seconds.items() if took is not None),
        ),
        Fact("Peak memory", None if memory is None else f"{memory:,.0f} MB"),
    ]
    return [fact for fact in told if fact.value]


def _files(result: Result) -> list[str]:
    if result.files is None:
        return []
    asked = result.files.queries
    size, inputs = format_bytes(asked.bytes), asked.public_inputs
    lines = [f"queries: {size} with {inputs:,} public inputs, SHA-256 {asked.sha256}"]
    for node in result.files.responses:
        known = "the node's own" if node.key_known else "which nobody compared"
        end = ""
        if node.asker_known is not None:
            end = f"; it had {'' if node.asker_known else 'not '}compared the server's key"
        size = format_bytes(node.bytes)
        lines.append(f"{node.node}: {size}, signed by key {node.signed_by}, {known}{end}")
    return lines
