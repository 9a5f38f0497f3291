"""FedIOD's Figure 6, drawn from the runs of its Table 3: the last images of servers, and their maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plots
import torch
from fediod_pictures import input_shape
from safetensors.torch import load_file

from fedstill.compare.comparison import ONLY_SETTING, ComparisonRun, read_comparison_folder
from fedstill.core.compute import Compute
from fedstill.core.errors import RunFolderError
from fedstill.models import build
from fedstill.models.inference import predict
from fedstill.report.images import CODE_COLORS, MAPS_SUFFIX
from fedstill.runs.simulation import build_simulation

SHOWN = 4  # pictures of each method


def reproduce(*, root: str, out: Path, seed: int, runs: Path, methods: list[str]) -> list[dict[str, Any]]:
    """Draw one seed, and give how well the first method's model finds the maps in the others' images, in
    percent."""
    comparison, (judging, *drawing) = read_comparison_folder(runs), methods
    given = build_simulation(comparison.run_config(ComparisonRun(ONLY_SETTING, judging, seed)))[0].setting
    judge = build(comparison.base["student"]["model"], input_shape(given), given.task.classes, 0, "student")
    judged_by = ComparisonRun(ONLY_SETTING, judging, seed)
    judge.load_state_dict(load_file(runs / judged_by.folder / "student.safetensors"))
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in (given.mean, given.std))
    rows, shown = [], []
    for method in drawing:
        file = runs / ComparisonRun(ONLY_SETTING, method, seed).folder / "samples.safetensors"
        if not file.exists():
            continue
        tensors = load_file(file)
        last = max((key for key in tensors if key.isdecimal()), key=int)
        images, maps = tensors[last], tensors[f"{last}{MAPS_SUFFIX}"]
        inputs = (images.float() / 255 - mean) / std
        predicted = predict(judge.eval(), inputs, Compute(given.engine)).argmax(1) > 0
        wanted = maps > 0
        dice = 200 * (predicted & wanted).sum() / (predicted.sum() + wanted.sum()).clamp_min(1)
        rows.append({"method": method, "metric": "maps found again, Dice", "value": float(dice)})
        shown += [
            [(f"{method}: map", CODE_COLORS[codes.numpy()], None) for codes in maps[:SHOWN]],
            [
                ("made from it", np.ascontiguousarray(each.numpy().transpose(1, 2, 0)), None)
                for each in images[:SHOWN]
            ],
        ]
    if not shown:
        raise RunFolderError(f"{runs} holds no images that servers made")
    plots.pictures(out / "figure6.png", shown)
    return rows
