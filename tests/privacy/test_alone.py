"""What one example says does not depend, not in its last bit, on which others are computed beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstill.models import build
from fedstill.privacy import alone
from fedstill.privacy.dpsgd import clipped_sum

CLIP = 0.5


def entropy(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x), y, reduction="none")


def slope(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return module(x).squeeze(1)


@pytest.mark.parametrize("model", ["linear", "mlp:40", "small-cnn:4"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 21])
def test_one_example_less_takes_its_own_gradient_away_and_nothing_else(model: str, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    network = nn.Linear(100, 10) if model == "linear" else build(model, (1, 8, 8), 10, 0)
    x = torch.randn(n, *((100,) if model == "linear" else (1, 8, 8)), generator=generator)
    y = torch.randint(0, 10, (n,), generator=generator)

    def summed(some: slice) -> torch.Tensor:
        trained = dict(network.named_parameters())
        return clipped_sum(network, trained, entropy, x[some], y[some], CLIP, rows=17)[0]

    own = summed(slice(1))
    assert own.norm() > 0.1 * CLIP
    assert (summed(slice(n)) - summed(slice(1, n)) - own).norm() < 1e-13  # float32 rounds to 1e-8


class Kernel(torch.autograd.Function):
    """Adds a rounding error to each row of a batch, by the batch's rows and the row's place."""

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
    """|w x|, whose slope is turned round by a rounding error where w x is nearly 0."""

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
def test_a_rounding_error_cannot_be_made_to_move_others(
    error: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernel, "error", staticmethod(ERRORS[error]), raising=False)
    monkeypatch.setattr(alone, "_even", {})
    network, x = Uneven(), torch.ones(n, 1)

    def summed(many: int) -> float:
        trained = dict(network.named_parameters())
        return clipped_sum(network, trained, slope, x[:many], x[:many, 0], CLIP, rows=8)[0].item()

    assert abs(summed(n)) == pytest.approx(n * CLIP, rel=1e-5)
    assert abs(summed(n) - summed(n - 1)) <= CLIP


def test_where_places_differ_examples_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rows_of(error: str) -> int:
        monkeypatch.setattr(Kernel, "error", staticmethod(ERRORS[error]), raising=False)
        monkeypatch.setattr(alone, "_even", {})

        def outputs(leaves: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
            asked.append(len(x))
            return [x + Kernel.error(len(x))]

        found = {alone.even(12, Uneven(), {}, outputs, torch.zeros(5)) for _ in range(2)}
        return found.pop()

    assert (rows_of("by rows"), asked) == (12, [12]), "once is enough"
    assert (rows_of("by place"), asked[1:]) == (1, [12, 6, 3])
