"""Build a run from its configuration: load and split data, create networks, describe them for the result."""

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
from fedstill.data.text_data import TextData
from fedstill.models import custom_model
from fedstill.models.interface import Interface
from fedstill.models.model_config import ModelConfig, read_model_config
from fedstill.models.predictors import URL_SCHEMES, Endpoint
from fedstill.protocol.method import unmet_need
from fedstill.runs.config import RunConfig, fingerprint_options
from fedstill.runs.setting import Setting
from fedstill.runs.simulation import Simulation


def build_simulation(config: RunConfig) -> tuple[Simulation, dict[str, Any]]:
    """Build a simulation from a configuration, with all checks.

    Returns:
        The simulation, and its description for the result.
    """
    data = load(config.data, config.task)
    if len(data.classes) < config.task.task_class.min_classes:
        expected = f"{config.task.task_class.min_classes} or more classes"
        raise DataError(f"{data.name}: the only class is {', '.join(data.classes)} (expected {expected})")
    task, method = config.task.make(data.classes), config.method
    reason = unmet_need(method.needs(), task)
    if reason is not None:  # first, as it cannot be fixed by other options
        raise MethodRefused(method.title, "", reason)
    task.check(data.train, "training data")
    parts, public = split_data(config, data)
    simulation = Simulation(build_setting(config, data, parts, public))
    if config.data.validation:
        simulation.notes.append(
            "evaluated on validation data (data.validation): the test data of this run are training examples "
            "that no node has"
        )
    split_config, split_values = config.split, simulation.setting.split_values
    value_info = {"values": list(split_values)} if split_values else {}
    split_info = {
        "name": split_config.registered_name,
        "about": split_config.about,
        **split_config.specific_options,
        "nodes": len(parts),
        **value_info,
    }
    return simulation, describe_run(config, data, sum(map(len, parts)), split_info)


def describe_run(
    config: RunConfig, data: DataSet, train: int | None, split: dict[str, Any]
) -> dict[str, Any]:
    """Describe a run for its result.

    Args:
        train: number of training examples of the nodes; None if unknown.
        split: how they were split.
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
            **describe_cases(data.test),
            "shape": list(data.test.inputs.shape[1:]),
            **({"schema": to_table(data.schema)} if data.schema else {}),
            "note": data.note,
        },
        "split": split,
    }


def describe_cases(test: TensorData) -> dict[str, Any]:
    """Return the number of cases (``test_cases``) and their kind (``case``); empty if each example is a case.

    A case is a patient with several slices or a picture with several patches; metrics are means over cases.
    """
    count = 0 if test.cases is None else len(test.cases.present_ids())
    if test.cases is None or count in (0, len(test)):
        return {}
    return {"test_cases": count, "case": "patient" if test.cases.corners is None else "picture"}


def build_setting(
    config: RunConfig, data: DataSet, parts: Sequence[TensorData], public: PublicData | None
) -> Setting:
    """Build the setting of a simulation from data that have been split.

    Args:
        data: classes, test set and normalization.
        parts: each node's examples.
        public: public data, or None.

    Raises:
        ArgumentError: there are more models than nodes.
    """
    names = config.nodes.models
    if len(names) > len(parts):
        raise ArgumentError("nodes.models", list(names), f"at most one for each of the {len(parts)} nodes")
    specs = [names[index % len(names)] for index in range(len(parts))]
    centralized_model = (
        _build_initial_network(config, data, config.student.model, "student")
        if config.evaluation.centralized
        else None
    )
    return replace(
        build_server_setting(config, data, public),
        parts=parts,
        models=[_build_node_model(config, data, spec, index) for index, spec in enumerate(specs)],
        centralized_model=centralized_model,
        policies=[config.nodes.policy] * len(parts),
        privacies=[config.nodes.privacy] * len(parts),
        perceptual=config.nodes.perceptual,
        model_names=specs,
        split_values=config.split.distinct_node_values(_columns_to_split(config, data)) or (),
    )


def build_server_setting(config: RunConfig, data: DataSet, public: PublicData | None) -> Setting:
    """Build the server's part of a setting. Its ``local`` are the options of training at the server."""
    return Setting(
        task=config.task.make(data.classes),
        parts=(),
        models=(),
        student=_build_initial_network(config, data, config.student.model, "student"),
        test=_test_set(config, data),
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


def _test_set(config: RunConfig, data: DataSet) -> TensorData:
    """Return the test set with its groups and cases, for metrics by site and by case.

    A site is a value of the column by which the nodes were split, or of the column "site". Cases that the
    reader of the data has built (patients from slices) are kept.
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


def _build_initial_network(
    config: RunConfig, data: DataSet, spec: str, *purpose: str | int
) -> torch.nn.Module:
    """Build a network with initial weights, which depend on the seed and the purpose."""
    shape = tuple(data.test.inputs.shape[1:])
    return models.build(spec, shape, len(data.classes), config.seed, *purpose, vocabulary=data.vocabulary)


def _build_node_model(config: RunConfig, data: DataSet, spec: str, index: int) -> torch.nn.Module:
    """Build a node's model."""
    parsed, place = parse_node_model(spec), Path()
    task, shape = config.task.make(data.classes), tuple(data.test.inputs.shape[1:])
    to = Interface(task, data.classes, shape, data.vocabulary, data.mean, data.std, data.schema)
    return custom_model.build_model(parsed, to, place, config.seed, "model", index, option="nodes.models")


def parse_node_model(spec: str) -> ModelConfig:
    """Parse an entry of ``nodes.models``.

    Raises:
        ArgumentError: an address of another machine. Running a shared configuration must not send inputs
            there.
    """
    parsed = read_model_config(spec, Path(), "nodes.models")
    if parsed.name.startswith(URL_SCHEMES) and not Endpoint(parsed.name).is_loopback:
        allowed = "an address on this machine, as http://127.0.0.1:8080/predict; others belong in a node.toml"
        raise ArgumentError("nodes.models", parsed.name, allowed)
    return parsed


def split_data(config: RunConfig, data: DataSet) -> tuple[list[TensorData], PublicData | None]:
    """Split the training data over the nodes; return the nodes' parts and the public data."""
    train, public = load_public(config.public, data, config.task)
    columns = _columns_to_split(config, data)
    column_name = config.split.column if isinstance(config.split, ByColumn) else ""
    if column_name in data.test_columns:  # as of training data: else figures by site would leave some out
        require_no_gaps(column_name, data.test_columns[column_name], "test data")
    generator = numpy_generator(config.seed, "split")
    units = columns[data.group_column] if data.group_column else None
    indices = split(train.targets, len(data.classes), config.split, generator, columns, units)
    return hide_labels([train.subset(part) for part in indices], config.split.findings, generator), public


def _columns_to_split(config: RunConfig, data: DataSet) -> dict[str, Column]:
    """Return the columns of the examples that are split over the nodes."""
    rows = hold_out(config.public, data)[0] if config.public.name == HELD_OUT else slice(None)
    return {name: column[rows] for name, column in data.columns.items()}
