"""What a run is made of, from its configuration: data, split, networks, and what its result says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedstill import models
from fedstill.core.config_tables import to_table
from fedstill.core.dataset import CaseIndex, Column, DataSet, TensorData
from fedstill.core.errors import ArgumentError, DataError, MethodRefused
from fedstill.core.seeds import numpy_generator
from fedstill.core.version import __version__
from fedstill.data.loading import SITE, load
from fedstill.data.public import HELD_OUT, PublicData, hold_out, load_public
from fedstill.data.splits import ByColumn, hide_labels, split
from fedstill.data.stratified_sampling import hash_groups, require_no_gaps
from fedstill.data.text import TextData
from fedstill.models import custom_model
from fedstill.models.interface import Interface
from fedstill.models.model_config import ModelConfig, read_model_config
from fedstill.models.predictors import URL_SCHEMES, Endpoint
from fedstill.protocol.method import unmet_need
from fedstill.runs.config import RunConfig, fingerprint_options
from fedstill.runs.setting import Setting
from fedstill.runs.simulation import Simulation


def prepare(config: RunConfig) -> tuple[Simulation, dict[str, Any]]:
    """Data, split, models and method of a configuration, made ready and checked.

    Returns:
        The run, and what the result says about it beside the figures.
    """
    data = load(config.data, config.task)
    if len(data.classes) < config.task.task_class.min_classes:
        told = f"{', '.join(data.classes)}: allowed are {config.task.task_class.min_classes} or more"
        raise DataError(f"{data.name}: the only class is {told}")
    task, method = config.task.make(data.classes), config.method
    reason = unmet_need(method.needs(), task)
    if reason is not None:  # before all that could be mended in vain
        raise MethodRefused(method.title, "every node", reason)
    task.check(data.train, "training data")
    parts, public = divide(config, data)
    simulation = Simulation(assemble(config, data, parts, public))
    if config.data.validation:
        simulation.notes.append(
            "measured on validation data (data.validation): what is called test data here is a part of the "
            "training examples that no node had"
        )
    how, values = config.split, simulation.setting.values
    stands = {"values": list(values)} if values else {}
    divided = {
        "name": how.registered_name,
        "about": how.about,
        **how.specific_options,
        "nodes": len(parts),
        **stands,
    }
    return simulation, about(config, data, sum(map(len, parts)), divided)


def about(config: RunConfig, data: DataSet, train: int | None, split: dict[str, Any]) -> dict[str, Any]:
    """What a result says of a run beside its figures.

    Args:
        train: how many examples the nodes have; None: theirs to know.
        split: how they are divided.
    """
    return {
        "fedstill": __version__,
        "name": config.name,
        "command": "",
        "options": fingerprint_options(config),
        "data": {
            "name": data.name,
            "classes": list(data.classes),
            "train": train,
            "test": len(data.test),
            **case_counts(data.test),
            "shape": list(data.test.inputs.shape[1:]),
            **({"schema": to_table(data.schema)} if data.schema else {}),
            "note": data.note,
        },
        "split": split,
    }


def case_counts(test: TensorData) -> dict[str, Any]:
    """Of how many cases test examples are parts, as figures are means over those; empty: of none.

    ``test_cases`` says how many, ``case`` what one is: a patient of several slices, a picture of several
    patches.
    """
    count = 0 if test.cases is None else len(test.cases.present_ids())
    if test.cases is None or count in (0, len(test)):
        return {}
    return {"test_cases": count, "case": "patient" if test.cases.corners is None else "picture"}


def assemble(
    config: RunConfig, data: DataSet, parts: Sequence[TensorData], public: PublicData | None
) -> Setting:
    """What a simulation is made of, from data that have been divided.

    Args:
        data: its classes, test part and normalization.
        parts: each node's own examples.

    Raises:
        ArgumentError: more models than nodes.
    """
    names = config.nodes.models
    if len(names) > len(parts):
        raise ArgumentError("nodes.models", list(names), f"at most one for each of the {len(parts)} nodes")
    specs = [names[index % len(names)] for index in range(len(parts))]
    centralized_model = (
        _network(config, data, config.student.model, "student") if config.evaluation.centralized else None
    )
    return replace(
        servers(config, data, public),
        parts=parts,
        models=[_node_model(config, data, spec, index) for index, spec in enumerate(specs)],
        centralized_model=centralized_model,
        policies=[config.nodes.policy] * len(parts),
        privacies=[config.nodes.privacy] * len(parts),
        perceptual=config.nodes.perceptual,
        model_names=specs,
        values=config.split.node_values(_columns(config, data)) or (),
    )


def servers(config: RunConfig, data: DataSet, public: PublicData | None) -> Setting:
    """What of a run is its server's: all but nodes. By ``local`` it trains what it trains by itself."""
    return Setting(
        task=config.task.make(data.classes),
        parts=(),
        models=(),
        student=_network(config, data, config.student.model, "student"),
        test=_tested(config, data),
        method=config.method,
        local=config.nodes.local,
        engine=config.engine,
        mean=data.mean,
        std=data.std,
        seed=config.seed,
        every=config.evaluation.every,
        samples=config.evaluation.samples,
        test_names=data.test_names,
        best=config.evaluation.best,
        public=public,
        link=config.link,
        classes=data.classes,
        vocabulary=data.vocabulary,
        schema=data.schema,
        student_name=config.student.model,
        learns=config.task,
        words=config.data.vocabulary if isinstance(config.data, TextData) else "",
        options=fingerprint_options(config),
    )


