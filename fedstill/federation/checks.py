"""Whom a server believes: answers that no sound node gives are found before they reach a student."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median

import torch

from fedstill.node.questions import Question

Tensors = Mapping[str, torch.Tensor]
SIZED = ("logits", "logit range")  # kinds whose size is compared between nodes


def faults(
    answers: Mapping[str, Tensors],
    question: Question,
    outlier: float,
    rows: int | None = None,
    classes: int | None = None,
) -> dict[str, str]:
    """What is wrong with the nodes' answers to one question.

    Args:
        answers: by node.
        question: what was asked; its declaration says which tensors belong into an answer.
        outlier: how many times larger than the others' median a node's logits may be.
        rows: how many inputs it was about, if it was about inputs; logits have one row for each.
        classes: how many columns logits have, if that is known.

    Returns:
        One line for each faulty node, by its name.

    >>> asked = Question("predict", handler=None, releases={"logits": "logits"})
    >>> good, bad = torch.ones(2, 3), torch.tensor([[1.0, float("nan"), 1.0]] * 2)
    >>> faults({"a": {"logits": good}, "b": {"logits": bad}}, asked, 100.0)
    {'b': 'logits hold NaN or infinity (2 of 6 numbers)'}
    """
    found: dict[str, str] = {}
    for node, answer in answers.items():
        if set(answer) != set(question.releases):
            found[node] = f"answered {sorted(answer) or 'nothing'}, not {sorted(question.releases)}"
    for node, answer in answers.items():
        if node not in found:
            found |= _unlike(node, answer, question, rows, classes)
    found |= _misshapen({node: answer for node, answer in answers.items() if node not in found})
    found |= not_finite({node: answer for node, answer in answers.items() if node not in found})
    sound = {node: answer for node, answer in answers.items() if node not in found}
    for name, kind in question.releases.items():
        if kind in SIZED:
            found |= _oversized({node: answer[name] for node, answer in sound.items()}, name, outlier)
    return found


def not_finite(answers: Mapping[str, Tensors]) -> dict[str, str]:
    """Nodes whose tensors hold NaN or infinities."""
    parts = [
        (node, name, tensor)
        for node, answer in answers.items()
        for name, tensor in answer.items()
        if tensor.is_floating_point()
    ]
    # One look at the device for all of them.
    wrong = torch.stack([(~torch.isfinite(tensor)).sum() for _, _, tensor in parts]).tolist() if parts else []
    found: dict[str, str] = {}
    for (node, name, tensor), count in zip(parts, wrong, strict=True):
        if count and node not in found:
            found[node] = f"{name} hold NaN or infinity ({count} of {tensor.numel()} numbers)"
    return found


def unlike_inputs(pulled: Mapping[str, Tensors], inputs: Tensors) -> dict[str, str]:
    """Nodes whose gradients are not those of the question's inputs, one number for each of theirs.

    Args:
        pulled: gradients by node.
        inputs: of the question, those that gradients are pulled back to.
    """
    wanted = {f"d/d{name}": tuple(tensor.shape) for name, tensor in inputs.items()}
    told = {
        node: {name: tuple(tensor.shape) for name, tensor in each.items()} for node, each in pulled.items()
    }
    return {
        node: f"gradients are {shapes}, not {wanted}" for node, shapes in told.items() if shapes != wanted
    }


def _unlike(
    node: str, answer: Tensors, question: Question, rows: int | None, classes: int | None
) -> dict[str, str]:
    """Whether a node's logits have a row for each input and a column for each class."""
    for name, kind in question.releases.items():
        shape = tuple(answer[name].shape)
        if kind != "logits":
            continue
        if rows is not None and shape[:1] != (rows,):
            return {node: f"{name} are {shape}, for {rows} inputs"}
        if classes is not None and shape[1:2] != (classes,):
            return {node: f"{name} are {shape}, for {classes} classes"}
    return {}


def _misshapen(answers: Mapping[str, Tensors]) -> dict[str, str]:
    """Nodes whose tensors have another shape or dtype than most nodes' have.

    Where as many say one thing as another, the first of these counts: one of them is wrong, and all that is
    known is that they differ.
    """
    forms = {
        node: {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in answer.items()}
        for node, answer in answers.items()
    }
    found: dict[str, str] = {}
    for name in next(iter(forms.values()), {}):
        usual, _ = Counter(form[name] for form in forms.values()).most_common(1)[0]
        for node, form in forms.items():
            if form[name] != usual and node not in found:
                shape, dtype = form[name]
                found[node] = f"{name} are {dtype} of shape {shape}, those of others {usual[1]} of {usual[0]}"
    return found


def _oversized(tensors: Mapping[str, torch.Tensor], name: str, outlier: float) -> dict[str, str]:
    """Nodes whose numbers are far larger than the other nodes' are, at the median of these."""
    compared = {node: tensor for node, tensor in tensors.items() if tensor.is_floating_point()}
    if not compared:
        return {}
    each = [tensor.float().square().mean().sqrt() for tensor in compared.values()]
    sizes = dict(zip(compared, torch.stack(each).tolist(), strict=True))
    found: dict[str, str] = {}
    for node, mine in sizes.items():
        others = [size for other, size in sizes.items() if other != node]
        if others and mine > outlier * median(others) > 0:
            found[node] = (
                f"{name} are {mine / median(others):.3g} times as large as others': link.outlier {outlier:g}"
            )
    return found
