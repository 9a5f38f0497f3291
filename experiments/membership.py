"""Membership inference on the students of a finished comparison. Results: docs/benchmarks/equal-terms.md.

    python experiments/membership.py RUNS [--shadows 16] [--seeds 0]

Reports the same as ``fedstill attack RUN --attacks membership`` does for a student, without repeating runs.
Shadow models depend on the records and the network, not on the method, so they are trained once for all
methods of a setting and a seed. --shadows 0 runs the attack by loss alone, which needs none.

The comparison must be of classifiers, in simulation, and all nodes must teach the student. Methods without a
student are skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from fedstill import models
from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.attacks.membership_inference import (
    TITLES,
    MembershipInference,
    choose_candidates,
    concatenate,
    score_candidates,
)
from fedstill.attacks.membership_scores import Record, auc_with_interval, shadow_halves, train_shadows
from fedstill.attacks.transcript import ReplayedRun, load_run
from fedstill.compare.comparison import ComparisonRun, read_comparison_folder
from fedstill.core.compute import Compute
from fedstill.core.errors import FedstillError
from fedstill.models.inference import predict
from fedstill.privacy.epsilon_lower_bounds import CONFIDENCE
from fedstill.runs.student_file import FILE, read

SEED = LeakageConfig().seed
RECORDS = MembershipInference().records


class Adversary:
    """Candidate records, and the outputs of shadow models for them."""

    def __init__(self, again: ReplayedRun, count: int) -> None:
        config, classes = again.config, len(again.data.classes)
        self.candidates = choose_candidates(concatenate(again.parts), again.data.test, RECORDS, SEED)
        self.inside = shadow_halves(len(self.candidates.records), count, SEED)
        self.compute = Compute(config.engine)

        def make(seed: int) -> torch.nn.Module:
            return models.build(config.student.model, again.input_shape, classes, seed, "shadow")

        task, local = again.new_setting.task, config.nodes.local
        shadows = train_shadows(
            make, self.candidates.records, self.inside, task, local, SEED, compute=self.compute
        )
        self.shadow_outputs = [self.outputs(shadow) for shadow in shadows]

    def outputs(self, network: torch.nn.Module) -> torch.Tensor:
        """Return logits for candidates and population, ``(N + Z, classes)``."""
        return predict(network, self.candidates.records_and_population.inputs, self.compute).cpu()

    def areas(self, student: torch.nn.Module) -> dict[str, Record]:
        """Return the AUC of each attack, with its interval over records."""
        outputs = torch.stack([self.outputs(self.compute.to_device(student)), *self.shadow_outputs])
        scores = score_candidates(self.candidates, outputs, self.inside)
        inside = self.candidates.inside
        sure = 1 - (1 - CONFIDENCE) / len(scores)  # simultaneous intervals, as the attack's
        return {
            name: auc_with_interval(score[inside], score[~inside], sure) for name, score in scores.items()
        }


def attack_students(
    runs: Path, shadows: int, seeds: Sequence[int] = ()
) -> Iterator[tuple[ComparisonRun, dict[str, Record]]]:
    """Yield each run that has a student with the attacks' results, for the given seeds or all."""
    adversaries: dict[tuple[object, ...], Adversary] = {}
    for planned_run in read_comparison_folder(runs).planned_runs():
        folder = runs / planned_run.folder
        if (folder / FILE).exists() and planned_run.seed in (seeds or [planned_run.seed]):
            again = load_run(folder)
            config = again.config
            at = (planned_run.setting, planned_run.seed, config.student, config.nodes.local, config.public)
            if at not in adversaries:
                adversaries[at] = Adversary(again, shadows)
            yield planned_run, adversaries[at].areas(read(folder)[0])


def in_percent(area: Record) -> str:
    """Format an AUC and its interval in percent."""
    return f"{100 * area['value']:.1f} [{100 * area['low']:.1f}, {100 * area['high']:.1f}]"


def main() -> None:
    """Print the AUC of each run in percent with its interval over records (95 %, simultaneous).

    Then print means by setting and method, and the number of runs whose interval is above 50.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--shadows", type=int, default=MembershipInference().shadows)
    parser.add_argument("--seeds", type=int, nargs="+", default=())
    given = parser.parse_args()
    reached: dict[tuple[str, str], list[dict[str, Record]]] = {}
    try:
        MembershipInference(shadows=given.shadows)  # validates the options
        for planned_run, areas in attack_students(given.runs, given.shadows, given.seeds):
            reached.setdefault((planned_run.setting, planned_run.label), []).append(areas)
            parts = [f"{TITLES[name]} {in_percent(area)}" for name, area in areas.items()]
            print(f"{planned_run.folder}: {', '.join(parts)}", flush=True)
    except FedstillError as error:
        parser.error(str(error))
    if not reached:
        parser.error(f"{given.runs} has no student of these seeds")
    for (setting, label), by_seed in reached.items():
        cells = [setting or given.runs.name, label]
        for name in by_seed[0]:
            values = [100 * areas[name]["value"] for areas in by_seed]
            above = sum(areas[name]["low"] > 0.5 for areas in by_seed)
            spread = f" \u00b1 {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
            cells.append(f"{TITLES[name]} {np.mean(values):.1f}{spread}, {above} of {len(by_seed)} above 50")
        print(" | ".join(cells))


if __name__ == "__main__":
    main()