def _tested(config: RunConfig, data: DataSet) -> TensorData:
    """The test part, with what figures heed of it: of which site each example is, and whose.

    A site is a value of the column that the nodes are divided by, or else of the column "site". Examples that
    their reader put together to cases (slices to patients) keep those.
    """
    test, columns = data.test, data.test_columns
    if data.group_column in columns:
        test = replace(test, groups=hash_groups(columns[data.group_column].tolist()))
    column = config.split.column if isinstance(config.split, ByColumn) else SITE
    if test.cases is not None or column not in columns or column == data.group_column:
        return test
    sites = tuple(map(str, columns[column].tolist()))
    each = torch.arange(len(test))
    names = data.test_names or tuple(map(str, each.tolist()))
    return replace(test, cases=CaseIndex(each, names, sites))


def _network(config: RunConfig, data: DataSet, spec: str, *purpose: str | int) -> torch.nn.Module:
    """A network in its first state, which follows from the seed and what it is for."""
    shape = tuple(data.test.inputs.shape[1:])
    return models.build(spec, shape, len(data.classes), config.seed, *purpose, vocabulary=data.vocabulary)


def _node_model(config: RunConfig, data: DataSet, spec: str, index: int) -> torch.nn.Module:
    """A node's model, whatever kind it is."""
    said, place = node_models(spec), Path()
    task, shape = config.task.make(data.classes), tuple(data.test.inputs.shape[1:])
    to = Interface(task, data.classes, shape, data.vocabulary, data.mean, data.std, data.schema)
    return custom_model.make(said, to, place, config.seed, "model", index, whose="nodes.models")


def node_models(spec: str) -> ModelConfig:
    """What one of ``nodes.models`` says of a model.

    Raises:
        ArgumentError: an address elsewhere: files that describe runs pass from hand to hand, and whoever runs
            one would send inputs there.
    """
    said = read_model_config(spec, Path(), "nodes.models")
    if said.name.startswith(URL_SCHEMES) and not Endpoint(said.name).loopback:
        allowed = "an address on this machine, as http://127.0.0.1:8080/predict; others stand in a node.toml"
        raise ArgumentError("nodes.models", said.name, allowed)
    return said


def divide(config: RunConfig, data: DataSet) -> tuple[list[TensorData], PublicData | None]:
    """Each node's own part of the training data, as a run divides them, and what is public."""
    train, public = load_public(config.public, data, config.task)
    columns = _columns(config, data)
    by = config.split.column if isinstance(config.split, ByColumn) else ""
    if by in data.test_columns:  # as of training data: else figures by site would leave some out
        require_no_gaps(by, data.test_columns[by], "test data")
    generator = numpy_generator(config.seed, "split")
    units = columns[data.group_column] if data.group_column else None
    indices = split(train.targets, len(data.classes), config.split, generator, columns, units)
    return hide_labels([train.subset(part) for part in indices], config.split.findings, generator), public


def _columns(config: RunConfig, data: DataSet) -> dict[str, Column]:
    """What is known of the examples that are divided over the nodes."""
    kept = hold_out(config.public, data)[0] if config.public.name == HELD_OUT else slice(None)
    return {name: column[kept] for name, column in data.columns.items()}
