"""Whom a server believes: answers that no sound node gives are found before they reach a student."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median

import torch

from fedstill.node.questions import Question

Tensors = Mapping[str, torch.Tensor]
SIZED = ("logits", "logit range")  # kinds whose size is compared between nodes


def faults(answers: Mapping[str, Tensors], question: Question, outlier: float) -> dict[str, str]:
    """What is wrong with the nodes' answers to one question.

    Args:
        answers: by node.
        question: what was asked; its declaration says which tensors belong into an answer.
        outlier: how many times larger than the others' median a node's logits may be.

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
    found |= _misshapen({node: answer for node, answer in answers.items() if node not in found})
    found |= not_finite({node: answer for node, answer in answers.items() if node not in found})
    sound = {node: answer for node, answer in answers.items() if node not in found}
    for name, kind in question.releases.items():
        if kind in SIZED:
            found |= _oversized({node: answer[name] for node, answer in sound.items()}, name, outlier)
    return found


def not_finite(answers: Mapping[str, Tensors]) -> dict[str, str]:
    """Nodes whose tensors hold NaN or infinities."""
    found: dict[str, str] = {}
    for node, answer in answers.items():
        for name, tensor in answer.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                wrong = int((~torch.isfinite(tensor)).sum())
                found[node] = f"{name} hold NaN or infinity ({wrong} of {tensor.numel()} numbers)"
                break
    return found


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
    sizes = {
        node: tensor.float().square().mean().sqrt().item()
        for node, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    found: dict[str, str] = {}
    for node, mine in sizes.items():
        others = [size for other, size in sizes.items() if other != node]
        if others and mine > outlier * median(others) > 0:
            found[node] = (
                f"{name} are {mine / median(others):.3g} times as large as others': link.outlier {outlier:g}"
            )
    return found
