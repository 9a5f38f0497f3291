"""FedIOD's Figures 3, 5 and 7 from the runs of its Tables 4, 2 and 9: models on test cases.

Shows the best, median and worst case of the first method's model. Segmentation: outlines (truth orange,
prediction blue, white where both agree). Reconstruction: images and their errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plots
import torch
from safetensors.torch import load_file

from fedstill.compare.comparison import ComparisonRun, read_comparison_folder
from fedstill.core.compute import Compute
from fedstill.models import build
from fedstill.models.inference import predict
from fedstill.report.images import OUTLINE_COLORS, outline_codes
from fedstill.runs.build import Setting, input_shape
from fedstill.runs.evaluation import choose_example_predictions
from fedstill.runs.simulation import build_simulation


def reproduce(*, root: str, out: Path, seed: int, runs: Path, methods: list[str]) -> list[dict[str, Any]]:
    """Draw a picture per setting; return the scores of the cases shown."""
    comparison, rows = read_comparison_folder(runs), []
    for setting in comparison.settings:
        first = comparison.run_config(ComparisonRun(setting, methods[0], seed))
        given = build_simulation(first)[0].setting
        outputs = {}
        for method in methods:
            folder = runs / ComparisonRun(setting, method, seed).folder
            if (folder / "student.safetensors").exists():
                outputs[method] = predicted(given, first.student.model, folder)
        chosen = choose_example_predictions(given.task, given.test, outputs, given.mean, given.std)
        if chosen is None:
            continue
        tensors, cases = chosen
        name = f"pictures{f'-{setting}' if setting else ''}.png"
        plots.pictures(
            out / name, [row for at, case in enumerate(cases) for row in case_rows(tensors, at, case)]
        )
        for case in cases:
            for model in case["models"]:
                about = {"setting": f"{setting} {case['rank']} case".strip(), "method": model["name"]}
                if model["score"] is not None:
                    rows.append({**about, "metric": given.task.metric, "value": model["score"]})
    return rows


def predicted(setting: Setting, model: str, folder: Path) -> torch.Tensor:
    """Return the outputs of a run's central model on all test inputs."""
    student = build(model, input_shape(setting), setting.task.classes, setting.spec.seed, "student")
    student.load_state_dict(load_file(folder / "student.safetensors"))
    return predict(student.eval(), setting.task.observe(setting.test.inputs), Compute(setting.spec.engine))


def case_rows(
    tensors: dict[str, torch.Tensor], at: int, case: dict[str, Any]
) -> list[list[tuple[str, Any, Any]]]:
    """Return the pictures of one case: one row, and for images a second row of errors."""
    truth = tensors[f"{at}/truth"].numpy()
    names = [
        model["name"] + ("" if model["score"] is None else f" {model['score']:.1f}")
        for model in case["models"]
    ]
    made = [tensors[f"{at}/output/{number}"].float().numpy() for number in range(len(names))]
    if case["kind"] == "map":
        image = tensors[f"{at}/image"].numpy()
        pixels = image.transpose(1, 2, 0) if len(image) == 3 else image[0] / 255
        row = [(f"{case['rank']}: truth", pixels, OUTLINE_COLORS[outline_codes(truth)])]
        over = [OUTLINE_COLORS[outline_codes(truth, each.astype(np.int32))] for each in made]
        return [[*row, *((name, pixels, lines) for name, lines in zip(names, over, strict=True))]]
    real = truth[0].astype(np.float32).clip(0, 1)
    shown = [(f"{case['rank']}: truth", real, None)]
    shown += [(name, each[0].clip(0, 1), None) for name, each in zip(names, made, strict=True)]
    errors = [("error x 4", np.zeros_like(real), None)]
    errors += [("", (4 * abs(each[0] - real)).clip(0, 1), None) for each in made]
    return [shown, errors]
