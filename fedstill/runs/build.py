"""From a specification to the objects of a run: load and split data, build networks, check that they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill import models
from fedstill.core.compute import Compute
from fedstill.core.config_tables import to_table
from fedstill.core.dataset import CaseIndex, Column, DataSet, TensorData, check_pixels
from fedstill.core.errors import ArgumentError, DataError, MethodRefused, by_caller
from fedstill.core.name_normalization import normalize_name
from fedstill.core.seeds import numpy_generator
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.core.version import __version__
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import SITE, load
from fedstill.data.partitioners import ByColumn, hide_labels, split
from fedstill.data.public import HELD_OUT, PublicData, hold_out, load_public
from fedstill.data.stratified_sampling import hash_groups, require_no_gaps
from fedstill.data.table_data import check_features
from fedstill.models import custom_model
from fedstill.models.backbones import RawInputs
from fedstill.models.interface import Interface
from fedstill.models.model_config import ModelConfig, encoder_backbone, read_model_config
from fedstill.models.module_check import needs_two_examples, require_opacus
from fedstill.models.predictors import URL_SCHEMES, Endpoint
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import NoPrivacy, PrivacyConfig
from fedstill.protocol.method import Method
from fedstill.protocol.needs import Needs, unmet_need
from fedstill.runs.feature_space import FeatureSpace, on_features, to_feature_space
from fedstill.runs.spec import RunSpec, fingerprint_options
from fedstill.tasks import Task

# --- the objects of a run, and checks before training that they fit together ----------------------------

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SimulatedNode:
    """A node of a simulation: its data and model, and what its owner decides.

    Args:
        name: its name.
        data: its private data.
        model: its network.
        policy: rules of its gate for releases.
        privacy: its privacy mechanism and budget.
        site: value of the column by which the data were split; empty: another split.
    """

    name: str
    data: TensorData
    model: nn.Module
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    privacy: PrivacyConfig = field(default_factory=NoPrivacy)
    site: str = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The specification of a run with its objects: data and networks, made from it or given in Python.

    Args:
        spec: all options of the run.
        task: what is learned: ``spec.task`` for these classes.
        student: the server's network.
        test: data that no node has.
        nodes: the nodes of a simulation; remote nodes have their own data and models.
        centralized_model: network for the centralized upper bound, or None.
        public: public data, for methods that need some.
        classes: names of the task's classes or labels, for reports; default: their numbers.
        mean, std: normalization of images, per channel; default: 0.5 and 0.5.
        vocabulary: number of token ids, for texts.
        schema: columns of tables; default: any numbers.
        test_names: name of each test example in its source; default: numbers from 0.
        feature_space: backbone whose features are the inputs; None: the data themselves are.
    """

    spec: RunSpec
    task: Task
    student: nn.Module
    test: TensorData
    nodes: Sequence[SimulatedNode] = ()
    centralized_model: nn.Module | None = None
    public: PublicData | None = None
    classes: Sequence[str] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocabulary: int = 0
    schema: TableSchema = NO_SCHEMA
    test_names: Sequence[str] = ()
    feature_space: FeatureSpace | None = None


def check_method(method: Method, task: Task, public: PublicData | None) -> None:
    """Refuse a method that cannot learn the task, or lacks public data.

    Raises:
        MethodRefused: the method does not fit.
        ArgumentError: it has no rounds.
    """
    method.total_steps  # noqa: B018 - which refuses to be none
    needs = method.needs()
    reason = unmet_need(needs, task)
    if reason is None and (needs.public or needs.public_labels) and public is None:
        reason = "there is no public data: " + by_caller(
            "pass --public.name NAME", "set public.name", "pass public=..."
        )
    if reason is None and needs.public_labels and public is not None and public.labels is None:
        reason = f"public data {public.name!r} have no labels of this task"
    if reason is not None:
        raise MethodRefused(method.title, "", reason)


