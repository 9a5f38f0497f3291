"""The page of a run: one HTML file that holds everything and loads nothing.

A run's folder goes in, ``report.html`` comes out. The page runs no script and its own content
security policy forbids it to load anything, so it can be opened, mailed and archived anywhere.
Names and texts in the folder come from users and nodes: everything is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedstill.report import link, plots, privacy
from fedstill.report.files import Ledger, Traffic, read_ledger, read_metrics, read_result, read_samples
from fedstill.report.table import (
    CENTRAL,
    MISSING,
    accuracy_of,
    accuracy_text,
    central_of,
    comparison,
    human_bytes,
    human_seconds,
    listed,
    method_title,
    number,
    percent,
    pick,
    points,
    whole,
    words,
)

SMALL_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

# What each kind of message says, for a reader who has to answer for it.
KINDS = {
    "private data": "training examples themselves, as they are",
    "logits": "the score that a node's model gives each class, for each input it was asked about",
    "critic": "how unlike its own data a node's critic finds each input, part by part",
    "inputs": "the inputs that the server asked about",
    "gradients": "slopes of the server's loss, which tell it how to change its inputs",
    "label counts": "how many examples of each class a node holds",
    "logit range": "the largest score in a node's answers, which sets the steps they are rounded to",
    "data sizes": "how many examples a node holds",
    "indices": "which rows of the public data a question is about",
    "schedule": "the number of the round",
    "parameters": "the weights of a model",
    "extractor parameters": "the weights of a model but for its last part, the head",
    "head parameters": "the weights of a model's last part, which tells the classes apart",
    "generator parameters": "the weights of a network that makes inputs or features like the node's",
}
MODELS = {kind for kind in KINDS if kind.endswith("parameters")}
# Kinds that carry neither a training example nor a model. Of any other kind the page claims nothing.
ANSWERS = {
    "logits",
    "critic",
    "gradients",
    "label counts",
    "data sizes",
    "indices",
    "schedule",
    "logit range",
}

REFERENCE_STYLES = {
    "standalone mean": "dotted",
    "nodes' own models": "dotted",
    "teachers' ensemble": "dashed",
    "centralised": "solid",
}

MOST_PANELS = 24  # small plots of local training


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run's folder, from the files in it, and return its path.

    Only ``result.json`` must exist. What the other files would have shown is marked "not measured"
    where they are missing. The same files give the same bytes. Raises RunFolderError where a file
    cannot be read as what it should be.
    """
    result = read_result(folder / "result.json")
    page = environment().get_template("page.html.j2").render(_view(folder, result))
    target = folder / "report.html"
    target.write_text(page, encoding="utf-8", newline="\n")
    return target


def plain_sentence(result: Mapping[str, Any], ledger: Ledger | None = None, made_up: bool = False) -> str:
    """What happened, in words for people who do not know the method.

    It claims only what the bytes by kind bear out. ``made_up`` says that the server generated the
    inputs itself; ``ledger`` tells which questions were about inputs.
    """
    nodes = pick(result, "nodes")
    count = len(nodes) if isinstance(nodes, list) else whole(result, "split", "nodes")
    if count is None:
        who = "Nodes, each with its own private data,"
    elif count == 1:
        who = "One node, with its own private data,"
    else:
        who = f"{_count_word(count).capitalize()} nodes, each with its own private data,"

    central, asked = central_of(result), whole(result, "questions")
    if central == "nodes" and asked == 0:
        return f"{who} trained {'its model' if count == 1 else 'their models'} alone. {_what_left(result)}"
    if asked is None:
        how = "by answering questions"
    elif asked == 0:
        how = "without answering any question"
    else:
        how = f"by answering {_count_word(asked)} question{'' if asked == 1 else 's'}"
        how += _about_inputs(result, asked, ledger, made_up)
    what, end = {
        "student": ("taught one central model", ""),
        "virtual": ("trained models of their own", "; the average of these was made only to be measured"),
        "ensemble": ("answer together, without any central model; they prepared this", ""),
        "nodes": ("trained models of their own", ""),
    }[central]
    return f"{who} {what} {how}{end}. {_what_left(result)}"


