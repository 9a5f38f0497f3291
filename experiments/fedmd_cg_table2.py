"""FedMD-CG's Table 2: what gradient inversion gets of five methods that share parameters, PSNR in dB.

    fedstill reproduce fedmd-cg-table2 --data.root FOLDER

Ten nodes, omega 10 (`split.alpha`), as in the paper. The paper says neither in which round it attacks, nor on
how many images, nor with which activations; here victims are nodes of one image, that take one SGD step a
round. Two rounds are attacked: the first, in which all nodes begin with the server's weights, so that it
knows the part that is not shared; and a later one, in which that part has been trained at its node. Two
networks: LeNet-5 with ReLU and max pooling, and the LeNet of DLG's paper, with sigmoids. Per cell: the mean
over the images of a seed, of DLG and, for LeNet-5, of the attack layer by layer.

MNIST stands where the paper has EMNIST; CIFAR-10 is a JPEG copy. A guess is the mean of real images.
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
PACKS = {"cifar10": "packs.cifar:CIFAR10"}  # of data sets by another name
PRESETS = Path(__file__).parent / "presets"  # packs are next to them
LATER = 5  # of ten rounds


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
        root: the folder that holds the data sets.
        out: for what each cell gave (cells that are there are not done again) and, if ``draws``, a picture.
        seed: of every draw.
        data: data sets.
        networks: of nodes and student.
        victims: images, each of another node.
        draws: whether originals and what was recovered are drawn, the first round's (Figure 4).
        steps: of L-BFGS, in DLG.
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
    """The first victim's image, once, and what DLG makes of it, with its PSNR."""
    row = [("original", _pixels(shown["original"][0]), None)] if first and shown else []
    for each in got.get("attacks", []):
        if each["name"] == "dlg":
            row.append((f"{method}: {each['psnr']['per_image'][0]:.1f}", _pixels(shown["dlg"][0]), None))
    return row


def _pixels(image: Any) -> Any:
    """An image ``(C, H, W)`` of bytes as one to draw: in color, or gray in [0, 1]."""
    pixels = image.numpy()
    return pixels[0] / 255 if len(pixels) == 1 else pixels.transpose(1, 2, 0)


def attacked(
    root: str, data: str, network: str, method: str, round: int, seed: int, victims: int, steps: int
) -> tuple[dict[str, Any], Any]:
    """The figures of one cell and seed, and the images."""
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
