"""FedMD-CG's Figure 2: a teacher's features, and those of generators trained with it by Eq. 9.

    fedstill reproduce fedmd-cg-fig2 --data.root FOLDER

LeNet-5 on MNIST; all features on the teacher's two principal axes. Prints, for each diversity loss, the
accuracy of the teacher's head on the generated features, and their spread within a class compared with that
of real ones. Takes about a minute on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from markupsafe import Markup

from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.seeds import torch_generator
from fedstill.data import load, make_data_config
from fedstill.methods.fedmd_cg import FedMDCG
from fedstill.models import build
from fedstill.models.extractor_head import split_model
from fedstill.models.gan import append_one_hot
from fedstill.models.inference import predict
from fedstill.node import local_training
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import FULL_TRAINING, LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.tasks.classification import Classification

SHOWN = 600  # dots per panel
SIDE, GAP, HEADING = 220, 20, 30  # pixels of a panel, between panels, and above each
COLORS = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#9498a0",
)


def reproduce(*, root: str, out: Path, seed: int, examples: int, epochs: float) -> list[dict[str, Any]]:
    """Train the teacher, then a generator for each diversity loss, and draw all their features.

    Args:
        root: folder of MNIST.
        out: folder of the picture.
        seed: seed of all sampling.
        examples: number of training images.
        epochs: training epochs of the teacher, and of each generator.
    """
    data = load(make_data_config("mnist", root=root, train_limit=examples))
    compute = Compute(EngineConfig(threads=1))
    task = Classification(len(data.classes))
    channels, height, width = data.test.inputs.shape[1:]
    setting = NodeSetting(task, LocalConfig(epochs=epochs, batch=64, smoothing=0.0), compute)
    model = split_model(build("lenet5", (channels, height, width), task.classes, seed), "teacher")
    node = Node("teacher", data.train, model, Gate("teacher", PolicyConfig(), AuditLog()), seed)
    local_training.attach_optimizers([node], setting.local)
    local_training.train([node], task, setting.local, compute)

    test = data.test
    accuracy = task.compute_metrics(predict(model, test.inputs, compute), test.targets)["accuracy"]
    order = torch.randperm(len(test), generator=torch_generator(seed, "shown"))[:SHOWN]
    labels = test.targets[order]
    real = predict(model.extractor, test.inputs[order], compute)  # (N, p)
    mean, axes = pca(real, 2)
    panels = [Panel("teacher", (real - mean) @ axes, labels)]
    rows = [
        {"method": "teacher", "metric": "known by the head, %", "value": accuracy},
        {"method": "teacher", "metric": "spread within a class", "value": within(real, labels)},
    ]
    for form in ("none", "div0", "div1", "div2"):
        method, rate = FedMDCG(diversity=form), FedMDCG.generator_lr
        method.prepare(node, setting)
        NodeView(NodeGroup([node]), setting).train(
            FULL_TRAINING,
            partial(method.generator_step, 0),
            roles=("generator",),
            purpose="generator",
            local=replace(setting.local, lr=rate, lr_end=rate),
        )
        z = torch.randn(len(labels), method.generator.noise, generator=torch_generator(seed, "z"))
        made = predict(node.modules["generator"], append_one_hot(z, labels, task.classes), compute)
        known = task.compute_metrics(predict(model.head, made, compute), labels)["accuracy"]
        panels.append(Panel(form, (made - mean) @ axes, labels))
        rows.append({"method": form, "metric": "known by the head, %", "value": known})
        rows.append({"method": form, "metric": "spread within a class", "value": within(made, labels)})
    (out / "figure2.svg").write_text(scatter(panels, data.classes), encoding="utf-8")
    return rows


def within(features: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the root mean square distance of features ``(N, p)`` from their class mean, per value."""
    classes = [features[labels == label] for label in sorted(set(labels.tolist()))]
    deviations = [mine - mine.mean(0) for mine in classes]
    return float(torch.cat(deviations).square().mean().sqrt())


class Panel(NamedTuple):
    """One scatter plot: its title, points ``(N, 2)`` and class indices ``(N,)``."""

    title: str
    points: torch.Tensor
    labels: torch.Tensor


def pca(features: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean ``(p,)`` of features ``(N, p)`` and the directions of largest variance ``(p, count)``.

    The largest entry of each axis is positive, so that the signs are the same on all machines.
    """
    mean = features.mean(0)
    axes = torch.linalg.svd(features - mean, full_matrices=False).Vh[:count].T  # (p, count)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))  # (1, count)
    return mean, axes * largest.sign() + 0.0  # + 0.0 removes -0


def scatter(panels: Sequence[Panel], classes: Sequence[str]) -> Markup:
    """Draw panels side by side on one scale, as a separate SVG file with the classes' names below."""
    every = torch.cat([panel.points for panel in panels])
    low, high = every.min(0).values, every.max(0).values
    scale = SIDE / float((high - low).max().clamp_min(1e-12))
    parts = []
    for column, panel in enumerate(panels):
        dots = [
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="1.6" fill="{}"/>').format(
                x, SIDE - y, COLORS[label % len(COLORS)]
            )
            for (x, y), label in zip(
                ((panel.points - low) * scale).tolist(), panel.labels.tolist(), strict=True
            )
        ]
        parts.append(
            Markup(
                '<g transform="translate({x} {y})"><text y="-10">{title}</text>'
                '<rect width="{side}" height="{side}"/>{dots}</g>\n'
            ).format(
                x=column * (SIDE + GAP), y=HEADING, title=panel.title, side=SIDE, dots=Markup("").join(dots)
            )
        )
    for index, name in enumerate(classes):
        parts.append(
            Markup('<text x="{}" y="{}" style="fill:{}">{}</text>\n').format(
                60 * index, HEADING + SIDE + 24, COLORS[index % len(COLORS)], name
            )
        )
    width = max(len(panels) * (SIDE + GAP) - GAP, 60 * len(classes))
    style = "text{font:13px sans-serif;fill:#777}rect{fill:none;stroke:#9996}"
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" viewBox="-2 0 {w} {h}"'
        ' width="{w}" height="{h}"><style>{style}</style>\n{parts}</svg>\n'
    ).format(
        label="Features on two principal axes: " + ", ".join(panel.title for panel in panels),
        w=width + 4,
        h=HEADING + SIDE + 34,
        style=Markup(style),
        parts=Markup("").join(parts),
    )