def _about_inputs(result: Mapping[str, Any], asked: int, ledger: Ledger | None, made_up: bool) -> str:
    if not whole(result, "bytes", "by_kind", "inputs", "down"):
        return ""
    inputs = "inputs that the server made up" if made_up else "inputs that the server sent"
    names = pick(result, "questions_by_name")
    names = names if isinstance(names, Mapping) else {}
    if ledger is not None:
        about = sum(whole(names, name) or 0 for name in ledger.about_inputs)
    else:
        about = asked if len(names) == 1 else 0
    if about == asked:
        return f" about {inputs}"
    if 0 < about < asked:
        return f", {_count_word(about)} of them about {inputs}"
    return f", some of them about {inputs}"


def _what_left(result: Mapping[str, Any]) -> str:
    by_kind = pick(result, "bytes", "by_kind")
    if not isinstance(by_kind, Mapping):
        return f"What left the nodes was {MISSING}."
    left = {kind for kind in by_kind if whole(by_kind, kind, "up") != 0}
    if "private data" in left:
        return "The nodes' training data left them."
    if left - ANSWERS - MODELS:
        extra = " Parameters of models are among it." if left & MODELS else ""
        return f"What left each node is listed below, kind by kind.{extra}"
    if left & MODELS:
        sentence = f"No training data left a node, but {listed(sorted(left & MODELS))} of models did."
    elif not by_kind:
        sentence = "Nothing left a node."
    elif MODELS & set(by_kind):
        sentence = "No training data left a node; parameters of models were sent to the nodes."
    else:
        sentence = "No training data and no model left a node."
    count = "roughly, with noise, how many" if privacy.counts_are_noisy(result) else "how many"
    if "label counts" in left:
        sentence += f" Beside its answers, each node told {count} examples of each class it holds."
    elif "data sizes" in left:
        sentence += f" Each node told {count} examples it holds."
    return sentence


def _count_word(count: int) -> str:
    return SMALL_NUMBERS[count] if 0 <= count < len(SMALL_NUMBERS) else f"{count:,}"


# --- reading the folder ---


