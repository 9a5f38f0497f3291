"""Checks of torch modules before they take part, and copies of networks with hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from fedstill.core.errors import ModelError
from fedstill.models import check_module
from fedstill.models.module_check import needs_two_examples
from fedstill.models.module_utils import deep_copy
from fedstill.node.architectures import architecture_key, stacking_key

SHAPE = (1, 4, 4)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


class WrappedOutputs(nn.Module):
    """Network whose outputs are changed by a wrapper."""

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
        (nn.BatchNorm1d(16).requires_grad_(False), (16,), True),  # it still computes over the batch
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
    model(x)  # keeps a weight with its graph
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
