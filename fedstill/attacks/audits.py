"""Every mechanism attacked, and what that shows beside what is claimed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fedstill.attacks import canary, releases
from fedstill.attacks.releases import Distinguisher
from fedstill.privacy.accounting import epsilon
from fedstill.privacy.audit import CONFIDENCE, discriminant, one_run, repeated

DELTA = 1e-5
Audit = Callable[[int], "Finding"]


@dataclass(frozen=True)
class Finding:
    """What an audit has shown.

    Args:
        claimed: epsilon that the audit log says it costs, an upper bound.
        shown: epsilon that it costs at least, whatever its noise.
        as_claimed: the same if its noise is of the kind that is claimed; None where that was not computed.
        refuted: whether the claim is too small, at any delta.
        runs: how often the mechanism was run.
    """

    mechanism: str
    on: str
    claimed: float
    shown: float
    as_claimed: float | None
    refuted: bool
    runs: int
    seconds: float


def audit(attack: Distinguisher, runs: int, confidence: float = CONFIDENCE) -> Finding:
    """Run an attack so often without the record, and as often with it.

    Raises:
        ArgumentError: fewer than 6 runs.
    """
    start = time.perf_counter()
    seen = [torch.stack([attack.see(there, run) for run in range(runs)]) for there in (False, True)]
    evidence = repeated(*discriminant(*seen), DELTA, confidence)
    return Finding(
        mechanism=attack.mechanism,
        on=attack.on,
        claimed=epsilon(attack.claimed, DELTA),
        shown=evidence.epsilon(DELTA),
        as_claimed=evidence.as_claimed(attack.claimed, DELTA),
        refuted=evidence.refutes(attack.claimed),
        runs=2 * runs,
        seconds=time.perf_counter() - start,
    )


def audit_one_run(seed: int = 0, confidence: float = CONFIDENCE) -> Finding:
    """Many records in one training."""
    start = time.perf_counter()
    world, canaries, guesses, correct = canary.in_one_run(seed=seed)
    claimed = epsilon(world.spent(), DELTA)
    shown = one_run(canaries, guesses, correct, DELTA, confidence)
    on = f"answers about {canaries} planted records"
    seconds = time.perf_counter() - start
    return Finding("dp-sgd", on, claimed, shown, None, shown > claimed, 1, seconds)


def _of(make: Callable[..., Distinguisher], runs: int, **options: str) -> Audit:
    return lambda seed: audit(make(seed=seed, **options), runs)


AUDITS: Mapping[str, tuple[Audit, ...]] = {
    "counts": (_of(releases.counts, 2000),),
    "dp-sgd": (_of(canary.steps, 1500), audit_one_run),
    "critic": (_of(canary.critic, 800),),
    "pate": (
        _of(releases.votes, 2000),
        _of(releases.votes, 2000, release="label"),
        _of(releases.gradients, 2000, mechanism="pate"),
    ),
    "noisy-outputs": (
        _of(releases.outputs, 2000),
        _of(releases.outputs, 2000, how="gaussian"),
        _of(releases.gradients, 2000),
    ),
}
"""By what is audited, each given the seed of data and noise."""
