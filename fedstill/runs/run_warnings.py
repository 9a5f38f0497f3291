"""What a run accepts and its reader should know of: each is a note in terminal, page and result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from fedstill.core.dataset import TensorData
from fedstill.core.text_format import join_names
from fedstill.data.public import PublicData
from fedstill.protocol.method import Method
from fedstill.runs.evaluation import Outputs
from fedstill.runs.setting import Setting
from fedstill.tasks import Task

MAX_EPSILON = 20.0  # beyond it a guarantee is one in name


def collect_warnings(
    setting: Setting,
    nodes: Sequence[str],
    privacy: Mapping[str, Any],
    model_outputs: Outputs,
    classes: Sequence[str],
) -> list[str]:
    """All that hold of a run that has come to its end, in words.

    Args:
        setting: the run; where nodes are elsewhere it has none of their data, and less is known.
    """
    found = [
        single(nodes),
        *idle(setting.method, setting.local.lr),
        weak(privacy),
        unheld(setting.task, setting.parts, classes),
        *shared(setting.test, setting.public, setting.parts),
        reshaped(setting.public),
        unscaled(setting.task, setting.mean, setting.std, setting.parts),
        probabilities(setting.task, model_outputs),
        unsound(model_outputs),
    ]
    return [each for each in found if each is not None]


def single(nodes: Sequence[str]) -> str | None:
    """One node alone."""
    return "there is one node alone: nothing is federated" if len(nodes) == 1 else None


def idle(method: Method, local: float) -> list[str]:
    """Learning rates that are 0."""
    options: Any = method
    rates = {"nodes.local.lr": local}
    for option in fields(options):
        if option.name == "lr" or option.name.endswith("_lr"):
            rates[f"method.{option.name}"] = getattr(options, option.name)
    return [f"{name} is 0: what it trains learns nothing" for name, rate in rates.items() if rate == 0]


def weak(privacy: Mapping[str, Any]) -> str | None:
    """An epsilon, as it was spent or as it may be, that hardly bounds anything."""
    most: dict[str, float] = {}
    for node in privacy["nodes"]:
        known = [value for key in ("epsilon", "budget") if (value := node.get(key)) is not None]
        if known and max(known) > MAX_EPSILON:
            most[node["name"]] = max(known)
    if not most:
        return None
    return (
        f"epsilon is up to {max(most.values()):.3g} at {join_names(list(most))}: above {MAX_EPSILON:g} a "
        "guarantee is one in name: what is held likely of a record may change by a factor of e^epsilon"
    )


def unheld(task: Task, parts: Sequence[TensorData], classes: Sequence[str]) -> str | None:
    """Classes or findings that are declared, and of which no node has an example."""
    if not parts or task.kind not in ("class", "labels"):
        return None
    held = torch.stack([task.counts(part).cpu() for part in parts]).sum(0)
    missing = [name for name, count in zip(classes, held.tolist(), strict=True) if count == 0]
    return f"no node holds an example of {join_names(missing)}: nothing teaches it" if missing else None


def shared(test: TensorData, public: PublicData | None, parts: Sequence[TensorData]) -> list[str]:
    """Inputs that are the same, to the last bit, in two of test, public and private data."""
    tested, known = digests(test.inputs), set(digests(public.inputs)) if public is not None else set()
    private = {each for part in parts for each in digests(part.inputs)}
    found = []
    for name, others in (("private", private), ("public", known)):
        if count := sum(each in others for each in tested):
            found.append(
                f"{count:,} of {len(tested):,} test examples are among the {name} data, too: figures flatter"
            )
    if count := len(known & private):
        found.append(
            f"{count:,} different public inputs are among the private data, too: these are no secret"
        )
    return found


def digests(inputs: torch.Tensor) -> list[bytes]:
    """A hash of each input."""
    rows = inputs.detach().cpu().contiguous().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]


def reshaped(public: PublicData | None) -> str | None:
    """Public images that were brought into the private ones' form."""
    return (
        f"public data {public.name} are {public.conversion}"
        if public is not None and public.conversion
        else None
    )


def unscaled(
    task: Task, mean: Sequence[float], std: Sequence[float], parts: Sequence[TensorData]
) -> str | None:
    """Images from 0 to 1 where, by the normalization that is declared, black is -1."""
    if task.form != "images" or task.kind == "image" or ({*mean, *std} or {0.5}) != {0.5}:
        return None
    if not parts or any(float(part.inputs.min()) < 0 for part in parts):
        return None
    model_outputs = "no node's inputs are below 0, and mean and std of 0.5 say that black is -1"
    return f"{model_outputs}: pixels from 0 to 1 want mean = 0 and std = 1"


def probabilities(task: Task, model_outputs: Outputs) -> str | None:
    """Models whose outputs are none of logits: a second softmax makes of them answers that are never sure."""
    names = [name for name, outputs in _models(model_outputs).items() if _are_probabilities(task, outputs)]
    if not names:
        return None
    last = "sigmoid" if task.kind == "labels" else "softmax"
    return f"outputs of {join_names(names)} are probabilities already, and logits are expected: leave the {last} out"


def _are_probabilities(task: Task, outputs: torch.Tensor) -> bool:
    if task.kind not in ("class", "labels", "map"):
        return False
    if task.kind == "labels":
        return bool((outputs > 0).all() and (outputs < 1).all())
    return bool((outputs >= 0).all() and ((outputs.float().sum(1) - 1).abs() < 1e-2).all())


def unsound(model_outputs: Outputs) -> str | None:
    """Models that give NaN or infinity, which any figure takes for some answer."""
    models = _models(model_outputs)
    bad = {name: int((~outputs.isfinite()).flatten(1).any(1).sum()) for name, outputs in models.items()}
    names = [name for name, count in bad.items() if count]
    if not names:
        return None
    most = f"{max(bad.values()):,} of {len(models[names[0]]):,} test inputs"
    return (
        f"outputs of {join_names(names)} are NaN or infinite for up to {most}: figures of these mean nothing"
    )


def _models(model_outputs: Outputs) -> dict[str, torch.Tensor]:
    """What each model gave, by name."""
    return {
        **model_outputs.node_models,
        **({} if model_outputs.global_model is None else {"the student": model_outputs.global_model}),
    }


def best(lines: Sequence[Mapping[str, Any]], task: Task, unit: str) -> list[str]:
    """Which evaluation was best, in words; none where nothing was measured on the way.

    Args:
        lines: of ``metrics.jsonl``.
        unit: what a turn is called.
    """
    judged = task.metrics[0]
    seen = [line for line in lines if line["phase"] == "distillation" and judged.key in line]
    if len(seen) < 2:
        return []
    choose = max if judged.better == "higher" else min
    found = choose(seen, key=lambda line: line[judged.key])
    model_outputs = f"{found[judged.key]:.1f} {judged.unit} at {unit} {found['step']}"
    return [
        f"the best of {len(seen)} evaluations on the test data was {model_outputs}; to choose it is to choose by "
        "the test data, and all other figures are of the end"
    ]
