"""Three nodes with digits, and methods that do the least work: what holds for all is tried here."""

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
from fedstill.runs.setting import Setting
from fedstill.tasks.classification import Classification

SHAPE, CLASSES = (1, 8, 8), 10
SIZES = (40, 24, 33)  # unequal, and none a multiple of the batch
LOCAL = LocalConfig(epochs=2, batch=16, lr=5e-3)

# The smallest work that still has more than one turn, for options that a method may have.
TINY: dict[str, Any] = {
    "rounds": 2,
    "first": 1,
    "steps": 3,
    "epochs": 2,
    "batch": 16,
    "noise": 6,
    "memory": 40,
    "subset": 20,
    "student_steps": 2,
    "student_batch": 16,
    "student_epochs": 1,
    "server_steps": 2,
    "server_batch": 16,
    "generator_width": 8,
    "critic_width": 4,
    "attention": 0.0,  # FedAD's needs convolutions: see test_fedad.py
    "target_examples": 12,
    "dream_steps": 2,
    "features": 8,
    "server_epochs": 2,
}


def config_of(name: str, **options: Any) -> Any:
    """A method's config, as small as may be."""
    kind = METHODS[name]
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{key: value for key, value in {**TINY, **options}.items() if key in known})


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 8 - 1).float().view(-1, *SHAPE), torch.tensor(y)


def some(first: int, count: int) -> TensorData:
    x, y = digits()
    return TensorData(x[first : first + count].clone(), y[first : first + count].clone())


def public() -> PublicData:
    """37 labeled images: a remainder in every batch."""
    data = some(400, 37)
    return PublicData("held-out", data.inputs, data.targets)


def setting(name: str, options: dict[str, Any], **changes: Any) -> Setting:
    """A federation of three nodes in which a method can run, as far as the networks allow it."""
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
        "engine": EngineConfig(name="one-by-one"),
        "public": public() if needs.public or needs.public_labels else None,
        "samples": 2,
        **changes,
    }
    return Setting(**given)
