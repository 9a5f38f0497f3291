"""Faults of an owner's policy and privacy options that single values do not show, one line each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.core.registry import Registry
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.stratified_sampling import largest_group_size
from fedstill.models import dp_compatibility
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import PrivacyConfig
from fedstill.protocol.method import METHODS
from fedstill.tasks import TASKS


def policy_faults(policy: PolicyConfig) -> list[str]:
    """Return plug-ins that are not installed, and queries that no method declares, as misspelled ones."""
    faults = []
    for name in policy.plugins:
        errors = [error for error in (_import_error(METHODS, name), _import_error(TASKS, name)) if error]
        if len(errors) == 2:  # neither a method nor a task
            faults.append(f"policy.plugins: {errors[name in TASKS and name not in METHODS]}")
    if faults:
        return faults
    names = [name for name in policy.queries if name != "*"]
    if not names:  # finding all queries of all methods takes time
        return faults
    methods = allowed_methods(policy)
    if any(name not in METHODS.builtin for name in methods):
        return faults  # a custom method may declare others
    known_names = known_queries(methods)
    unknown = [name for name in names if name not in known_names]
    return [str(UnknownName("query of policy.queries", name, sorted(known_names))) for name in unknown]


def allowed_methods(policy: PolicyConfig) -> list[str]:
    """Return the plug-ins of a policy that are methods; all others are tasks."""
    return [name for name in policy.plugins if _import_error(METHODS, name) is None]


def _import_error(registry: Registry[Any], name: str) -> FedstillError | None:
    try:
        registry[name]
    except FedstillError as error:
        return error
    return None


def known_queries(methods: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of all queries of the package's own methods, and of the given ones."""
    return frozenset().union(*(METHODS[name].query_names for name in (*METHODS.builtin, *methods)))


def privacy_faults(
    config: PrivacyConfig,
    data: TensorData | None,
    model: nn.Module | None,
    data_config: NodeDataConfig | None = None,
) -> list[str]:
    """Return reasons why a mechanism protects nothing, or does not work with these data or this model, if
    known.

    Slices of NIfTI volumes are scaled by their whole volume, so one slice by itself is not a record:
    without it all others of its volume would differ.
    """
    if not config.protects:
        if math.isinf(config.tightest_epsilon_budget):
            return []
        expected = "a mechanism if a budget is set: without a guarantee nothing can be released"
        return [str(ArgumentError("privacy.mechanism", config.registered_name, expected))]
    errors = []
    part, main = next(iter(config.noise_option_tables.items()), ("", None))
    if main is not None and main.noise is None and math.isinf(config.tightest_epsilon_budget):
        expected = f"a finite value, from which privacy.{part}.noise is calibrated"
        errors.append(ArgumentError("privacy.epsilon", config.epsilon, expected))
    errors += config.faults()
    if data is not None:
        if config.group_size > 1 and data.groups is None:
            expected = "1 without data.group"
            errors.append(ArgumentError("privacy.group_size", config.group_size, expected))
        volumes = data_config if data_config is not None and data_config.source == "nifti" else None
        if volumes and (volumes.group != "patient" or config.group_size == 1 < largest_group_size(data)):
            expected = "2 or more, with data.group = 'patient': slices of a volume are scaled together"
            errors.append(ArgumentError("privacy.group_size", config.group_size, expected))
        for name, delta in (("delta", config.delta), ("total_delta", config.total_delta)):
            if delta is not None and delta * len(data) >= 1:
                expected = f"well below 1 / {len(data)}, one over the number of records"
                errors.append(ArgumentError(f"privacy.{name}", delta, expected))
    faults = [str(fault) for fault in errors]
    if "model" in config.dp_trained and model is not None:
        try:
            dp_compatibility.reject_dp_incompatible(model, "the model")
        except FedstillError as error:
            faults.append(f"privacy.mechanism {config.registered_name}: {error}")
    return faults
