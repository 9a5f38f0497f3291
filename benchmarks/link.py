"""Cost of communication with a node: seconds and bytes of a two-way query, by engine and input shape.

    python benchmarks/link.py                       # all engines, three shapes, three nodes
    python benchmarks/link.py --engines in-process flare-poc --nodes 3 --queries 20
    python benchmarks/link.py --engines flare-poc --nodes 3 5 --secure-aggregation   # without and with

The query is FedIOD's: inputs down, logits and critic values up, their gradients down, the inputs' gradient
up. All nodes have the same small network. All engines compute the same, so only communication differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shutil
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

from fedstill.runs import run
from fedstill.runs.spec import RunSpec, from_dict

SHAPES = ((64, 1, 8, 8), (64, 3, 32, 32), (1024, 3, 32, 32))
ENGINES = ("in-process", "flare", "flare-poc")
FORMS = (("float32", "float32"), ("float16", "float16"), ("int8", "int8"))


def data_file(folder: Path, shape: tuple[int, ...]) -> Path:
    """Write an ``.npz`` file of noise; accuracy does not matter here."""
    generator = np.random.default_rng(0)
    _, channels, height, width = shape
    images = generator.integers(0, 256, (400, height, width, channels), dtype=np.uint8)
    path = folder / "noise.npz"
    np.savez(path, images=images, labels=np.arange(400) % 10, split=(np.arange(400) % 5 == 0).astype(int))
    return path


def configuration(
    data: Path,
    shape: tuple[int, ...],
    engine: str,
    nodes: int,
    queries: int,
    forms: tuple[str, str],
    sums: bool,
) -> RunSpec:
    """Return a run with this many queries and almost no training."""
    return from_dict(
        {
            "name": "link",
            "data": {"name": str(data)},
            "split": {"name": "iid", "nodes": nodes},
            "nodes": {"models": ["mlp:8"], "local": {"epochs": 0.1}},
            "student": {"model": "mlp:8"},
            "method": {
                "name": "fediod",
                # Under secure aggregation FedIOD adds one statistic of each response.
                **({"ensemble": "logits", "gan": 0.0, "conf": 0.0, "unique": 0.0} if sums else {}),
                "steps": queries,
                "batch": shape[0],
                "generator": {"width": 2},
                "critic": {"width": 1},
                "student": {"steps": 1, "batch": 1, "memory": max(shape[0], 1)},
            },
            "engine": {
                "backend": "local" if engine == "in-process" else engine,
                "batching": "one-by-one",
                "threads": 1,
            },
            "evaluation": {"every": 0, "centralized": False, "samples": 0},
            "link": {"inputs": forms[0], "gradients": forms[1], "secure_aggregation": sums},
        }
    )


def measured(config: RunSpec, out: Path) -> dict[str, float]:
    """Return the seconds and bytes of one query, and communication's share of the run."""
    start = time.perf_counter()
    result = run.run(config, out, command="benchmarks/link.py", progress=False)
    total = time.perf_counter() - start
    queries = result["queries_by_name"]["predict_logits"]
    link = result.get("link")
    seconds = result["seconds"]["distillation"] / queries
    if link is None:
        size = float(result["bytes"]["up"] + result["bytes"]["down"])
        return {"seconds": seconds, "bytes": size / queries, "link": 0.0, "share": 0.0, "run": total}
    running = result["seconds"]["distillation"]
    return {
        "seconds": seconds,
        "bytes": link["bytes_each"] * link["messages"] / queries,
        "link": link["link"] / queries,
        "share": link["link"] / running,
        "run": total,
    }


def main() -> None:
    """Measure and print a Markdown table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument(
        "--shapes", type=int, default=len(SHAPES), help="how many of them, the smallest first"
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[3])
    parser.add_argument(
        "--secure-aggregation", action="store_true", help="each without and with link.secure_aggregation"
    )
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--forms", nargs="+", default=["float32"], choices=[form for form, _ in FORMS])
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    options = parser.parse_args()
    rows = []
    masks = (False, True) if options.secure_aggregation else (False,)
    for shape, engine, form, nodes, sums in itertools.product(
        SHAPES[: options.shapes], options.engines, options.forms, options.nodes, masks
    ):
        with tempfile.TemporaryDirectory() as folder:
            data = data_file(Path(folder), shape)
            config = configuration(data, shape, engine, nodes, options.queries, (form, form), sums)
            each = []
            for repeat in range(options.repeats):
                out = Path(folder) / f"run-{repeat}"
                each.append(measured(config, out))
                shutil.rmtree(out, ignore_errors=True)
        row = {key: statistics.median(one[key] for one in each) for key in each[0]}
        rows.append(
            {
                "shape": list(shape),
                "engine": engine,
                "form": form,
                "nodes": nodes,
                "secure_aggregation": sums,
                **row,
            }
        )
        print(rows[-1], flush=True)
    about = {
        "queries": options.queries,
        "repeats": options.repeats,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    if options.out:
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(f"\n{about}\n")
    print("| inputs | engine | form | nodes | masked | ms per query | link, ms | kB | share of the link |")
    print("|---|---|---|---:|---|---|---|---|---|")
    for row in rows:
        shape = "x".join(map(str, row["shape"][1:]))
        print(
            f"| {row['shape'][0]} of {shape} | {row['engine']} | {row['form']} | {row['nodes']} "
            f"| {'yes' if row['secure_aggregation'] else 'no'} | {1000 * row['seconds']:.0f} "
            f"| {1000 * row['link']:.0f} | {row['bytes'] / 1000:,.0f} | {100 * row['share']:.0f}% |"
        )


if __name__ == "__main__":
    main()