def environment() -> Environment:
    """The templates of this folder, with the words that pages use for figures."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["size"] = _size
    made.filters["count"] = lambda value: MISSING_MARK if value is None else f"{value:,}"
    made.filters["duration"] = lambda value: MISSING_MARK if value is None else human_seconds(value)
    made.filters["percent"] = lambda value: MISSING_MARK if value is None else percent(value)
    made.filters["known"] = lambda value: MISSING_MARK if value is None else value
    return made


MISSING_MARK = Markup('<span class="missing">{}</span>').format(MISSING)


def _size(count: int | None) -> Markup:
    """Bytes for people, with the exact number for whoever points at them."""
    if count is None:
        return MISSING_MARK
    return Markup('<span title="{:,} bytes">{}</span>').format(count, human_bytes(count))


def _view(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the template names, computed: the template decides only how it looks."""
    metrics = read_metrics(folder / "metrics.jsonl")
    ledger = read_ledger(folder / "ledger.jsonl")
    samples = read_samples(folder / "samples.safetensors")
    config = folder / "config.toml"
    rows = comparison(result)
    references = [
        (row.name, REFERENCE_STYLES[row.name], row.accuracy)
        for row in rows
        if row.accuracy is not None and not row.is_student
    ]
    line = sorted(metrics.accuracy.items())
    turn = words(result, "turn") or "step"
    # Where the nodes' models are trained before the first turn, theirs would be a flat line.
    own = sorted(metrics.own.items()) if turn == "round" and central_of(result) != "nodes" else []
    if own:
        references = [reference for reference in references if reference[0] != "nodes' own models"]
    central = CENTRAL[central_of(result)][0]
    local = list(metrics.local.items())[:MOST_PANELS]
    if metrics.centralised:
        local.append(("centralised", metrics.centralised))
    return {
        "title": method_title(result),
        "name": words(result, "name"),
        "sentence": plain_sentence(result, ledger, made_up=bool(samples)),
        "data_name": words(result, "data", "name"),
        "context": _context(result),
        "key_figures": _key_figures(result),
        "rows": [(row, accuracy_text(row), plots.accuracy_bar(row)) for row in rows],
        "references": references,
        "unmeasured": [row.name for row in rows if row.accuracy is None and not row.is_student],
        "accuracy_plot": plots.accuracy_plot(line, references, central, own, turn) if line else None,
        "central": central_of(result),
        # Neither a simulation nor a rehearsal, which read nodes' figures past their gates.
        "apart": "files" in result
        or ("link" in result and not (pick(result, "standalone") or pick(result, "local"))),
        "processes": _processes(result),
        "central_name": central,
        "turn": turn,
        "turns": whole(result, "turns"),
        "own": own[-1][1] if own else None,
        "own_title": "Accuracy alone" if _own_accuracies(result)[0] else "Accuracy of its own",
        "last_accuracy": line[-1][1] if line else None,
        "holdings": _holdings(result),
        "noisy_counts": privacy.counts_are_noisy(result),
        "samples": samples,
        "losses": _panels(list(metrics.losses.items())),
        "local": _panels(local, share_axis=True),
        "centralised_drawn": bool(metrics.centralised),
        "local_left_out": max(0, len(metrics.local) - MOST_PANELS),
        "traffic": _traffic(result, ledger),
        "link": link.parts(result),
        "link_bar": link.time_bar(link.parts(result)),
        "message_cost": link.message_cost(result),
        "events": link.events(result),
        "privacy": privacy.section(result, ledger),
        "nodes": _nodes(result),
        "command": words(result, "command"),
        "facts": _facts(result),
        "config": config.read_text(encoding="utf-8", errors="replace") if config.exists() else None,
    }


def _processes(result: Mapping[str, Any]) -> str:
    """Where the nodes of a simulation were."""
    return "each node was a process of its own" if "link" in result else "all nodes ran in one process"


def _key_figures(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    reached, alone = accuracy_of(result), number(result, "standalone", "accuracy", "mean")
    up, down = whole(result, "bytes", "up"), whole(result, "bytes", "down")
    total, distillation = number(result, "seconds", "total"), number(result, "seconds", "distillation")
    tests = whole(result, "data", "test")
    first = comparison(result)[0]
    first_text = _unbroken(accuracy_text(first))
    title = {"student": "Student accuracy", "virtual": "Accuracy of the average",
             "ensemble": "Ensemble accuracy", "nodes": "Mean accuracy of the nodes"}  # fmt: skip
    central = central_of(result)
    gain: dict[str, Any] = {
        "name": "Gain over standalone",
        "value": None if reached is None or alone is None else points(reached - alone),
        "unit": "points",
        "note": None if alone is None else f"a node alone reaches {first_text}",
    }
    if central == "nodes" or (alone is None and first.name == "nodes' own models"):
        gain = {
            "name": "Nodes' own models",
            "value": None if first.accuracy is None else percent(first.accuracy),
            "note": None if first.spread is None else f"\u00b1 {first.spread:.1f} over the nodes",
        }
    return [
        {
            "name": title[central],
            "value": None if reached is None else percent(reached),
            "note": None if tests is None else f"on {tests:,} test examples",
        },
        gain,
        {
            "name": "Crossed the wire",
            "value": None if up is None or down is None else _size(up + down),
            "note": None
            if up is None or down is None
            else f"{_unbroken(human_bytes(up))} left the nodes, {_unbroken(human_bytes(down))} came to them",
        },
        {
            "name": "Time",
            "value": None if total is None else human_seconds(total),
            "note": None
            if distillation is None
            else f"{_unbroken(human_seconds(distillation))} of it "
            + ("in rounds" if words(result, "turn") == "round" else "distillation"),
        },
    ]


def _unbroken(figure: str) -> str:
    """A figure that no line break parts from its unit or its spread: "71.8% ± 6.5" is one."""
    return figure.replace(" ", "\u00a0")


def _context(result: Mapping[str, Any]) -> str | None:
    """The data and how it was split, in sentences, as far as the result tells.

    A run from Python names no data set: then the nodes' own examples are counted.
    """
    held = [whole(node, "examples") for node in _node_records(result)]
    known = [count for count in held if count is not None]
    train, test = whole(result, "data", "train"), whole(result, "data", "test")
    if train is None and known and len(known) == len(held):
        train = sum(known)
    counts = [
        f"{count:,} {label}" for count, label in ((train, "training"), (test, "test")) if count is not None
    ]
    size = f"{' and '.join(counts)} examples" if counts else ""
    shape = pick(result, "data", "shape")
    if size and isinstance(shape, list) and shape:
        size += " of " + " \u00d7 ".join(str(side) for side in shape)
    what = ", ".join(part for part in (words(result, "data", "name"), size) if part)

    how, alpha = words(result, "split", "how"), number(result, "split", "alpha")
    if how is not None and alpha is not None:
        how += f", alpha\u00a0{alpha:g}"
    note = words(result, "data", "note")
    public, rows = words(result, "public", "name"), whole(result, "public", "examples")
    if public is not None and rows is not None:
        public += f", {rows:,} examples"
    sentences = [
        what and f"Data: {what}",
        how and f"Split over the nodes: {how}",
        note and note[0].upper() + note[1:],
        public and f"Public data: {public}",
        words(result, "public", "note"),
    ]
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence) or None


