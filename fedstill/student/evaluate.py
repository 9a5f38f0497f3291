"""Evaluate a student on data that its run did not use, with the code that evaluates runs.

The result has all metrics of the task, overall and by site, a confidence interval of the main metric, and the
number of examples that a node had in training. The latter is determined only if the nodes' data are on this
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import FedstillError
from fedstill.core.run_writer import RunWriter, read_object
from fedstill.core.text_format import replace_nonfinite
from fedstill.core.version import __version__
from fedstill.data.features import FeatureCache, compute_features
from fedstill.data.loading import load
from fedstill.data.new_data import EvaluationDataOptions, load_labeled
from fedstill.models.backbones import BackboneWithHead
from fedstill.runs.build import describe_cases, split_data
from fedstill.runs.data_digests import digest_examples
from fedstill.runs.evaluation import Evaluation, Outputs, student_outputs_as_reloaded
from fedstill.runs.results import input_hashes
from fedstill.runs.spec import load_toml
from fedstill.runs.student_file import read


def evaluate(
    run: str | Path,
    data: str,
    how: EvaluationDataOptions | None = None,
    model: nn.Module | str | None = None,
    backbone: str | Path = "",
    backbone_weights: str | Path = "",
) -> dict[str, Any]:
    """Evaluate the student of a run on other data.

    Args:
        run: folder of the run, or its ``student.safetensors``.
        data: a path, all of whose examples are used, or the name of a data set, whose test part is used.
        how: how the data are read; None: by the defaults.
        model, backbone, backbone_weights: as in :func:`fedstill.load`.

    Returns:
        ``metrics`` by key, ``interval`` of the main metric, ``sites`` with the same for each site,
        ``labels``, the number of ``examples`` (and cases), and ``seen``: how many examples a node had, None
        if unknown, and ``why``.

    Raises:
        FedstillError: there is no student, or the data do not fit it.
    """
    network, about = read(run, model, str(backbone), str(backbone_weights))
    reading = how or EvaluationDataOptions()
    if about.words and not reading.words:
        reading = EvaluationDataOptions(**{**asdict(reading), "words": about.words})
    test = load_labeled(data, about.spec_or_error, reading)
    task, compute = about.spec_or_error.make_task(), Compute(EngineConfig())
    evaluation = Evaluation(task, test.to(compute.device), compute, 0)
    inputs = evaluation.test.inputs
    if isinstance(network, BackboneWithHead):
        cache = FeatureCache.from_options(about.features, network.backbone)
        inputs = compute_features(network.backbone, inputs, cache, batch=about.features.batch)
        network = network.head
    outputs = student_outputs_as_reloaded(network, inputs, compute)
    predictions = Outputs(outputs)
    details = evaluation.detailed_metrics(predictions, about.spec_or_error.classes)
    sites = {}
    for site in evaluation.sites:
        rows = evaluation.site_rows(site)
        part = Evaluation(task, evaluation.test.subset(rows), compute, 0)
        site_outputs = outputs[rows]
        sites[site] = {
            "examples": len(rows),
            "metrics": replace_nonfinite(part.compute_metrics(site_outputs)),
            "interval": _interval(part, Outputs(site_outputs)),
        }
    advice = task.metric_warning(test.targets, about.spec_or_error.classes)
    return {
        "fedstill": __version__,
        "student": about.model,
        "run": str(run),
        "data": data,
        "task": task.name,
        "metric": task.metric,
        "measures": [asdict(metric) for metric in task.metrics],
        "examples": len(test),
        **describe_cases(test),
        "metrics": replace_nonfinite(evaluation.compute_metrics(outputs)),
        "interval": _interval(evaluation, predictions),
        "sites": sites,
        "labels": details["labels"],
        "seen": count_seen_examples(Path(run), test),
        "notes": [advice] if advice else [],
    }


def _interval(evaluation: Evaluation, outputs: Outputs) -> list[float] | None:
    resampled = evaluation.confidence_intervals(outputs, RunWriter(None))
    return None if resampled is None else resampled["global_model"]


def count_seen_examples(run: Path, test: TensorData) -> Mapping[str, Any]:
    """Count the test examples that are identical to examples of a node, or of the public data.

    Args:
        run: folder of the run.
        test: examples in the input format of the run, on the CPU.

    Returns:
        ``examples`` and ``public`` with the counts, or ``examples`` None if unknown; and ``why``.
    """
    if not (run / "config.toml").exists():
        return {"examples": None, "why": "the run's configuration is not here"}
    result = read_object(run / "result.json")
    if result["split"]["name"] == "as it is":
        return {"examples": None, "why": "the nodes' data are elsewhere"}
    try:
        config = load_toml(run / "config.toml")
        parts, public = split_data(config, load(config.data, config.task))
    except FedstillError as error:
        return {"examples": None, "why": f"the run's data cannot be read: {error}"}
    if digest_examples(parts) != result.get("data_digest"):
        name = config.data.registered_name
        why = f"the data at {name} are not the run's: start fedstill in the folder of the run's start"
        return {"examples": None, "why": why}
    private = {digest for part in parts for digest in input_hashes(part.inputs)}
    shared = set(input_hashes(public.inputs)) if public is not None else set[str]()
    tested = input_hashes(test.inputs)
    seen_hashes = {"examples": private, "public": shared - private}
    return {name: sum(digest in hashes for digest in tested) for name, hashes in seen_hashes.items()} | {
        "why": ""
    }
