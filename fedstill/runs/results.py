"""The results of a run: metrics, costs and privacy for ``result.json``, predictions, and warnings."""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.dataset import TensorData
from fedstill.core.table_schema import TableSchema
from fedstill.core.text_format import csv_cell, join_names, replace_nonfinite
from fedstill.data.public import PublicData
from fedstill.models.module_utils import parameter_count
from fedstill.node.audit_entries import ALL_RUNS
from fedstill.privacy.statement import summarize_privacy
from fedstill.protocol.method import Method, method_name
from fedstill.runs.base import Run
from fedstill.runs.build import Setting
from fedstill.runs.evaluation import Outputs, mean
from fedstill.runs.student_file import file_module, header
from fedstill.tasks import Task


def collect_results(run: Run) -> dict[str, Any]:
    """Return the metrics, bytes, queries and privacy costs for ``result.json``."""
    evaluation, metric, public = run.evaluation, run.task.metric, run.public
    outputs = run.test_outputs()
    main_metrics: Mapping[str, Any] = {metric: None}
    if outputs.global_model is not None:
        main_metrics = replace_nonfinite(evaluation.compute_metrics(outputs.global_model))
    elif outputs.node_models:
        main_metrics = replace_nonfinite(
            mean([evaluation.compute_metrics(each, node=name) for name, each in outputs.node_models.items()])
        )
    _save_predictions(run, outputs)
    audit_summary = run.audit.traffic_totals()
    by_node: Mapping[str, dict[str, int]] = audit_summary["by_node"]
    no_bytes = {"up": 0, "down": 0}
    nodes = [{**about, "bytes": by_node.get(about["name"]) or no_bytes} for about in run.describe_nodes()]
    model = run.setting.spec.student.model
    student = {"model": model, "parameters": parameter_count(run.student), **main_metrics}
    scale = [tuple(values.flatten().tolist()) for values in (run.mean, run.std)]
    names = tuple(run.setting.classes) or tuple(map(str, range(run.task.classes)))
    advice = run.task.metric_warning(run.test.targets, names)
    privacy = summarize_privacy(run.privacy_statements(), _privacy_costs(run))
    warnings_found = collect_warnings(run.setting, list(run.server.federation.nodes), privacy, outputs, names)
    notes = [*run.notes, *run.listeners.notes, *warnings_found, *([advice] if advice else ())]
    notes += (
        best_evaluation_notes(run.records.metrics, run.task, run.server.unit)
        if run.setting.spec.evaluation.best
        else ()
    )
    return {
        "method": method_name(run.method),
        "title": run.method.title,
        "task": run.task.name,
        "kind": run.task.kind,
        "metric": metric,
        "metrics": [asdict(each) for each in run.task.metrics],
        "seed": run.setting.spec.seed,
        "evaluated_model": run.method.evaluated_model,
        "needs": asdict(run.needs),
        "releases": list(run.side.released_kinds()),
        "kinds": {
            kind: {
                "description": kind.description,
                "category": kind.category,
                "from_label_maps": kind.from_label_maps,
            }
            for kind in run.side.transmitted_kinds()
        },
        "returned": sorted(
            {each.sends[name] for each in run.side.queries.values() for name in each.details.owner_only}
        ),
        "iteration_unit": run.server.unit,
        "iterations": run.server.total_steps,
        "public": None if public is None else public.to_record(),
        "bytes": {key: audit_summary[key] for key in ("up", "down", "by_kind")},
        "queries": audit_summary["queries"],
        "queries_by_name": audit_summary["queries_by_name"],
        "events": run.server.federation.exclusions.events,
        "engine": {
            "backend": run.setting.spec.engine.backend,
            "batching": run.setting.spec.engine.batching,
            "device": str(run.compute.device),
            "precision": run.compute.precision,
            "threads": run.compute.threads,
            **run.group_info(),
        },
        "privacy": privacy,
        **main_metrics,
        "notes": notes,
        "nodes": nodes,
        "student": student if run.has_student else None,
        **run.baseline_metrics(outputs),
        "majority": evaluation.majority_baseline(),
        "intervals": evaluation.confidence_intervals(outputs, run.records),
        **evaluation.detailed_metrics(outputs, run.setting.classes),
        "pictures": evaluation.save_example_predictions(outputs, scale[0], scale[1], run.records),
        "seconds": {"total": run.clock.total, **run.clock.seconds},
    }