def _node_records(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nodes = pick(result, "nodes")
    return [node for node in nodes if isinstance(node, Mapping)] if isinstance(nodes, list) else []


def _node_name(place: int, node: Mapping[str, Any]) -> str:
    return words(node, "name") or f"node {place + 1}"


def _holdings(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The classes each node holds: names, and for each node the counts with a shade from 0 to 1."""
    held = []
    for place, node in enumerate(_node_records(result)):
        counts = pick(node, "label_counts")
        known = isinstance(counts, list) and bool(counts)
        held.append((_node_name(place, node), [whole({"n": n}, "n") for n in counts] if known else None))
    width = max((len(counts) for _, counts in held if counts), default=0)
    if width == 0:
        return None
    classes = pick(result, "data", "classes")
    names = [str(name) for name in classes[:width]] if isinstance(classes, list) else []
    names += [str(place) for place in range(len(names), width)]
    most = max(count or 0 for _, counts in held for count in counts or [])

    def cell(count: int | None) -> dict[str, Any]:
        # Even a single example gets a shade that can be told from none.
        shade = 0.08 + 0.84 * count / most if count else 0.0
        return {"count": count, "shade": f"{shade:.2f}", "strong": shade > 0.75}

    def row(name: str, counts: list[int | None] | None) -> dict[str, Any]:
        padded = [] if counts is None else counts + [None] * (width - len(counts))
        return {
            "name": name,
            "cells": [cell(count) for count in padded],
            "total": None if counts is None else sum(count or 0 for count in counts),
        }

    return {"classes": names, "nodes": [row(name, counts) for name, counts in held]}


def _panels(
    series: Sequence[tuple[str, Mapping[float, float | None]]], share_axis: bool = False
) -> list[dict[str, Any]]:
    """Small plots, one a series; with a shared axis, heights can be compared across them."""
    lines = [
        [(step, value) for step, value in sorted(values.items()) if value is not None] for _, values in series
    ]
    everything = [value for line in lines for _, value in line]
    span = (min(everything), max(everything)) if share_axis and everything else None
    return [
        {
            "name": name,
            "last": _last(values),
            "plot": plots.small_plot(name, line, span) if line else None,
            "lost": len(values) - len(line),
        }
        for (name, values), line in zip(series, lines, strict=True)
    ]


def _last(values: Mapping[float, float | None]) -> str | None:
    if not values:
        return None
    value = values[max(values)]
    return "not finite" if value is None else f"{value:.3g}"


def _traffic(result: Mapping[str, Any], ledger: Ledger | None) -> dict[str, Any]:
    """What left each node and what came to it, by kind where the ledger tells, else as sums."""
    records = {_node_name(place, node): node for place, node in enumerate(_node_records(result))}
    stored = pick(result, "bytes", "by_kind")
    by_kind = stored if isinstance(stored, Mapping) else {}
    sums: dict[str, Counter[str]] = {}
    for way in ("up", "down"):
        if ledger is None:
            sums[way] = Counter({str(kind): whole(by_kind, kind, way) or 0 for kind in by_kind})
        else:
            sums[way] = ledger.total(way)
    # The order of result.json, then whatever only the ledger knows.
    order = [str(kind) for kind in by_kind] + sorted((set(sums["up"]) | set(sums["down"])) - set(by_kind))
    kinds = {way: [kind for kind in order if sums[way][kind]] for way in ("up", "down")}

    strangers = sorted(set(ledger.nodes) - set(records)) if ledger else []
    rows = []
    for name in [*records, *strangers]:
        row: dict[str, Any] = {"name": name, "questions": None}
        for way in ("up", "down"):
            row[way] = [None] * len(kinds[way])
            row[f"{way}_total"] = whole(records.get(name), "bytes", way)
        if ledger is not None:
            traffic = ledger.nodes.get(name, Traffic())
            row["questions"] = len(traffic.questions)
            for way, counter in (("up", traffic.up), ("down", traffic.down)):
                row[way] = [counter[kind] for kind in kinds[way]]
                row[f"{way}_total"] = sum(counter.values())
        rows.append(row)

    totals = {way: whole(result, "bytes", way) for way in ("up", "down")}
    if ledger is not None:
        agrees = all(
            sum(sums[way].values()) == totals[way]
            and all(sums[way][kind] == (whole(by_kind, kind, way) or 0) for kind in order)
            for way in ("up", "down")
        )
        totals = {way: sum(sums[way].values()) for way in ("up", "down")}
    return {
        "kinds": kinds,
        "meanings": [
            (kind, KINDS[kind]) for kind in order if kind in KINDS and (kind in kinds["up"] + kinds["down"])
        ],
        "rows": rows,
        "sums": {way: [sums[way][kind] for kind in kinds[way]] for way in ("up", "down")},
        "totals": totals,
        "questions": whole(result, "questions"),
        "ledger": None if ledger is None else ("agrees" if agrees else "disagrees"),
    }  # fmt: skip


def _nodes(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    _, alone = _own_accuracies(result)
    nodes: list[dict[str, Any]] = [
        {
            "name": _node_name(place, node),
            "model": words(node, "model"),
            "parameters": whole(node, "parameters"),
            "examples": whole(node, "examples"),
            "alone": number({"accuracy": alone[place]}, "accuracy") if place < len(alone) else None,
        }
        for place, node in enumerate(_node_records(result))
    ]
    if pick(result, "student") is None and "student" in result:  # the method has no central model
        return nodes
    return [
        *nodes,
        {
            "model": words(result, "student", "model"),
            "parameters": whole(result, "student", "parameters"),
            "is_student": True,
            "accuracy": accuracy_of(result),
        },
    ]


def _own_accuracies(result: Mapping[str, Any]) -> tuple[bool, list[Any]]:
    """Whether the nodes' models were trained alone, and their accuracies."""
    stored = pick(result, "standalone", "accuracy", "per_node")
    if isinstance(stored, list):
        return True, stored
    at_the_end = pick(result, "local", "accuracy", "per_node")
    return "local" not in result, at_the_end if isinstance(at_the_end, list) else []


def _engine(result: Mapping[str, Any]) -> str | None:
    """The engine with what it ran on: "auto, cpu, float32, 1 thread"."""
    threads = whole(result, "engine", "threads")
    parts = [words(result, "engine", key) for key in ("name", "device", "precision")]
    if threads is not None:
        parts.append(f"{threads:,} thread{'' if threads == 1 else 's'}")
    return ", ".join(part for part in parts if part) or None


def _grouping(result: Mapping[str, Any]) -> list[str]:
    """How the engine computed the nodes, a sentence a phase."""
    phases = pick(result, "engine", "groups")
    lines = []
    for phase, groups in phases.items() if isinstance(phases, Mapping) else ():
        sizes = (
            [len(group) for group in groups if isinstance(group, list)] if isinstance(groups, list) else []
        )
        stacked = [size for size in sizes if size > 1]
        alone = sizes.count(1)
        parts = []
        if stacked:
            many = f"{_count_word(len(stacked))} group{'' if len(stacked) == 1 else 's'}"
            parts.append(f"{sum(stacked):,} nodes stacked in {many}")
        if alone:
            parts.append(f"{alone:,} node{'' if alone == 1 else 's'} one by one")
        if parts:
            in_rounds = phase == "distillation" and words(result, "turn") == "round"
            name = "rounds" if in_rounds else str(phase).replace("_", " ")
            lines.append(f"{name}: {', '.join(parts)}{_ratios(result, str(phase))}")
    return lines


def _ratios(result: Mapping[str, Any], phase: str) -> str:
    """What the engine measured before it chose, for each kind of node by the name of its first."""
    stored = pick(result, "engine", "stacked_over_one_by_one", phase)
    names = list(stored) if isinstance(stored, Mapping) else []
    measured = {str(name): ratio for name in names if (ratio := number(stored, name)) is not None}
    if not measured:
        return ""
    times = {name: f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}" for name, ratio in measured.items()}
    if len(times) == 1:
        return f" (stacked measured {next(iter(times.values()))} times as long)"
    each = ", ".join(f"{time} for {name} and its like" for name, time in times.items())
    return f" (stacked measured, times as long: {each})"


def _facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What else the result tells of the run; a run from Python records less."""
    seconds = [
        f"{label} {human_seconds(value)}"
        for label, key in (
            ("local training", "local_training"),
            ("centralised", "centralised"),
            ("rounds" if words(result, "turn") == "round" else "distillation", "distillation"),
        )
        if (value := number(result, "seconds", key)) is not None
    ]
    versions = pick(result, "versions")
    memory = whole(result, "peak_memory_mb")
    date = words(result, "date")
    facts = [
        ("Seed", words(result, "seed")),
        ("Date", date and date.replace("T", " ", 1).replace("+00:00", " UTC")),
        ("Machine", words(result, "machine")),
        ("Engine", _engine(result)),
        ("Nodes computed", "\n".join(_grouping(result)) or None),
        ("Files", "\n".join(_files(result)) or None),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
         if isinstance(versions, Mapping) and versions else words(result, "fedstill")),
        ("Time", ", ".join(seconds) or None),
        ("Peak memory", None if memory is None else f"{memory:,} MB"),
    ]  # fmt: skip
    return [(name, value) for name, value in facts if value]


def _files(result: Mapping[str, Any]) -> list[str]:
    """What was carried by hand, and whose keys signed it, where questions and answers came as files."""
    asked, answers = pick(result, "files", "questions"), pick(result, "files", "answers")
    lines = []
    if isinstance(asked, Mapping):
        size, inputs = human_bytes(whole(asked, "bytes") or 0), whole(asked, "public_inputs") or 0
        lines.append(f"questions: {size} with {inputs:,} public inputs, SHA-256 {words(asked, 'sha256')}")
    for node in answers if isinstance(answers, list) else []:
        known = "the node's own" if pick(node, "key_known") else "which nobody compared"
        size = human_bytes(whole(node, "bytes") or 0)
        asker = pick(node, "asker_known")
        asked = "" if asker is None else f"; it had {'' if asker else 'not '}compared the server's key"
        lines.append(
            f"{words(node, 'node')}: {size}, signed by key {words(node, 'signed_by')}, {known}{asked}"
        )
    return lines
