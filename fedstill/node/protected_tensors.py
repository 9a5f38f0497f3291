"""Bounds and noise of a release, and its privacy cost, before it is charged."""

from __future__ import annotations

from dataclasses import dataclass

from fedstill.node.audit_entries import GRADIENT, RESPONSE
from fedstill.node.release_ledger import Release
from fedstill.node.run_budgets import RunBudgets
from fedstill.privacy.events import PrivacyCost, total_cost
from fedstill.protocol.digests import digest
from fedstill.protocol.wire_format import Tensors

# Names of noise streams by part: another name gives other noise.
NOISE_PARTS = {RESPONSE: "answer", GRADIENT: "gradient"}


@dataclass(frozen=True)
class ProtectedTensors:
    """Tensors with noise, if required.

    Args:
        tensors: the tensors.
        cost, max_cost: actual cost, and its upper bound, which depends on shapes only; None: no guarantee.
        rule: protection in words.
        bounded_digest: digest of the bounded tensors without noise.
    """

    tensors: Tensors
    cost: PrivacyCost | None = None
    max_cost: PrivacyCost | None = None
    rule: str = "none"
    bounded_digest: str = ""


def protect(budgets: RunBudgets | None, release: Release, tensors: Tensors) -> ProtectedTensors:
    """Bound tensors and add noise, as the privacy mechanism requires."""
    if budgets is None:
        return ProtectedTensors(tensors)
    query, received, mechanism = release.query, release.received, budgets.mechanism
    rules = {name: mechanism.rule(query, name) for name in tensors}
    bounded = {name: rule.bound(tensors[name]) for name, rule in rules.items()}
    # The noise stream depends on all bits that it hides: equal noise on two responses would cancel.
    noise_part = NOISE_PARTS[release.part]
    bounded_digest = digest(noise_part, bounded)
    noise_names = (
        "gate",
        received.number,
        noise_part,
        received.content_hash,
        received.history_hash,
        bounded_digest,
    )
    noised = {
        name: rule.noise(bounded[name], mechanism.noise_sampler(*noise_names, name))
        for name, rule in rules.items()
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, shape in shapes.items():
        mechanism.require_declared_width(query, name, shape)
    cost, max_cost = (
        total_cost(mechanism.release_costs(query, shapes, released)) for released in (noised, None)
    )
    texts = [f"{name}: {mechanism.describe_rule(query, name, shape)}" for name, shape in shapes.items()]
    return ProtectedTensors(noised, cost, max_cost, "; ".join(texts), bounded_digest)
