"""Per-example gradients do not depend on the other examples of the batch, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.models import build
from fedstill.privacy import per_example
from fedstill.privacy.clipping import row_norms
from fedstill.privacy.dpsgd import clipped_sum_and_loss

CLIP = 0.5


def entropy(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x), y, reduction="none")


def linear_loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return module(x).squeeze(1)


@pytest.mark.parametrize("model", ["linear", "mlp:40", "small-cnn:4"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 21])
def test_removing_an_example_changes_only_its_gradient(model: str, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    network = nn.Linear(100, 10) if model == "linear" else build(model, (1, 8, 8), 10, 0)
    x = torch.randn(n, *((100,) if model == "linear" else (1, 8, 8)), generator=generator)
    y = torch.randint(0, 10, (n,), generator=generator)

    def summed(some: slice) -> torch.Tensor:
        trained = dict(network.named_parameters())
        return clipped_sum_and_loss(
            network, trained, entropy, x[some], y[some], CLIP, rows=17, isolate_rounding=True
        )[0]

    own = summed(slice(1))
    assert own.norm() > 0.1 * CLIP
    assert (summed(slice(n)) - summed(slice(1, n)) - own).norm() < 1e-13  # float32 rounds to 1e-8


class Kernel(torch.autograd.Function):
    """Add a rounding error to each row of a batch that depends on the batch size and the position."""

    error: Callable[[int], torch.Tensor]

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + Kernel.error(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        x = x.movedim(in_dims[0], 0)
        return x + Kernel.error(len(x)).view(-1, *[1] * (x.ndim - 1)), 0


class Uneven(nn.Module):
    """Return |w x|; where w x is close to 0, a rounding error reverses the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([-1e-7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Kernel.apply(x * self.w).abs()
        return out


ERRORS: dict[str, Callable[[int], torch.Tensor]] = {
    "by rows": lambda rows: torch.full((rows,), 2e-7 * (rows % 2)),
    "by place": lambda rows: 2e-7 * (torch.arange(rows) == rows - 1).float(),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("n", [6, 9])
def test_rounding_errors_do_not_affect_other_examples(
    error: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernel, "error", staticmethod(ERRORS[error]), raising=False)
    monkeypatch.setattr(per_example, "_layouts", {})
    network, x = Uneven(), torch.ones(n, 1)

    def summed(many: int) -> float:
        trained = dict(network.named_parameters())
        return clipped_sum_and_loss(
            network, trained, linear_loss, x[:many], x[:many, 0], CLIP, rows=8, isolate_rounding=True
        )[0].item()

    assert abs(summed(n)) == pytest.approx(n * CLIP, rel=1e-5)
    assert abs(summed(n) - summed(n - 1)) <= CLIP


class Bent(Uneven):
    """``Uneven`` with a rounding error that is multiplied by frozen weights and buffers, initially 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("scale", torch.zeros(1))
        self.register_buffer("times", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        error = Kernel.apply(torch.zeros_like(x))
        out: torch.Tensor = (x * self.w + (self.gain + self.scale + self.times) * error).abs()
        return out


def odd_position_error(rows: int) -> torch.Tensor:
    """Reverse the gradient at odd positions if x is 1, which happens only without the first record."""
    return 2e-7 * (torch.arange(rows) % 2)


SIGNS = torch.tensor([1.0, -1.0] * 4).unsqueeze(1)  # (8, 1)


@pytest.mark.parametrize("sent", ["gain", "scale", "times"])
def test_rounding_errors_behind_zero_layers_are_detected(sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "error", staticmethod(odd_position_error), raising=False)
    monkeypatch.setattr(per_example, "_layouts", {})
    network = Bent()

    def summed(some: slice) -> float:
        trained, x = {"w": network.w}, SIGNS[some]
        return clipped_sum_and_loss(
            network, trained, linear_loss, x, x[:, 0], CLIP, rows=8, isolate_rounding=True
        )[0].item()

    assert summed(slice(8)) == pytest.approx(-8 * CLIP, rel=1e-5)
    getattr(network, sent).data.fill_(1)
    assert abs(summed(slice(8)) - summed(slice(1, 8))) <= CLIP


def test_layout_trial_restores_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network reaches its modules under two names, like a network split into extractor and head."""
    monkeypatch.setattr(per_example, "_layouts", {})
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    network = nn.Sequential(layers[:-1], layers)  # contains the first layer twice
    layers[0].requires_grad_(False).register_buffer("mean", torch.full((4,), 0.5))
    network.forward = lambda x: layers(x)  # type: ignore[method-assign]
    before = {name: each.clone() for name, each in network.state_dict().items()}
    trained = {name: own for name, own in network.named_parameters() if own.requires_grad}
    clipped_sum_and_loss(
        network,
        trained,
        entropy,
        torch.ones(4, 3),
        torch.zeros(4, dtype=torch.int64),
        CLIP,
        rows=4,
        isolate_rounding=True,
    )
    assert per_example._layouts, "the trial took place"
    assert isinstance(layers[0].weight, nn.Parameter)
    for name, each in network.state_dict().items():
        assert torch.equal(each, before[name]), name


def test_loss_with_other_options_gets_its_own_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Kernel, "error", staticmethod(odd_position_error), raising=False)
    monkeypatch.setattr(per_example, "_layouts", {})
    network = nn.Sequential(nn.Linear(1, 1, bias=False))
    network[0].weight.data.fill_(-1e-7)

    def loss_of(options: SimpleNamespace) -> Any:
        def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = module(x)
            return (Kernel.apply(z) if options.uneven else z).abs().squeeze(1)

        return loss

    def summed(some: slice, uneven: bool) -> float:
        trained, loss, x = (
            dict(network.named_parameters()),
            loss_of(SimpleNamespace(uneven=uneven)),
            SIGNS[some],
        )
        return clipped_sum_and_loss(network, trained, loss, x, x[:, 0], CLIP, rows=8, isolate_rounding=True)[
            0
        ].item()

    assert summed(slice(8), False) == pytest.approx(-8 * CLIP, rel=1e-5)
    assert abs(summed(slice(8), True) - summed(slice(1, 8), True)) <= CLIP


def test_chooses_layout_with_equal_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this example, a product of many rows with one matrix rounds unevenly; products of one row do not."""
    calls = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return x * w

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def vmap(  # type: ignore[override]
            info: Any, in_dims: Any, x: torch.Tensor, w: torch.Tensor
        ) -> tuple[torch.Tensor, int]:
            calls.append((len(x), in_dims[1] is None))
            return x * w + error[in_dims[1] is None] * torch.arange(len(x)).view(-1, 1), 0

    def chosen_layout() -> tuple[bool, int]:
        monkeypatch.setattr(per_example, "_layouts", {})
        calls.clear()

        def one(leaves: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
            return [Product.apply(x, leaves["w"])]

        leaves, x = {"w": torch.ones(3)}, torch.zeros(5, 3)
        first, again = (
            per_example.PerExampleFunction(one, 12, nn.Identity(), leaves, x, isolate_rounding=True)
            for _ in range(2)
        )
        assert (first.shared, first.rows) == (again.shared, again.rows)
        return first.shared, first.rows

    error = {True: 0.0, False: 0.0}  # keys: shared parameters, own parameters
    assert chosen_layout() == (True, 12)
    assert calls == [(12, True)] * per_example.MAX_TRIALS, "the layout is stored"

    error[True] = 1e-3
    assert chosen_layout() == (False, 12)
    assert set(calls) == {(12, True), (12, False)}

    error[False] = 1e-3
    assert chosen_layout() == (True, 1)

    calls.clear()
    leaves, x = {"w": torch.ones(3)}, torch.zeros(5, 3)
    quick = per_example.PerExampleFunction(lambda leaves, x: [x], 12, nn.Identity(), leaves, x)
    assert (quick.shared, quick.rows, calls) == (True, 12, []), "no trial without the option"


@pytest.mark.parametrize("hidden", [2, 4, 6, 8, 10, 12])
def test_narrow_networks_use_batches(hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    network = nn.Sequential(nn.Linear(13, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    x, y = torch.randn(60, 13, generator=generator), torch.randint(0, 3, (60,), generator=generator)
    trained = dict(network.named_parameters())
    every = clipped_sum_and_loss(network, trained, entropy, x, y, CLIP, rows=80, isolate_rounding=True)[0]
    own = clipped_sum_and_loss(network, trained, entropy, x[:1], y[:1], CLIP, rows=80, isolate_rounding=True)[
        0
    ]
    rest = clipped_sum_and_loss(
        network, trained, entropy, x[1:], y[1:], CLIP, rows=80, isolate_rounding=True
    )[0]
    assert (every - rest - own).norm() < 1e-13


def test_overflowing_row_leaves_other_norms_unchanged() -> None:
    rows = torch.randn(5, 400, generator=torch.Generator().manual_seed(0))
    huge = torch.cat([rows, 1e25 * rows[:1]])
    assert torch.equal(row_norms(huge)[:5], row_norms(rows))
