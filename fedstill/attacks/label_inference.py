"""Label inference: the shares of classes in a node's data, estimated from its responses.

A node's model learns how frequent each class is: by Bayes' rule ``p_k(y | x)`` is in proportion to
``p(x | y) pi_k(y)``, with ``pi_k`` the shares of classes at node k. The server sees ``p_k(y | x)`` for many
inputs x. It has two estimates of ``pi_k``, which need neither data nor labels:

- *mean prediction*: the mean of ``p_k(y | x)`` over the inputs;
- *log ratio*: ``p(x | y)`` is the same for all nodes, so ``log p_k(y | x)`` minus its mean over the nodes is
  ``log pi_k(y)``, up to a term of y. Its mean over the inputs, normalized, estimates ``pi_k`` if the classes
  are equally frequent over all nodes.

So a method reveals label counts even if it does not send them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedstill.attacks.attack import (
    Attack,
    AttackResult,
    ComparisonColumn,
    LeakageMetric,
    Target,
    format_percent,
)
from fedstill.attacks.membership_scores import auc_with_interval
from fedstill.core.errors import MethodRefused
from fedstill.core.options import PositiveInt
from fedstill.protocol.node_side import NodeSide

COLUMN = "label_shares_error"
MIN_PROBABILITY = 1e-6  # in place of a released probability of 0, whose logarithm is infinite


@dataclass(frozen=True)
class LabelInference(Attack):
    """Estimate of the shares of classes at each node from its responses."""

    title: ClassVar[str] = "Label inference"
    columns: ClassVar[tuple[ComparisonColumn, ...]] = (
        ComparisonColumn(
            name=COLUMN,
            head="label shares off by",
            title="Label shares off by %",
            description="Half the summed differences between the estimated and the true shares of classes at "
            "a node, mean over the nodes; 0: known exactly. Label counts that a method sends are not used.",
            lower_is_stronger=True,
        ),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "The estimates use only responses to inputs, neither labels nor label counts. Guess: equal shares.",
    )

    rows_used: PositiveInt = 2000
    """Last rows of responses that are used."""

    @property
    def transcript_rows(self) -> int:
        return self.rows_used

    def refusal(self, side: NodeSide) -> str | None:
        if side.sums:
            return "the server sees the sum of all nodes' responses"
        if any(kind.category == "scores" for kind in side.released_kinds()):
            return None
        return "no node released scores of classes for inputs"

    def run(self, target: Target) -> AttackResult:
        """Estimate the shares of classes at each node that released scores.

        Raises:
            MethodRefused: an input does not have one class, or no node released scores.
        """
        title, task = target.experiment.method.title, target.experiment.task
        if task.kind != "class":
            raise MethodRefused(title, "", f"the task {task.name} does not have one class per input")
        responses = {node.name: target.transcript.responses(node.name) for node in target.nodes}
        found = {name: pair for name, pair in responses.items() if pair is not None}
        if not found:
            raise MethodRefused(title, "", "no node released scores of classes for inputs")
        broken = [name for name, (_, z) in found.items() if not z.isfinite().all()]
        scores = {name: z[-self.rows_used :] for name, (_, z) in found.items() if name not in broken}
        skipped = [(f"label inference at {name}", "its responses are not finite") for name in broken]
        if not scores:
            raise MethodRefused(title, "", "no responses are finite")
        names = list(scores)
        truth = {node.name: class_shares(task.counts(node.data)) for node in target.nodes}
        classes = list(target.experiment.setting.classes) or [str(y) for y in range(task.classes)]
        estimates = {"mean prediction": mean_predictions(scores)}
        shared = [found[name][0][-self.rows_used :] for name in names]  # the inputs of each node
        if len(names) > 1 and all(torch.equal(x, shared[0]) for x in shared):
            estimates["log ratio"] = log_ratios(scores)
        elif len(names) > 1:
            skipped.append(("label inference by log ratio", "nodes answered different inputs"))
        variants = {
            variant: [compare_shares(name, by_node[name], truth[name], classes) for name in names]
            for variant, by_node in estimates.items()
        }
        return AttackResult({"variants": variants}, skipped=skipped)

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
        for variant, nodes in part["variants"].items():
            target = f"{len(nodes)} nodes"
            error = sum(node["error"] for node in nodes) / len(nodes)
            guess = sum(node["guess"] for node in nodes) / len(nodes)
            yield LeakageMetric(
                attack=variant,
                target=target,
                metric="label shares off by",
                value=100 * error,
                text=format_percent(error),
                baseline=format_percent(guess),
                column=COLUMN,
            )
            found = [node["absent_auc"] for node in nodes if node["absent_auc"] is not None]
            if found:
                yield LeakageMetric(
                    attack=variant,
                    target=target,
                    metric="AUC of absent classes",
                    text=format_percent(sum(found) / len(found)),
                    baseline="50.0%",
                )
            for node in nodes:
                yield LeakageMetric(
                    attack=variant,
                    target=node["node"],
                    metric="label shares off by",
                    text=format_percent(node["error"]),
                    note=f"most frequent class: {node['most_frequent']} (estimated "
                    f"{node['estimated_most_frequent']})",
                    detail=True,
                )

    def sentence(self, part: Mapping[str, Any]) -> str:
        errors = {
            variant: sum(node["error"] for node in nodes) / len(nodes)
            for variant, nodes in part["variants"].items()
        }
        best = min(errors, key=lambda variant: errors[variant])
        nodes = part["variants"][best]
        right = sum(node["most_frequent"] == node["estimated_most_frequent"] for node in nodes)
        return (
            f"Responses alone reveal the shares of classes up to {100 * errors[best]:.0f} %, and the most "
            f"frequent class of {right} of {len(nodes)} nodes."
        )


def class_shares(counts: torch.Tensor) -> torch.Tensor:
    """Return the share of each class, ``(C,)`` float64, of counts that are not all 0."""
    counts = counts.detach().double().cpu()
    return counts / counts.sum()


def log_probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Return ``log p(y | x)`` ``(Q, C)`` float64 of logits, or of probabilities if all rows are such.

    >>> log_probabilities(torch.tensor([[0.0, 0.0]])).exp()
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    >>> log_probabilities(torch.tensor([[0.25, 0.75]])).exp()
    tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """
    scores = scores.double()
    is_distribution = bool((scores >= 0).all()) and bool(((scores.sum(1) - 1).abs() < 1e-3).all())
    if not is_distribution:
        return scores.log_softmax(1)
    p = scores.clamp_min(MIN_PROBABILITY)
    return (p / p.sum(1, keepdim=True)).log()