def write_results(run: Run, result: Mapping[str, Any], *, keep_state: bool = False) -> None:
    """Write the result, the student's file and the method's own files.

    Args:
        result: content of ``result.json``.
        keep_state: keep the checkpoint.
    """
    for name, text in run.method.output_files(run.server, run.server.state).items():
        run.records.write_file(name, text)
    student = file_module(run.setting) if run.has_student else None
    run.records.finish(result, student, header(run.setting), keep_state=keep_state)
    run.listeners.close(result)


def _save_predictions(run: Run, model_outputs: Outputs) -> None:
    """Write predictions on the test cases; nodes' examples are not among them."""
    if run.records.folder is None:
        return
    evaluation = run.evaluation
    outputs_by_model = {
        name: (outputs, evaluation.test_data_for(name)) for name, outputs in model_outputs.node_models.items()
    }
    if model_outputs.global_model is not None:
        outputs_by_model = {run.method.evaluated_model: (model_outputs.global_model, run.test)}
    names = TestNames(run.setting.test_names, run.setting.classes, run.setting.schema)
    text = predictions_csv(run.task, outputs_by_model, names)
    if text is not None:
        run.records.write_file(FILE, text)


def _privacy_costs(run: Run) -> dict[str, tuple[Counter[str], int]]:
    """Return the privacy cost of each node's releases, and the number of releases without a guarantee."""
    spending = {name: run.audit.spending(name, ALL_RUNS) for name in run.server.federation.nodes}
    return {name: (Counter(spent.total_events), spent.total_no_guarantee) for name, spent in spending.items()}


# --- predictions.csv ------------------------------------------------------------------------------------

FILE = "predictions.csv"
MAX_CLASSES = 30  # largest number of classes with a column per probability
MAX_PROBABILITIES = 1_000_000  # in a file
DIGITS = 9  # significant digits of float32; more if rounding would change the largest probability

Floats = npt.NDArray[np.float64]
Judged = Mapping[str, tuple[torch.Tensor, TensorData]]


@dataclass(frozen=True)
class TestNames:
    """Names of the examples and classes of a test set.

    Args:
        examples: name of each example in its source; default: numbers from 0.
        classes: names of classes or labels; default: their numbers.
        schema: of a table, whose unit is used for numbers.
    """

    examples: Sequence[str] = ()
    classes: Sequence[str] = ()
    schema: TableSchema | None = None


def predictions_csv(task: Task, outputs_by_model: Judged, test_names: TestNames) -> str | None:
    """Return the text of ``predictions.csv``; None for tasks without a metric per case.

    Args:
        outputs_by_model: outputs ``(N, C, ...)`` by model, with the test set and the targets that the model
            was trained for.
        test_names: names of examples and classes.
    """
    if not outputs_by_model:
        return None
    lines = io.StringIO()
    write = csv.writer(lines, lineterminator="\n").writerow
    numbers = sum(outputs.shape[0] * outputs.shape[1] for outputs, _ in outputs_by_model.values())
    all_probabilities = task.classes <= MAX_CLASSES and numbers <= MAX_PROBABILITIES
    for index, (model, (outputs, test)) in enumerate(outputs_by_model.items()):
        found = _case_lines(task, outputs, test, test_names) or _example_lines(
            task, outputs, test, test_names, all_probabilities
        )
        if found is None:
            return None
        head, rows = found
        if index == 0:
            write(["model", *head])
        for row in rows:
            write([csv_cell(model), *row])
    return lines.getvalue()


Lines = tuple[list[str], Iterable[list[str]]]


def _case_lines(task: Task, outputs: torch.Tensor, test: TensorData, test_names: TestNames) -> Lines | None:
    """Return a line for each case of label maps, with the metric of all its examples together."""
    if task.kind != "map" or test.cases is None:
        return None
    scores = task.case_scores(outputs, test.targets, test.cases)
    if scores is None:
        return None
    cases = test.cases
    rows = [
        [csv_cell(cases.names[number]), csv_cell(cases.sites[number]), _format_number(score)]
        for number, score in zip(cases.present_ids(), scores.tolist(), strict=True)
    ]
    return ["case", "site", task.metric], rows


