"""Checks of torch modules used by nodes, and copies of networks with hooks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from fedstill.core.errors import FedstillError, ModelError
from fedstill.models import PatchCritic, build, check_module, example_inputs
from fedstill.models.module_check import DPIncompatibleError, needs_two_examples, reject_dp_incompatible
from fedstill.models.module_utils import deep_copy
from fedstill.node.architectures import architecture_key, stacking_key

SHAPE = (1, 4, 4)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


class WrappedOutputs(nn.Module):
    """Network whose outputs are changed by a function."""

    def __init__(self, change: Callable[[torch.Tensor], Any], *, only_training: bool = False) -> None:
        super().__init__()
        self.inner, self.change, self.only_training = network(), change, only_training

    def forward(self, x: torch.Tensor) -> Any:
        out = self.inner(x)
        return out if self.only_training and not self.training else self.change(out)


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def scripted(model: nn.Module | None = None) -> nn.Module:
    return torch.jit.script(model or network())


def traced(model: nn.Module | None = None) -> nn.Module:
    return torch.jit.trace(model or network(), torch.zeros(2, *SHAPE))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a class": (lambda: nn.Linear, "class Linear"),
    "float64": (lambda: network().double(), "'1.weight' of float64"),
    "float16": (lambda: network().half(), "'1.weight' of float16"),
    "one layer in bfloat16": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3).bfloat16()),
        "'2.weight' of bfloat16",
    ),
    "TorchScript": (scripted, "TorchScript"),
    "traced": (traced, "TorchScript"),
    "TorchScript inside": (lambda: nn.Sequential(scripted(), nn.Identity()), "'0' of the model.*TorchScript"),
    "DataParallel": (lambda: nn.DataParallel(network()), r"DataParallel.*\.module"),
    "compiled": (lambda: torch.compile(network()), "torch.compile"),
    "without data": (lambda: network().to("meta"), "meta"),
    "a dict": (lambda: WrappedOutputs(lambda out: {"logits": out}), "returns a dict"),
    "a tuple": (lambda: WrappedOutputs(lambda out: (out, None)), "returns a tuple"),
    "a tuple in training": (
        lambda: WrappedOutputs(lambda out: (out, None), only_training=True),
        "returns a tuple in training mode",
    ),
    "classes": (lambda: WrappedOutputs(lambda out: out.round().long()), "int64"),
    "complex numbers": (lambda: WrappedOutputs(lambda out: out * 1j), "complex64"),
    "no gradient": (lambda: WrappedOutputs(lambda out: out.detach()), "without gradients"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rejects_untrainable_modules_in_one_line(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(
        ModelError, match=f"the model.*{message}" if "of the" not in message else message
    ) as caught:
        check_module(make(), SHAPE, (3,), "the model")
    assert "\n" not in str(caught.value)


def test_check_keeps_module_and_random_state() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_module(model, SHAPE, (3,), "the model")
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(own.grad is None for own in model.parameters())


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(frozen(nn.Flatten()), nn.Linear(16, 3)),
        lambda: scripted(frozen(network())),
        lambda: traced(frozen(network())),
        lambda: WrappedOutputs(lambda out: out.double()),
        lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.Linear(8, 3)),
        lambda: nn.Sequential(nn.Flatten(), spectral_norm(nn.Linear(16, 3))),
        lambda: nn.Sequential(nn.Flatten(), torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 3))),
    ],
)
def test_accepts_suitable_modules(model: Callable[[], nn.Module]) -> None:
    check_module(model(), SHAPE, (3,), "the model")


@pytest.mark.parametrize(
    ("layer", "shape", "wanted"),
    [
        (nn.BatchNorm1d(16), (16,), True),
        (nn.BatchNorm2d(4), (4, 1, 1), True),
        (nn.BatchNorm2d(4), (4, 2, 1), False),
        # frozen parameters, but still batch statistics
        (nn.BatchNorm1d(16).requires_grad_(False), (16,), True),
        (nn.LayerNorm(16), (16,), False),
    ],
)
def test_batch_norm_of_one_value_needs_two_examples(
    layer: nn.Module, shape: tuple[int, ...], wanted: bool
) -> None:
    assert needs_two_examples(layer, shape) is wanted


OLD_REPARAMETRIZATIONS = {
    "spectral_norm": spectral_norm,
    "weight_norm": weight_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("how", OLD_REPARAMETRIZATIONS)
def test_reparametrized_networks_are_copied_after_forward(how: str) -> None:
    model = nn.Sequential(OLD_REPARAMETRIZATIONS[how](nn.Linear(4, 3)))
    x = torch.rand(2, 4)
    model(x)  # stores a weight with its graph
    twin = deep_copy(model)
    assert torch.equal(twin.eval()(x), model.eval()(x))
    assert not {id(own) for own in twin.parameters()} & {id(own) for own in model.parameters()}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("how", OLD_REPARAMETRIZATIONS)
def test_reparametrized_networks_have_equal_architectures(how: str) -> None:
    one, other, plain = (
        OLD_REPARAMETRIZATIONS[how](nn.Linear(4, 3)),
        OLD_REPARAMETRIZATIONS[how](nn.Linear(4, 3)),
        nn.Linear(4, 3),
    )
    one(torch.rand(2, 4))
    assert architecture_key(one) == architecture_key(other) != architecture_key(plain)


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale, self.activation = nn.Linear(4, 3), torch.full((3,), scale), lambda x: x


def test_attributes_compare_by_value_for_averaging_and_by_identity_for_stacking() -> None:
    one, same, other = Scaled(1.0), Scaled(1.0), Scaled(2.0)
    assert architecture_key(one) == architecture_key(same) != architecture_key(other)
    assert stacking_key(one) != stacking_key(same)


IMAGE = (1, 8, 8)


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
    network[1].requires_grad_(False)  # frozen batch norm mixes examples too
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
    reject_dp_incompatible(flat, "it", example_inputs(IMAGE))
    assert flat[:3](torch.randn(2, *IMAGE)).abs().min() > 0
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
        # in evaluation mode too: it will be trained
        reject_dp_incompatible(nn.Sequential(layer).eval(), "it")
    harmless = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout(0.0))
    reject_dp_incompatible(harmless, "it", example_inputs(IMAGE))


def test_long_list_of_layers_is_truncated_and_suitable_models_are_named() -> None:
    with pytest.raises(DPIncompatibleError) as error:
        reject_dp_incompatible(build("resnet8:4", IMAGE, 3, 0), "the model")
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
    reject_dp_incompatible(PatchCritic(1, 4, "group"), "the critic", example_inputs(IMAGE))


def test_trial_finds_layer_that_stores_inputs() -> None:
    network = nn.Sequential(nn.Flatten(), RunningMean())
    with pytest.raises(DPIncompatibleError, match="1: 'seen'"):
        reject_dp_incompatible(network, "it", example_inputs(IMAGE))
    assert network[1].seen.abs().max() == 0, "the trial uses a copy"


class Averaging(nn.Linear):
    """Layer that keeps a running mean in a plain attribute."""

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
        reject_dp_incompatible(network, "it", example_inputs(IMAGE))


def test_trial_finds_network_without_per_example_gradients() -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x.flatten(1))
            return out if out.sum().item() > 0 else 2 * out

    class Drawing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1) * torch.rand_like(x.flatten(1)))

    for network in (Branching(64, 3), Drawing(64, 3)):
        with pytest.raises(DPIncompatibleError, match="per-example"):
            reject_dp_incompatible(network, "it", example_inputs(IMAGE))


def test_missing_opacus_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("opacus", "opacus.layers", "opacus.validators"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FedstillError, match=r"'fedstill\[dp\]'"):
        reject_dp_incompatible(build("mlp:8", IMAGE, 3, 0), "it")
