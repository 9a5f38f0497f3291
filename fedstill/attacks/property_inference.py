"""Property inference: the share of a node's records that have an attribute, estimated from its responses.

The attribute is not the label: an age above the mean, one sex, bright images. No record is identified; the
share is a fact about the node as a whole, such as its patients or its scanner, and a privacy budget for
single records does not hide it.

The adversary has held-out records and knows the node's local training and its shares of classes, which many
methods send. It trains shadow models on records that it draws with known shares of the attribute and the
node's shares of classes, evaluates them on the inputs that the node was queried with, and fits the share by
ridge regression on their probabilities. The regression, applied to the node's responses, is the estimate.
The use of shadow models follows Ateniese et al. (IJSN 2015), the regression of the share on a model's outputs
Suri and Evans (PoPETs 2022), who train a network in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge

from fedstill.attacks.attack import (
    Attack,
    AttackResult,
    ComparisonColumn,
    LeakageMetric,
    Target,
    format_percent,
)
from fedstill.attacks.label_inference import log_probabilities
from fedstill.attacks.membership_inference import private_records
from fedstill.attacks.membership_scores import train_shadows
from fedstill.core.dataset import DataSet, TensorData
from fedstill.core.errors import ArgumentError, MethodRefused
from fedstill.core.options import PositiveInt
from fedstill.core.seeds import derive, numpy_generator
from fedstill.models.inference import predict
from fedstill.node.node import Node
from fedstill.protocol.node_side import NodeSide

MEAN = "mean"  # attribute: the mean of an input
COLUMN = "property_error"
SHARES = (0.1, 0.9)  # least and largest share of the attribute in a shadow's records
RIDGES = tuple(10.0**power for power in range(-4, 5))  # relative to the mean of the kernel's diagonal
MIN_RECORDS = 10  # held-out records with the attribute, and without it


@dataclass(frozen=True)
class PropertyInference(Attack):
    """Estimate of the share of a node's records that have an attribute, from its responses."""

    title: ClassVar[str] = "Property inference"
    columns: ClassVar[tuple[ComparisonColumn, ...]] = (
        ComparisonColumn(
            name=COLUMN,
            head="property off by",
            title="Property off by %",
            description="Difference between the estimated and the true share of a node's records with an "
            "attribute other than the label, mean over the attacked nodes; 0: known exactly.",
            lower_is_stronger=True,
        ),
    )
    notes: ClassVar[tuple[str, ...]] = (
        "Guess: the share in held-out data. Shadow models know the node's shares of classes and train alone.",
    )
    user_errors: ClassVar[tuple[str, ...]] = ("properties.attribute",)

    attribute: str = MEAN
    """The attribute: ``mean``, the mean of an input (the brightness of an image) above its mean over held-out
    data; or a feature of a table, such as ``age`` or ``sex: f``, above its mean.
    """
    shadows: Annotated[int, Ge(4)] = 16
    """Shadow models for each attacked node."""
    attacked: PositiveInt = 1
    """Number of attacked nodes, those with the most records."""
    responses: PositiveInt = 500
    """Last responses of a node that are used."""

    @property
    def transcript_rows(self) -> int:
        return self.responses

    def refusal(self, side: NodeSide) -> str | None:
        if side.sums:
            return "the server sees the sum of all nodes' responses"
        if any(kind.category == "scores" for kind in side.released_kinds()):
            return None
        return "no node released scores of classes for inputs"

    def run(self, target: Target) -> AttackResult:
        """Estimate the shares of the attribute at the nodes with the most records.

        Raises:
            ArgumentError: no such attribute, or held-out data of which nearly all or nearly none have it.
            MethodRefused: an input does not have one class, or no node released finite scores.
        """
        title, task = target.experiment.method.title, target.experiment.task
        if task.kind != "class":
            raise MethodRefused(title, "", f"the task {task.name} does not have one class per input")
        attribute = Attribute.of(target.replay.data, self.attribute)
        largest = sorted(target.nodes, key=lambda node: -len(node.data))
        found, skipped = [], []
        for node in largest[: self.attacked]:
            pair = target.transcript.responses(node.name)
            if pair is None or not pair[1].isfinite().all():
                why = "it released no responses to inputs" if pair is None else "its responses are not finite"
                skipped.append((f"property inference at {node.name}", why))
                continue
            inputs, responses = (part[-self.responses :] for part in pair)
            found.append(self._attack_node(target, node, attribute, inputs, responses))
        if not found:
            raise MethodRefused(title, "", skipped[0][1])
        return AttackResult({"attribute": attribute.text, "nodes": found}, skipped=skipped)

    def _attack_node(
        self,
        target: Target,
        node: Node,
        attribute: Attribute,
        inputs: torch.Tensor,
        responses: torch.Tensor,
    ) -> dict[str, Any]:
        """Estimate one node's share from its responses ``(Q, C)`` to inputs ``(Q, ...)``."""
        replayed, compute = target.replay, target.experiment.compute
        position = [other.name for other in target.nodes].index(node.name)
        models, local = replayed.config.nodes.models, replayed.config.nodes.local
        records, pool = private_records(target.experiment, node).to("cpu"), replayed.data.test
        seed = derive(target.seed, "properties", node.name)
        samples = sample_shadow_records(pool, attribute.of_inputs(pool.inputs), records, self.shadows, seed)
        make = replayed.model_factory(models[position % len(models)])
        everything = torch.ones(self.shadows, len(records), dtype=torch.bool)
        pools = [pool.subset(rows) for rows in samples]
        shadows = train_shadows(make, pools, everything, target.experiment.task, local, seed, compute=compute)
        outputs = [predict(shadow, inputs.to(compute.device), compute).cpu() for shadow in shadows]
        scores = torch.stack([*outputs, responses])  # (S + 1, Q, C)
        features = torch.stack([log_probabilities(z).exp().flatten() for z in scores])  # (S + 1, Q C)
        shares = torch.stack([attribute.share(part) for part in pools])  # (S,)
        fitted = fit_ridge(features[:-1], shares, features[-1])
        estimate = min(max(fitted.estimate, 0.0), 1.0)
        truth, guess = float(attribute.share(records)), float(attribute.share(pool))
        return {
            "node": node.name,
            "truth": truth,
            "estimate": estimate,
            "error": abs(estimate - truth),
            "guess": abs(guess - truth),
            "shadow_error": fitted.left_out_error,
            "shadows": self.shadows,
            "responses": len(responses),
        }

    def rows(self, part: Mapping[str, Any]) -> Iterator[LeakageMetric]:
        nodes = part["nodes"]
        error, guess = (sum(node[key] for node in nodes) / len(nodes) for key in ("error", "guess"))
        yield LeakageMetric(
            attack="ridge regression",
            target=f"{len(nodes)} node{'s' * (len(nodes) > 1)}",
            metric=f"share with {part['attribute']} off by",
            value=100 * error,
            text=format_percent(error),
            baseline=format_percent(guess),
            column=COLUMN,
        )
        for node in nodes:
            yield LeakageMetric(
                attack="ridge regression",
                target=node["node"],
                metric=f"share with {part['attribute']} off by",
                text=format_percent(node["error"]),
                baseline=format_percent(node["guess"]),
                note=f"estimated {format_percent(node['estimate'])}, true {format_percent(node['truth'])}; "
                f"for shadow models that were left out of the fit off by "
                f"{format_percent(node['shadow_error'])}",
                detail=True,
            )

    def sentence(self, part: Mapping[str, Any]) -> str:
        nodes = part["nodes"]
        error, guess = (sum(node[key] for node in nodes) / len(nodes) for key in ("error", "guess"))
        return (
            f"Responses reveal the share of records with {part['attribute']} up to {100 * error:.0f} points; "
            f"a guess without them is off by {100 * guess:.0f}."
        )


@dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute that a record has or not: a value of its input above a threshold.

    Args:
        text: description for the report.
        threshold: mean of the value over held-out data.
        feature: index of the value in an input of a table; -1: the mean of the input.
    """

    text: str
    threshold: float
    feature: int

    @classmethod
    def of(cls, data: DataSet, name: str) -> Attribute:
        """Return the attribute of this name.

        Raises:
            ArgumentError: no such attribute, or held-out data of which nearly all or nearly none have it.
        """
        inputs, features = data.test.inputs, list(data.schema.feature_names)
        allowed = [MEAN] * inputs.is_floating_point() + features
        if name not in allowed:
            raise ArgumentError(
                "properties.attribute",
                name,
                f"one of {', '.join(allowed)}" if allowed else "no texts as inputs",
            )
        feature = features.index(name) if name in features else -1
        values = cls("", 0.0, feature)._values(inputs)
        attribute = cls(f"{name} above {float(values.mean()):.3g}", float(values.mean()), feature)
        having = int(attribute.of_inputs(inputs).sum())
        if min(having, len(inputs) - having) < MIN_RECORDS:
            expected = f"one that {MIN_RECORDS} held-out records or more have, and as many do not"
            raise ArgumentError(
                "properties.attribute", name, f"{expected}; {having} of {len(inputs)} have it"
            )
        return attribute

    def of_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return which inputs ``(N, ...)`` have the attribute, ``(N,)`` bool."""
        return self._values(inputs) > self.threshold

    def share(self, records: TensorData) -> torch.Tensor:
        """Return the share of records with the attribute, a float64 scalar."""
        return self.of_inputs(records.inputs).double().mean()

    def _values(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.flatten(1).double()
        return flat.mean(1) if self.feature < 0 else flat[:, self.feature]


def sample_shadow_records(
    pool: TensorData, has_attribute: torch.Tensor, records: TensorData, models: int, seed: int
) -> list[torch.Tensor]:
    """Return rows of the pool for each shadow model, as many as the node has records, with repetition.

    Each shadow has the node's shares of classes among those that the pool has. Its share of the attribute is
    spread evenly over :data:`SHARES`, as far as records of a class with and without the attribute exist.

    >>> pool = TensorData(torch.zeros(4, 1), torch.tensor([0, 0, 1, 1]))
    >>> has = torch.tensor([True, False, True, False])
    >>> records = TensorData(torch.zeros(200, 1), torch.zeros(200).long())
    >>> rows = sample_shadow_records(pool, has, records, 2, 0)
    >>> [round(float(has[each].double().mean()), 1) for each in rows], pool.targets[rows[0]].unique().tolist()
    ([0.1, 0.9], [0])
    """
    random = numpy_generator(seed, "shadow records")
    targets, having = pool.targets.numpy(), has_attribute.numpy()
    labels = records.targets.numpy()
    labels = labels[np.isin(labels, targets)]
    if not len(labels):
        raise ArgumentError("records", "no class that held-out data have", "one or more")
    samples = []
    for share in np.linspace(*SHARES, models):
        drawn = random.choice(labels, len(records))
        wanted = random.random(len(records)) < share
        rows = np.empty(len(records), np.int64)
        for label in np.unique(drawn):
            for value in (False, True):
                chosen = (drawn == label) & (wanted == value)
                cell = np.flatnonzero((targets == label) & (having == value))
                if not len(cell):
                    cell = np.flatnonzero(targets == label)
                rows[chosen] = random.choice(cell, int(chosen.sum()))
        samples.append(torch.from_numpy(rows))
    return samples


@dataclass(frozen=True)
class RidgeFit:
    """Result of :func:`fit_ridge`.

    Attributes:
        estimate: prediction for the new example.
        left_out_error: mean absolute error for examples that were left out of the fit.
    """

    estimate: float
    left_out_error: float


def fit_ridge(x: torch.Tensor, y: torch.Tensor, new: torch.Tensor) -> RidgeFit:
    """Fit y by ridge regression on x, and predict it for a new example.

    In the dual form, with the centered kernel K = x x^T and the ridge r: a = (K + r I)^-1 (y - mean y). The
    residual of a left-out example is a_i / ((K + r I)^-1)_ii, with a further 1 / S for the mean, so that all
    are known from one fit; the ridge with the least sum of their squares is taken.

    Args:
        x: features ``(S, F)`` float64.
        y: targets ``(S,)`` float64.
        new: features of the new example ``(F,)``.

    >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]).double()
    >>> round(fit_ridge(x, 0.1 * x[:, 0], torch.tensor([2.5]).double()).estimate, 3)
    0.25
    """
    center, level = x.mean(0), y.mean()
    features = x - center
    kernel = features @ features.T  # (S, S)
    scale = float(kernel.diagonal().mean())
    if scale == 0:
        return RidgeFit(float(level), float((y - level).abs().mean()))
    best: tuple[float, torch.Tensor, torch.Tensor] | None = None
    identity = torch.eye(len(y), dtype=x.dtype)
    mean = torch.full_like(kernel, 1 / len(y))
    for ridge in RIDGES:
        inverse = torch.linalg.inv(kernel + ridge * scale * identity)
        weights = inverse @ (y - level)
        hat = mean + kernel @ inverse  # fitted values are hat @ y, as the kernel is centered
        residuals = (y - hat @ y) / (1 - hat.diagonal()).clamp(min=1e-9)
        squares = float(residuals.square().sum())
        if best is None or squares < best[0]:
            best = squares, weights, residuals
    assert best is not None
    _, weights, residuals = best
    estimate = level + (features @ (new - center)) @ weights
    return RidgeFit(float(estimate), float(residuals.abs().mean()))
