"""FedIOD's Table 7 in form: inception scores of generated images, as the generator's losses are added.

    fedstill reproduce fediod-table7 --data.root FOLDER

CIFAR-10 (a JPEG copy), 20 nodes, alpha 0.1, small ResNet-8, trained once for all rows. "Inception score" is
here by a ResNet-8 taught by the four fifths of the training images that no node holds (the paper: ImageNet's
InceptionNet, so that its figures are on another scale); the adapted score is the mean over the nodes' models.
Of the last inputs that the server sent. Held-out real images stand beside them.

The paper's columns, as we read the table, are the first five rows. Weights of losses are fedstill's; without
the class balance, which the published code has and the table has not: it is the last row. "***" weighs
answers by data size, for generator and student alike. About 25 minutes on one free core.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from fediod_fig4 import LOCAL, SMALL, distilled, divided
from torch import nn

from fedstill.attacks.generative_metrics import inception_scores
from fedstill.core.errors import ArgumentError
from fedstill.methods.fediod import FedIOD
from fedstill.methods.standalone import Standalone
from fedstill.runs.simulation import Simulation

FULL = replace(SMALL, balance=0.0)
ROWS: dict[str, FedIOD] = {
    "L_gan": replace(FULL, mimic=0.0, conf=0.0, unique=0.0),
    "L_gan, L_mimic (***)": replace(FULL, importance="size", conf=0.0, unique=0.0),
    "L_gan, L_mimic (Eq. 8)": replace(FULL, conf=0.0, unique=0.0),
    "L_gan, L_mimic (Eq. 8), L_conf": replace(FULL, unique=0.0),
    "L_gan, L_mimic (Eq. 8), L_conf, L_unique": FULL,
    "all of these, and the class balance": SMALL,
}


def reproduce(
    *,
    root: str,
    out: Path,
    seed: int,
    nodes: int,
    images: int,
    steps: int,
    epochs: float,
    judge_epochs: float,
) -> list[dict[str, Any]]:
    """Rows are scores by what the generator learns from, and the student's accuracy.

    Args:
        root: the folder that holds CIFAR-10.
        out: not used.
        seed: of every draw.
        nodes: K.
        images: generated ones that are scored.
        steps: of FedIOD, in each row.
        epochs: of the nodes' models.
        judge_epochs: of the classifier in place of InceptionNet.
    """
    if not 2 <= images <= steps * SMALL.batch:
        raise ArgumentError("images", images, f"from 2 to {steps * SMALL.batch}, as many as are sent")
    began = time.monotonic()
    federation = divided(root, nodes, 0.1, seed, False, judge_epochs)
    setting = replace(federation.setting, local=replace(LOCAL, epochs=epochs))
    local = Simulation(replace(setting, method=Standalone()))
    local.run()
    teachers = {node.name: node.model.eval().requires_grad_(False) for node in local.nodes}
    print(f"judge: {federation.accuracy:.1f} % on test images; {time.monotonic() - began:.0f} s", flush=True)

    rows: list[dict[str, Any]] = []
    for name, method in ROWS.items():
        own = [copy.deepcopy(model) for model in teachers.values()]
        experiment, sent = distilled(setting, replace(method, steps=steps), own, images)
        outputs = experiment.evaluation.outputs(experiment.student)
        accuracy = experiment.evaluation.metrics(outputs)["accuracy"]
        rows += scored(name, sent, federation.judge, teachers)
        rows.append({"method": name, "figure": "student's accuracy", "value": accuracy})
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return rows + scored("held-out real images", setting.test.inputs, federation.judge, teachers)


def scored(
    name: str, images: torch.Tensor, judge: nn.Module, teachers: Mapping[str, nn.Module]
) -> list[dict[str, Any]]:
    """Inception scores of images by the judge, and the mean of those by each node's model."""
    adapted = inception_scores(images, teachers)
    figures = {
        "inception": inception_scores(images, {"judge": judge})["judge"],
        "adapted": fmean(adapted.values()),
    }
    return [{"method": name, "figure": figure, "value": value} for figure, value in figures.items()]
