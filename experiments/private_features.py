"""Accuracy of linear models that train privately on fixed features, and of their ensemble.

    python experiments/private_features.py --root FOLDER --validation --epsilon inf 3.5 8  # Fashion-MNIST
    python experiments/private_features.py --root FOLDER --data packs.cifar:CIFAR10 --nodes 20 --epsilon 7.7
    python experiments/private_features.py --root FOLDER --data packs.cifar:CIFAR10 --nodes 1 --limit 20000

Prints the accuracy in percent on test images or, with --validation, on a sixth of the training images, which
no node holds then: of the nodes' own models, of the mean of their probabilities, and of their consensus
weighted by exact label counts. Partition, features, sums of clipped gradients and noise multipliers are those
of a run; defaults are those of the preset fashion-fedkd-private. Noise on label counts, the student and the
secure random generator are omitted, so a row takes a minute or two on one core. Epsilon covers the training
alone, at delta 1e-5.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fedstill import models
from fedstill.core.dataset import DataSet
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import torch_generator
from fedstill.data.loading import load
from fedstill.privacy.accounting import calibrate_noise
from fedstill.privacy.dpsgd import clipped_sum_and_loss
from fedstill.privacy.events import Event, PrivacyCost
from fedstill.runs.build import split_data
from fedstill.runs.spec import RunSpec, from_dict

Options = argparse.Namespace
PIECE = 250  # images per batch of features


def losses(head: nn.Module, f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of each example, ``(B,)``."""
    return F.cross_entropy(head(f), y, reduction="none")


def learned(
    f: torch.Tensor, y: torch.Tensor, classes: int, noise: float, draws: torch.Generator, o: Options
) -> nn.Linear:
    """Train a linear layer on all features ``(n, d)`` at each step; ``noise`` is relative to the clip."""
    head = nn.Linear(f.shape[1], classes, bias=False)
    nn.init.zeros_(head.weight)
    trained, v = {"weight": head.weight}, torch.zeros(head.weight.numel())
    for _ in range(o.steps):
        total, _ = clipped_sum_and_loss(head, trained, losses, f, y, o.clip)
        if noise:
            total += noise * o.clip * torch.randn(total.shape, generator=draws)
        v = o.momentum * v + total / len(f)
        head.weight.data -= o.lr * v.view_as(head.weight)
    return head


@torch.no_grad()
def percent(config: RunSpec, data: DataSet, o: Options) -> dict[float, list[float]]:
    """Return the nodes' mean accuracy and that of both ensembles for one seed, by epsilon."""
    parts, _ = split_data(config, data)
    classes, task = len(data.classes), config.task.make(data.classes)
    network = models.build(o.model, tuple(data.test.inputs.shape[1:]), classes, config.seed)
    assert isinstance(network, nn.Sequential)
    fixed = nn.Sequential(*list(network)[:-1])
    *own, test = [
        torch.cat([fixed(piece) for piece in inputs.split(PIECE)])
        for inputs in (*(part.inputs for part in parts), data.test.inputs)
    ]
    counts = torch.stack([task.counts(part) for part in parts]).unsqueeze(1)  # (K, 1, C)
    accuracies = {}
    for epsilon in o.epsilon:
        noise = 0.0
        if math.isfinite(epsilon):
            noise = calibrate_noise(lambda s: PrivacyCost({Event("gaussian", s): o.steps}), epsilon, 1e-5)
        z = []  # (B, C) of each node
        for k, (f, part) in enumerate(zip(own, parts, strict=True)):
            draws = torch_generator(config.seed, "noise", k)
            z.append(learned(f, part.targets, classes, noise, draws, o)(test))
        equal = torch.full_like(counts, 1 / len(parts))
        probs = task.ensemble(torch.stack(z), equal, "probs")
        consensus = task.ensemble(torch.stack(z), counts / counts.sum(0), "consensus")
        hits = [(each.argmax(1) == data.test.targets).float().mean() for each in (*z, probs, consensus)]
        right = [100 * hit.item() for hit in hits]
        accuracies[epsilon] = [statistics.mean(right[:-2]), *right[-2:]]
    return accuracies


def main() -> None:
    """Print a Markdown table of means and deviations over seeds."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--root", required=True, help="the folder that holds the data")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--model", default="random-conv:64")
    parser.add_argument("--validation", action="store_true")
    for name, count in {"nodes": 5, "limit": 0, "steps": 80}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    for name, number in {"lr": 64.0, "clip": 0.5, "momentum": 0.9}.items():
        parser.add_argument(f"--{name}", type=float, default=number)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[math.inf])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    o = parser.parse_args()
    torch.set_num_threads(1)
    part = 1 / 6 if o.validation else 0.0
    table = {
        "plugins": [str(Path(__file__).parent / "presets")],
        "data": {"name": o.data, "root": o.root, "train_limit": o.limit, "validation": part},
        "public": {"name": "held-out", "share": 0.05},
        "split": {"name": "dirichlet", "alpha": 1.0, "nodes": o.nodes},
        "method": {"name": "fedkd"},
    }
    try:
        data = load(from_dict(table).data)
        each = [percent(from_dict({**table, "seed": seed}), data, o) for seed in o.seeds]
    except FedstillError as error:
        parser.error(str(error))
    print("| epsilon | a node's own model | mean of probabilities | consensus |\n|---|---|---|---|")
    for epsilon in o.epsilon:
        columns = zip(*(one[epsilon] for one in each), strict=True)
        spread = (lambda c: f" ± {statistics.stdev(c):.1f}") if len(each) > 1 else lambda c: ""
        cells = [f"{statistics.mean(c):.1f}{spread(c)}" for c in columns]
        print(f"| {epsilon:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
