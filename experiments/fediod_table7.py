"""FedIOD's Table 7 in form: inception scores of generated images, as the generator's losses are added.

    python experiments/fediod_table7.py --root FOLDER --out fediod_table7.json

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
import json
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import tyro
from fediod_fig4 import LOCAL, SMALL, distilled, divided

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
PAPER = [(2.40, 2.30), (2.90, 2.19), (2.95, 2.35), (2.64, 2.74), (3.57, 2.82)]  # inception, adapted


def main(
    root: str = "",
    out: Path = Path("fediod_table7.json"),
    seed: int = 0,
    nodes: int = 20,
    images: int = 2000,
    steps: int = 300,
    epochs: float = 8.0,
    judge_epochs: float = 3.0,
) -> None:
    """Print the scores as a Markdown table, and write them as JSON.

    Args:
        root: the folder that holds CIFAR-10.
        out: the JSON file.
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
    for at, (name, method) in enumerate(ROWS.items()):
        own = [copy.deepcopy(model) for model in teachers.values()]
        experiment, sent = distilled(setting, replace(method, steps=steps), own, images)
        outputs = experiment.evaluation.outputs(experiment.student)
        accuracy = experiment.evaluation.metrics(outputs)["accuracy"]
        judged = inception_scores(sent, {"judge": federation.judge})["judge"]
        adapted = inception_scores(sent, teachers)
        rows.append(
            {"row": name, "inception": judged, "adapted": fmean(adapted.values()), "nodes": adapted}
            | {"paper": PAPER[at] if at < len(PAPER) else None, "student": accuracy}
        )
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    real: torch.Tensor = setting.test.inputs
    judged = inception_scores(real, {"judge": federation.judge})["judge"]
    adapted = inception_scores(real, teachers)
    rows.append(
        {"row": "held-out real images", "inception": judged, "adapted": fmean(adapted.values())}
        | {"nodes": adapted, "paper": None, "student": None}
    )

    seconds = time.monotonic() - began
    print(
        f"\n{images} images, seed {seed}; the judge is right on {federation.accuracy:.1f} % of test images\n"
    )
    print("| G learns from | inception score | adapted | the paper's | student, % |\n|---|---|---|---|---|")
    for row in rows:
        paper = "" if row["paper"] is None else "{:.2f}, {:.2f}".format(*row["paper"])
        student = "" if row["student"] is None else f"{row['student']:.1f}"
        print(f"| {row['row']} | {row['inception']:.2f} | {row['adapted']:.2f} | {paper} | {student} |")
    print(f"\n{seconds:.0f} s")
    told = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": seconds,
        "options": {"seed": seed, "nodes": nodes, "images": images, "steps": steps, "epochs": epochs}
        | {"judge_epochs": judge_epochs},
        "judge": federation.accuracy,
        "rows": rows,
    }
    out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
