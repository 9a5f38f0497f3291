"""Accuracy of shortened presets in float32 and bfloat16, seed by seed.

    python benchmarks/precision_accuracy.py --root DIR --out runs/precision

Resumes after an interruption. Presets with small images are excluded, as ``engine.precision = "auto"`` uses
float32 for them. Each preset's own metric (accuracy, Dice, AUC, SSIM) is measured on test data; no option is
chosen by it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from fedstill.report.statistics import paired_t_interval

HERE = Path(__file__).parents[1] / "experiments" / "presets"
CIFAR = "--data.train_limit 5000 --nodes.local.epochs 5"
RUNS = {
    "fashion-fediod": "--data.train_limit 6000 --method.steps 150",
    "fashion-fediod-skewed": "--data.train_limit 6000 --method.steps 150",
    "fashion-fedmd-cg": "--data.train_limit 4000 --method.rounds 4",
    "mnist-fedmd-cg": "--data.train_limit 4000 --method.rounds 4",
    "cifar10-fediod-jpeg": f"{CIFAR} --method.steps 100",
    "cifar10-fedkd-jpeg": f"{CIFAR} --public.limit 2000 --method.student.epochs 10",
    "mri-segmentation-fedavg": "",
    "mri-segmentation-fediod": "",  # full length: in 60 steps no student learns anything
    "mri-reconstruction-fedavg": "",
    "mri-reconstruction-fediod": "--method.pretrain 100 --method.steps 60",
    "nuclei-fedavg": "--method.rounds 5",
    "nuclei-fediod": "",
    "xray-fedavg": "--method.rounds 10",
    "xray-fedkd": "",
    "xray-fediod": "--method.steps 60",
}
PRECISIONS = ("float32", "bfloat16")


def metric(preset: str, seed: int, precision: str, root: Path, out: Path) -> float:
    """Return the preset's own metric of one run, in percent. Runs it first if there is no result."""
    folder = out / preset / f"{precision}-{seed}"
    if not (folder / "result.json").exists():
        named = str(path) if (path := HERE / f"{preset}.toml").exists() else preset
        options = (
            f"--seed {seed} --engine.threads 1 --engine.precision {precision} --evaluation.centralized false"
        )
        words = [*RUNS[preset].split(), *options.split(), "--data.root", str(root), "--out", str(folder)]
        public = ["--public.root", str(root)] if "fedkd-jpeg" in preset else []
        start = ["run", named, *words, *public]
        if (folder / "config.toml").exists():
            start = ["run", "--resume", str(folder)]
        command = [sys.executable, "-m", "fedstill", *start, "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "result.json").read_text())
    return float(result[result["metric"]])


def main() -> None:
    """Run what is missing and print a line per preset, and an overall difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="two or more")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    given = parser.parse_args()
    if len(given.seeds) < 2:
        parser.error("--seeds: two or more, as what one does is chance")
    means = []
    print("| run | float32 | bfloat16 | difference over seeds |\n|---|---|---|---|", flush=True)
    for preset in given.only:
        accuracies = {
            precision: [metric(preset, seed, precision, given.root, given.out) for seed in given.seeds]
            for precision in PRECISIONS
        }
        differences = [
            b - f for f, b in zip(*(accuracies[precision] for precision in PRECISIONS), strict=True)
        ]
        cells = [f"{statistics.fmean(of):.1f} ± {statistics.stdev(of):.1f}" for of in accuracies.values()]
        gap = paired_t_interval(differences)
        means.append(gap.mean)
        print(
            f"| `{preset} {RUNS[preset]}` | {' | '.join(cells)} | {gap.mean:+.2f} ± {gap.half_width:.2f} |",
            flush=True,
        )
    overall = paired_t_interval(means)
    print(f"\nOver {len(means)} presets: {overall.mean:+.2f} ± {overall.half_width or 0:.2f} (95 %, t)")


if __name__ == "__main__":
    main()