def check_student_and_server_data(setting: Setting) -> None:
    """Refuse test data, public data or a student that do not fit the task.

    Raises:
        FedstillError: the first that does not fit.
    """
    setting.task.check(setting.test, "test data")
    shape, public = input_shape(setting), setting.public
    models.check_module(
        setting.student, shape, setting.task.output_shape(shape), "student", setting.task.form
    )
    if not any(parameter.requires_grad for parameter in setting.student.parameters()):
        raise ArgumentError("student", "all frozen", "a network with trainable parameters")
    if public is not None:
        public_shape = tuple(public.inputs.shape[1:])
        labels = (
            setting.task.empty_targets(len(public), public_shape) if public.labels is None else public.labels
        )
        data = TensorData(public.inputs, labels.to(public.inputs.device))
        setting.task.check(data, "public data")
        check_range(setting, data, "public data")
        if public_shape != shape:
            raise ArgumentError("shape of public data", public_shape, f"{shape}, as in the test data")


def make_nodes(
    parts: Sequence[TensorData],
    models: Sequence[nn.Module],
    names: Sequence[str] = (),
    policies: Sequence[PolicyConfig] = (),
    privacies: Sequence[PrivacyConfig] = (),
) -> list[SimulatedNode]:
    """Return the nodes of a simulation from lists with one entry for each node; defaults for empty ones.

    Raises:
        ArgumentError: a list has another length.
    """
    count = len(parts)
    if isinstance(privacies, PrivacyConfig):
        raise ArgumentError("privacies", "a PrivacyConfig", "a list of them, one for each node")
    lists: dict[str, Sequence[Any]] = {
        "models": models,
        "names": names or [f"node-{index}" for index in range(count)],
        "policies": policies or [PolicyConfig()] * count,
        "privacies": privacies or [NoPrivacy()] * count,
    }
    for what, given in lists.items():
        if not given or len(given) != count:
            raise ArgumentError(what, len(given), f"one for each of the {count} parts of the data")
    return [
        SimulatedNode(name=name, data=part, model=model, policy=policy, privacy=privacy)
        for part, model, name, policy, privacy in zip(parts, *lists.values(), strict=True)
    ]


def check_nodes(setting: Setting) -> None:
    """Check the nodes of a simulation.

    Raises:
        FedstillError: names, data or models do not fit together.
    """
    names = [node.name for node in setting.nodes]
    if len(set(map(normalize_name, names))) < len(names):
        raise ArgumentError("names", names, "each name once")
    shape = input_shape(setting)
    outputs = setting.task.output_shape(shape)
    for node in setting.nodes:
        setting.task.check(node.data, f"data of {node.name}")
        if tuple(node.data.inputs.shape[1:]) != shape:
            found = tuple(node.data.inputs.shape[1:])
            raise ArgumentError(f"input shape of {node.name}", found, f"{shape}, as in the test data")
        check_range(setting, node.data, f"data of {node.name}")
        models.check_module(node.model, shape, outputs, f"model of {node.name}", setting.task.form)
        if setting.public is not None and 0 < node.policy.max_rows < (rows := len(setting.public.inputs)):
            option = "nodes.policy.max_rows"
            limit = f"up to {node.policy.max_rows}, by {by_caller(option, option, 'max_rows of its policy')}"
            raise ArgumentError("public inputs", rows, limit)
    owners = [*((node.name, node.model) for node in setting.nodes), ("the student", setting.student)]
    owner_by_parameter: dict[int, str] = {}
    for owner, model in owners:
        for parameter in model.parameters():
            other = owner_by_parameter.setdefault(id(parameter), owner)
            if other != owner:
                raise ArgumentError("models", f"{other} and {owner}", "networks that share no parameter")


def check_networks(title: str, needs: Needs, frozen: Mapping[str, bool], alike: Mapping[str, bool]) -> None:
    """Refuse nodes whose networks the method cannot use, before training.

    Args:
        title, needs: title and needs of the method.
        frozen: by node, whether all parameters of its model are frozen.
        alike: by node, whether its model has the student's architecture.

    Raises:
        MethodRefused: naming all of these nodes.
    """
    reasons: dict[str, list[str]] = {}
    for node in frozen:
        if needs.trainable and frozen[node]:
            reasons.setdefault("its model is frozen, but the method trains it", []).append(node)
        elif needs.same_architecture and not alike[node]:
            option = by_caller("student.model", "student.model", "student=")
            reason = f"its model does not have the student's architecture ({option})"
            reasons.setdefault(reason, []).append(node)
    if reasons:
        (reason, nodes), *others = reasons.items()
        also = "".join(f"; {', '.join(who)}: {why}" for why, who in others)
        raise MethodRefused(title, ", ".join(nodes), f"{reason}{also}")
    if needs.student_architecture and not any(alike.values()):
        raise MethodRefused(title, "the student", "no node has its architecture")