def mean_predictions(scores: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean of ``p_k(y | x)`` over the inputs, ``(C,)``, by node.

    Args:
        scores: logits or probabilities ``(Q, C)`` by node.
    """
    return {name: log_probabilities(z).exp().mean(0) for name, z in scores.items()}


def log_ratios(scores: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the normalized exponential of the mean log-probabilities relative to all nodes, ``(C,)``.

    >>> z = torch.tensor([[0.2, 0.8], [0.6, 0.4]]).log()  # the likelihoods of two inputs
    >>> shares = {"a": torch.tensor([0.9, 0.1]), "b": torch.tensor([0.1, 0.9])}
    >>> found = log_ratios({name: z + pi.log() for name, pi in shares.items()})
    >>> found["a"]
    tensor([0.9000, 0.1000], dtype=torch.float64)
    """
    means = {name: log_probabilities(z).mean(0) for name, z in scores.items()}
    centre = torch.stack(list(means.values())).mean(0)
    return {name: (mean - centre).softmax(0) for name, mean in means.items()}


def compare_shares(
    node: str, estimate: torch.Tensor, truth: torch.Tensor, classes: Sequence[str]
) -> dict[str, Any]:
    """Compare estimated shares of classes ``(C,)`` with the true ones.

    Returns:
        ``error``: half the summed differences, from 0 (equal) to 1 (disjoint); ``guess``: the same of equal
        shares; ``absent_auc``: AUC by which the estimate separates absent classes from present ones, from 0
        to 1, or None if none or all but none are absent; the most frequent class by both.

    >>> found = compare_shares("a", torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.5, 0.5, 0.0]), "xyz")
    >>> round(found["error"], 3), round(found["guess"], 3), found["absent_auc"], found["most_frequent"]
    (0.2, 0.333, 1.0, 'x')
    """
    estimate, truth = estimate.double(), truth.double()
    absent, absent_auc = truth == 0, None
    if bool(absent.any()):
        absent_auc = auc_with_interval(estimate[~absent], estimate[absent])["value"]
    equal = torch.full_like(truth, 1 / len(truth))
    return {
        "node": node,
        "error": float((estimate - truth).abs().sum() / 2),
        "guess": float((equal - truth).abs().sum() / 2),
        "absent_auc": absent_auc,
        "most_frequent": classes[int(truth.argmax())],
        "estimated_most_frequent": classes[int(estimate.argmax())],
    }
