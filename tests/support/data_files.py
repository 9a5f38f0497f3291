"""Data files of every task, and tables of hospitals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.runs.spec import RunSpec, from_dict
from tests.support import data_files

SURVIVAL_SCHEMA = """
target = "months"
event = "died"
intervals = 8

[[columns]]
name = "age"
range = [0, 100]

[[columns]]
name = "stage"
type = "category"
categories = ["I", "II", "III"]

[[columns]]
name = "marker"
range = [-4, 4]
missing = true

[[columns]]
name = "months"
range = [0, 40]

[[columns]]
name = "died"
type = "category"
categories = ["no", "yes"]
"""
SURVIVAL_HEADER = "age,stage,marker,months,died"


def write_survival(folder: Path, rows: int = 120, sites: int = 3, seed: int = 0) -> Path:
    """Write a folder with a csv of survival data for each site, and return it.

    Times are exponential, and shorter for old or ill patients and those with a high marker. They are censored
    by a missed visit or the end of the study at 40 months, whichever comes first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schema.toml").write_text(SURVIVAL_SCHEMA, encoding="utf-8")
    draw = np.random.default_rng(seed)
    for site in range(sites):
        age = draw.uniform(30, 90, rows).round()
        stage = draw.choice(3, rows, p=[[0.6, 0.3, 0.1], [0.2, 0.6, 0.2], [0.1, 0.3, 0.6]][site % 3])
        marker = draw.normal(0, 1, rows).clip(-4, 4).round(2)
        risk = 0.04 * (age - 60) + 1.2 * (stage - 1) + 0.8 * marker
        event = draw.exponential(18 * np.exp(-risk))
        until = np.minimum(draw.exponential(40, rows), 40)
        lines = [
            f"{age[n]:.0f},{'I' * (stage[n] + 1)},{'' if n % 11 == 0 else marker[n]},"
            f"{min(event[n], until[n]):.2f},{'yes' if event[n] <= until[n] else 'no'}"
            for n in range(rows)
        ]
        text = "\n".join([SURVIVAL_HEADER, *lines]) + "\n"
        (folder / f"site-{site}.csv").write_text(text, encoding="utf-8")
    return folder


HOSPITAL_SCHEMA = """\
target = "ill"
[[columns]]
name = "age"
range = [0.0, 100.0]
missing = true
[[columns]]
name = "sex"
type = "category"
categories = ["f", "m"]
[[columns]]
name = "ill"
type = "category"
categories = ["no", "yes"]
"""
HOSPITAL_RUN = """\
name = "hospitals"
task = { name = "tabular" }
data = { name = "DATA" }
split = { name = "column", column = "site", nodes = 0, minimum = 1 }
student = { model = "linear" }
method = { name = "fedavg", rounds = 20 }
[nodes]
models = ["linear"]
local = { epochs = 2, lr = 0.05, batch = 8 }
policy = { outputs_only = false }
[evaluation]
centralized = false
every = 0
[engine]
threads = 1
"""


def write_hospital(folder: Path, site: str, seed: int, count: int = 60) -> None:
    """Write a hospital's table: patients older than 50 are ill, except for one in ten."""
    draw = np.random.default_rng(seed)
    ages, sexes = draw.uniform(1, 99, count).round(3), draw.integers(0, 2, count)
    ill = (ages > 50) != (draw.random(count) < 0.1)
    rows = [
        f"{age},{'fm'[sex]},{['no', 'yes'][int(is_ill)]}"
        for age, sex, is_ill in zip(ages, sexes, ill, strict=True)
    ]
    (folder / f"{site}.csv").write_text("age,sex,ill\n" + "\n".join(rows) + "\n", encoding="utf-8")


SIDE, COUNT = 16, 60
TEST = np.arange(COUNT) % 3 == 0


