"""Benefit of scaling columns by noisy sums, for tables whose schema has exact ranges or ten times wider ones.

    python experiments/column_sums.py

FedAvg of mlp:64, 10 rounds, 5 nodes (wine: 4), Dirichlet alpha 0.5, evaluated on a validation part of the
training rows. "ranges" scales by the schema alone. "sums" first runs column-sums, in which nodes add noise 4
(epsilon 0.93 at delta 1e-5), and scales by the resulting schema. "exact" does the same without noise. The
rows of "clinics" are generated: 20,000 rows of 10 columns, with overlapping classes.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from sklearn.datasets import make_classification

from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data import make_data_config
from fedstill.data.table_data import TableData, schema_text
from fedstill.runs.run import run
from fedstill.runs.spec import from_dict

SEEDS = 3
NODES = {"wine": 4, "breast-cancer": 5, "clinics": 5}
EPOCHS = {"wine": 100, "breast-cancer": 100, "clinics": 10}


def table(name: str) -> tuple[TableSchema, dict[str, Sequence[object]]]:
    """Return a schema and its columns of cells."""
    if name != "clinics":
        known = make_data_config(name)
        assert isinstance(known, TableData)
        return known.schema(), dict(known.cells())
    x, y = make_classification(20_000, 10, n_informative=6, n_clusters_per_class=1, flip_y=0, random_state=0)
    x = x.clip(-8, 8)
    columns = [SchemaColumn(name=f"x{index}", range=(-8.0, 8.0)) for index in range(10)]
    response = SchemaColumn(name="ill", type="category", categories=("0", "1"))
    cells: dict[str, Sequence[object]] = {f"x{index}": x[:, index].tolist() for index in range(10)}
    return TableSchema("ill", (*columns, response)), {**cells, "ill": y.tolist()}


def widened(column: SchemaColumn, times: float) -> SchemaColumn:
    """Widen the range of a numeric column by a factor, about its middle; return other columns unchanged."""
    if column.type == "category":
        return column
    low, high = column.range
    middle, half = (low + high) / 2, times * (high - low) / 2
    return replace(column, range=(middle - half, middle + half))


def reached(folder: Path, name: str, schema: str, seed: int, method: dict[str, object], noise: float) -> Path:
    """Run a method on the csv in a folder with one of its schemas; return the run's folder.

    The file ``accuracy`` in it has the accuracy.
    """
    privacy = {"mechanism": "dp-sgd", "sums": {"noise": noise}} if noise else {}
    policy = {"kinds": ["column sums"]} if method["name"] == "column-sums" else {"outputs_only": False}
    out = folder / f"{schema}-{method['name']}-{seed}"
    config = {
        "seed": seed,
        "task": {"name": "tabular"},
        "data": {"name": str(folder / "rows.csv"), "schema": str(folder / schema), "validation": 0.25},
        "split": {"nodes": NODES[name], "alpha": 0.5},
        "nodes": {
            "models": ["mlp:64"],
            "local": {"epochs": EPOCHS[name]},
            "policy": policy,
            "privacy": privacy,
        },
        "student": {"model": "mlp:64"},
        "evaluation": {"centralized": False},
        "method": method,
    }
    result = run(from_dict(config), out, command="", progress=False)
    (out / "accuracy").write_text(str(result.get("accuracy")))
    return out


def accuracy(folder: Path, name: str, schema: str, seed: int) -> float:
    """Return FedAvg's accuracy in percent."""
    out = reached(folder, name, schema, seed, {"name": "fedavg", "rounds": 10}, 0.0)
    return float((out / "accuracy").read_text())


def compared(folder: Path, name: str, times: float) -> None:
    """Print the accuracies on a data set, with ranges widened by a factor."""
    schema, cells = table(name)
    schema = replace(schema, columns=tuple(widened(column, times) for column in schema.columns))
    (folder / "ranges").write_text(schema_text(schema))
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([list(cells), *zip(*cells.values(), strict=True)])
    accuracies: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        accuracies.setdefault("ranges", []).append(accuracy(folder, name, "ranges", seed))
        for variant, noise in (("sums", 4.0), ("exact", 0.0)):
            method = {"name": "column-sums", "noise": noise}
            (folder / "asking").write_text(schema_text(schema))
            out = reached(folder, name, "asking", seed, method, noise)
            (folder / f"{variant}-{seed}").write_text((out / "schema.toml").read_text())
            out.rename(folder / f"asked-{variant}-{seed}")
            accuracies.setdefault(variant, []).append(accuracy(folder, name, f"{variant}-{seed}", seed))
    summaries = (
        f"{variant} {np.mean(each):.1f} \u00b1 {np.std(each, ddof=1):.1f}"
        for variant, each in accuracies.items()
    )
    print(f"{name:14} ranges x {times:g}: {', '.join(summaries)}", flush=True)


if __name__ == "__main__":
    for name in NODES:
        for times in (1.0, 10.0):
            with tempfile.TemporaryDirectory() as here:
                compared(Path(here), name, times)