def _example_lines(
    task: Task, outputs: torch.Tensor, test: TensorData, test_names: TestNames, all_probabilities: bool
) -> Lines | None:
    """Return a line for each example.

    Args:
        all_probabilities: with the probability of every class.
    """
    table = _prediction_rows(task, outputs.detach().cpu(), test, test_names, all_probabilities)
    if table is None:
        return None
    head, rows = table
    names = [*map(csv_cell, test_names.examples or map(str, range(len(test))))]
    columns: dict[str, list[str]] = {"example": names}
    if (cases := test.cases) is not None:
        of = cases.case_ids.tolist()
        columns["case"] = [csv_cell(cases.names[number]) for number in of]
        columns["site"] = [csv_cell(cases.sites[number]) for number in of]
    columns = {name: each for name, each in columns.items() if name == "example" or any(each)}
    if columns.get("case") == names:  # each example is a case, of the same name
        del columns["case"]
    leading_cells = zip(*columns.values(), strict=True)
    return [*columns, *head], ([*first, *rest] for first, rest in zip(leading_cells, rows, strict=True))


def _prediction_rows(
    task: Task, outputs: torch.Tensor, test: TensorData, test_names: TestNames, all_probabilities: bool
) -> Lines | None:
    """Return truth and predictions: the names of columns, and a row for each example."""
    names = [*(test_names.classes or map(str, range(task.classes)))]
    targets = test.targets.cpu()
    if task.kind == "class":
        return _class_columns(outputs, targets, names, all_probabilities)
    if task.kind == "labels":
        shares = outputs.double().sigmoid().numpy()
        head = [f"{what}_{name}" for what in ("truth", "p") for name in names]
        known = [["" if each < 0 else str(each) for each in row] for row in targets.tolist()]
        return head, ([*row, *map(_format_number, p)] for row, p in zip(known, shares.tolist(), strict=True))
    if task.kind == "number":
        offset, scale = target_offset_and_scale(test_names.schema)
        pairs = torch.stack([targets.flatten(), outputs.flatten()], 1).double() * scale + offset
        return ["truth", "predicted"], ([*map(_format_number, pair)] for pair in pairs.tolist())
    if task.kind == "time":
        survived = (1 - outputs.double().sigmoid()).cumprod(1).tolist()
        head = ["intervals", "event", *(f"p_{survival_label(name)}" for name in names)]
        followed = [[_format_number(time), str(int(event))] for time, event in targets.tolist()]
        return head, ([*row, *map(_format_number, p)] for row, p in zip(followed, survived, strict=True))
    scores = task.case_scores(outputs, targets, None)
    return None if scores is None else ([task.metric], ([_format_number(score)] for score in scores.tolist()))


def _class_columns(
    outputs: torch.Tensor, targets: torch.Tensor, names: list[str], all_probabilities: bool
) -> Lines:
    shares: Floats = outputs.double().clamp(-1e300, 1e300).softmax(1).numpy()
    best, true = shares.argmax(1).tolist(), targets.tolist()
    head = [f"p_{name}" for name in names] if all_probabilities else ["p_predicted", "p_truth"]

    def rows() -> Iterable[list[str]]:
        for row, predicted, truth in zip(shares, best, true, strict=True):
            p = (
                _format_probabilities(row.tolist(), predicted)
                if all_probabilities
                else [_format_number(row[predicted]), _format_number(row[truth])]
            )
            yield [csv_cell(names[truth]), csv_cell(names[predicted]), *p]

    return ["truth", "predicted", *head], rows()


def _format_probabilities(p: Sequence[float], best: int) -> list[str]:
    """Format probabilities so that the largest stays the largest."""
    texts = [*map(_format_number, p)]
    rounded = [*map(float, texts)]
    return texts if rounded.index(max(rounded)) == best else [*map(repr, p)]


def _format_number(value: float) -> str:
    return f"{value:.{DIGITS}g}"


