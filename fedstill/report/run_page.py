"""HTML report of a run: one file, ``report.html``, that contains everything and loads nothing.

The page runs no script, and its content security policy forbids loading anything, so it can be opened, mailed
and archived anywhere. Names and texts come from users and nodes, so everything is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedstill.core.progress import PROGRESS_FILE
from fedstill.core.run_writer import write_text
from fedstill.core.text_format import NOT_MEASURED, format_bytes, format_count, format_seconds, join_names
from fedstill.protocol.method import METHODS
from fedstill.protocol.payload_kinds import KNOWN_KINDS
from fedstill.report import figures, images, live_page, privacy_section, run_tables
from fedstill.report.records import (
    LOCAL,
    MAIN,
    RESULT_FILE,
    STANDALONE,
    AuditTotals,
    Result,
    RunFiles,
    find_record,
    model_rows,
)
from fedstill.report.run_tables import interval_label, interval_text
from fedstill.report.tables import (
    Fact,
    bytes_markup,
    format_difference,
    format_record,
    format_value_without_unit,
    format_with_unit,
    lowercase_title,
    template_environment,
)

MAX_PANELS = 24  # small plots of local training

# Label counts of nodes by kind of task: heading, description, and whether counts sum to the number of
# examples.
LABEL_COUNTS: Mapping[str, tuple[str, str, bool]] = {
    "": ("Classes at each node", "Training examples per class and node", True),
    "labels": (
        "Findings at each node",
        "Training examples per finding and node (an example may have several findings, or none)",
        False,
    ),
    "map": (
        "Classes in each node's images",
        "Training images per class and node; each image is divided among classes in proportion to its pixels",
        True,
    ),
    "image": ("Images at each node", "Training images per node", True),
    "number": ("Rows at each node", "Training rows per node", True),
    "time": (
        "Follow-up times at each node",
        "Training rows per node for which each time interval was observed",
        False,
    ),
}


def write_report(folder: Path) -> Path:
    """Write the report of a run into its folder and return the path of ``report.html``.

    The report of an unfinished run shows its progress.

    Args:
        folder: folder of the run.

    Raises:
        RunFolderError: a file is broken or missing.

    ``write_report(Path("runs/fediod"))`` returns ``Path("runs/fediod/report.html")``.
    """
    target = folder / "report.html"
    write_text(target, render_run_page(folder))
    return target


def render_run_page(folder: Path, nonce: str = "") -> str:
    """Return the HTML report of a run; of an unfinished run, its progress.

    Only ``result.json`` is required; content of other missing files is shown as "not measured". The same
    files give the same page.

    Args:
        folder: folder of the run.
        nonce: nonce of the refresh script of a served page.

    Raises:
        RunFolderError: a file is broken or missing.
    """
    if not (folder / RESULT_FILE).exists() and (folder / PROGRESS_FILE).exists():
        return live_page.render_progress_page(folder, nonce)
    template = template_environment().get_template("page.html.j2")
    return template.render(_template_variables(RunFiles.read(folder)))


def _template_variables(run: RunFiles) -> dict[str, Any]:
    folder, result, log = run.folder, run.result, run.metrics
    config, columns = folder / "config.toml", run_tables.columns_table(folder, result)
    samples, curve = images.generated_samples(folder), figures.read_learning_curve(run)
    label_counts = LABEL_COUNTS.get(result.kind, LABEL_COUNTS[""])
    local = figures.local_losses(run)
    generated = bool(samples) or (columns is not None and len(columns.columns) > 1)
    omitted = list(local)[MAX_PANELS : len(log.local_losses)]
    shown_local = {name: values for name, values in local.items() if name not in omitted}
    return {
        "result": result,
        "lead": lead_sentence(result),
        "details": detail_sentences(result, run.audit, generated=generated),
        "context": _data_sentences(result),
        "tiles": _tiles(result),
        "metric": {"title": result.metric.title, "name": lowercase_title(result.metric.title)},
        "models": model_rows(result),
        "interval_label": interval_label(result),
        "models_table": run_tables.models_table(result),
        "curve": curve,
        "curve_plot": curve and figures.responsive_svg(partial(figures.plot_learning_curve, curve), "curve"),
        "processes": "each node was a separate process" if result.link else "all nodes ran in one process",
        "label_counts": label_counts,
        "label_counts_table": run_tables.label_counts_table(
            result, label_counts[1], with_sum=label_counts[2]
        ),
        "findings": run_tables.findings_table(result),
        "sites": run_tables.site_tables(result),
        "confusion": run_tables.confusion_table(result),
        "reliability": result.calibration
        and figures.responsive_svg(partial(figures.plot_reliability, result.calibration), "reliability"),
        "pictures": images.build_image_section(folder, result),
        "count_noise": privacy_section.count_noise_text(result),
        "samples": samples,
        "columns": columns,
        "server_losses": _loss_panels(log.server_losses),
        "local_losses": _loss_panels(shown_local, share_axis=True),
        "has_centralized_loss": bool(log.centralized_losses),
        "omitted_nodes": len(omitted),
        "traffic": run_tables.traffic_table(result, run.audit),
        "time_table": run_tables.time_table(result),
        "time_bar": run_tables.time_bar(result),
        "message_cost": run_tables.message_cost_text(result),
        "privacy": privacy_section.build_privacy_section(result, run.audit),
        "leakage": privacy_section.build_leakage_section(folder, result),
        "nodes": run_tables.nodes_table(result),
        "facts": run_facts(result),
        "config": config.read_text(encoding="utf-8", errors="replace") if config.exists() else None,
    }


def _tiles(result: Result) -> list[Fact]:
    metric, name, value = result.metric, lowercase_title(result.metric.title), result.value
    up, down, test_examples = result.bytes.up, result.bytes_down, result.data.test
    total, distillation = result.seconds.total, result.seconds.distillation
    titles = {"student": f"Student {name}", "virtual": f"{metric.title} of the average",
              "ensemble": f"Ensemble {name}", "nodes": f"Mean {name} of local models"}  # fmt: skip
    traffic, directions, share = None, "", ""
    if up is not None and down is not None:
        from_nodes, to_nodes = (_with_nobreak_spaces(format_bytes(count)) for count in (up, down))
        traffic, directions = bytes_markup(up + down), f"{from_nodes} from nodes, {to_nodes} to nodes"
    if distillation is not None:
        phase = "in rounds" if result.iteration_unit == "round" else "distillation"
        share = f"of which {_with_nobreak_spaces(format_seconds(distillation))} {phase}"
    return [
        Fact(
            titles[result.evaluated_model],
            None if value is None else format_with_unit(metric, value),
            ""
            if test_examples is None
            else f"on {_test_data_text(result, test_examples)}{_interval_text(result)}",
        ),
        _gain_text(result),
        privacy_section.privacy_tile(result),
        Fact("Traffic", traffic, directions),
        Fact("Time", None if total is None else re.sub(r"(?<=\d) ", "\u00a0", format_seconds(total)), share),
    ]


def _gain_text(result: Result) -> Fact:
    """Return the gain over standalone training; without a standalone baseline, the local models' metric."""
    metric, first = result.metric, model_rows(result)[0]
    standalone = find_record(result.records, STANDALONE, metric.key)
    if result.evaluated_model == "nodes" or (standalone is None and first.model == LOCAL):
        std = None if first.main_record is None else first.main_record.std
        note = "" if std is None else f"\u00b1 {format_value_without_unit(metric, std)} over nodes"
        return Fact(
            "Local models", None if first.value is None else format_with_unit(metric, first.value), note
        )
    gain, note = None, ""
    if standalone is not None:
        note = f"a standalone node reaches {_with_nobreak_spaces(format_record(metric, standalone))}"
        if result.value is not None:
            difference = format_difference(metric, result.value - standalone.value)
            gain = Markup('{} <span class="unit">points</span>').format(difference)
    return Fact("Gain over standalone", gain, note)


