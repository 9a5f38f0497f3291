"""A table of survival times whose hazards are known, for tests: no data set with such times comes along."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SCHEMA = """
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
HEADER = "age,stage,marker,months,died"


def write(folder: Path, rows: int = 120, sites: int = 3, seed: int = 0) -> Path:
    """A folder with a csv for each site: exponential times, shorter for the old, the ill and a high marker,
    censored by whichever comes first of a visit that was missed and the end at 40 months."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schema.toml").write_text(SCHEMA, encoding="utf-8")
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
        text = "\n".join([HEADER, *lines]) + "\n"
        (folder / f"site-{site}.csv").write_text(text, encoding="utf-8")
    return folder
