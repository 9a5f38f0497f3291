"""Three nodes with digits, and methods with minimal options, for tests that run all methods."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits

from fedstill.core.compute import EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.data.public import PublicData
from fedstill.models import build
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS
from fedstill.runs.build import Setting
from fedstill.tasks.classification import Classification
from tests.support.runs import make_setting

SHAPE, CLASSES = (1, 8, 8), 10
SIZES = (40, 24, 33)  # unequal, and no multiple of the batch
LOCAL = LocalConfig(epochs=2, batch=16, lr=5e-3)

# Minimal values of options and groups of options that methods may have, with more than one step.
TINY: dict[str, Any] = {
    "rounds": 2,
    "initial_rounds": 1,
    "steps": 3,
    "epochs": 2,
    "batch": 16,
    "subset": 20,
    "attention": 0.0,  # FedAD's attention needs convolutions: see test_fedad.py
    "target_examples": 12,
    "dream_steps": 2,
    "class_steps": 2,
    "ipc": 1,
    "image_steps": 2,
    "features": 8,
    "server_epochs": 2,
    "server_batch": 16,
    "student_epochs": 1,
    "generator": {"noise": 6, "width": 8},
    "critic": {"width": 4},
    "student": {"steps": 2, "epochs": 2, "batch": 16, "memory": 40},
    "server": {"steps": 2, "batch": 16},
}


def config_of(name: str, **options: Any) -> Any:
    """Return the config of a method with minimal options.

    Args:
        name: name of the method.
        options: options. Those of a group are a table, such as ``student={"steps": 1}``; options that the
            method does not have are ignored.
    """
    kind = METHODS[name]
    default = kind()
    changes = {}
    for each in dataclasses.fields(kind):
        tiny, value = TINY.get(each.name), options.get(each.name)
        group = getattr(default, each.name)
        if dataclasses.is_dataclass(group) and not dataclasses.is_dataclass(value):
            known = {one.name for one in dataclasses.fields(group)}
            table = {**(tiny or {}), **(value or {})}
            changes[each.name] = dataclasses.replace(
                group, **{key: one for key, one in table.items() if key in known}
            )
        elif each.name in options:
            changes[each.name] = value
        elif tiny is not None and not isinstance(tiny, dict):
            changes[each.name] = tiny
    return kind(**changes)


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 8 - 1).float().view(-1, *SHAPE), torch.tensor(y)


def some(first: int, count: int) -> TensorData:
    x, y = digits()
    return TensorData(x[first : first + count].clone(), y[first : first + count].clone())


def public() -> PublicData:
    """Return 37 labeled images: the last batch is smaller."""
    data = some(400, 37)
    return PublicData("held-out", data.inputs, data.targets)


def setting(name: str, options: dict[str, Any], **changes: Any) -> Setting:
    """Return a federation of three nodes that satisfies a method's requirements, except for networks."""
    config = config_of(name, **options)
    needs = config.needs()
    given: dict[str, Any] = {
        "task": Classification(CLASSES),
        "parts": [some(sum(SIZES[:index]), size) for index, size in enumerate(SIZES)],
        "models": [build("mlp:12", SHAPE, CLASSES, 0, index) for index in range(3)],
        "student": build("mlp:12", SHAPE, CLASSES, 0, "student"),
        "test": some(1000, 150),
        "method": config,
        "policies": [PolicyConfig(outputs_only=False)] * 3,
        "local": LOCAL,
        "engine": EngineConfig(batching="one-by-one"),
        "public": public() if needs.public or needs.public_labels else None,
        "samples": 2,
        **changes,
    }
    return make_setting(**given)
