"""Measures a student on data that were not its run's, by the code that measures runs.

All figures of its task, in all and site by site, what each leads by with its interval, and whether a node had
any of the examples: that is looked up where the nodes' data are on this machine, and else not claimed.
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
from fedstill.data.loading import load
from fedstill.data.new_data import NewDataOptions, load_labeled
from fedstill.runs.build import case_counts, divide
from fedstill.runs.config import load_toml
from fedstill.runs.evaluation import Evaluation, Outputs, student_outputs
from fedstill.runs.run_warnings import digests
from fedstill.runs.simulation import digest_of
from fedstill.runs.student_file import read


def evaluate(
    run: str | Path, data: str, how: NewDataOptions | None = None, model: nn.Module | str | None = None
) -> dict[str, Any]:
    """What a run's student is worth on other data.

    Args:
        run: its folder, or its ``student.safetensors``.
        data: a path, all of whose examples count, or a data set with a name, whose test part does.
        how: they are read; None: by the defaults.
        model: as :func:`fedstill.load` takes it.

    Returns:
        ``metrics`` by key, ``interval`` of the leading one, ``sites`` with the same of each, ``labels``, how
        many ``examples`` (and cases) there are, and ``count_seen_examples``: how many of them were a node's, None where that
        cannot be looked up, and ``why``.

    Raises:
        FedstillError: there is no student, or the data are not of its form.
    """
    network, about = read(run, model)
    reading = how or NewDataOptions()
    if about.words and not reading.words:
        reading = NewDataOptions(**{**asdict(reading), "words": about.words})
    test = load_labeled(data, about.known, reading)
    task, compute = about.known.make_task(), Compute(EngineConfig())
    look = Evaluation(task, test.to(compute.device), compute, 0)
    outputs = student_outputs(network, look.test.inputs, compute)
    told = Outputs(outputs)
    details = look.details(told, about.known.classes)
    sites = {}
    for site in look.sites:
        rows = look.site_rows(site)
        part = Evaluation(task, look.test.subset(rows), compute, 0)
        own = outputs[rows]
        sites[site] = {
            "examples": len(rows),
            "metrics": replace_nonfinite(part.compute_metrics(own)),
            "interval": _interval(part, Outputs(own)),
        }
    advice = task.metric_advice(test.targets, about.known.classes)
    return {
        "fedstill": __version__,
        "student": about.model,
        "run": str(run),
        "data": data,
        "task": task.name,
        "metric": task.metric,
        "measures": [asdict(metric) for metric in task.metrics],
        "examples": len(test),
        **case_counts(test),
        "metrics": replace_nonfinite(look.compute_metrics(outputs)),
        "interval": _interval(look, told),
        "sites": sites,
        "labels": details["labels"],
        "seen": count_seen_examples(Path(run), test),
        "notes": [advice] if advice else [],
    }


def _interval(look: Evaluation, told: Outputs) -> list[float] | None:
    drawn = look.confidence_intervals(told, RunWriter(None))
    return None if drawn is None else drawn["central"]


def count_seen_examples(run: Path, test: TensorData) -> Mapping[str, Any]:
    """How many test examples are, to the last bit, among what a run's nodes had, or among the public data
    that its student may have learned on; None where nobody can tell.

    Args:
        test: examples in the run's form, on the CPU.
    """
    if not (run / "config.toml").exists():
        return {"examples": None, "why": "the run's configuration is not here"}
    result = read_object(run / "result.json")
    if result["split"]["name"] == "as it is":
        return {"examples": None, "why": "the nodes' data are elsewhere"}
    try:
        config = load_toml(run / "config.toml")
        parts, public = divide(config, load(config.data, config.task))
    except FedstillError as error:
        return {"examples": None, "why": f"the run's data cannot be read: {error}"}
    if digest_of(parts) != result.get("data_digest"):
        why = f"the data at {config.data.registered_name} are not the run's: start in the folder where the run started"
        return {"examples": None, "why": why}
    private = {each for part in parts for each in digests(part.inputs)}
    shared = set(digests(public.inputs)) if public is not None else set[str]()
    tested = digests(test.inputs)
    both = {"examples": private, "public": shared - private}
    return {name: sum(each in known for each in tested) for name, known in both.items()} | {"why": ""}
