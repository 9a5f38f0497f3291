"""Attacks on single releases: the same questions asked of two worlds that differ in one record.

Each run asks twice, and the record moves the second answer the other way: so everything that is paid for
tells something, and noise that comes twice is found. Request handler, gate, rules, noise, audit log are those
of any run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedstill.attacks.candidates import merged
from fedstill.attacks.worlds import CLASSES, SHAPE, World, contradicted
from fedstill.privacy.config import GradientsConfig, PrivacyConfig
from fedstill.privacy.events import Price
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.privacy.pate import PATE, PateConfig
from fedstill.protocol.schedule import LocalConfig

See = Callable[[bool, int], torch.Tensor]

LOCAL = LocalConfig(
    epochs=0, least_steps=30, batch=8, optimiser="sgd", lr=1e-3, lr_end=1e-3, momentum=0, smoothing=0
)
STEEP = 1e4  # of what is pulled back: every network's gradient is clipped
UNHEARD = 1e6  # noise of what is released beside what is attacked: its price is next to nothing
TEACHERS = 4


@dataclass(frozen=True)
class Distinguisher:
    """What somebody who knows all records but one makes of a mechanism.

    Args:
        on: what is attacked, in words.
        claimed: what a run costs by the audit log of the node.
        see: given whether the record is there and the number of the run, what is seen of it ``(d,)``.
    """

    mechanism: str
    on: str
    claimed: Price
    see: See


def counts(scale: float = 1.0, seed: int = 0) -> Distinguisher:
    """Label counts, asked for twice: the record is one of its class."""
    privacy = PATE(counts_noise=scale, pate=PateConfig(teachers=1, noise=1.0))

    def ask(world: World, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([world.ask("count_labels")["counts"] for _ in range(2)])

    data, record = contradicted(seed)
    before = torch.bincount(data.targets, minlength=CLASSES).repeat(2).float()
    after = before + torch.bincount(record.targets, minlength=CLASSES).repeat(2)
    return _attack("counts", "noisy label counts", privacy, ask, seed, (before, after))


def votes(noise: float = 2.0, release: str = "votes", seed: int = 0) -> Distinguisher:
    """Noisy votes: the record turns one teacher's vote where it is asked."""
    pate = PateConfig(teachers=TEACHERS, noise=noise, release="label" if release == "label" else "votes")
    privacy = PATE(pate=pate)
    on = "noisy votes" if release == "votes" else "the class of most votes"
    return _attack("pate", on, privacy, _answers, seed)


def outputs(how: str = "laplace", noise: float = 0.4, bound: float = 0.1, seed: int = 0) -> Distinguisher:
    """Noisy outputs of a network that the record turns round."""
    kind = OutputsConfig(how="gaussian" if how == "gaussian" else "laplace", noise=noise, bound=bound)
    privacy = NoisyOutputs(outputs=kind)
    ends = torch.tensor(-bound), torch.tensor(bound)
    return _attack("noisy-outputs", f"bounded outputs, {how} noise", privacy, _answers, seed, ends)


def gradients(noise: float = 2.0, mechanism: str = "noisy-outputs", seed: int = 0) -> Distinguisher:
    """Sanitised gradients: the record turns a network's gradient round, or that of one teacher of several."""
    if mechanism == "pate":
        teachers, own = PateConfig(teachers=TEACHERS, noise=UNHEARD), GradientsConfig(noise=noise / TEACHERS)
        of = f"mean of {TEACHERS} teachers' gradients"
        return _attack(mechanism, of, PATE(pate=teachers, gradients=own), _pulled, seed)
    outputs = OutputsConfig(how="gaussian", noise=UNHEARD, bound=1.0)
    privacy = NoisyOutputs(outputs=outputs, gradients=GradientsConfig(noise=noise))
    return _attack(mechanism, "sanitised gradients", privacy, _pulled, seed)


def _answers(world: World, x: torch.Tensor) -> torch.Tensor:
    """Answers about the first digit and about its negative: a network of one layer answers the other way."""
    return torch.cat([world.ask("examine", x=at)["logits"].flatten() for at in (x, -x)])


def _pulled(world: World, x: torch.Tensor) -> torch.Tensor:
    """Gradients along the first digit, of a pull and of its negative."""
    along, steep = (x / x.norm()).flatten(), torch.tensor([[STEEP, -STEEP]])
    seen = []
    for pull in (steep, -steep):
        world.ask("examine", x=x)
        seen.append(world.pull_back(pull)["d/dx"].flatten() @ along)
    return torch.stack(seen)


def _attack(
    mechanism: str,
    on: str,
    privacy: PrivacyConfig,
    ask: Callable[[World, torch.Tensor], torch.Tensor],
    seed: int,
    ends: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Distinguisher:
    """Ask two worlds; with the exact answers of either, also what is seen cut off at them: so much of a
    number is what tells the worlds apart under Laplace noise."""
    teachers = privacy.pate.teachers if isinstance(privacy, PATE) else 1
    data, record = contradicted(seed, teachers)
    x = data.inputs[:1].view(1, *SHAPE)
    worlds = [World(records, privacy, LOCAL, secret=seed) for records in (data, merged([data, record]))]
    for world in worlds:
        world.learn()

    def see(there: bool, run: int) -> torch.Tensor:
        seen = ask(worlds[there], x)
        return seen if ends is None else torch.cat([seen, seen.clamp(*ends)])

    see(False, 0)
    return Distinguisher(mechanism, on, worlds[0].spent(), see)