def target_offset_and_scale(schema: TableSchema | None) -> tuple[float, float]:
    """Return offset and scale that convert a model's numbers, from -1 to 1, to the unit of a schema's target.

    >>> target_offset_and_scale(None)
    (0.0, 1.0)
    """
    response = schema.target_column if schema else None
    low, high = response.range if response is not None and response.range else (-1.0, 1.0)
    return (low + high) / 2, (high - low) / 2


def survival_label(interval: str) -> str:
    """Return the label of the probability that no event occurs by the end of an interval.

    >>> survival_label("10 to 20")
    'beyond 20'
    """
    return f"beyond {interval.rpartition(' to ')[2]}"


# --- warnings about a finished run ----------------------------------------------------------------------

MAX_EPSILON = 20.0  # beyond it a guarantee is one in name


def collect_warnings(
    setting: Setting,
    nodes: Sequence[str],
    privacy: Mapping[str, Any],
    model_outputs: Outputs,
    classes: Sequence[str],
) -> list[str]:
    """Return all warnings about a finished run.

    Args:
        setting: of the run; with remote nodes it has none of their data, and fewer checks are possible.
        nodes: their names.
        privacy: "privacy" of the result.
        classes: names of the classes.
    """
    parts = [node.data for node in setting.nodes]
    found = [
        single_node_warning(nodes),
        *zero_learning_rates_warning(setting.spec.method, setting.spec.nodes.local.lr),
        weak_privacy_warning(privacy),
        missing_classes_warning(setting.task, parts, classes),
        *duplicate_inputs_warnings(setting.test, setting.public, parts),
        warn_reshaped_public(setting.public),
        unscaled_images_warning(setting.task, setting.mean, setting.std, parts),
        probabilities_as_logits_warning(setting.task, model_outputs),
        non_finite_outputs_warning(model_outputs),
    ]
    return [each for each in found if each is not None]


def single_node_warning(nodes: Sequence[str]) -> str | None:
    """Warn about a federation of one node."""
    return "there is only one node: nothing is federated" if len(nodes) == 1 else None


def zero_learning_rates_warning(method: Method, local: float) -> list[str]:
    """Warn about learning rates of 0."""
    rates = {"nodes.local.lr": local, **_learning_rates(method, "method")}
    return [f"{name} is 0: its parameters are not trained" for name, rate in rates.items() if rate == 0]


def _learning_rates(options: Any, section: str) -> dict[str, float]:
    """Return the learning rates among options and their groups, by name."""
    rates: dict[str, float] = {}
    for option in fields(options):
        value, name = getattr(options, option.name), f"{section}.{option.name}"
        if is_dataclass(value):
            rates |= _learning_rates(value, name)
        elif option.name == "lr" or option.name.endswith("_lr"):
            rates[name] = value
    return rates


def weak_privacy_warning(privacy: Mapping[str, Any]) -> str | None:
    """Warn about a large epsilon, spent or budgeted."""
    epsilon_by_node: dict[str, float] = {}
    for node in privacy["nodes"]:
        public_hashes = [value for key in ("epsilon", "budget") if (value := node.get(key)) is not None]
        if public_hashes and max(public_hashes) > MAX_EPSILON:
            epsilon_by_node[node["name"]] = max(public_hashes)
    if not epsilon_by_node:
        return None
    return (
        f"epsilon is up to {max(epsilon_by_node.values()):.3g} at {join_names(list(epsilon_by_node))}: above "
        f"{MAX_EPSILON:g} the guarantee is nominal, as the odds about a record may change by a factor "
        "of e^epsilon"
    )


def missing_classes_warning(task: Task, parts: Sequence[TensorData], classes: Sequence[str]) -> str | None:
    """Warn about declared classes or labels without an example at any node."""
    if not parts or task.kind not in ("class", "labels"):
        return None
    class_counts = torch.stack([task.counts(part).cpu() for part in parts]).sum(0)
    missing = [name for name, count in zip(classes, class_counts.tolist(), strict=True) if count == 0]
    return f"no node has an example of {join_names(missing)}: it cannot be learned" if missing else None


