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
        mechanism: by its name in an owner's file.
        on: what was attacked.
        claimed: epsilon that the audit log says it costs, an upper bound.
        shown: epsilon that it costs at least, whatever its noise.
        as_claimed: the same if its noise is of the kind that is claimed; None where that was not computed.
        refuted: whether the claim is too small, at any delta.
        runs: how often the mechanism was run.
        seconds: that it took.
    """

    mechanism: str
    on: str
    claimed: float
    shown: float
    as_claimed: float | None
    refuted: bool
    runs: int
    seconds: float


def audit(attack: Distinguisher, runs: int, delta: float = DELTA, confidence: float = CONFIDENCE) -> Finding:
    """Run an attack so often without the record, and as often with it.

    Raises:
        ArgumentError: fewer than 6 runs.
    """
    start = time.perf_counter()
    seen = [torch.stack([attack.see(there, run) for run in range(runs)]) for there in (False, True)]
    evidence = repeated(*discriminant(*seen), delta, confidence)
    claimed = epsilon(attack.claimed, delta)
    shown, refuted = evidence.epsilon(delta), evidence.refutes(attack.claimed)
    as_claimed = evidence.as_claimed(attack.claimed, delta)
    seconds = time.perf_counter() - start
    return Finding(attack.mechanism, attack.on, claimed, shown, as_claimed, refuted, 2 * runs, seconds)


def audit_one_run(delta: float = DELTA, confidence: float = CONFIDENCE, seed: int = 0) -> Finding:
    """Many records in one training."""
    start = time.perf_counter()
    world, canaries, guesses, correct = canary.in_one_run(seed=seed)
    claimed = epsilon(world.spent(), delta)
    shown = one_run(canaries, guesses, correct, delta, confidence)
    on = f"answers about {canaries} planted records"
    seconds = time.perf_counter() - start
    return Finding("dp-sgd", on, claimed, shown, None, shown > claimed, 1, seconds)


def _of(make: Callable[[int], Distinguisher], runs: int) -> Audit:
    return lambda seed: audit(make(seed), runs)


AUDITS: Mapping[str, tuple[Audit, ...]] = {
    "counts": (_of(lambda seed: releases.counts(seed=seed), 2000),),
    "dp-sgd": (
        _of(lambda seed: canary.steps(seed=seed), 1500),
        lambda seed: audit_one_run(seed=seed),
    ),
    "critic": (_of(lambda seed: canary.critic(seed=seed), 800),),
    "pate": (
        _of(lambda seed: releases.votes(seed=seed), 2000),
        _of(lambda seed: releases.votes(release="label", seed=seed), 2000),
        _of(lambda seed: releases.gradients(mechanism="pate", seed=seed), 2000),
    ),
    "noisy-outputs": (
        _of(lambda seed: releases.outputs("laplace", seed=seed), 2000),
        _of(lambda seed: releases.outputs("gaussian", seed=seed), 2000),
        _of(lambda seed: releases.gradients(seed=seed), 2000),
    ),
}
"""By what is audited, each given the seed of data and noise."""