def _test_data_text(result: Result, examples: int) -> str:
    cases, case = result.data.test_cases, result.data.case
    if cases is None:
        return f"{examples:,} test examples"
    return f"{format_count(cases, f'test {case}')} ({examples:,} examples)"


def _interval_text(result: Result) -> str:
    main = find_record(result.records, MAIN, result.metric.key)
    ends = None if main is None else main.interval
    return (
        f"; {result.intervals.level}% interval {_with_nobreak_spaces(interval_text(result.metric, ends))}"
        if ends and result.intervals
        else ""
    )


def _with_nobreak_spaces(text: str) -> str:
    """Return a value with no-break spaces, so that no line breaks before its unit or deviation."""
    return text.replace(" ", "\u00a0")


def _data_sentences(result: Result) -> str | None:
    """Return sentences on data, split and public data; a run from Python counts its nodes' examples."""
    by_node = [node.examples for node in result.nodes]
    known = [count for count in by_node if count is not None]
    train, test = result.data.train, result.data.test
    if train is None and known and len(known) == len(by_node):
        train = sum(known)
    noise = privacy_section.count_noise_text(result) if result.is_distributed else ""
    by_part = {f"training (as reported by nodes, {noise})" if noise else "training": train, "test": test}
    counts = [f"{count:,} {label}" for label, count in by_part.items() if count is not None]
    size = f"{' and '.join(counts)} examples" if counts else ""
    shape = result.data.shape
    if size and shape:
        are_features = result.data.schema or result.options.get("features.backbone")
        noun = " features" if are_features else " tokens"
        size += " of " + " \u00d7 ".join(str(side) for side in shape) + (noun if len(shape) == 1 else "")
    data = ", ".join(part for part in (result.data.name, size) if part)

    split = result.split.about or result.split.name
    values = result.split.values
    if values and len(values) == len(by_node):
        pairs = ", ".join(
            f"{node.name} has {value}" for node, value in zip(result.nodes, values, strict=True)
        )
        split = f"by {result.split.column}: {pairs}"
    note = result.data.note
    public, examples = result.public.name, result.public.examples
    if public is not None and examples is not None:
        public += f", {examples:,} examples"
    sentences = [
        data and f"Data: {data}",
        split and f"Split over the nodes: {split}",
        note and note[0].upper() + note[1:],
        public and f"Public data: {public}",
        result.public.note,
    ]
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence) or None


