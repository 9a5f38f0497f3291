"""Networks that DP-SGD can train, and the errors that name unsuitable layers and replacements."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from fedstill.core.errors import FedstillError
from fedstill.models import PatchCritic, build, example_inputs
from fedstill.models.dp_compatibility import DPIncompatibleError, reject_dp_incompatible

SHAPE = (1, 8, 8)


class RunningMean(nn.Module):
    """A custom layer that keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x.flatten(1) + 1)
        self.seen.add_(out.detach().mean(0))
        return out


def test_error_lists_every_unsuitable_layer_with_its_replacement() -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 48, 3),
        nn.BatchNorm2d(48),
        nn.Sequential(nn.BatchNorm2d(48, affine=False), nn.InstanceNorm2d(48, track_running_stats=True)),
        nn.GRU(4, 5),
        nn.RNN(4, 5),
        nn.LazyLinear(3),
        nn.InstanceNorm2d(48),
    )
    network[1].requires_grad_(False)  # frozen ones mix examples too
    with pytest.raises(DPIncompatibleError) as error:
        reject_dp_incompatible(network, "the model of node 'a'")
    assert set(error.value.layers) == {"1", "2.0", "2.1", "3", "4", "5"}
    assert error.value.layers["1"] == "BatchNorm2d -> GroupNorm(16, 48)"
    assert error.value.layers["3"] == "GRU -> opacus.layers.DPGRU"
    text = str(error.value)
    assert text.startswith(
        "the model of node 'a' cannot be trained with DP-SGD (batch norm mixes examples): 1: BatchNorm2d -> "
        "GroupNorm(16, 48); 2.0"
    )
    assert "track_running_stats=False" in text
    assert "\n" not in text


def test_batch_norm_of_flat_features_is_replaced_by_layer_norm() -> None:
    """Group norm with one feature per group always returns 0."""
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    with pytest.raises(DPIncompatibleError) as error:
        reject_dp_incompatible(flat, "it")
    assert error.value.layers == {"2": "BatchNorm1d -> LayerNorm(32)"}
    flat[2] = nn.LayerNorm(32)
    reject_dp_incompatible(flat, "it", example_inputs(SHAPE))
    assert flat[:3](torch.randn(2, *SHAPE)).abs().min() > 0
    long = nn.Sequential(nn.Conv1d(1, 32, 3), nn.BatchNorm1d(32))
    with pytest.raises(DPIncompatibleError, match=r"1: BatchNorm1d -> GroupNorm\(32, 32\)"):
        reject_dp_incompatible(long, "it")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout(0.1), "0: Dropout -> none: its random mask"),
        (nn.RReLU(), "0: RReLU -> LeakyReLU"),
        (type("Mine", (nn.BatchNorm2d,), {})(4), r"0: Mine -> GroupNorm\(4, 4\)"),
    ],
)
def test_rejects_layers_that_opacus_accepts(layer: nn.Module, message: str) -> None:
    with pytest.raises(DPIncompatibleError, match=message):
        reject_dp_incompatible(nn.Sequential(layer).eval(), "it")  # even as it answers: it will learn
    harmless = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout(0.0))
    reject_dp_incompatible(harmless, "it", example_inputs(SHAPE))


def test_long_list_of_layers_is_truncated_and_suitable_models_are_named() -> None:
    with pytest.raises(DPIncompatibleError) as error:
        reject_dp_incompatible(build("resnet8:4", SHAPE, 3, 0), "the model")
    count, text = len(error.value.layers), str(error.value)
    assert text.count("BatchNorm2d ->") == 6 < count
    assert f"; and {count - 6} more; small-cnn, lenet5 and mlp have none of these" in text
    with pytest.raises(DPIncompatibleError) as few:
        reject_dp_incompatible(nn.Sequential(nn.BatchNorm2d(4)), "mine")
    assert "more" not in str(few.value)
    assert "small-cnn" not in str(few.value)


def test_critic_needs_group_norm_for_dp_sgd() -> None:
    with pytest.raises(DPIncompatibleError, match=r"3: BatchNorm2d -> GroupNorm\(8, 8\)"):
        reject_dp_incompatible(PatchCritic(1, 4), "the critic")
    reject_dp_incompatible(PatchCritic(1, 4, "group"), "the critic", example_inputs(SHAPE))


def test_trial_finds_layer_that_stores_inputs() -> None:
    network = nn.Sequential(nn.Flatten(), RunningMean())
    with pytest.raises(DPIncompatibleError, match=r"1: 'seen' stores inputs"):
        reject_dp_incompatible(network, "it", example_inputs(SHAPE))
    assert network[1].seen.abs().max() == 0, "tried on a copy"


class Averaging(nn.Linear):
    """Keeps a running mean in a plain attribute."""

    mean = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.flatten(1).mean(0)
        return super().forward(x.flatten(1) - self.mean.detach())


class AppendsInputs(nn.Linear):
    """Layer that appends its inputs to a list."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.flatten(1))
        return super().forward(x.flatten(1) + sum(each.mean() for each in self.seen))


@pytest.mark.parametrize(
    ("network", "named"),
    [(Averaging(64, 3), "'mean' stores inputs"), (AppendsInputs(64, 3), "it stores its inputs")],
)
def test_rejects_networks_that_store_inputs_outside_of_buffers(network: nn.Module, named: str) -> None:
    with pytest.raises(DPIncompatibleError, match=named):
        reject_dp_incompatible(network, "it", example_inputs(SHAPE))


def test_trial_finds_network_without_per_example_gradients() -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x.flatten(1))
            return out if out.sum().item() > 0 else 2 * out

    class Drawing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1) * torch.rand_like(x.flatten(1)))

    for network in (Branching(64, 3), Drawing(64, 3)):
        with pytest.raises(DPIncompatibleError, match="the network itself: no per-example gradients"):
            reject_dp_incompatible(network, "it", example_inputs(SHAPE))


def test_missing_opacus_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("opacus", "opacus.layers", "opacus.validators"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FedstillError, match=r"^Opacus is not installed: pip install 'fedstill\[dp\]'$"):
        reject_dp_incompatible(build("mlp:8", SHAPE, 3, 0), "it")
