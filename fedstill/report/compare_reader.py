"""Summary of a comparison from the folders of its runs, with notes for the reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.attacks.attack_results import ComparisonColumn
from fedstill.attacks.config import LeakageConfig
from fedstill.compare import comparison_runner
from fedstill.compare.comparison_file import SHARED, Comparison, ComparisonRun, released_kinds
from fedstill.core.text_format import format_count, join_names
from fedstill.protocol.method import method_name
from fedstill.report.compare_summary import ComparedSetting, ComparisonSummary
from fedstill.report.compared_method import LOCAL_PREFIX, ComparedMethod, FinishedRun
from fedstill.report.metric_text import lowercase_title
from fedstill.report.model_scores import describe_requirements
from fedstill.report.result import MAIN_MODELS, Result
from fedstill.report.run_files import RunFiles


def summarize(out: Path, comparison: Comparison) -> ComparisonSummary:
    """Read the runs of a comparison and return their summary.

    Args:
        out: folder of the comparison.
        comparison: its content.

    Raises:
        RunFolderError: a file of a run is broken.
    """
    settings = tuple(_read_setting(out, comparison, name) for name in comparison.settings)
    entries = [entry for setting in settings for entry in setting.entries]
    notes, leakage_columns = _notes(comparison, settings), tuple[ComparisonColumn, ...]()
    if comparison.leakage is not None:
        notes += _attack_notes(settings, comparison_runner.read_not_attacked(out))
        leakage_columns = LeakageConfig.from_table(comparison.leakage).comparison_columns
    return ComparisonSummary(
        name=comparison.name,
        about=comparison.about,
        seeds=comparison.seeds,
        settings=settings,
        notes=tuple(notes),
        published=tuple(dict.fromkeys(paper for entry in entries for paper in entry.published.values())),
        command=comparison_runner.read_command(out),
        leakage=comparison.leakage is not None,
        leakage_columns=leakage_columns,
    )


def _read_setting(out: Path, comparison: Comparison, name: str) -> ComparedSetting:
    reasons = comparison_runner.read_not_run(out)
    entries = tuple(
        _read_method(out, comparison, name, number, label, reasons)
        for number, label in enumerate(comparison.methods, start=1)
    )
    first = ComparisonRun(name, next(iter(comparison.methods)), comparison.seeds[0])
    metrics = comparison.run_config(first).task.metrics
    return ComparedSetting(name, _data_and_training_text(comparison, name, entries), entries, metrics)


def _read_method(
    out: Path, comparison: Comparison, setting: str, number: int, label: str, reasons: Mapping[str, str]
) -> ComparedMethod:
    config = comparison.run_config(ComparisonRun(setting, label, comparison.seeds[0]))
    method, metrics = config.method, config.task.metrics
    runs, not_run, missing = [], {}, []
    for seed in comparison.seeds:
        folder = ComparisonRun(setting, label, seed).folder
        if folder in reasons:
            not_run[seed] = reasons[folder]
        elif (out / folder / "result.json").exists():
            files, config_of_attacks = RunFiles.read(out / folder), comparison.leakage
            leakage = (
                None
                if config_of_attacks is None
                else comparison_runner.read_attack(out / folder, config_of_attacks)
            )
            runs.append(
                FinishedRun(seed, folder, files.result, files.metrics, leakage, files.resampled_metric)
            )
        else:
            missing.append(seed)
    names = [f"{prefix}{metric.key}" for metric in metrics for prefix in ("", LOCAL_PREFIX)]
    published = {name: comparison.published(setting, label, name) for name in names}
    return ComparedMethod(
        number=number,
        label=label,
        method=method_name(method),
        title=method.title if "title" in vars(type(method)) else label,  # an inherited title does not count
        evaluated_model=method.evaluated_model,
        releases=released_kinds(config),
        needs=describe_requirements(vars(method.needs())),
        runs=tuple(runs),
        not_run=not_run,
        missing=tuple(missing),
        published={name: paper for name, paper in published.items() if paper is not None},
        budget=config.nodes.privacy.epsilon,
        metric=metrics[0].key,
    )


def _data_and_training_text(comparison: Comparison, setting: str, entries: Sequence[ComparedMethod]) -> str:
    """Return data, split, networks and local training in one line."""
    # Take the options from a method without run options of its own, if there is one.
    label = min(comparison.methods, key=lambda name: "nodes" in comparison.runs.get(name, {}))
    config = comparison.run_config(ComparisonRun(setting, label, comparison.seeds[0]))
    data, split, local = config.data, config.split, config.nodes.local
    batch = f"batch {local.batch}"
    # A split by a column has as many nodes as the column has values, which only the runs record.
    recorded = (run.result.split.nodes for entry in entries for run in entry.runs)
    count = split.nodes or next(filter(None, recorded), None)
    nodes = f"{count} nodes, " if count else ""
    parts = [
        f"{data.title or data.registered_name}, {nodes}{split.about}",
        f"networks {', '.join(config.nodes.models)}, student {config.student.model}",
        f"local training: {format_count(local.epochs, 'epoch')} in total, {local.optimizer}, "
        f"learning rate {local.lr:g}, {batch}",
    ]
    results = [run.result for entry in entries for run in entry.runs]
    notes = dict.fromkeys([*(result.data.note for result in results), *map(_public_data_text, results)])
    return "; ".join([*parts, *filter(None, notes)])


def _public_data_text(result: Result) -> str | None:
    name = result.public.name
    if name is None:
        return None
    count, note = result.public.examples, result.public.note
    size = "" if count is None else f", {count:,} examples"
    return f"public data: {name}{size}" + ("" if note is None else f" ({note})")


def _notes(comparison: Comparison, settings: Sequence[ComparedSetting]) -> list[str]:
    count = len(comparison.seeds)
    over = (
        "one seed, so no standard deviation"
        if count == 1
        else f"mean \u00b1 sample standard deviation over {count} seeds"
    )
    too_few_seeds = (
        "With one seed no difference is significant, so nothing is bold."
        if count == 1
        else "With one or two seeds nothing is bold."
    )
    entries = [entry for setting in settings for entry in setting.entries]
    metrics = {metric.key: metric for setting in settings for metric in setting.metrics}
    titles = {setting.metric.title: None for setting in settings}
    notes = [
        f"{join_names(list(titles))} {'is' if len(titles) == 1 else 'are'} in percent, after the last "
        "round, on "
        f"test data that no node saw ({over}).",
        "For one seed, all methods have the same split, initial weights from the same random stream, the "
        "same "
        "local optimizer, batch size and number of local epochs. Local data are shuffled. Batch norm "
        "statistics "
        "are part of a model: they are sent and averaged together with its parameters.",
        f"Bold: the {'highest' if len(metrics) == 1 else 'best'} mean among methods with the same kind of "
        "evaluated model, if it is significantly better than all others (paired 95% CI, in brackets). The "
        "CI is "
        f"over seeds and, for the main metric, over test cases. {too_few_seeds} "
        "Methods "
        "whose nodes release their data are never bold. Methods are in the order of the comparison's file.",
    ]
    if any(entry.spread_is_over_nodes for entry in entries):
        notes.append("With one seed, deviations of local models are over the nodes.")
    in_tables = [metric for metric in metrics.values() if metric.in_summary or metric.title in titles]
    lower = [metric.title for metric in in_tables if metric.better == "lower"]
    if lower:
        notes.append(f"Lower is better: {', '.join(lower)}.")
    if not comparison.sets_policy:
        notes.append(
            "The policy of the nodes allows outputs only. Methods that need more run under a policy that "
            "allows "
            "it, which data owners would have to accept."
        )
    kinds = {entry.evaluated_model for entry in entries}
    notes += [
        f"{MAIN_MODELS[kind][0].capitalize()}: {MAIN_MODELS[kind][1]}."
        for kind in MAIN_MODELS
        if kind in kinds
    ]
    if "ensemble" in kinds:
        notes.append(
            "An ensemble queries all nodes for every input at inference. Its bytes do not include these "
            "queries."
        )
    notes.append(
        f"Local {lowercase_title(settings[0].metric.title)} is the mean over the nodes' local models at "
        "the end, "
        "each on its own random share of the test data (FedMD-CG, section 3.1). The values on all test "
        "data are "
        "in the CSV file."
    )
    deltas = {bound[1] for entry in entries if (bound := entry.privacy_bound()) is not None}
    if deltas:
        notes.append(
            "Epsilon: privacy cost of a run for each record (or group of records) of a node, the maximum "
            "over nodes "
            f"and seeds, rounded up, at delta {', '.join(f'{delta:g}' for delta in sorted(deltas))}. It "
            "does not "
            "include the cost of choosing hyperparameters on private data."
        )
    methods_of_note: dict[str, dict[str, None]] = {}
    for entry in entries:
        for run in entry.runs:
            for note in run.result.note_sentences:
                methods_of_note.setdefault(note, {})[entry.name] = None
    notes += [f"{join_names(list(names))}: {note}" for note, names in methods_of_note.items()]
    for label, table in comparison.runs.items():
        keys = ", ".join(_dotted_option_lines(table))
        # Privacy options differ by design, since comparisons are made over privacy budgets.
        nodes = {key: value for key, value in table.get("nodes", {}).items() if key != "privacy"}
        if nodes or any(key in SHARED for key in table if key != "nodes"):
            notes.append(f"Unequal conditions: {label} has other run options ({keys}).")
        elif keys:
            notes.append(f"{label} has its own run options: {keys}.")
    if comparison.note:
        notes.append(comparison.note)
    if comparison.changed:
        notes.append(f"Options from the command line: {', '.join(comparison.changed)}.")
        if comparison.paper:
            notes.append("Published metrics are for the setting without these options.")
    return notes


def _attack_notes(settings: Sequence[ComparedSetting], reasons: Mapping[str, str]) -> list[str]:
    notes, pending = [], []
    for setting in settings:
        for entry in setting.entries:
            for run in entry.runs:
                name = ", ".join(part for part in (entry.name, setting.name, f"seed {run.seed}") if part)
                if run.folder in reasons:
                    notes.append(f"{name}: not attacked: {reasons[run.folder]}.")
                elif run.leakage is None:
                    pending.append(name)
                elif run.leakage.audit:
                    mismatch = run.leakage.audit
                    notes.append(
                        f"{name}: the attacked repetition differs from the run of the folder: {mismatch}."
                    )
    if pending:
        notes.append(f"Not yet attacked with the options of this comparison: {'; '.join(pending)}.")
    return notes


def _dotted_option_lines(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    options = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            options += _dotted_option_lines(value, f"{prefix}{key}.")
        else:
            options.append(f"{prefix}{key} = {value}")
    return options
