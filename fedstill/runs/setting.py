"""What an experiment is made of, and whether it fits together: said before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedstill import models
from fedstill.core.compute import EngineConfig
from fedstill.core.dataset import TensorData, check_pixels
from fedstill.core.errors import ArgumentError, DataError, MethodRefused, by_caller, option_name
from fedstill.core.names import normalize_name
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.data.public import PublicData
from fedstill.data.tables import check_features
from fedstill.federation.link_config import LinkConfig
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import NoPrivacy, PrivacyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method, Needs, unmet_need
from fedstill.tasks import Task, TaskConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """Everything that an experiment is made of, as objects; :mod:`fedstill.runs.run` makes one from a config.

    Args:
        parts: each node's private data.
        test: data that no node sees.
        method: the method's config, for example ``FedIOD()``.
        centralized_model: network for the centralized upper bound, or None.
        mean, std: the data's declared normalization, per channel; none is 0.5 and 0.5.
        every: the server's turns between evaluations; 0 is only at the end, None ten times a run.
        samples: generated inputs kept at each evaluation.
        test_names: of each test example in its source; none: numbers from 0.
        best: whether the best evaluation is told beside the last.
        public: public data, for methods that need some.
        link: in which form tensors travel, and what is done about nodes that fail.
        privacies: how the nodes protect their records; none is not at all.
        classes: names of the task's classes or labels, for reports; none: their numbers.
        vocabulary: how many token ids there are, where inputs are texts.
        schema: what the columns of rows of a table may be; none: any numbers.
        perceptual: a file of VGG weights at every node, for losses that compare images by features; none: "".
        model_names, student_name: what the networks are called in results; none: as their classes are.
        values: what of a column each node stands for, known to whoever divided the data; none: of none.
        learns: the task with its options, for the student's file; None: the file does not say it.
        words: how words become token ids, where inputs are texts.
        options: of a config, by dotted name: a run goes on with those that it began with.
    """

    task: Task
    parts: Sequence[TensorData]
    models: Sequence[nn.Module]
    student: nn.Module
    test: TensorData
    method: Method
    centralized_model: nn.Module | None = None
    names: Sequence[str] = ()
    policies: Sequence[PolicyConfig] = ()
    local: LocalConfig = field(default_factory=LocalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    seed: int = 0
    every: int | None = None
    samples: int = 12
    test_names: Sequence[str] = ()
    best: bool = False
    public: PublicData | None = None
    link: LinkConfig = field(default_factory=LinkConfig)
    privacies: Sequence[PrivacyConfig] = ()
    classes: Sequence[str] = ()
    vocabulary: int = 0
    schema: Schema = NO_SCHEMA
    perceptual: str = ""
    model_names: Sequence[str] = ()
    student_name: str = ""
    values: Sequence[str] = ()
    learns: TaskConfig | None = None
    words: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def check_method(method: Method, task: Task, public: PublicData | None) -> None:
    """Refuse a method that cannot learn the task, or lacks public data.

    Raises:
        MethodRefused: it does.
        ArgumentError: it has no rounds.
    """
    method.total_steps  # noqa: B018 - which refuses to be none
    needs = method.needs()
    reason = unmet_need(needs, task)
    if reason is None and (needs.public or needs.public_labels) and public is None:
        reason = f"there is no public data: set {option_name('public.name')}"
    if reason is None and needs.public_labels and public is not None and public.labels is None:
        reason = f"public data {public.name!r} have no labels of this task"
    if reason is not None:
        raise MethodRefused(method.title, "every node", reason)


def check_server(setting: Setting) -> None:
    """Refuse test data, public data or a student that do not go with the task.

    Raises:
        FedstillError: naming the first misfit.
    """
    setting.task.check(setting.test, "test data")
    shape, public = shape_of(setting), setting.public
    models.check_module(
        setting.student, shape, setting.task.output_shape(shape), "student", setting.task.form
    )
    if not any(parameter.requires_grad for parameter in setting.student.parameters()):
        raise ArgumentError("student", "all frozen", "a network with something to train")
    if public is not None:
        theirs = tuple(public.inputs.shape[1:])
        labels = setting.task.empty_targets(len(public), theirs) if public.labels is None else public.labels
        data = TensorData(public.inputs, labels.to(public.inputs.device))
        setting.task.check(data, "public data")
        check_range(setting, data, "public data")
        if theirs != shape:
            raise ArgumentError("shape of public data", theirs, f"{shape}, as in the test data")


def check_nodes(setting: Setting) -> tuple[list[str], list[PolicyConfig]]:
    """Names and policies of a simulation's nodes, once their data and models fit together.

    Raises:
        FedstillError: they do not; naming the first misfit.
    """
    count = len(setting.parts)
    names = list(setting.names) or [f"node-{index}" for index in range(count)]
    policies = list(setting.policies) or [PolicyConfig()] * count
    if isinstance(setting.privacies, PrivacyConfig):
        raise ArgumentError("privacies", "a PrivacyConfig", "a list of them, one for each node")
    privacies = list(setting.privacies) or [NoPrivacy()] * count
    by_node: dict[str, Sequence[Any]] = {"names": names, "policies": policies, "privacies": privacies}
    for what, given in {"models": setting.models, **by_node}.items():
        if not given or len(given) != count:
            raise ArgumentError(what, len(given), f"one for each of the {count} parts of the data")
    if len(set(map(normalize_name, names))) < count:
        raise ArgumentError("names", names, "each name once")
    shape = shape_of(setting)
    outputs = setting.task.output_shape(shape)
    for name, part, model in zip(names, setting.parts, setting.models, strict=True):
        setting.task.check(part, f"data of {name}")
        if tuple(part.inputs.shape[1:]) != shape:
            found = tuple(part.inputs.shape[1:])
            raise ArgumentError(f"input shape of {name}", found, f"{shape}, as in the test data")
        check_range(setting, part, f"data of {name}")
        models.check_module(model, shape, outputs, f"model of {name}", setting.task.form)
    owners = [*zip(names, setting.models, strict=True), ("the student", setting.student)]
    seen: dict[int, str] = {}
    for owner, model in owners:
        for parameter in model.parameters():
            other = seen.setdefault(id(parameter), owner)
            if other != owner:
                raise ArgumentError("models", f"{other} and {owner}", "networks that share no parameter")
    return names, policies


def check_networks(title: str, needs: Needs, frozen: Mapping[str, bool], alike: Mapping[str, bool]) -> None:
    """Refuse nodes whose networks are not what a method needs, before anything is trained.

    Args:
        title, needs: of the method.
        frozen: by node, whether nothing of its model may be trained.
        alike: by node, whether its model is of the student's architecture.

    Raises:
        MethodRefused: naming all of them at once, for those who see to it.
    """
    reasons: dict[str, list[str]] = {}
    for node in frozen:
        if needs.trainable and frozen[node]:
            reasons.setdefault("its model is frozen, and every round trains it", []).append(node)
        elif needs.same_architecture and not alike[node]:
            named = by_caller(*2 * ("which student.model names",), "that of student=")
            apart = f"its model is not of the student's architecture, {named}"
            reasons.setdefault(apart, []).append(node)
    if reasons:
        (reason, nodes), *others = reasons.items()
        also = "".join(f"; {', '.join(who)}: {why}" for why, who in others)
        raise MethodRefused(title, ", ".join(nodes), f"{reason}{also}")
    if needs.student_architecture and not any(alike.values()):
        raise MethodRefused(title, "the student", "its architecture is none of the nodes'")


def shape_of(setting: Setting) -> Shape:
    """``(C, H, W)`` of an image, ``(L,)`` of a text, ``(F,)`` of a row, as in the test data."""
    return tuple(setting.test.inputs.shape[1:])


def check_range(setting: Setting, data: TensorData, what: str) -> None:
    """Refuse what a generator could never make: pixels outside 0..1, and rows that their schema forbids."""
    if setting.schema and setting.task.form == "rows":
        check_features(data.inputs, setting.schema, what)
    if setting.task.form != "images":
        return
    mean, std = (each.flatten().tolist() for each in normalization(setting))
    images = setting.task.real_images(data)  # what is measured of an image may be brighter than white
    try:
        check_pixels(images, mean, std, what)
    except DataError as error:
        raise DataError(f"{error}; say how inputs were normalized with mean and std") from None


def normalization(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of images, as declared: two of (C, 1, 1); of others none: (0, 1, 1)."""
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
