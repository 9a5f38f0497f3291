"""Privacy protection of a node: mechanism, private networks or teachers, and the gate's budgets."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch

from fedstill import models
from fedstill.core.config_tables import to_table
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.stratified_sampling import largest_group_size, limit_groups
from fedstill.models import module_check
from fedstill.models.module_utils import deep_copy, to_vector
from fedstill.node.limits import limit_parameters
from fedstill.node.model_setup import architecture_hash
from fedstill.node.node import Node, frozen_parameter_names
from fedstill.node.run_budgets import RunBudgets
from fedstill.node.run_mechanism import PrivacyMechanism
from fedstill.privacy.config import PrivacyConfig
from fedstill.privacy.pate import TeacherEnsemble
from fedstill.protocol.digests import digest, keyed_digest
from fedstill.protocol.node_side import NodeSetting, NodeSide

# Options that do not change responses.
BUDGET_OPTIONS = ("epsilon", "delta", "total_epsilon", "total_delta", "accountant", "audit_log")


def needs_mechanism(config: PrivacyConfig) -> bool:
    """Return whether a configuration has a privacy mechanism or a budget."""
    return config.protects or math.isfinite(config.tightest_epsilon_budget)


def group_privacy_notes(parts: Sequence[TensorData], configs: Sequence[PrivacyConfig]) -> tuple[str, ...]:
    """Return a note if epsilon holds for one record, but several records belong to one group (a patient,
    for example).

    The note holds a count of the nodes' data: a simulation may print it, a node tells a server only that
    groups exist.
    """
    per_record = [config.protects and config.group_size == 1 for config in configs]
    largest_group = max(
        (
            largest_group_size(part)
            for part, is_per_record in zip(parts, per_record, strict=True)
            if is_per_record
        ),
        default=1,
    )
    if largest_group == 1:
        return ()
    advice = f"privacy.group_size = {largest_group} protects all records of a group together"
    return (
        f"epsilon holds for one record: a patient or slide has up to {largest_group} at one node; {advice}",
    )


def protect(
    node: Node,
    config: PrivacyConfig,
    side: NodeSide,
    method: Any,
    setting: NodeSetting,
    *,
    secret: int,
    salt: str = "",
    group: str = "",
) -> None:
    """Give a node its privacy mechanism and its gate the budgets, before any training.

    Args:
        node: the node, with data and first weights.
        config: the owner's privacy options.
        side: the node's part of ``method``, before it has prepared the node.
        method: the method.
        setting: task, local options and public data.
        secret: key of the noise.
        salt: random text of the run at a real node; empty in a simulation, which can be repeated.
        group: column of the records' group.

    Raises:
        FedstillError: mechanism, model and method do not fit together, or no noise level is enough.
    """
    data = node.data
    if config.group_size > 1 and data.groups is None:
        raise ArgumentError("privacy.group_size", config.group_size, "1 without data.group")
    has_groups = data.groups is not None  # declared groups, whatever their sizes: sizes depend on records
    if data.groups is not None:
        # Groups are dropped if each record is protected by itself.
        data = limit_groups(data, config.group_size)
        node.data = data = data if config.group_size > 1 else replace(data, groups=None)
    if config.protects_through_training and node.is_frozen:
        expected = "none or noisy-outputs: its model is frozen, and may contain every record"
        raise ArgumentError(f"privacy.mechanism of {node.name}", config.registered_name, expected)
    mechanism = PrivacyMechanism(
        node.name,
        config,
        side,
        setting.local,
        len(data),
        setting.task,
        secret=secret,
        salt=salt,
        group=group,
    )
    mechanism.has_groups = has_groups
    mechanism.setup_hash = _setup_hash(node, mechanism, method, setting, secret)
    if "model" in config.dp_trained:
        inputs = models.example_inputs(data.inputs.shape[1:], setting.task.form)
        module_check.reject_dp_incompatible(node.model, f"model of {node.name}", inputs)
    node.dp_sgd_parameters = mechanism.dp_sgd_parameters()
    if shards := config.shard_indices(data):
        _install_teachers(node, config, shards)
    ledger = node.gate.ledger
    ledger.budgets = RunBudgets(mechanism, ledger.audit, ledger.run, ledger.payer)


def _setup_hash(
    node: Node, mechanism: PrivacyMechanism, method: Any, setting: NodeSetting, secret: int
) -> str:
    """Return a hash of all that a node's responses depend on, without its budgets.

    Options count by value, so that a renamed option or a moved class gives the same noise.
    """
    data = node.data
    tensors = {"inputs": data.inputs, "targets": data.targets, "weights": to_vector(node.model)}
    if data.groups is not None:
        tensors["groups"] = data.groups
    if setting.public is not None:  # queries refer to their rows by index
        tensors["public"] = setting.public.inputs
        if setting.public.labels is not None:
            tensors["public labels"] = setting.public.labels
    if setting.perceptual is not None:
        tensors["perceptual"] = to_vector(setting.perceptual)
    compute = (setting.compute.device.type, setting.compute.precision)  # affects the last digits
    protection = {
        name: value for name, value in to_table(mechanism.config).items() if name not in BUDGET_OPTIONS
    }
    if not mechanism.config.isolate_rounding:  # its default adds nothing
        del protection["isolate_rounding"]
    levels = dict(mechanism.noise_levels)
    protection["sums"] = levels.pop("sums")
    description = (
        architecture_hash(node.model),
        sorted(node.frozen["model"]),
        method.title,
        [_option_values(to_table(getattr(method, option.name))) for option in fields(method)],
        _option_values(to_table(mechanism.local)),
        _option_values(protection),
        _option_values(levels),
        node.seed,
        compute,
        setting.task.name,
        setting.task.option_values(),
    )
    return keyed_digest(secret, f"{digest('binding', tensors)} {description!r}")


def _option_values(value: Any) -> Any:
    """Return the values of a table and its subtables, in order and without their names."""
    return [_option_values(item) for item in value.values()] if isinstance(value, Mapping) else value


def run_uncharged_preparation(side: NodeSide, nodes: Sequence[Node]) -> None:
    """Run a method's preparation of nodes, which is not charged: networks with private training may not
    take a step in it (ArgumentError), and the policy limits the parameters of further networks.
    """
    for node in nodes:
        node.remaining_private_steps = {} if node.dp_sgd_parameters else None
        with limit_parameters(node.gate.policy.max_parameters, node.name, "join"):
            side.prepare(node)
        node.remaining_private_steps = None


def require_unchanged_data(node: Node) -> None:
    """Refuse a node whose data a method has changed since its costs were computed."""
    budgets = node.gate.budgets
    if budgets is not None and budgets.mechanism.protects and len(node.data) != budgets.mechanism.examples:
        mechanism = budgets.mechanism.name
        raise ArgumentError(
            f"privacy.mechanism of {node.name}", mechanism, "none if public data are added to its own"
        )


def _install_teachers(node: Node, config: PrivacyConfig, parts: Sequence[torch.Tensor]) -> None:
    """Replace a node's model by an ensemble of copies, each with its own part of the records."""
    networks = [deep_copy(node.model) for _ in parts]
    node.modules["model"] = config.ensemble(networks).to(node.data.inputs.device)
    node.frozen["model"] = frozen_parameter_names(node.model)
    node.teachers = make_teachers(node, parts)


def make_teachers(node: Node, parts: Sequence[torch.Tensor]) -> list[Node]:
    """Return a node's teachers as nodes ``node-0/teacher-3``, each with its part of the records, for
    training.

    Their networks are submodules of the node's model, so training them trains it. Teachers without records
    are left out and abstain.
    """
    model = cast(TeacherEnsemble, node.model)
    model.set_abstaining_teachers(parts)
    teachers = []
    for index, part in enumerate(parts):
        if not len(part):
            continue
        prefix, teacher = f"teachers.{index}.", copy.copy(node)
        teacher.name = f"{node.name}/teacher-{index}"
        teacher.data = node.data.subset(part.to(node.data.inputs.device))
        teacher.modules = {"model": model.teachers[index]}
        frozen = (name for name in node.frozen["model"] if name.startswith(prefix))
        teacher.frozen = {"model": frozenset(name.removeprefix(prefix) for name in frozen)}
        teacher.optimizers, teacher.dp_sgd_parameters, teacher.teachers = {}, {}, []
        teachers.append(teacher)
    return teachers
