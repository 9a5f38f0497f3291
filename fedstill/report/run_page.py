"""report.html, the page of a run: one file that holds everything and loads nothing.

A run's folder goes in, ``report.html`` comes out. The page runs no script and its own content
security policy forbids it to load anything, so it can be opened, mailed and archived anywhere.
Names and texts in the folder come from users and nodes: everything is escaped.
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
from fedstill.core.text_format import format_bytes, format_count, format_seconds
from fedstill.report import (
    communication_time,
    image_panels,
    leakage_section,
    plotting,
    privacy_section,
    run_figures,
    run_progress,
    run_tables,
    table_columns,
)
from fedstill.report.metric_text import (
    format_difference,
    format_spread,
    format_value,
    format_with_unit,
    lowercase_title,
)
from fedstill.report.model_scores import comparison, interval_text, tested
from fedstill.report.result import FILE, OverNodes, Result
from fedstill.report.run_files import RunFiles
from fedstill.report.run_text import facts, plain_sentence
from fedstill.report.table_formats import Fact
from fedstill.report.templates import environment, size

MOST_PANELS = 24  # small plots of local training

# What a node's counts are, by the task's kind: a heading, a sentence, whether they sum to its examples.
HELD: Mapping[str, tuple[str, str, bool]] = {
    "": ("The classes each node holds", "Training examples of each class at each node", True),
    "labels": (
        "The findings each node holds",
        "Training examples with each finding at each node (one may have several, or none)",
        False,
    ),
    "map": (
        "What each node's images show",
        "Training images at each node, each parted over the classes as its pixels are",
        True,
    ),
    "image": ("The images each node holds", "Training images at each node", True),
    "number": ("The rows each node holds", "Training rows at each node", True),
    "time": (
        "How long each node's rows were followed",
        "Training rows at each node that say whether the event came in an interval",
        False,
    ),
}


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run's folder, from the files in it, and return its path.

    Of a run that is not finished it shows how far that is. Raises RunFolderError where a file is broken.
    """
    target = folder / "report.html"
    write_text(target, page(folder))
    return target


def page(folder: Path, served: str = "") -> str:
    """The page of a run; of one that is not finished, of what there is so far.

    Only ``result.json`` must exist; what other files would have shown is marked "not measured". The same
    files give the same page.

    Args:
        served: the nonce of its script, where a browser may ask for the page again.

    Raises:
        RunFolderError: a file is broken or missing.
    """
    if not (folder / FILE).exists() and (folder / PROGRESS_FILE).exists():
        return run_progress.page(folder, served)
    return environment().get_template("page.html.j2").render(_view(RunFiles.read(folder)))


def _view(run: RunFiles) -> dict[str, Any]:
    folder, result, metrics = run.folder, run.result, run.metrics
    config, columns = folder / "config.toml", table_columns.section(folder, result)
    samples, levels, course = (
        image_panels.samples(folder),
        comparison(result),
        run_figures.read_learning_curve(run),
    )
    held, local = HELD.get(result.kind, HELD[""]), run_figures.local_losses(run)
    made = bool(samples) or (columns is not None and len(columns.columns) > 1)
    left_out = list(local)[MOST_PANELS : len(metrics.local)]
    drawn = {name: values for name, values in local.items() if name not in left_out}
    return {
        "result": result,
        "sentence": plain_sentence(result, run.audit, made_up=made),
        "context": _context(result),
        "key_figures": _key_figures(result),
        "metric": {"title": result.metric.title, "name": lowercase_title(result.metric.title)},
        "levels": levels,
        "intervals": tested(result),
        "reached": run_tables.reached(result),
        "course": course,
        "course_drawn": course
        and plotting.responsive(partial(run_figures.plot_learning_curve, course), "course"),
        "processes": "each node was a process of its own" if result.link else "all nodes ran in one process",
        "held": held,
        "holdings": run_tables.holdings(result, held[1], with_sum=held[2]),
        "findings": run_tables.findings(result),
        "sites": run_tables.sites(result),
        "confusion": run_tables.confusion(result),
        "reliability": result.calibration
        and plotting.responsive(partial(run_figures.plot_reliability, result.calibration), "reliability"),
        "pictures": image_panels.section(folder, result),
        "count_noise_text": privacy_section.count_noise_text(result),
        "samples": samples,
        "columns": columns,
        "losses": _panels(metrics.losses),
        "local": _panels(drawn, share_axis=True),
        "centralized_drawn": bool(metrics.centralized),
        "local_left_out": len(left_out),
        "traffic": run_tables.traffic(result, run.audit),
        "link": communication_time.time_table(result),
        "link_bar": communication_time.time_bar(result),
        "message_cost": communication_time.message_cost(result),
        "privacy": privacy_section.section(result, run.audit),
        "leakage": leakage_section.section(folder, result),
        "nodes": run_tables.nodes(result),
        "facts": facts(result),
        "config": config.read_text(encoding="utf-8", errors="replace") if config.exists() else None,
    }


