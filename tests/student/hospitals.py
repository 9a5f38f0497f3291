"""Tables of four hospitals, three of which form a federation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SCHEMA = """\
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
RUN = """\
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


def write(folder: Path, site: str, seed: int, count: int = 60) -> None:
    """Write a hospital's table: patients older than 50 are ill, except for one in ten."""
    draw = np.random.default_rng(seed)
    ages, sexes = draw.uniform(1, 99, count).round(3), draw.integers(0, 2, count)
    ill = (ages > 50) != (draw.random(count) < 0.1)
    rows = [
        f"{age},{'fm'[sex]},{['no', 'yes'][int(is_ill)]}"
        for age, sex, is_ill in zip(ages, sexes, ill, strict=True)
    ]
    (folder / f"{site}.csv").write_text("age,sex,ill\n" + "\n".join(rows) + "\n", encoding="utf-8")