def _loss_panels(
    series: Mapping[str, Mapping[float, float | None]], share_axis: bool = False
) -> list[dict[str, Any]]:
    lines = {name: figures.finite_points(values) for name, values in series.items()}
    all_values = [value for line in lines.values() for _, value in line]
    span = (min(all_values), max(all_values)) if share_axis and all_values else None
    panels = []
    for name, values in series.items():
        line, plot = lines[name], None
        last = values[max(values)]
        if line:
            with figures.plot_style():
                plot = figures.to_svg(figures.plot_loss(name, line, span), f"panel {name} {span}")
        last_text = "not finite" if last is None else f"{last:.3g}"
        not_finite = len(values) - len(line)
        panels.append({"name": name, "last": last_text, "plot": plot, "not_finite": not_finite})
    return panels


# --- sentences and facts on a run -----------------------------------------------------------------------


SMALL_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def lead_sentence(result: Result) -> str:
    """Return one sentence on what the nodes trained, and with how many queries."""
    count = len(result.nodes) or result.split.nodes
    nodes = "one node" if count == 1 else "nodes" if count is None else f"{count_word(count)} nodes"
    subject = nodes.capitalize()
    central, queries = result.evaluated_model, result.queries
    if central == "nodes" and queries == 0:
        return f"{subject} trained {'its model' if count == 1 else 'their models'} standalone."
    if queries is None:
        means = "by responding to queries"
    elif queries == 0:
        means = "without any query"
    else:
        means = f"by responding to {count_word(queries)} {'query' if queries == 1 else 'queries'}"
    predicate, end = {
        "student": ("trained one global model", ""),
        "virtual": ("trained local models", "; their average was computed only for evaluation"),
        "ensemble": ("form an ensemble without a global model; they prepared it", ""),
        "nodes": ("trained local models", ""),
    }[central]
    return f"{subject} {predicate} {means}{end}."


def detail_sentences(result: Result, audit: AuditTotals | None = None, generated: bool = False) -> str:
    """Return sentences on the queries and on the releases, as far as the bytes by kind support them.

    Args:
        result: the run's result.
        audit: totals of the audit log, to count queries with inputs.
        generated: whether the server generated the inputs of queries.
    """
    return " ".join(filter(None, (_inputs_sentence(result, audit, generated), _release_sentence(result))))


def _inputs_sentence(result: Result, audit: AuditTotals | None, generated: bool) -> str:
    sent, queries = (result.bytes.by_kind or {}).get("inputs"), result.queries
    if sent is None or not sent.down or not queries:
        return ""
    inputs = "inputs generated by the server" if generated else "inputs sent by the server"
    by_name = result.queries_by_name
    if audit is not None:
        with_inputs = sum(by_name.get(name, 0) for name in audit.queries_with_inputs)
    else:
        with_inputs = queries if len(by_name) == 1 else 0
    if with_inputs == queries:
        return f"{'The query was' if queries == 1 else 'The queries were'} about {inputs}."
    if 0 < with_inputs < queries:
        start = f"{count_word(with_inputs)} of the {count_word(queries)} queries".capitalize()
        return f"{start} {'was' if with_inputs == 1 else 'were'} about {inputs}."
    return f"Some of the queries were about {inputs}."


