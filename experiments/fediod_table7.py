"""FedIOD's Table 7, reduced: inception scores of generated images, as the generator's losses are added.

    fedstill reproduce fediod-table7 --data.root FOLDER

20 nodes, alpha 0.1, trained once for all rows. Here the "inception score" uses a ResNet-8 trained on the
images that no node holds. The paper uses ImageNet's InceptionNet, so its values are on another scale. The
adapted score is the mean over the nodes' models. Both are computed for the last inputs that the server sent,
and for held-out real images for comparison.

The paper's columns, as we read the table, are the first five rows: responses by Eq. 9, weighted by Eq. 8 as
printed, S at tau = inf, L_conf and L_unique with weight 1, as in Table 6. The class balance is in the
published code but not in the table; it is the last row. "***" weights responses by data size, for both
generator and student.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from fediod_fig4 import distilled, divided
from torch import nn

from fedstill.attacks.generative_metrics import inception_scores
from fedstill.core.errors import ArgumentError
from fedstill.methods.fediod import FedIOD
from fedstill.methods.standalone import Standalone
from fedstill.runs.simulation import Simulation

AS_PRINTED: dict[str, Any] = {"ensemble": "logits", "importance": "fakeness", "tau": math.inf}
WEIGHTS: dict[str, Any] = {"conf": 1.0, "unique": 1.0, "balance": 0.0}
ROWS: dict[str, dict[str, Any]] = {
    "L_gan": {"mimic": 0.0, "conf": 0.0, "unique": 0.0},
    "L_gan, L_mimic (***)": {"importance": "size", "conf": 0.0, "unique": 0.0},
    "L_gan, L_mimic (Eq. 8)": {"conf": 0.0, "unique": 0.0},
    "L_gan, L_mimic (Eq. 8), L_conf": {"unique": 0.0},
    "L_gan, L_mimic (Eq. 8), L_conf, L_unique": {},
    "all of these, and the class balance": {"balance": FedIOD.balance},
}


def reproduce(
    *,
    root: str,
    out: Path,
    seed: int,
    base: str,
    held_out: float,
    images: int,
    judge_epochs: float,
) -> list[dict[str, Any]]:
    """Return rows of scores by the losses of the generator, and the student's accuracy.

    Args:
        root: folder of CIFAR-10.
        out: not used.
        seed: seed of all sampling.
        base: FedIOD's run, a preset or a file.
        held_out: share of the training images that no node holds.
        images: number of generated images that are scored.
        judge_epochs: training epochs of the classifier in place of InceptionNet.
    """
    began = time.monotonic()
    federation = divided(base, root, alpha=0.1, held_out=held_out, seed=seed, gray=False, epochs=judge_epochs)
    setting, printed = federation.setting, replace(federation.method, **AS_PRINTED, **WEIGHTS)
    if not 2 <= images <= (most := printed.steps * printed.batch):
        raise ArgumentError("images", images, f"from 2 to {most}, as many as are sent")
    local = Simulation(replace(setting, spec=replace(setting.spec, method=Standalone())))
    local.run()
    teachers = {node.name: node.model.eval().requires_grad_(False) for node in local.nodes}
    print(f"judge: {federation.accuracy:.1f} % on test images; {time.monotonic() - began:.0f} s", flush=True)

    rows: list[dict[str, Any]] = []
    for name, options in ROWS.items():
        own = [copy.deepcopy(model) for model in teachers.values()]
        experiment, sent = distilled(federation, replace(printed, **options), own, images)
        outputs = experiment.evaluation.outputs(experiment.student)
        accuracy = experiment.evaluation.compute_metrics(outputs)["accuracy"]
        rows += scored(name, sent, federation.judge, teachers)
        rows.append({"method": name, "metric": "student's accuracy", "value": accuracy})
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return rows + scored("held-out real images", setting.test.inputs, federation.judge, teachers)


def scored(
    name: str, images: torch.Tensor, judge: nn.Module, teachers: Mapping[str, nn.Module]
) -> list[dict[str, Any]]:
    """Return inception scores of images by the judge, and the mean of those by each node's model."""
    adapted = inception_scores(images, teachers)
    metrics = {
        "inception": inception_scores(images, {"judge": judge})["judge"],
        "adapted": fmean(adapted.values()),
    }
    return [{"method": name, "metric": metric, "value": value} for metric, value in metrics.items()]
