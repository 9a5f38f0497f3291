"""DP-SGD (Abadi et al. 2016, "Deep Learning with Differential Privacy"): how a node's networks learn so that
what they have learned may be told at a price known before.

Each step draws each record by itself (Poisson sampling), shortens each record's gradient to an L2 norm of at
most ``clip``, and adds Gaussian noise of standard deviation ``noise * clip`` to their sum. One record moves
that sum by ``clip`` at most, so a step is the sampled Gaussian event that :func:`price` names.

An example's gradient follows from that record and the step's name alone, never from which others were drawn
or in what order: networks that draw at random while they learn (dropout) are refused, and how an image is
augmented follows from what it shows.

Assumed: neighbouring data differ by one record (or one group of ``group`` records) added or removed; how many
records there are sets rate and steps, and counts as known. What training reports of its losses is for the
node's owner alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from fedstill.core.compute import Compute, as_laid_out
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.augment import augmented
from fedstill.models.private import NotPrivate, check
from fedstill.node.node import Node
from fedstill.node.training import WHOLE, LocalConfig, Report, Span, cosine, set_lr
from fedstill.privacy.bounds import kept, lengths
from fedstill.privacy.events import Event, Price
from fedstill.privacy.randomness import Draws, add_noise
from fedstill.tasks import Task

__all__ = ["DPSGD", "NotPrivate", "check", "clipped_sum", "price", "rate", "sample", "step", "train"]

# Losses (B,) of a network on inputs (B, C, H, W) and targets (B, ...), each of its own example alone.
PrivateLoss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
PublicLoss = Callable[[nn.Module], torch.Tensor]  # a scalar that no record of the node enters
# Inputs (B, C, H, W), each changed by itself, as it is and as the draws of the step say.
Augment = Callable[[torch.Tensor, torch.Tensor, Draws], tuple[torch.Tensor, torch.Tensor]]

ROOM = 2**25  # numbers of examples' gradients in memory at once (128 MiB): as many examples as fit, or one


@dataclass(frozen=True)
class DPSGD:
    """How a network learns privately.

    Args:
        noise: its standard deviation over ``clip`` (the noise multiplier); 0: none, and no guarantee.
        clip: largest L2 norm of one record's gradient.
        draws: names to random draws, of which none is told to anyone. The same names give the same draws:
            they must differ from run to run, and between steps that could both be told of.
        group: records of one protected unit.

    Raises:
        ArgumentError: a value outside its range.
    """

    noise: float
    clip: float
    draws: Callable[..., Draws]
    group: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.noise < float("inf"):
            raise ArgumentError("noise of DP-SGD", self.noise, "0 (none: no guarantee) or more")
        if not 0 < self.clip < float("inf"):
            raise ArgumentError("clip of DP-SGD", self.clip, "above 0")
        if self.group < 1:
            raise ArgumentError("group of DP-SGD", self.group, "1 or more")


def rate(n: int, batch: int) -> float:
    """The probability at which each of ``n`` records is drawn, for ``batch`` of them on average.

    >>> rate(200, 50), rate(20, 50)
    (0.25, 1.0)
    """
    return min(1.0, batch / n)


def price(dp: DPSGD, n: int, batch: int, steps: int) -> Price | None:
    """What so many steps cost; None without noise.

    The Gaussian mechanism on a Poisson sample; at rate 1 a group moves the sum by as many clips as it has
    records, and the noise counts so much less.

    >>> dp = DPSGD(2.0, 1.0, draws=None, group=4)
    >>> [str(event) for n in (100, 10) for event in price(dp, n, 10, 7)]
    ['gaussian(2.0, rate=0.1, group=4)', 'gaussian(0.5)']
    """
    if dp.noise == 0:
        return None
    q = rate(n, batch)
    event = Event("gaussian", dp.noise / dp.group) if q == 1 else Event("gaussian", dp.noise, q, dp.group)
    return Price({event: steps} if steps else {})


def step(
    node: Node,
    role: str,
    dp: DPSGD,
    rate: float,
    *purpose: str | int,
    private_loss: PrivateLoss,
    batch: float,
    public_loss: PublicLoss | None = None,
    augment: Augment | None = None,
) -> float:
    """One private step of a node's network.

    An empty sample is a step like any other: noise alone.

    Args:
        node: whose network learns, with its optimiser, on its own data.
        role: of the network.
        dp: clip, noise and draws.
        rate: at which each record is drawn.
        purpose: names the step's draws, together with what the node is being asked.
        private_loss: of the drawn records.
        batch: how many are drawn on average; the noisy sum of gradients is divided by it.
        public_loss: is added to the mean of the private one; costs nothing.
        augment: changes inputs and targets; what it does to one must not depend on others, nor on its place.

    Returns:
        The mean private loss of the drawn records, 0 if there are none. Not protected: for the owner alone.
    """
    module, optimiser = node.modules[role], node.optimisers[role]
    names = (node.asking, *purpose)  # what is asked again otherwise is another release, with other noise
    drawn = sample(node.data, rate, dp.draws(*names, "sample"))
    trained = {name: own for name, own in module.named_parameters() if name not in node.frozen[role]}
    training = module.training
    module.train()
    inputs, targets = drawn.inputs, drawn.targets
    if augment is not None and len(drawn):
        inputs, targets = augment(inputs, targets, dp.draws(*names, "augment"))
    total, loss = clipped_sum(module, trained, private_loss, inputs, targets, dp.clip)
    if dp.noise:
        # Named by the sum, too: should a sum ever differ where the names do not, say in its last digits on
        # another machine, then so does all of its noise, and no difference of two steps is without noise.
        noise = dp.draws(*names, "noise", _digest(total)).normal(tuple(total.shape))
        total = add_noise(total, noise, dp.noise * dp.clip)
    gradient = total / batch
    if public_loss is not None:
        gradient = gradient + _public_gradient(module, trained, public_loss)
    module.train(training)
    pieces = torch.split(gradient, [own.numel() for own in trained.values()])
    for own, piece in zip(trained.values(), pieces, strict=True):
        own.grad = as_laid_out(piece.view(own.shape), own)
    optimiser.step()
    optimiser.zero_grad()
    return loss


def train(
    node: Node,
    task: Task,
    config: LocalConfig,
    compute: Compute,
    *,
    dp: DPSGD,
    span: Span = WHOLE,
    start: int = 0,
    steps: int | None = None,
    report: Report | None = None,
    purpose: str = "local",
    private_loss: PrivateLoss | None = None,
    public_loss: PublicLoss | None = None,
) -> int:
    """Train a node's model privately: :func:`fedstill.node.training.train`, one node, one private step each.

    Each step's draws follow from its number, so a training that was stopped goes on as if it had not been.

    Args:
        node: with an optimiser for its model.
        task, config, compute, span, start, steps, report, purpose: as there; a batch is an average here.
        dp: clip, noise and draws.
        private_loss: None for the task's own.
        public_loss: added to it in each step, at no price: a penalty on the parameters, say.

    Returns:
        Steps of the span done in all.
    """
    total = max(config.steps(len(node.data)), span.of)
    numbers = span.steps(total)
    end = len(numbers) if steps is None else min(len(numbers), start + steps)
    q = rate(len(node.data), config.batch)
    for number in numbers[start:end]:
        set_lr(node.optimisers["model"], cosine(number, total, config.lr, config.lr_end))
        with compute.step(node.seed, node.name, purpose, number):
            loss = step(
                node,
                "model",
                dp,
                q,
                purpose,
                number,
                private_loss=private_loss or _losses(task, config),
                batch=q * len(node.data),
                public_loss=public_loss,
                augment=_augment(task, config),
            )
        if report is not None:
            report([node], number - numbers[0] + 1, torch.tensor([loss]))
    return end


def sample(data: TensorData, rate: float, draws: Draws) -> TensorData:
    """Records drawn each by itself (Poisson sampling): none, some or all of them."""
    chosen = (draws.uniform((len(data),)) < rate).nonzero().flatten()
    return data.subset(chosen.to(data.inputs.device))


def clipped_sum(
    module: nn.Module,
    trained: dict[str, nn.Parameter],
    private_loss: PrivateLoss,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    clip: float,
) -> tuple[torch.Tensor, float]:
    """The sum of the examples' gradients, each shortened to an L2 norm of at most ``clip``.

    An example's gradient is computed from that example alone, whatever the network: layers that look at the
    whole batch see a batch of one, and random draws end in torch's error. A gradient that is not finite
    counts nothing.

    Args:
        module: the network, as it is to learn (its mode is not changed here).
        trained: its parameters in training, by name.
        private_loss: of each example.
        inputs, targets: ``(B, ...)``; B may be 0.
        clip: above 0.

    Returns:
        The sum, all trained parameters in one vector ``(P,)`` float32, and the examples' mean loss.
    """
    # vmap knows no channels last: with parameters laid out so, it only takes longer.
    leaves = {f"module.{name}": own.detach().contiguous() for name, own in trained.items()}
    bound = _Bound(module, lambda *args: private_loss(*args)[0])

    def one(leaves: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = functional_call(bound, leaves, (x.unsqueeze(0), y.unsqueeze(0)))
        return loss

    each = vmap(grad_and_value(one), in_dims=(None, 0, 0), randomness="error")
    sums = [torch.zeros(own.numel(), device=inputs.device) for own in trained.values()]
    losses = 0.0
    for x, y in _parts(inputs, targets, max(ROOM // sum(map(len, sums)), 1)):
        gradients, values = each(leaves, x, y)
        losses += values.sum().item()
        rows = [gradients[name].flatten(1) for name in leaves]  # (b, P_i) each
        norms = torch.stack([lengths(row) for row in rows]).norm(dim=0)  # (b,) float64
        factors, sound = kept(norms, clip).float(), norms.isfinite()
        if not sound.all():
            rows = [torch.where(sound.unsqueeze(1), row, 0.0) for row in rows]
        for own, row in zip(sums, rows, strict=True):
            own += factors @ row
    return torch.cat(sums), losses / max(len(inputs), 1)


class _Bound(nn.Module):
    """A function of a network as a network, so that its parameters can be given in the call."""

    def __init__(self, module: nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(self.module, *args)


def _public_gradient(
    module: nn.Module, trained: dict[str, nn.Parameter], public_loss: PublicLoss
) -> torch.Tensor:
    """``(P,)``, as :func:`clipped_sum` orders it."""
    leaves = {f"module.{name}": own.detach().requires_grad_() for name, own in trained.items()}
    with torch.enable_grad():
        loss = functional_call(_Bound(module, public_loss), leaves, ())
        wanted = list(leaves.values())
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
    pairs = zip(found, wanted, strict=True)
    return torch.cat([(torch.zeros_like(leaf) if g is None else g).flatten() for g, leaf in pairs])


def _parts(
    inputs: torch.Tensor, targets: torch.Tensor, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for first in range(0, len(inputs), size):
        yield inputs[first : first + size], targets[first : first + size]


def _losses(task: Task, config: LocalConfig) -> PrivateLoss:
    """The task's loss of each example: each is a batch of one."""

    def losses(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return task.loss(module(inputs).float().unsqueeze(1), targets.unsqueeze(1), config.smoothing)

    return losses


def _augment(task: Task, config: LocalConfig) -> Augment | None:
    how = config.augment
    if how == "none":
        return None
    return lambda inputs, targets, draws: augmented(task, inputs, targets, moves(inputs, draws), how)


def moves(inputs: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Four random numbers of each input, ``(4, B)`` int64 from 0: a keyed hash of what it holds.

    Drawn by its place in the batch, one record less would change the numbers of those after it.

    Args:
        inputs: ``(B, ...)``.
        draws: give the key, which nobody is to know.
    """
    key = draws.uniform((8,)).numpy().tobytes()  # 64 bytes, of which 416 bits are random
    rows = inputs.cpu().numpy()
    hashes = (hashlib.blake2b(row.tobytes(), digest_size=32, key=key).digest() for row in rows)
    numbers = np.frombuffer(b"".join(hashes), "<u8") >> 1
    return torch.from_numpy(numbers.astype(np.int64)).view(-1, 4).T


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.cpu().numpy().tobytes(), digest_size=16).hexdigest()