def _release_sentence(result: Result) -> str:
    by_kind = result.bytes.by_kind
    if by_kind is None:
        return f"The releases of the nodes were {NOT_MEASURED}."
    released = {kind for kind, sums in by_kind.items() if sums.up}
    kinds = result.declared_payload_kinds()
    # Payload kinds that contain neither training examples nor models. The page makes no claims about other
    # kinds, nor about what a plug-in declares.
    described = kinds if result.method in METHODS.builtin else KNOWN_KINDS
    known = {kind for kind in by_kind if kind in described}
    models = {kind for kind in known if kinds[kind].category == "model"}
    responses = {
        kind for kind in known & released if kinds[kind].is_output or kinds[kind].category == "query"
    }
    from_maps = {kind for kind in known & released if kinds[kind].from_label_maps}
    if "private data" in released:
        return "The nodes released their training data."
    if "label maps" in released and not released - responses - from_maps:
        return "No node released images or models, but each released the label maps of its images."
    if released - responses - models:
        parameters = " They include model parameters." if released & models else ""
        return f"The releases of each node are listed below by payload kind.{parameters}"
    if released & models:
        names = join_names(sorted(released & models))
        sentence = f"No node released training data, but nodes released {names} of models."
    elif not by_kind:
        sentence = "No node released anything."
    elif models:
        sentence = "No node released training data; model parameters were sent to the nodes."
    else:
        sentence = "No node released training data or models."
    noise = privacy_section.count_noise_text(result)
    noise_text = f" ({noise})" if noise else ""
    if "label counts" in released:
        counts = "its number of examples per class"
        if result.kind == "time":
            counts = "its number of rows followed through each interval"
        sentence += f" Each node also released {counts}{noise_text}."
    elif "data sizes" in released:
        sentence += f" Each node released its number of examples{noise_text}."
    if revealing := privacy_section.nodes_revealing_sizes(result):
        sentence += (
            f" The exact number of records of {join_names(revealing)} follows from the privacy cost of "
            "training, "
            "which contains the sampling rate."
        )
    return sentence


def count_word(count: int) -> str:
    return SMALL_NUMBERS[count] if 0 <= count < len(SMALL_NUMBERS) else f"{count:,}"


# --- facts to reproduce the run -----------------------------------------------------------------------------


def _engine_text(result: Result) -> str | None:
    threads = result.engine.threads
    parts = [result.engine.backend, result.engine.batching, result.engine.device, result.engine.precision]
    if threads is not None:
        parts.append(format_count(threads, "thread"))
    return ", ".join(part for part in parts if part) or None


def _batching_lines(result: Result) -> list[str]:
    lines = []
    for phase, groups in result.engine.groups.items():
        sizes = [len(group) for group in groups]
        stacked = [size for size in sizes if size > 1]
        single = sizes.count(1)
        parts = []
        if stacked:
            group_count = f"{count_word(len(stacked))} group{'' if len(stacked) == 1 else 's'}"
            parts.append(f"{sum(stacked):,} nodes stacked in {group_count}")
        if single:
            parts.append(f"{format_count(single, 'node')} one by one")
        if parts:
            in_rounds = phase == "distillation" and result.iteration_unit == "round"
            name = "rounds" if in_rounds else phase.replace("_", " ")
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def run_facts(result: Result) -> list[Fact]:
    """Return what a reader needs to reproduce the run; runs from Python record fewer facts."""
    seconds = result.seconds
    by_phase = {
        "local training": seconds.local_training,
        "centralized": seconds.centralized,
        "rounds" if result.iteration_unit == "round" else "distillation": seconds.distillation,
    }
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    memory, date = result.peak_memory_mb, result.date or ""
    facts = [
        Fact("Seed", None if result.seed is None else str(result.seed)),
        Fact("Date", date.replace("T", " ", 1).replace("+00:00", " UTC")),
        Fact("Machine", result.machine),
        Fact("Engine", _engine_text(result)),
        Fact("Batching of nodes", "\n".join(_batching_lines(result))),
        Fact("Files", "\n".join(_file_lines(result))),
        Fact("Versions", versions or result.fedstill),
        Fact(
            "Time",
            ", ".join(
                f"{phase} {format_seconds(duration)}"
                for phase, duration in by_phase.items()
                if duration is not None
            ),
        ),
        Fact("Peak memory", None if memory is None else f"{memory:,.0f} MB"),
    ]
    return [fact for fact in facts if fact.value]


def _file_lines(result: Result) -> list[str]:
    if result.files is None:
        return []
    queries = result.files.queries
    size, inputs = format_bytes(queries.bytes), queries.public_inputs
    lines = [f"queries: {size} with {inputs:,} public inputs, SHA-256 {queries.sha256}"]
    for response in result.files.responses:
        verified = "verified" if response.key_known else "not verified"
        end = ""
        if response.asker_known is not None:
            end = f"; the node had {'' if response.asker_known else 'not '}verified the server's key"
        size = format_bytes(response.bytes)
        lines.append(f"{response.node}: {size}, signed by key {response.signed_by} ({verified}){end}")
    return lines
