"""FedMD-CG's Table 2: PSNR in dB of gradient inversion on five methods that share parameters.

    fedstill reproduce fedmd-cg-table2 --data.root FOLDER

Ten nodes, omega 10 (`split.alpha`), as in the paper. The paper does not state the attacked round, the number
of images or the activations. Here victims are nodes with one image that take one SGD step per round. Two
rounds are attacked. In the first, all nodes start from the server's weights, so the server knows the part
that is not shared. In the later one, each node has trained that part. There are two networks: LeNet-5 with
ReLU and max pooling, and the LeNet of DLG's paper, with sigmoids. Each cell is the mean over the images of a
seed, of DLG and, for LeNet-5, of the layer-wise attack.

MNIST replaces the paper's EMNIST; CIFAR-10 is a JPEG copy. A guess is the mean of real images.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import plots

from fedstill.attacks.gradient_inversion import GradientInversion, run_inversion
from fedstill.attacks.transcript import ReplayedRun
from fedstill.core.errors import FedstillError
from fedstill.runs.spec import from_dict

METHODS = ("fedavg", "fedper", "lg-fedavg", "fedcg", "fedmd-cg")
ATTACKS = {"lenet5": ("dlg", "layers"), "sigmoid-lenet": ("dlg",)}
PACKS = {"cifar10": "packs.cifar:CIFAR10"}  # data sets whose readers are in packs
PRESETS = Path(__file__).parent / "presets"  # the folder of the packs
LATER = 5  # the later attacked round, of ten


def reproduce(
    *,
    root: str,
    out: Path,
    seed: int,
    data: list[str],
    networks: list[str],
    victims: int,
    draws: bool,
    steps: int = 25,
) -> list[dict[str, Any]]:
    """Attack all methods on all data sets; rows are PSNR in dB by method, round and attack.

    Args:
        root: folder of the data sets.
        out: folder of each cell's result (existing ones are reused) and, if ``draws``, of a picture.
        seed: seed of all sampling.
        data: data sets.
        networks: networks of nodes and student.
        victims: number of images, each of a different node.
        draws: draw originals and recovered images of the first round (Figure 4).
        steps: L-BFGS steps of DLG.
    """
    rows: list[dict[str, Any]] = []
    pictures = []
    for name in data:
        for network in networks:
            setting, guess, line = f"{name}, {network}", None, list[Any]()
            for method in METHODS:
                for round in (0,) if draws else (0, LATER):
                    file = out / f"{name}-{network}-{method}-{round}.json"
                    if draws or not file.exists():
                        got, shown = attacked(root, name, network, method, round, seed, victims, steps)
                        file.write_text(json.dumps(got, indent=1), encoding="utf-8")
                        line += victim_row(got, shown, method, first=not line) if draws else []
                    got = json.loads(file.read_text(encoding="utf-8"))
                    guess = got.get("guess", guess)
                    for each in got.get("attacks", []):
                        about = {"setting": setting, "method": f"{method}, round {round}"}
                        rows.append({**about, "metric": each["name"], "value": each["psnr"]["mean"]})
            if guess is not None:
                rows.append({"setting": setting, "method": "a guess", "metric": "dlg", "value": guess})
            pictures += [line] if line else []
    if pictures:
        plots.pictures(out / "figure4.png", pictures)
    return rows


def victim_row(got: dict[str, Any], shown: Any, method: str, *, first: bool) -> list[tuple[str, Any, Any]]:
    """Return the pictures of the first victim: the original if ``first``, and DLG's result with its PSNR."""
    row = [("original", _pixels(shown["original"][0]), None)] if first and shown else []
    for each in got.get("attacks", []):
        if each["name"] == "dlg":
            row.append((f"{method}: {each['psnr']['per_image'][0]:.1f}", _pixels(shown["dlg"][0]), None))
    return row


def _pixels(image: Any) -> Any:
    """Convert an image ``(C, H, W)`` of bytes for drawing: in color, or gray in [0, 1]."""
    pixels = image.numpy()
    return pixels[0] / 255 if len(pixels) == 1 else pixels.transpose(1, 2, 0)


def attacked(
    root: str, data: str, network: str, method: str, round: int, seed: int, victims: int, steps: int
) -> tuple[dict[str, Any], Any]:
    """Return the results of one cell and seed, and the images."""
    config = from_dict(
        {
            "seed": seed,
            "plugins": [str(PRESETS)],
            "data": {"name": PACKS.get(data, data), "root": root, "train_limit": 2000},
            "split": {"name": "dirichlet", "nodes": 10, "alpha": 10.0},
            "nodes": {
                "models": [network],
                "local": {
                    "epochs": 5.0,
                    "optimizer": "sgd",
                    "lr": 0.1,
                    "lr_end": 0.1,
                    "momentum": 0.0,
                    "smoothing": 0.0,
                },
                "policy": {"outputs_only": False},
            },
            "student": {"model": network},
            "method": {"name": method, "rounds": 10},
            "engine": {"batching": "one-by-one", "threads": 1},
        }
    )
    start = time.monotonic()
    attack = GradientInversion(victims=victims, round=round, attacks=ATTACKS[network], steps=steps)
    try:
        got = run_inversion(ReplayedRun.from_config(config), attack, seed)
    except FedstillError as error:
        return {"refused": str(error)}, None
    return {**got.part, "refused_attacks": got.skipped, "seconds": time.monotonic() - start}, got.pictures