def check_batch_size_for_batch_norm(setting: Setting, networks: Mapping[str, nn.Module]) -> None:
    """Refuse a method's batch size of 1 if a network with batch normalization cannot train on it.

    Raises:
        ArgumentError: naming the option, or the public data.
    """
    method, public = setting.spec.method, setting.public
    needs = method.needs()
    sources_of_one = [f"method.{name}" for name in method.batch_options if attrgetter(name)(method) == 1]
    needed = needs.public or needs.public_labels
    if needed and method.batch_options and public is not None and len(public) == 1:
        sources_of_one.append("public.name")
    for network_name, model in networks.items():
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        if (
            sources_of_one
            and is_trained
            and needs_two_examples(model, input_shape(setting), setting.task.form)
        ):
            raise ArgumentError(
                sources_of_one[0], "1 example", f"2 or more, for the batch norm of the {network_name}"
            )


def input_shape(setting: Setting) -> Shape:
    """Return the shape of an input: ``(C, H, W)`` of an image, ``(L,)`` of a text, ``(F,)`` of a row."""
    return tuple(setting.test.inputs.shape[1:])


def check_range(setting: Setting, data: TensorData, what: str) -> None:
    """Refuse pixels outside 0..1 and rows outside their schema, which a generator cannot produce."""
    if setting.schema and setting.task.form == "rows":
        check_features(data.inputs, setting.schema, what)
    if setting.task.form != "images":
        return
    mean, std = (each.flatten().tolist() for each in normalization(setting))
    images = setting.task.real_images(data)  # inputs of reconstruction may be brighter than white
    try:
        check_pixels(images, mean, std, what)
    except DataError as error:
        raise DataError(f"{error}; set mean and std to the normalization of the inputs") from None


