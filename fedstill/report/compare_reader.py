"""From the folders of a comparison's runs to its figures, and what a reader must know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.attacks.config import LeakageConfig
from fedstill.attacks.leakage import LeakageColumn
from fedstill.compare import comparison_runner
from fedstill.compare.comparison_file import SHARED, Comparison, ComparisonRun, released_kinds
from fedstill.core.text_format import format_count, join_names
from fedstill.protocol.method import method_name
from fedstill.report.compare_summary import ComparedSetting, Summary
from fedstill.report.compared_method import LOCAL, ComparedMethod, FinishedRun
from fedstill.report.metric_text import lowercase_title
from fedstill.report.model_scores import describe_needs
from fedstill.report.result import MAIN_MODELS, Result
from fedstill.report.run_files import RunFiles


def summarize(out: Path, comparison: Comparison) -> Summary:
    """The figures of a comparison, from the folders of its runs.

    Raises:
        RunFolderError: a file in them is broken.
    """
    settings = tuple(_setting(out, comparison, name) for name in comparison.settings)
    entries = [entry for setting in settings for entry in setting.entries]
    notes, leaks = _notes(comparison, settings), tuple[LeakageColumn, ...]()
    if comparison.leakage is not None:
        notes += _of_attacks(settings, comparison_runner.read_not_attacked(out))
        leaks = LeakageConfig.from_table(comparison.leakage).columns
    return Summary(
        name=comparison.name,
        about=comparison.about,
        seeds=comparison.seeds,
        settings=settings,
        notes=tuple(notes),
        published=tuple(dict.fromkeys(paper for entry in entries for paper in entry.published.values())),
        command=comparison_runner.read_command(out),
        leakage=comparison.leakage is not None,
        leaks=leaks,
    )


def _setting(out: Path, comparison: Comparison, name: str) -> ComparedSetting:
    reasons = comparison_runner.read_not_run(out)
    entries = tuple(
        _entry(out, comparison, name, place, label, reasons)
        for place, label in enumerate(comparison.methods, start=1)
    )
    first = ComparisonRun(name, next(iter(comparison.methods)), comparison.seeds[0])
    metrics = comparison.run_config(first).task.metrics
    return ComparedSetting(name, _context(comparison, name, entries), entries, metrics)


def _entry(
    out: Path, comparison: Comparison, setting: str, number: int, label: str, reasons: Mapping[str, str]
) -> ComparedMethod:
    config = comparison.run_config(ComparisonRun(setting, label, comparison.seeds[0]))
    method, metrics = config.method, config.task.metrics
    runs, not_run, missing = [], {}, []
    for seed in comparison.seeds:
        place = ComparisonRun(setting, label, seed).folder
        if place in reasons:
            not_run[seed] = reasons[place]
        elif (out / place / "result.json").exists():
            files, leakage = RunFiles.read(out / place), comparison.leakage
            found = None if leakage is None else comparison_runner.read_attack(out / place, leakage)
            runs.append(FinishedRun(seed, place, files.result, files.metrics, found, files.resamples))
        else:
            missing.append(seed)
    names = [f"{whose}{metric.key}" for metric in metrics for whose in ("", LOCAL)]
    published = {name: comparison.published(setting, label, name) for name in names}
    return ComparedMethod(
        place=number,
        label=label,
        method=method_name(method),
        title=method.title if "title" in vars(type(method)) else label,  # not one that it has inherited
        central=method.evaluated_model,
        leaves=released_kinds(config),
        needs=describe_needs(vars(method.needs())),
        runs=tuple(runs),
        not_run=not_run,
        missing=tuple(missing),
        published={name: paper for name, paper in published.items() if paper is not None},
        budget=config.nodes.privacy.epsilon,
        metric=metrics[0].key,
    )


def _context(comparison: Comparison, setting: str, entries: Sequence[ComparedMethod]) -> str:
    """Data, split, networks and local budget, in one line."""
    # What holds for all methods is best seen in one that has no run options of its own.
    label = min(comparison.methods, key=lambda name: "nodes" in comparison.runs.get(name, {}))
    config = comparison.run_config(ComparisonRun(setting, label, comparison.seeds[0]))
    data, split, local = config.data, config.split, config.nodes.local
    batch = f"batch {local.batch}"
    # As many as a column has values: the runs know.
    known = (run.result.split.nodes for entry in entries for run in entry.runs)
    count = split.nodes or next(filter(None, known), None)
    nodes = f"{count} nodes, " if count else ""
    parts = [
        f"{data.title or data.registered_name}, {nodes}{split.about}",
        f"networks {', '.join(config.nodes.models)}, student {config.student.model}",
        f"each node trains {format_count(local.epochs, 'epoch')} in all, {local.optimizer}, "
        f"rate {local.lr:g}, {batch}",
    ]
    results = [run.result for entry in entries for run in entry.runs]
    notes = dict.fromkeys([*(result.data.note for result in results), *map(_public, results)])
    return "; ".join([*parts, *filter(None, notes)])


def _public(result: Result) -> str | None:
    name = result.public.name
    if name is None:
        return None
    count, note = result.public.examples, result.public.note
    size = "" if count is None else f", {count:,} examples"
    return f"public data: {name}{size}" + ("" if note is None else f" ({note})")


def _notes(comparison: Comparison, settings: Sequence[ComparedSetting]) -> list[str]:
    count = len(comparison.seeds)
    over = (
        "one seed alone: no spread is known" if count == 1 else f"mean \u00b1 sample deviation, {count} seeds"
    )
    entries = [entry for setting in settings for entry in setting.entries]
    metrics = {metric.key: metric for setting in settings for metric in setting.metrics}
    titles = {setting.metric.title: None for setting in settings}
    notes = [
        f"{join_names(list(titles))} {'is' if len(titles) == 1 else 'are'} in percent, of the last round, on "
        f"test data that no node saw ({over}).",
        "One seed gives all methods the same split, first weights drawn alike, the same local optimizer, "
        "batch and number of local epochs; local data are shuffled. Statistics of batch norm are part of a "
        "network: they travel and are averaged with the parameters around them.",
        f"Bold is the {'highest' if len(metrics) == 1 else 'best'} mean of those judged by the same kind of "
        "model, where no data leave a node, if it is above every other by more than chance explains: by the "
        "95% interval of their paired difference, in brackets, over seeds and, of what models are judged "
        "by, test cases. What is not is level; of one or two seeds nothing is bold. Methods stand as given.",
    ]
    if any(entry.spread_is_over_nodes for entry in entries):
        notes.append("Behind the nodes' mean stands its deviation over the nodes, as there is one seed.")
    in_tables = [metric for metric in metrics.values() if metric.in_summary or metric.title in titles]
    lower = [metric.title for metric in in_tables if metric.better == "lower"]
    if lower:
        notes.append(f"Lower is better: {', '.join(lower)}.")
    if not comparison.sets_policy:
        notes.append(
            "Nodes let outputs pass and nothing else, except to methods that need more: these run under a "
            "policy that allows it, which owners of data would have to give."
        )
    kinds = {entry.central for entry in entries}
    notes += [
        f"{MAIN_MODELS[kind][0].capitalize()}: {MAIN_MODELS[kind][1]}."
        for kind in MAIN_MODELS
        if kind in kinds
    ]
    if "ensemble" in kinds:
        notes.append(
            "An ensemble asks all nodes about every input that it is used on: that is not in its bytes."
        )
    notes.append(
        f"Local {lowercase_title(settings[0].metric.title)} is the mean over the nodes' own models at the end, "
        "each on a random share of the "
        "test data of its own (FedMD-CG, section 3.1); on all test data it is in the CSV."
    )
    deltas = {kept[1] for entry in entries if (kept := entry.epsilon()) is not None}
    if deltas:
        notes.append(
            "Epsilon: what a run costs each record (or group of records) of a node, the most over nodes and "
            f"seeds, rounded up, at delta {', '.join(f'{delta:g}' for delta in sorted(deltas))}. What was "
            "learned in choosing options by looking at private data is not in it."
        )
    said: dict[str, dict[str, None]] = {}
    for entry in entries:
        for run in entry.runs:
            for note in run.result.note_sentences:
                said.setdefault(note, {})[entry.name] = None
    notes += [f"{join_names(list(names))}: {note}" for note, names in said.items()]
    for label, table in comparison.runs.items():
        keys = ", ".join(_dotted(table))
        # How a node is protected is of its owner, and what a comparison by privacy is about.
        nodes = {key: value for key, value in table.get("nodes", {}).items() if key != "privacy"}
        if nodes or any(key in SHARED for key in table if key != "nodes"):
            notes.append(f"Not on equal terms: {label} has other run options ({keys}).")
        elif keys:
            notes.append(f"{label} has run options of its own: {keys}.")
    if comparison.note:
        notes.append(comparison.note)
    if comparison.changed:
        notes.append(f"Options given on the command line: {', '.join(comparison.changed)}.")
        if comparison.paper:
            notes.append("Published figures are of the setting without those options.")
    return notes


def _of_attacks(settings: Sequence[ComparedSetting], reasons: Mapping[str, str]) -> list[str]:
    notes, waiting = [], []
    for setting in settings:
        for entry in setting.entries:
            for run in entry.runs:
                where = ", ".join(part for part in (entry.name, setting.name, f"seed {run.seed}") if part)
                if run.folder in reasons:
                    notes.append(f"{where}: not attacked: {reasons[run.folder]}.")
                elif run.leakage is None:
                    waiting.append(where)
                elif run.leakage.audit:
                    wrong = run.leakage.audit
                    notes.append(f"{where}: what was attacked is not the run of its folder: {wrong}.")
    if waiting:
        notes.append(f"Not attacked yet with the options of this comparison: {'; '.join(waiting)}.")
    return notes


def _dotted(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in table.items():
        nested = isinstance(value, Mapping)
        found += _dotted(value, f"{prefix}{key}.") if nested else [f"{prefix}{key} = {value}"]
    return found
