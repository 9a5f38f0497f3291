"""Warnings about a finished run, which appear as notes in the terminal, the report and the result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
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
    """Return all warnings about a finished run.

    Args:
        setting: of the run; with remote nodes it has none of their data, and fewer checks are possible.
        nodes: their names.
        privacy: "privacy" of the result.
        classes: names of the classes.
    """
    found = [
        single_node_warning(nodes),
        *zero_learning_rates_warning(setting.method, setting.local.lr),
        weak_privacy_warning(privacy),
        missing_classes_warning(setting.task, setting.parts, classes),
        *duplicate_inputs_warnings(setting.test, setting.public, setting.parts),
        warn_reshaped_public(setting.public),
        unscaled_images_warning(setting.task, setting.mean, setting.std, setting.parts),
        probabilities_as_logits_warning(setting.task, model_outputs),
        non_finite_outputs_warning(model_outputs),
    ]
    return [each for each in found if each is not None]


def single_node_warning(nodes: Sequence[str]) -> str | None:
    """Warn about a federation of one node."""
    return "there is only one node: nothing is federated" if len(nodes) == 1 else None


def zero_learning_rates_warning(method: Method, local: float) -> list[str]:
    """Warn about learning rates of 0."""
    rates = {"nodes.local.lr": local, **_learning_rates(method, "method")}
    return [f"{name} is 0: its parameters are not trained" for name, rate in rates.items() if rate == 0]


def _learning_rates(options: Any, section: str) -> dict[str, float]:
    """Return the learning rates among options and their groups, by name."""
    rates: dict[str, float] = {}
    for option in fields(options):
        value, name = getattr(options, option.name), f"{section}.{option.name}"
        if is_dataclass(value):
            rates |= _learning_rates(value, name)
        elif option.name == "lr" or option.name.endswith("_lr"):
            rates[name] = value
    return rates


def weak_privacy_warning(privacy: Mapping[str, Any]) -> str | None:
    """Warn about a large epsilon, spent or budgeted."""
    epsilon_by_node: dict[str, float] = {}
    for node in privacy["nodes"]:
        public_hashes = [value for key in ("epsilon", "budget") if (value := node.get(key)) is not None]
        if public_hashes and max(public_hashes) > MAX_EPSILON:
            epsilon_by_node[node["name"]] = max(public_hashes)
    if not epsilon_by_node:
        return None
    return (
        f"epsilon is up to {max(epsilon_by_node.values()):.3g} at {join_names(list(epsilon_by_node))}: above "
        f"{MAX_EPSILON:g} the guarantee is nominal, as the odds about a record may change by a factor "
        "of e^epsilon"
    )


def missing_classes_warning(task: Task, parts: Sequence[TensorData], classes: Sequence[str]) -> str | None:
    """Warn about declared classes or labels without an example at any node."""
    if not parts or task.kind not in ("class", "labels"):
        return None
    class_counts = torch.stack([task.counts(part).cpu() for part in parts]).sum(0)
    missing = [name for name, count in zip(classes, class_counts.tolist(), strict=True) if count == 0]
    return f"no node has an example of {join_names(missing)}: it cannot be learned" if missing else None


def duplicate_inputs_warnings(
    test: TensorData, public: PublicData | None, parts: Sequence[TensorData]
) -> list[str]:
    """Warn about inputs that occur in two of test, public and private data."""
    test_hashes, public_hashes = (
        input_hashes(test.inputs),
        set(input_hashes(public.inputs)) if public is not None else set(),
    )
    private = {each for part in parts for each in input_hashes(part.inputs)}
    found = []
    for name, others in (("private", private), ("public", public_hashes)):
        if count := sum(each in others for each in test_hashes):
            found.append(
                f"{count:,} of {len(test_hashes):,} test examples are also {name} data: metrics are too good"
            )
    if count := len(public_hashes & private):
        found.append(f"{count:,} different public inputs are also private data: these are not secret")
    return found


def input_hashes(inputs: torch.Tensor) -> list[bytes]:
    """Return a hash of each input."""
    rows = inputs.detach().cpu().contiguous().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]


def warn_reshaped_public(public: PublicData | None) -> str | None:
    """Warn about public images that were converted to the shape of the private ones."""
    return (
        f"public data {public.name} are {public.conversion}"
        if public is not None and public.conversion
        else None
    )


def unscaled_images_warning(
    task: Task, mean: Sequence[float], std: Sequence[float], parts: Sequence[TensorData]
) -> str | None:
    """Warn about images from 0 to 1 if the declared normalization maps black to -1."""
    if task.form != "images" or task.kind == "image" or ({*mean, *std} or {0.5}) != {0.5}:
        return None
    if not parts or any(float(part.inputs.min()) < 0 for part in parts):
        return None
    model_outputs = "no node's inputs are below 0, and mean and std of 0.5 say that black is -1"
    return f"{model_outputs}: pixels from 0 to 1 want mean = 0 and std = 1"


def probabilities_as_logits_warning(task: Task, model_outputs: Outputs) -> str | None:
    """Warn about models that return probabilities: a second softmax of them is never confident."""
    names = [
        name
        for name, outputs in _outputs_by_model_name(model_outputs).items()
        if _are_probabilities(task, outputs)
    ]
    if not names:
        return None
    last = "sigmoid" if task.kind == "labels" else "softmax"
    return f"outputs of {join_names(names)} are probabilities (expected logits): remove the {last}"


def _are_probabilities(task: Task, outputs: torch.Tensor) -> bool:
    if task.kind not in ("class", "labels", "map"):
        return False
    if task.kind == "labels":
        return bool((outputs > 0).all() and (outputs < 1).all())
    return bool((outputs >= 0).all() and ((outputs.float().sum(1) - 1).abs() < 1e-2).all())


def non_finite_outputs_warning(model_outputs: Outputs) -> str | None:
    """Warn about models that return NaN or infinity."""
    models = _outputs_by_model_name(model_outputs)
    bad = {name: int((~outputs.isfinite()).flatten(1).any(1).sum()) for name, outputs in models.items()}
    names = [name for name, count in bad.items() if count]
    if not names:
        return None
    count = f"{max(bad.values()):,} of {len(models[names[0]]):,} test inputs"
    return (
        f"outputs of {join_names(names)} are NaN or infinite for up to {count}: their metrics are meaningless"
    )


def _outputs_by_model_name(model_outputs: Outputs) -> dict[str, torch.Tensor]:
    """Return the outputs of all models by name."""
    return {
        **model_outputs.node_models,
        **({} if model_outputs.global_model is None else {"the student": model_outputs.global_model}),
    }


def best_evaluation_notes(lines: Sequence[Mapping[str, Any]], task: Task, unit: str) -> list[str]:
    """Return a note about the best evaluation of a run; empty if there was only one.

    Args:
        lines: lines of ``metrics.jsonl``.
        unit: name of a step: step, epoch or round.
    """
    main_metric = task.metrics[0]
    evaluations = [line for line in lines if line["phase"] == "distillation" and main_metric.key in line]
    if len(evaluations) < 2:
        return []
    choose = max if main_metric.better == "higher" else min
    best = choose(evaluations, key=lambda line: line[main_metric.key])
    value = f"{best[main_metric.key]:.1f} {main_metric.unit} at {unit} {best['step']}"
    return [
        f"the best of {len(evaluations)} evaluations on the test data was {value}; choosing it is "
        "selection on "
        "the test data, and all other metrics are of the end of the run"
    ]