def normalization(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of images, ``(C, 1, 1)`` each; ``(0, 1, 1)`` for other inputs."""
    if setting.task.form != "images":
        return torch.zeros(0, 1, 1), torch.ones(0, 1, 1)
    channels = setting.test.inputs.shape[1]
    given = {"mean": setting.mean, "std": setting.std}
    for name, values in given.items():
        if values and len(values) != channels:
            raise ArgumentError(name, values, f"one value for each of the {channels} channels, or none")
    mean, std = (torch.tensor(values or (0.5,) * channels).view(-1, 1, 1) for values in given.values())
    if (std <= 0).any():
        raise ArgumentError("std", setting.std, "above 0")
    return mean, std


# --- objects from a configuration -----------------------------------------------------------------------


def describe_run(spec: RunSpec, data: DataSet, train: int | None, split: dict[str, Any]) -> dict[str, Any]:
    """Describe a run for its result.

    Args:
        train: number of training examples of the nodes; None if unknown.
        split: how they were split.
    """
    return {
        "fedstill": __version__,
        "name": spec.name,
        "command": "",
        "options": fingerprint_options(spec),
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


def run_task(spec: RunSpec, classes: Sequence[str]) -> Task:
    """Return what the models of a run learn: its task, on rows of features if there is a backbone."""
    task = spec.task.make(classes)
    return task.on_features() if spec.features else task


@dataclass(frozen=True, eq=False)
class LoadedData:
    """Data of a simulation, as its models take them.

    Args:
        data: classes, test set and normalization.
        parts: each node's examples.
        public: public data, or None.
        feature_space: backbone whose features are the inputs; None: the data themselves are.
    """

    data: DataSet
    parts: Sequence[TensorData]
    public: PublicData | None
    feature_space: FeatureSpace | None = None


def prepare_data(
    spec: RunSpec, data: DataSet, *, progress: bool = False, placeholder: bool = False
) -> LoadedData:
    """Split the data of a run over the nodes, and compute their features if there is a backbone.

    Args:
        data: the data set of the run.
        progress: show the progress of the features.
        placeholder: take zeros as features, which are enough to check a run.

    Raises:
        FedstillError: the data cannot be split, or the backbone cannot be loaded.
    """
    parts, public = split_data(spec, data)
    return _to_model_inputs(spec, data, parts, public, progress=progress, placeholder=placeholder)


def prepare_server_data(spec: RunSpec, *, train_needed: bool = False) -> tuple[LoadedData, DataSpec]:
    """Load the data of a server, and compute their features if there is a backbone.

    Args:
        train_needed: refuse data without training examples.

    Returns:
        The data, without parts, and the spec of the inputs before features.

    Raises:
        FedstillError: the data or the backbone cannot be loaded.
    """
    data = load(spec.data, spec.task, train_needed=train_needed)
    _, public = load_public(spec.public, data, spec.task)
    return _to_model_inputs(spec, data, [], public), DataSpec.from_data(spec.task, data)


def _to_model_inputs(
    spec: RunSpec,
    data: DataSet,
    parts: Sequence[TensorData],
    public: PublicData | None,
    *,
    progress: bool = False,
    placeholder: bool = False,
) -> LoadedData:
    """Return data as the models take them: with features as inputs if there is a backbone.

    Args:
        parts: each node's examples.
        public: public data, or None.
        progress: show the progress of the features.
        placeholder: take zeros as features.

    Raises:
        FedstillError: the backbone cannot be loaded, or does not take the inputs, or a package is missing.
    """
    if "model" in spec.nodes.privacy.dp_trained:
        require_opacus()  # before features are computed
    if not spec.features:
        return LoadedData(data, parts, public)
    run_task(spec, data.classes)  # raises if the task has targets at each pixel
    if data.schema:
        raise ArgumentError("features.backbone", spec.features.backbone, "none for rows of a table")
    new_parts, test, public, space = to_feature_space(
        spec.features,
        RawInputs(tuple(data.test.inputs.shape[1:]), data.mean, data.std, data.vocabulary),
        spec.public,
        parts,
        data.test,
        public,
        compute=Compute(spec.engine),
        progress=progress,
        placeholder=placeholder,
    )
    return LoadedData(on_features(data, test), new_parts, public, space)


def build_setting(spec: RunSpec, loaded: LoadedData) -> Setting:
    """Build the setting of a simulation from data that have been split.

    Raises:
        ArgumentError: there are more models than nodes.
    """
    data, parts = loaded.data, loaded.parts
    names = spec.nodes.models
    if len(names) > len(parts):
        raise ArgumentError("nodes.models", list(names), f"at most one for each of the {len(parts)} nodes")
    if spec.nodes.encoder_weights and not any(
        encoder_backbone(parsed.name) and not (parsed.weights or parsed.encoder_weights)
        for parsed in map(parse_node_model, names)
    ):
        expected = "none, as no model of nodes.models has a pretrained encoder without weights"
        raise ArgumentError("nodes.encoder_weights", spec.nodes.encoder_weights, expected)
    centralized_model = _build_student(spec, data) if spec.evaluation.centralized else None
    sites = spec.split.distinct_node_values(_columns_to_split(spec, data)) or [""] * len(parts)
    task, shape = run_task(spec, data.classes), tuple(data.test.inputs.shape[1:])
    interface = Interface(task, data.classes, shape, data.vocabulary, data.mean, data.std, data.schema)
    nodes = [
        SimulatedNode(
            name=f"node-{index}",
            data=part,
            model=build_node_model(spec, interface, index),
            policy=spec.nodes.policy,
            privacy=spec.nodes.privacy,
            site=site,
        )
        for index, (part, site) in enumerate(zip(parts, sites, strict=True))
    ]
    return replace(build_server_setting(spec, loaded), nodes=nodes, centralized_model=centralized_model)


def build_server_setting(spec: RunSpec, loaded: LoadedData) -> Setting:
    """Build the server's part of a setting, without nodes."""
    data = loaded.data
    return Setting(
        spec=spec,
        task=run_task(spec, data.classes),
        student=_build_student(spec, data),
        test=_test_set(spec, data),
        public=loaded.public,
        classes=data.classes,
        mean=data.mean,
        std=data.std,
        vocabulary=data.vocabulary,
        schema=data.schema,
        test_names=data.test_names,
        feature_space=loaded.feature_space,
    )


def _test_set(spec: RunSpec, data: DataSet) -> TensorData:
    """Return the test set with its groups and cases, for metrics by site and by case.

    A site is a value of the column by which the nodes were split, or of the column "site". Cases that the
    reader of the data has built (patients from slices) are kept.
    """
    test, columns = data.test, data.test_columns
    if data.group_column in columns:
        test = replace(test, groups=hash_groups(columns[data.group_column].tolist()))
    column = spec.split.column if isinstance(spec.split, ByColumn) else SITE
    if test.cases is not None or column not in columns or column == data.group_column:
        return test
    sites = tuple(map(str, columns[column].tolist()))
    each = torch.arange(len(test))
    names = data.test_names or tuple(map(str, each.tolist()))
    return replace(test, cases=CaseIndex(each, names, sites))


def _build_student(spec: RunSpec, data: DataSet) -> torch.nn.Module:
    """Build the student's network with initial weights, which depend on the seed."""
    shape, name = tuple(data.test.inputs.shape[1:]), spec.student.model
    how: dict[str, Any] = {"vocabulary": data.vocabulary, "mean": data.mean, "std": data.std}
    try:
        network = models.build(name, shape, len(data.classes), spec.seed, "student", **how)
    except ArgumentError as error:
        raise ArgumentError("student.model", name, error.expected) from error
    custom_model.load_encoder(network, spec.student.encoder_weights, "student.encoder_weights")
    return network


def build_node_model(spec: RunSpec, interface: Interface, index: int) -> torch.nn.Module:
    """Build the model of a simulation's node, by the node's index."""
    names = spec.nodes.models
    parsed = parse_node_model(names[index % len(names)], spec.nodes.encoder_weights)
    return custom_model.build_model(
        parsed, interface, Path(), spec.seed, "model", index, option="nodes.models"
    )


def parse_node_model(spec: str, encoder_weights: str = "") -> ModelConfig:
    """Parse an entry of ``nodes.models``.

    Args:
        spec: the entry.
        encoder_weights: ``nodes.encoder_weights``, for an entry with an encoder that has no weights.

    Raises:
        ArgumentError: an address of another machine. Running a shared configuration must not send inputs
            there.
    """
    parsed = read_model_config(spec, Path(), "nodes.models")
    if parsed.name.startswith(URL_SCHEMES) and not Endpoint(parsed.name).is_loopback:
        allowed = "an address on this machine, as http://127.0.0.1:8080/predict; others belong in a node.toml"
        raise ArgumentError("nodes.models", parsed.name, allowed)
    if encoder_backbone(parsed.name) and not (parsed.weights or parsed.encoder_weights):
        parsed = replace(parsed, encoder_weights=encoder_weights)
    return parsed


def split_data(spec: RunSpec, data: DataSet) -> tuple[list[TensorData], PublicData | None]:
    """Split the training data over the nodes; return the nodes' parts and the public data."""
    train, public = load_public(spec.public, data, spec.task)
    columns = _columns_to_split(spec, data)
    column_name = spec.split.column if isinstance(spec.split, ByColumn) else ""
    if column_name in data.test_columns:  # as of training data: else figures by site would leave some out
        require_no_gaps(column_name, data.test_columns[column_name], "test data")
    generator = numpy_generator(spec.seed, "split")
    units = columns[data.group_column] if data.group_column else None
    indices = split(train.targets, len(data.classes), spec.split, generator, columns, units)
    return hide_labels([train.subset(part) for part in indices], spec.split.findings, generator), public


def _columns_to_split(spec: RunSpec, data: DataSet) -> dict[str, Column]:
    """Return the columns of the examples that are split over the nodes."""
    rows = hold_out(spec.public, data)[0] if spec.public.name == HELD_OUT else slice(None)
    return {name: column[rows] for name, column in data.columns.items()}
