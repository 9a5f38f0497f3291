"""Saved form of a method's state at the server, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedstill.core.checkpoint import check_state
from fedstill.core.compute import match_parameter_layout
from fedstill.core.errors import ArgumentError


def check_state_can_be_saved(name: str, state: Any) -> None:
    """Check that a state can be saved."""
    if not hasattr(state, "__dict__"):
        expected = "an object with attributes, such as a dataclass without slots"
        raise ArgumentError(f"state of method {name}", type(state).__name__, expected)
    for key, value in vars(state).items():
        try:
            check_state(to_saved_form(value))
        except TypeError as error:
            expected = (
                "tensors, numbers, texts, lists and mappings of these, networks, optimizers, or an object "
                f"with state_dict() and load_state_dict(); {error}"
            )
            raise ArgumentError(f"state.{key} of method {name}", type(value).__name__, expected) from error


def to_saved_form(value: Any) -> Any:
    """Return the saved form of one attribute of the state."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return dict(value.state_dict())
    if isinstance(value, Mapping):
        return {name: to_saved_form(part) for name, part in value.items()}
    return value.state_dict() if hasattr(value, "state_dict") else value


def restore(current: Any, saved: Any, device: torch.device) -> Any:
    """Return the attribute in its saved state; :meth:`Method.init_state` made ``current``."""
    if isinstance(current, nn.Module | torch.optim.Optimizer):
        current.load_state_dict(saved)
        if isinstance(current, torch.optim.Optimizer):
            match_parameter_layout(current)
        return current
    if hasattr(current, "load_state_dict"):
        current.load_state_dict(saved, device)
        return current
    if isinstance(saved, Mapping):
        here = current if isinstance(current, Mapping) else {}
        return {name: restore(here.get(name), part, device) for name, part in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(restore(None, part, device) for part in saved)
    return saved.to(device) if isinstance(saved, torch.Tensor) else saved
