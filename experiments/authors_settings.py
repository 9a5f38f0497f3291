"""FD and FedProto in their authors' settings on MNIST. Results: docs/benchmarks/authors.md.

    python experiments/authors_settings.py FOLDER fd|fedproto [--seeds 3] [--methods fd standalone]

FOLDER contains mnist.npz. Splits, steps and networks are the papers', as described on that page, except that
FD's network has a quarter of the width.

fd: 2 nodes with 2,000 images each, of which only 5 in each of three classes are kept. 16 rounds of 250 steps
with batch 64. Each node is evaluated on all test images.

fedproto: 20 nodes with 2 to 5 classes, 99 or 100 images per class. 100 rounds of one epoch with batch 8. Each
node is evaluated on the test images of its own classes, by its head and by the nearest mean prototype.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fedstill
from fedstill.core.seeds import numpy_generator
from fedstill.data import make_data_config
from fedstill.data.loading import load
from fedstill.methods._class_means import class_means
from fedstill.protocol.method import METHODS
from fedstill.tasks import TASKS

CLASSES, MEAN, STD = 10, 0.1307, 0.3081
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.01, "lr_end": 0.01, "smoothing": 0.0}


class TwoAndTwo(nn.Module):
    """Two convolutions without padding and two linear layers; features are the last linear layer's input."""

    def __init__(self, extractor: Sequence[nn.Module], features: int, *, drop: float) -> None:
        super().__init__()
        self.extractor = nn.Sequential(*extractor)
        self.head = nn.Sequential(nn.Dropout(drop), nn.Linear(features, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images ``(B, 1, 28, 28)`` to logits."""
        z: torch.Tensor = self.head(self.extractor(x))
        return z


def fedproto_network() -> nn.Module:
    """Return FedProto's network: 5 x 5 convolutions of 10 and 20 channels, each pooled, and 50 features."""
    layers = [nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.Dropout2d()]
    layers += [nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(320, 50), nn.ReLU()]
    return TwoAndTwo(layers, 50, drop=0.5)


def fd_network() -> nn.Module:
    """Return FD's network at a quarter of the width: 3 x 3 convolutions, one pooling.

    At the full width it has the paper's 1,199,648 parameters.
    """
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return TwoAndTwo([*layers, nn.Linear(16 * 144, 32), nn.ReLU()], 32, drop=0.0)


@dataclass
class Setup:
    """Nodes of a setting: their images, networks and training options."""

    parts: list[tuple[torch.Tensor, torch.Tensor]]
    models: list[nn.Module]
    rounds: int
    local: fedstill.LocalConfig


def fd(x: torch.Tensor, y: torch.Tensor, draw: np.random.Generator) -> Setup:
    """Return FD's setting: images sampled uniformly, then most images of three classes dropped."""
    order, parts = draw.permutation(len(y)), []
    for node in range(2):
        mine = torch.from_numpy(order[2000 * node : 2000 * (node + 1)])
        for c in draw.choice(CLASSES, 3, replace=False):
            dropped = (y[mine] == int(c)).nonzero()[5:, 0]
            mine = mine[~torch.isin(torch.arange(len(mine)), dropped)]
        parts.append((x[mine], y[mine]))
    steps = fedstill.LocalConfig(epochs=0, min_steps=4000, batch=64, momentum=0.0, **SGD)
    return Setup(parts, [fd_network() for _ in parts], 16, steps)


def fedproto(x: torch.Tensor, y: torch.Tensor, draw: np.random.Generator) -> Setup:
    """Return FedProto's setting: no two nodes share an image."""
    parts = []
    for node in range(20):
        known = draw.choice(CLASSES, draw.integers(2, 6), replace=False)
        count = int(draw.integers(99, 101))
        mine = torch.cat([(y == int(c)).nonzero()[110 * node : 110 * node + count, 0] for c in known])
        parts.append((x[mine], y[mine]))
    epochs = fedstill.LocalConfig(epochs=100, batch=8, momentum=0.5, **SGD)
    return Setup(parts, [fedproto_network() for _ in parts], 100, epochs)


def class_accuracies(setup: Setup, x: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
    """Return each node's accuracy in percent on test images of its classes, by head and by prototype."""
    held = torch.stack([F.one_hot(labels, CLASSES).any(0) for _, labels in setup.parts])  # (K, C)
    nodes = zip(setup.models, setup.parts, strict=True)
    class_sums = torch.stack(
        [class_means(model.extractor(i), labels, CLASSES) for model, (i, labels) in nodes]
    )
    C = class_sums.sum(0) / held.sum(0).clamp_min(1).unsqueeze(
        1
    )  # a plain mean, as in the published code; (C, p)
    accuracies: dict[str, list[float]] = {"head": [], "prototypes": []}
    for model, mine in zip(setup.models, held, strict=True):
        at = mine[y]
        f = model.extractor(x[at])
        far = torch.cdist(f, C).masked_fill(~mine, torch.inf)
        for by, predicted in (("head", model.head(f).argmax(1)), ("prototypes", far.argmin(1))):
            accuracies[by].append(100 * (predicted == y[at]).float().mean().item())
    return {by: np.array(values) for by, values in accuracies.items()}


def run(setting: str, method: str, root: str, seed: int) -> dict[str, np.ndarray]:
    """Return the accuracy of each node, by name of the measurement."""
    data = load(make_data_config("mnist", root=root), TASKS["classification"]())
    x, x_test = ((part.inputs / 2 + 0.5 - MEAN) / STD for part in (data.train, data.test))
    y, y_test = data.train.targets, data.test.targets
    torch.manual_seed(seed)
    setup = {"fd": fd, "fedproto": fedproto}[setting](x, y, numpy_generator(seed, "authors' split"))
    outcome = fedstill.distil(
        setup.parts,
        setup.models,
        fd_network() if setting == "fd" else fedproto_network(),
        (x_test, y_test),
        CLASSES,
        method=METHODS[method](**({} if method == "standalone" else {"rounds": setup.rounds})),
        local=setup.local,
        engine=fedstill.EngineConfig(threads=1),
        # FedProto releases prototypes
        policies=[fedstill.PolicyConfig(outputs_only=False)] * len(setup.parts),
        mean=(MEAN,),
        std=(STD,),
        seed=seed,
        every=0,
    )
    if setting == "fd":
        return {"all classes": np.array(outcome.result["local"]["accuracy"]["per_node"])}
    with torch.no_grad():
        for model in setup.models:
            model.eval()
        return class_accuracies(setup, x_test, y_test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("setting", choices=["fd", "fedproto"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=[])
    given = parser.parse_args()
    for name in given.methods or [given.setting, "standalone"]:
        reached: dict[str, list[float]] = {}
        for seed in range(given.seeds):
            for by, values in run(given.setting, name, given.folder, seed).items():
                reached.setdefault(by, []).append(values.mean())
                spread = f"nodes \u00b1 {values.std(ddof=1):.2f}"
                print(f"{name}, seed {seed}, {by}: {values.mean():.2f} ({spread})", flush=True)
        for by, means_of in reached.items():
            each = ", ".join(f"{mean:.2f}" for mean in means_of)
            print(f"{name}, {by}: {np.mean(means_of):.2f} of {each}", flush=True)
