"""Accuracy of each ensemble of the nodes' models on test images, before any distillation.

    python benchmarks/ensembles.py --presets digits-fediod-skewed --seeds 0 1 2

Trains the nodes of each preset and prints the accuracy of their ensemble for every ``method.ensemble``,
with and without label smoothing. An evaluation of a simulation: it reads nodes' models directly.
"""

from __future__ import annotations

import argparse
import dataclasses
from statistics import mean

import torch

from fedstill.core.errors import FedstillError
from fedstill.models.inference import predict
from fedstill.node import local_training
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import load
from fedstill.tasks import logit_formulas

ENSEMBLES = ("logits", "log_probs", "probs", "consensus")
UPDATES = (1, 2, 5, 20)


def measure(preset: str, seed: int, smoothing: float, root: str) -> dict[str, float]:
    """Return the accuracy in percent of each ensemble and of the average node."""
    config = load(preset)
    local = dataclasses.replace(config.nodes.local, smoothing=smoothing)
    config = dataclasses.replace(
        config,
        seed=seed,
        data=dataclasses.replace(config.data, root=root),
        nodes=dataclasses.replace(config.nodes, local=local),
        evaluation=dataclasses.replace(config.evaluation, centralized=False),
    )
    experiment, _ = build_simulation(config)
    task = experiment.task
    for node in experiment.nodes:
        local_training.train([node], task, local, experiment.compute)
    test = experiment.test
    responses = torch.stack(
        [predict(node.model, test.inputs, experiment.compute) for node in experiment.nodes]
    )  # (K, N, classes)
    weights = task.importance_weights(torch.stack([task.counts(node.data) for node in experiment.nodes]))
    outputs: dict[str, torch.Tensor] = {
        ensemble: task.ensemble(responses, weights, ensemble) for ensemble in ENSEMBLES
    }
    for updates in UPDATES:
        outputs[f"turns={updates}"] = logit_formulas.consensus(responses.log_softmax(2), weights, updates)
    accuracies = {
        ensemble: task.compute_metrics(output, test.targets)["accuracy"]
        for ensemble, output in outputs.items()
    }
    alone = [task.compute_metrics(response, test.targets)["accuracy"] for response in responses]
    return {"standalone": mean(alone), **accuracies}


def main() -> None:
    """Print a Markdown table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--presets", nargs="+", default=["digits-fediod-skewed", "digits-fediod"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--smoothing", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--root", default="", help="where data sets lie")
    given = parser.parse_args()
    columns = ("standalone", *ENSEMBLES, *(f"turns={updates}" for updates in UPDATES))
    print("| preset | seeds | smoothing |", " | ".join(columns), "|")
    print("|---|---|---|", "---|" * len(columns), sep="")
    for preset in given.presets:
        for smoothing in given.smoothing:
            try:
                runs = [measure(preset, seed, smoothing, given.root) for seed in given.seeds]
            except FedstillError as error:
                parser.error(str(error))
            metrics = " | ".join(f"{mean(run[column] for run in runs):.1f}" for column in columns)
            seeds = " ".join(map(str, given.seeds))
            print(f"| {preset} | {seeds} | {smoothing} | {metrics} |", flush=True)


if __name__ == "__main__":
    main()
