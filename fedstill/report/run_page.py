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
    tabular_data_section,
)
from fedstill.report.metric_text import (
    format_difference,
    format_spread,
    format_value_without_unit,
    format_with_unit,
    lowercase_title,
)
from fedstill.report.model_scores import LOCAL_MODELS, interval_label, interval_text, list_model_scores
from fedstill.report.result import RESULT_FILE, MetricOverNodes, Result
from fedstill.report.run_files import RunFiles
from fedstill.report.run_text import run_facts, run_sentence
from fedstill.report.table_formats import Fact
from fedstill.report.templates import bytes_markup, template_environment

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
        return run_progress.render_progress_page(folder, nonce)
    template = template_environment().get_template("page.html.j2")
    return template.render(_template_variables(RunFiles.read(folder)))


def _template_variables(run: RunFiles) -> dict[str, Any]:
    folder, result, log = run.folder, run.result, run.metrics
    config, columns = folder / "config.toml", tabular_data_section.columns_table(folder, result)
    samples, curve = image_panels.generated_samples(folder), run_figures.read_learning_curve(run)
    label_counts = LABEL_COUNTS.get(result.kind, LABEL_COUNTS[""])
    local = run_figures.local_losses(run)
    generated = bool(samples) or (columns is not None and len(columns.columns) > 1)
    omitted = list(local)[MAX_PANELS : len(log.local_losses)]
    shown_local = {name: values for name, values in local.items() if name not in omitted}
    return {
        "result": result,
        "sentence": run_sentence(result, run.audit, generated=generated),
        "context": _data_sentences(result),
        "tiles": _tiles(result),
        "metric": {"title": result.metric.title, "name": lowercase_title(result.metric.title)},
        "models": list_model_scores(result),
        "interval_label": interval_label(result),
        "models_table": run_tables.models_table(result),
        "curve": curve,
        "curve_plot": curve
        and plotting.responsive_svg(partial(run_figures.plot_learning_curve, curve), "curve"),
        "processes": "each node was a separate process" if result.link else "all nodes ran in one process",
        "label_counts": label_counts,
        "label_counts_table": run_tables.label_counts_table(
            result, label_counts[1], with_sum=label_counts[2]
        ),
        "findings": run_tables.findings_table(result),
        "sites": run_tables.site_tables(result),
        "confusion": run_tables.confusion_table(result),
        "reliability": result.calibration
        and plotting.responsive_svg(partial(run_figures.plot_reliability, result.calibration), "reliability"),
        "pictures": image_panels.build_image_section(folder, result),
        "count_noise": privacy_section.count_noise_text(result),
        "samples": samples,
        "columns": columns,
        "server_losses": _loss_panels(log.server_losses),
        "local_losses": _loss_panels(shown_local, share_axis=True),
        "has_centralized_loss": bool(log.centralized_losses),
        "omitted_nodes": len(omitted),
        "traffic": run_tables.traffic_table(result, run.audit),
        "time_table": communication_time.time_table(result),
        "time_bar": communication_time.time_bar(result),
        "message_cost": communication_time.message_cost_text(result),
        "privacy": privacy_section.build_privacy_section(result, run.audit),
        "leakage": leakage_section.build_leakage_section(folder, result),
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
        Fact("Traffic", traffic, directions),
        Fact("Time", None if total is None else re.sub(r"(?<=\d) ", "\u00a0", format_seconds(total)), share),
    ]


def _gain_text(result: Result) -> Fact:
    """Return the gain over standalone training; without a standalone baseline, the local models' metric."""
    metric, first = result.metric, list_model_scores(result)[0]
    stats, standalone = first.stats[0], result.standalone.get(result.metric.key, MetricOverNodes()).mean
    if result.evaluated_model == "nodes" or (standalone is None and first.name == LOCAL_MODELS):
        note = (
            "" if stats.std is None else f"\u00b1 {format_value_without_unit(metric, stats.std)} over nodes"
        )
        return Fact(
            "Local models", None if stats.mean is None else format_with_unit(metric, stats.mean), note
        )
    gain, note = None, ""
    if standalone is not None:
        note = f"a standalone node reaches {_with_nobreak_spaces(format_spread(metric, stats))}"
    if result.value is not None and standalone is not None:
        gain = Markup('{} <span class="unit">points</span>').format(
            format_difference(metric, result.value - standalone)
        )
    return Fact("Gain over standalone", gain, note)


def _test_data_text(result: Result, examples: int) -> str:
    cases, case = result.data.test_cases, result.data.case
    if cases is None:
        return f"{examples:,} test examples"
    return f"{format_count(cases, f'test {case}')} ({examples:,} examples)"


def _interval_text(result: Result) -> str:
    ends = next((model.interval for model in list_model_scores(result) if model.is_main), None)
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
        noun = " features" if result.data.schema else " tokens"
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
    lines = {name: run_figures.finite_points(values) for name, values in series.items()}
    all_values = [value for line in lines.values() for _, value in line]
    span = (min(all_values), max(all_values)) if share_axis and all_values else None
    panels = []
    for name, values in series.items():
        line, plot = lines[name], None
        last = values[max(values)]
        if line:
            with plotting.plot_style():
                plot = plotting.to_svg(run_figures.plot_loss(name, line, span), f"panel {name} {span}")
        last_text = "not finite" if last is None else f"{last:.3g}"
        not_finite = len(values) - len(line)
        panels.append({"name": name, "last": last_text, "plot": plot, "not_finite": not_finite})
    return panels
