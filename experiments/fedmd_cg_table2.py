"""FedMD-CG's Table 2: what gradient inversion gets of five methods that share parameters, PSNR in dB.

    python experiments/fedmd_cg_table2.py --root FOLDER --out table2.json

Ten nodes, omega 10 (`split.alpha`), as in the paper. The paper says neither in which round it attacks, nor on
how many images, nor with which activations; here victims are nodes of one image, that take one SGD step a
round. Two rounds are attacked: the first, in which all nodes begin with the server's weights, so that it
knows the part that is not shared; and a later one, in which that part has been trained at its node. Two
networks: LeNet-5 with ReLU and max pooling, and the LeNet of DLG's paper, with sigmoids. Per cell: the mean
over the images of a seed, then mean and standard deviation over seeds, of DLG and, for LeNet-5, of the attack
layer by layer.

MNIST stands where the paper has EMNIST; CIFAR-10 is a JPEG copy. A guess is the mean of real images.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import tyro

from fedstill.attacks.gradient_inversion import GradientInversion, inverted
from fedstill.attacks.rerun import Replay
from fedstill.core.errors import FedstillError
from fedstill.runs.config import from_dict

METHODS = ("fedavg", "fedper", "lg-fedavg", "fedcg", "fedmd-cg")
ATTACKS = {"lenet5": ("dlg", "layers"), "sigmoid-lenet": ("dlg",)}
PAPER = {
    "mnist": (24.54, 23.55, 6.78, 7.05, 6.95),  # EMNIST
    "fashion-mnist": (22.63, 19.66, 6.33, 6.98, 7.02),
    "cifar10": (29.22, 14.84, 8.75, 9.87, 9.69),
}
PACKS = {"cifar10": "packs.cifar:CIFAR10"}  # of data sets by another name
PRESETS = Path(__file__).parent / "presets"  # packs are beside them
LATER = 5  # of ten rounds


def main(
    root: str,
    out: Path = Path("table2.json"),
    data: tuple[str, ...] = tuple(PAPER),
    networks: tuple[str, ...] = tuple(ATTACKS),
    seeds: int = 5,
    victims: int = 1,
) -> None:
    """Attack all methods on all data sets, and print the table.

    Args:
        root: the folder that holds the data sets.
        out: all figures, written after each cell; cells that it holds already are not done again.
        data: data sets.
        networks: of nodes and student.
        seeds: 0 up to so many.
        victims: images a seed, each of another node.
    """
    cells: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name in data:
        for network in networks:
            for method in METHODS:
                for round in (0, LATER):
                    for seed in range(seeds):
                        key = f"{name} {network} {method} {round} {seed}"
                        if key not in cells:
                            cells[key] = attacked(root, name, network, method, round, seed, victims)
                            out.write_text(json.dumps(cells, indent=1))
    for network in networks:
        print(table(cells, data, network, seeds))


def attacked(
    root: str, data: str, network: str, method: str, round: int, seed: int, victims: int
) -> dict[str, Any]:
    """The figures of one cell and seed."""
    config = from_dict(
        {
            "seed": seed,
            "plugins": [str(PRESETS)],
            "data": {"name": PACKS.get(data, data), "root": root, "train_limit": 2000},
            "split": {"how": "dirichlet", "nodes": 10, "alpha": 10.0},
            "nodes": {
                "models": [network],
                "local": {
                    "epochs": 5.0,
                    "optimiser": "sgd",
                    "lr": 0.1,
                    "lr_end": 0.1,
                    "momentum": 0.0,
                    "smoothing": 0.0,
                },
                "policy": {"outputs_only": False},
            },
            "student": {"model": network},
            "method": {"name": method, "rounds": 10},
            "engine": {"name": "one-by-one", "threads": 1},
        }
    )
    start = time.monotonic()
    asked = GradientInversion(victims=victims, round=round, attacks=ATTACKS[network])
    try:
        got = inverted(Replay.of(config), asked, seed)
    except FedstillError as error:
        return {"refused": str(error)}
    return {**got.part, "refused_attacks": got.skipped, "seconds": time.monotonic() - start}


def table(cells: dict[str, Any], data: tuple[str, ...], network: str, seeds: int) -> str:
    """Markdown: a row a method and round, a column a data set and attack."""
    columns = [(name, attack) for name in data for attack in ATTACKS[network]]
    heads = [f"{name}, {attack}" for name, attack in columns]
    lines = [
        f"{network}, PSNR in dB over {seeds} seeds",
        "",
        f"| method, round | {' | '.join(heads)} | paper |",
        f"|---|{'---|' * (len(columns) + 1)}",
    ]
    for place, method in enumerate(METHODS):
        for round in (0, LATER):
            found = [_cell(cells, name, network, method, round, seeds, attack) for name, attack in columns]
            paper = " / ".join(f"{PAPER[name][place]:.2f}" for name in data)
            lines.append(f"| {method}, {round} | {' | '.join(found)} | {paper} |")
    guesses = [
        statistics.mean(cells[f"{name} {network} fedavg 0 {seed}"]["guess"] for seed in range(seeds))
        for name, _ in columns
    ]
    lines.append(f"| a guess | {' | '.join(f'{guess:.1f}' for guess in guesses)} | |")
    return "\n".join(lines) + "\n"


def _cell(
    cells: dict[str, Any], data: str, network: str, method: str, round: int, seeds: int, attack: str
) -> str:
    values = [
        each["psnr"]["mean"]
        for seed in range(seeds)
        for each in cells[f"{data} {network} {method} {round} {seed}"].get("attacks", [])
        if each["name"] == attack
    ]
    if not values:
        return "does not apply"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.1f}"


if __name__ == "__main__":
    tyro.cli(main)