def duplicate_inputs_warnings(
    test: TensorData, public: PublicData | None, parts: Sequence[TensorData]
) -> list[str]:
    """Warn about inputs that occur in two of test, public and private data."""
    test_hashes, public_hashes = (
        input_hashes(test.inputs),
        set(input_hashes(public.inputs)) if public is not None else set(),
    )
    private = {each for part in parts for each in input_hashes(part.inputs)}
    found = []
    for name, others in (("private", private), ("public", public_hashes)):
        if count := sum(each in others for each in test_hashes):
            found.append(
                f"{count:,} of {len(test_hashes):,} test examples are also {name} data: metrics are too good"
            )
    if count := len(public_hashes & private):
        found.append(f"{count:,} different public inputs are also private data: these are not secret")
    return found


def input_hashes(inputs: torch.Tensor) -> list[bytes]:
    """Return a hash of each input."""
    rows = inputs.detach().cpu().contiguous().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]


def warn_reshaped_public(public: PublicData | None) -> str | None:
    """Warn about public images that were converted to the shape of the private ones."""
    return (
        f"public data {public.name} are {public.conversion}"
        if public is not None and public.conversion
        else None
    )


def unscaled_images_warning(
    task: Task, mean: Sequence[float], std: Sequence[float], parts: Sequence[TensorData]
) -> str | None:
    """Warn about images from 0 to 1 if the declared normalization maps black to -1."""
    if task.form != "images" or task.kind == "image" or ({*mean, *std} or {0.5}) != {0.5}:
        return None
    if not parts or any(float(part.inputs.min()) < 0 for part in parts):
        return None
    model_outputs = "no node's inputs are below 0, and mean and std of 0.5 say that black is -1"
    return f"{model_outputs}: pixels from 0 to 1 want mean = 0 and std = 1"


def probabilities_as_logits_warning(task: Task, model_outputs: Outputs) -> str | None:
    """Warn about models that return probabilities: a second softmax of them is never confident."""
    names = [
        name
        for name, outputs in _outputs_by_model_name(model_outputs).items()
        if _are_probabilities(task, outputs)
    ]
    if not names:
        return None
    last = "sigmoid" if task.kind == "labels" else "softmax"
    return f"outputs of {join_names(names)} are probabilities (expected logits): remove the {last}"


def _are_probabilities(task: Task, outputs: torch.Tensor) -> bool:
    if task.kind not in ("class", "labels", "map"):
        return False
    if task.kind == "labels":
        return bool((outputs > 0).all() and (outputs < 1).all())
    return bool((outputs >= 0).all() and ((outputs.float().sum(1) - 1).abs() < 1e-2).all())


def non_finite_outputs_warning(model_outputs: Outputs) -> str | None:
    """Warn about models that return NaN or infinity."""
    models = _outputs_by_model_name(model_outputs)
    bad = {name: int((~outputs.isfinite()).flatten(1).any(1).sum()) for name, outputs in models.items()}
    names = [name for name, count in bad.items() if count]
    if not names:
        return None
    count = f"{max(bad.values()):,} of {len(models[names[0]]):,} test inputs"
    return (
        f"outputs of {join_names(names)} are NaN or infinite for up to {count}: their metrics are meaningless"
    )


def _outputs_by_model_name(model_outputs: Outputs) -> dict[str, torch.Tensor]:
    """Return the outputs of all models by name."""
    return {
        **model_outputs.node_models,
        **({} if model_outputs.global_model is None else {"the student": model_outputs.global_model}),
    }


def best_evaluation_notes(lines: Sequence[Mapping[str, Any]], task: Task, unit: str) -> list[str]:
    """Return a note about the best evaluation of a run; empty if there was only one.

    Args:
        lines: lines of ``metrics.jsonl``.
        unit: name of a step: step, epoch or round.
    """
    main_metric = task.metrics[0]
    evaluations = [line for line in lines if line["phase"] == "distillation" and main_metric.key in line]
    if len(evaluations) < 2:
        return []
    choose = max if main_metric.better == "higher" else min
    best = choose(evaluations, key=lambda line: line[main_metric.key])
    value = f"{best[main_metric.key]:.1f} {main_metric.unit} at {unit} {best['step']}"
    return [
        f"the best of {len(evaluations)} evaluations on the test data was {value}; choosing it is "
        "selection on "
        "the test data, and all other metrics are of the end of the run"
    ]