def images(targets: str) -> Callable[[Path], tuple[str, str]]:
    """Return a writer of images with a bright square, whose position is the class, the labels or the mask."""

    def write(folder: Path) -> tuple[str, str]:
        draw = np.random.default_rng(0)
        pixels = draw.integers(20, 100, (COUNT, SIDE, SIDE), dtype=np.uint8)
        masks, label = np.zeros_like(pixels), draw.integers(0, 4, COUNT)
        for image, mask, one in zip(pixels, masks, label, strict=True):
            top, left = 8 * (one // 2), 8 * (one % 2)
            mask[top : top + 6, left : left + 6] = 1
            image[mask == 1] += 30
        taught = {
            "class": {"labels": label},
            "labels": {"labels": np.stack([label % 2, label // 2, draw.integers(0, 2, COUNT)], 1)},
            "map": {"masks": masks, "patient": np.arange(COUNT) // 3},
            "image": {},
        }[targets]
        split = TEST if targets != "map" else np.arange(COUNT) // 3 % 3 == 0
        whole, tested = folder / "whole.npz", folder / "tested.npz"
        np.savez(whole, images=pixels, **taught, split=split.astype(np.int64))
        np.savez(tested, images=pixels[split], **{name: each[split] for name, each in taught.items()})
        return str(whole), str(tested)

    return write


def table(target: str, kind: str) -> Callable[[Path], tuple[str, str]]:
    """Return a writer of rows of two numbers that determine a class or a number."""

    def write(folder: Path) -> tuple[str, str]:
        draw = np.random.default_rng(0)
        a, b = draw.uniform(0, 1, (2, COUNT)).round(3)
        value = (a + b + draw.uniform(0, 0.4, COUNT)).round(3)
        cells = value if kind == "number" else np.where(value > 1.2, "high", "low")
        own = {"number": "range = [0.0, 2.4]", "class": 'type = "category"\ncategories = ["low", "high"]'}
        schema = f'target = "{target}"\n' + "".join(
            f'[[columns]]\nname = "{name}"\n{about}\n'
            for name, about in (("a", "range = [0.0, 1.0]"), ("b", "range = [0.0, 1.0]"), (target, own[kind]))
        )
        (folder / "schema.toml").write_text(schema, encoding="utf-8")
        for name, rows in (("whole", np.arange(COUNT)), ("tested", np.flatnonzero(TEST))):
            split = [("test" if TEST[row] else "train") for row in rows]
            head = f"a,b,{target}" + (",split" if name == "whole" else "")
            lines = [
                f"{a[row]},{b[row]},{cells[row]}" + (f",{part}" if name == "whole" else "")
                for row, part in zip(rows, split, strict=True)
            ]
            (folder / f"{name}.csv").write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
        return str(folder / "whole.csv"), str(folder / "tested.csv")

    return write


def texts(folder: Path) -> tuple[str, str]:
    draw = np.random.default_rng(0)
    words = (["good", "fine", "warm"], ["bad", "dull", "cold"])
    lines = []
    for number in range(COUNT):
        label = int(draw.integers(2))
        text = " ".join([*draw.choice(words[label], 2), *draw.choice(words[1 - label], 1), f"w{number}"])
        lines.append((text, label))
    whole = [f"{text},{label},{'test' if TEST[row] else 'train'}" for row, (text, label) in enumerate(lines)]
    tested = [f"{text},{label}" for row, (text, label) in enumerate(lines) if TEST[row]]
    (folder / "whole.csv").write_text("\n".join(["text,label,split", *whole]), encoding="utf-8")
    (folder / "tested.csv").write_text("\n".join(["text,label", *tested]), encoding="utf-8")
    return str(folder / "whole.csv"), str(folder / "tested.csv")


def survival(folder: Path) -> tuple[str, str]:
    data_folder = data_files.write_survival(folder / "hospitals", rows=COUNT, sites=1)
    (file,) = data_folder.glob("*.csv")
    head, *rows = file.read_text(encoding="utf-8").splitlines()
    tested = [row for row, is_test in zip(rows, TEST, strict=True) if is_test]
    (data_folder / "tested.csv").write_text("\n".join([head, *tested]), encoding="utf-8")
    parts = [f"{row},{'test' if is_test else 'train'}" for row, is_test in zip(rows, TEST, strict=True)]
    file.write_text("\n".join([f"{head},split", *parts]), encoding="utf-8")
    return str(file), str(data_folder / "tested.csv")


# By task: the writer of its data, its network, and the options of its data.
TASKS: dict[str, tuple[Callable[[Path], tuple[str, str]], str, dict[str, Any]]] = {
    "classification": (images("class"), "small-cnn:8", {}),
    "multi-label": (images("labels"), "small-cnn:8", {}),
    "segmentation": (images("map"), "unet:8", {}),
    "reconstruction": (images("image"), "unet:4", {}),
    "text": (texts, "transformer:16", {"words": 50, "length": 6}),
    "tabular": (table("level", "class"), "mlp:16", {}),
    "regression": (table("value", "number"), "mlp:16", {}),
    "survival": (survival, "mlp:16", {}),
}
# Segmentation needs more training: a student that predicts one class everywhere would hide rounding.
LOCAL = {"segmentation": {"epochs": 10, "batch": 8, "lr": 1e-3}}


def config(task: str, folder: Path, **tables: Any) -> tuple[RunSpec, str]:
    """Return a small run that trains in bfloat16, and the path of its test data."""
    write, model, data = TASKS[task]
    whole, tested = write(folder)
    table = {
        "task": {"name": task},
        "data": {"name": whole, **data},
        "split": {"name": "iid", "nodes": 3, "minimum": 1},
        "nodes": {
            "models": [model],
            "local": LOCAL.get(task, {"epochs": 2, "batch": 8, "lr": 5e-3}),
            "policy": {"outputs_only": False},
        },
        "student": {"model": model},
        "evaluation": {"centralized": False, "samples": 0},
        "engine": {"batching": "one-by-one", "precision": "bfloat16", "threads": 1},
        "method": {"name": "fedavg", "rounds": 2},
        **tables,
    }
    return from_dict(table), tested