def _key_figures(result: Result) -> list[Fact]:
    metric, name, reached = result.metric, lowercase_title(result.metric.title), result.value
    up, down, tests = result.bytes.up, result.bytes_down, result.data.test
    total, distillation = result.seconds.total, result.seconds.distillation
    title = {"student": f"Student {name}", "virtual": f"{metric.title} of the average",
             "ensemble": f"Ensemble {name}", "nodes": f"Mean {name} of the nodes"}  # fmt: skip
    wire, ways, part = None, "", ""
    if up is not None and down is not None:
        left, came = (_unbroken(format_bytes(count)) for count in (up, down))
        wire, ways = size(up + down), f"{left} left the nodes, {came} came to them"
    if distillation is not None:
        what = "in rounds" if result.turn == "round" else "distillation"
        part = f"{_unbroken(format_seconds(distillation))} of it {what}"
    return [
        Fact(
            title[result.central],
            None if reached is None else format_with_unit(metric, reached),
            "" if tests is None else f"on {_tested(result, tests)}{_interval(result)}",
        ),
        _gain(result),
        Fact("Crossed the wire", wire, ways),
        Fact("Time", None if total is None else re.sub(r"(?<=\d) ", "\u00a0", format_seconds(total)), part),
    ]


def _gain(result: Result) -> Fact:
    """What the run adds to nodes that are alone; where there is no such figure, what nodes reach."""
    metric, first = result.metric, comparison(result)[0]
    one, alone = first.measured[0], result.standalone.get(result.metric.key, OverNodes()).mean
    if result.central == "nodes" or (alone is None and first.name == "nodes' own models"):
        spread = "" if one.std is None else f"\u00b1 {format_value(metric, one.std)} over the nodes"
        return Fact(
            "Nodes' own models", None if one.mean is None else format_with_unit(metric, one.mean), spread
        )
    gain, note = (
        None,
        "" if alone is None else f"a node alone reaches {_unbroken(format_spread(metric, one))}",
    )
    if result.value is not None and alone is not None:
        gain = Markup('{} <span class="unit">points</span>').format(
            format_difference(metric, result.value - alone)
        )
    return Fact("Gain over standalone", gain, note)


def _tested(result: Result, examples: int) -> str:
    cases, case = result.data.test_cases, result.data.case
    if cases is None:
        return f"{examples:,} test examples"
    return f"{format_count(cases, f'test {case}')} ({examples:,} examples)"


def _interval(result: Result) -> str:
    ends = next((level.interval for level in comparison(result) if level.is_main), None)
    return (
        f"; {result.intervals.level}% interval {_unbroken(interval_text(result.metric, ends))}"
        if ends and result.intervals
        else ""
    )


def _unbroken(metric: str) -> str:
    """A figure that no line break parts from its unit or its spread: "71.8% ± 6.5" is one."""
    return metric.replace(" ", "\u00a0")


def _context(result: Result) -> str | None:
    """The data and how it was split; a run from Python names no data: its nodes' examples are counted."""
    held = [node.examples for node in result.nodes]
    known = [count for count in held if count is not None]
    train, test = result.data.train, result.data.test
    if train is None and known and len(known) == len(held):
        train = sum(known)
    noise = privacy_section.count_noise_text(result) if result.is_distributed else ""
    told_of = {f"training (as told, {noise})" if noise else "training": train, "test": test}
    counts = [f"{count:,} {label}" for label, count in told_of.items() if count is not None]
    size = f"{' and '.join(counts)} examples" if counts else ""
    shape = result.data.shape
    if size and shape:
        named = " features" if result.data.schema else " tokens"
        size += " of " + " \u00d7 ".join(str(side) for side in shape) + (named if len(shape) == 1 else "")
    what = ", ".join(part for part in (result.data.name, size) if part)

    how = result.split.about or result.split.name
    values = result.split.values
    if values and len(values) == len(held):
        each = ", ".join(f"{node.name} has {value}" for node, value in zip(result.nodes, values, strict=True))
        how = f"by {result.split.column}: {each}"
    note = result.data.note
    public, rows = result.public.name, result.public.examples
    if public is not None and rows is not None:
        public += f", {rows:,} examples"
    sentences = [
        what and f"Data: {what}",
        how and f"Split over the nodes: {how}",
        note and note[0].upper() + note[1:],
        public and f"Public data: {public}",
        result.public.note,
    ]
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence) or None


def _panels(
    series: Mapping[str, Mapping[float, float | None]], share_axis: bool = False
) -> list[dict[str, Any]]:
    lines = {name: run_figures.finite_points(values) for name, values in series.items()}
    everything = [value for line in lines.values() for _, value in line]
    span = (min(everything), max(everything)) if share_axis and everything else None
    panels = []
    for name, values in series.items():
        line, plot = lines[name], None
        last = values[max(values)]
        if line:
            with plotting.plot_style():
                plot = plotting.to_svg(run_figures.plot_loss(name, line, span), f"panel {name} {span}")
        told = "not finite" if last is None else f"{last:.3g}"
        lost = len(values) - len(line)
        panels.append({"name": name, "last": told, "plot": plot, "lost": lost})
    return panels
