"""DP-SGD: clipping, noise, Poisson sampling, and equality with Opacus."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.models import build
from fedstill.node import dp_training, local_training
from fedstill.node.dp_training import private_step
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.privacy import dpsgd
from fedstill.privacy.dpsgd import DPParameters, clipped_sum_and_loss
from fedstill.privacy.noise import seeded_sampler
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.tasks.classification import Classification

pytestmark = pytest.mark.usefixtures("steady_adam")

TASK, COMPUTE, SHAPE = Classification(3), Compute(), (1, 8, 8)
PLAIN = LocalConfig(epochs=2, batch=8, smoothing=0.0)


def made(model: nn.Module | str = "mlp:8", n: int = 20, scale: float = 1.0, seed: int = 0) -> Node:
    """Return a node whose optimizer is plain SGD with learning rate 1: a step adds the negative gradient."""
    generator = torch.Generator().manual_seed(seed)
    inputs = scale * torch.randn(n, *SHAPE, generator=generator)
    network = build(model, SHAPE, 3, 0) if isinstance(model, str) else model
    data = TensorData(inputs, torch.randint(3, (n,), generator=generator))
    gate: Any = SimpleNamespace(budgets=None, encoder=None)  # nothing is released here
    node = Node("n", data, network, gate, 0)
    node.optimizers["model"] = torch.optim.SGD(network.parameters(), 1.0)
    return node


def private(noise: float = 0.0, clip: float = 1.0, secret: int = 0, group: int = 1) -> DPParameters:
    return DPParameters(noise, clip, partial(seeded_sampler, secret), group)


def entropy(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(x), y, reduction="none")


def vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([own.detach().flatten() for own in module.parameters()])


def moved(
    node: Node, dp: DPParameters, q: float, number: int = 0, batch: float = 1.0, **how: Any
) -> torch.Tensor:
    """Return the change of the network by one real step: minus the gradient of the step."""
    before = vector(node.model)
    private_step(node, "model", dp, q, number, private_loss=entropy, batch=batch, **how)
    return vector(node.model) - before


def total(node: Node, clip: float, rows: Sequence[int] | None = None) -> torch.Tensor:
    data = node.data if rows is None else node.data.subset(torch.tensor(rows, dtype=torch.int64))
    trained = dict(node.model.named_parameters())
    return clipped_sum_and_loss(node.model, trained, entropy, data.inputs, data.targets, clip)[0]


# --- clipping -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    scale=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e3, 1e9, 1e18, 1e30, math.inf, math.nan]),
    clip=st.floats(1e-3, 1e3),
    seed=st.integers(0, 99),
)
def test_example_gradients_are_clipped(scale: float, clip: float, seed: int) -> None:
    node = made(n=3, scale=scale, seed=seed)
    for row in range(3):
        length = total(node, clip, [row]).double().norm().item()
        assert length <= clip
    assert total(node, clip).double().norm().item() <= 3 * clip


def test_huge_gradient_is_clipped() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    node = made(network, n=20, scale=1e25)  # the square is beyond the range of float32
    with torch.no_grad():
        wrong = network(node.data.inputs).argmax(1) != node.data.targets
    lengths = torch.stack([total(node, 0.5, [row]).double().norm() for row in range(20)])
    assert wrong.any()
    torch.testing.assert_close(lengths, 0.5 * wrong.double(), rtol=1e-5, atol=0)
    assert lengths.max() <= 0.5


def test_non_finite_gradient_is_dropped() -> None:
    node = made(n=4)
    node.data.inputs[2] = math.nan
    torch.testing.assert_close(total(node, 1.0), total(node, 1.0, [0, 1, 3]))


class Mixing(nn.Module):
    """A network whose outputs depend on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        out: torch.Tensor = self.linear(x - 0.5 * x.mean(0))
        return out


def test_clipped_sum_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    node = made(n=20)
    together = total(node, 0.5)
    for limit in (6 * len(together), 1):
        monkeypatch.setattr(dpsgd, "MAX_GRADIENT_NUMBERS", limit)
        torch.testing.assert_close(total(node, 0.5), together)


@pytest.mark.parametrize("model", ["small-cnn:4", "mlp:8", "random-conv:4", "scattering:2", Mixing])
def test_step_sensitivity_is_at_most_the_clip(
    model: str | Callable[[], nn.Module],
) -> None:
    network = (lambda: build(model, SHAPE, 3, 0)) if isinstance(model, str) else model
    n, clip, batch = 24, 0.3, 4.0

    def stepped(rows: Sequence[int]) -> torch.Tensor:
        node = made(network(), n, scale=10.0)
        node.data = node.data.subset(torch.tensor(rows))
        return batch * moved(node, private(clip=clip), 1.0, batch=batch)

    full = stepped(range(n))
    by = [(full - stepped([r for r in range(n) if r != row])).norm().item() for row in range(n)]
    assert max(by) <= clip * (1 + 1e-3)  # parameters are float32, so a step rounds them
    assert max(by) > 0.9 * clip, "the clip is nearly attained"


def model_output(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return module(x).squeeze(1)


@pytest.mark.parametrize("shortcut", [True, False])
def test_large_sum_sensitivity_is_at_most_the_clip(shortcut: bool) -> None:
    """In float32, the small ones after 1024 large ones would all be rounded up, those after 1023 down."""
    layer = nn.Linear(1, 1, bias=False)
    network = layer if shortcut else Behind(layer)
    x = torch.cat([torch.full((2**10, 1), 2.0), torch.full((20_000, 1), 1.01 * 2.0**-14)])

    def summed(rows: torch.Tensor) -> torch.Tensor:
        return clipped_sum_and_loss(
            network, dict(layer.named_parameters()), model_output, rows, torch.ones(len(rows)), 1.0
        )[0]

    assert 0.99 < (summed(x) - summed(x[1:])).norm() <= 1


@pytest.mark.parametrize("shortcut", [True, False])
def test_tiny_gradient_on_huge_features_is_clipped(shortcut: bool) -> None:
    """A server that sends a network's weights, including frozen first layers, chooses both."""
    layer = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(layer.weight)
    layer.weight.data[0, 0] = 60e-30  # the other classes have probability e^-60
    network, x = layer if shortcut else Behind(layer), torch.tensor([[1e30, 0.0, 0.0, 0.0]])
    for clip in (1.0, 1e-3):
        gradient, _ = clipped_sum_and_loss(
            network, dict(layer.named_parameters()), entropy, x, torch.tensor([0]), clip
        )
        assert 0.99 * clip < gradient.norm() <= clip


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layer_sum_matches_explicit_gradients(bias: bool) -> None:
    torch.manual_seed(0)
    layer, f, y = (
        nn.Linear(50, 3, bias=bias),
        10 ** torch.randn(40, 1) * torch.randn(40, 50),
        torch.arange(40) % 3,
    )
    f[1, 0], f[2] = math.nan, 1e30
    for clip in (0.1, 1.0, 30.0):
        for rows in (slice(0), slice(2, 3), slice(None)):
            args = (dict(layer.named_parameters()), entropy, f[rows], y[rows], clip)
            quick, loss = clipped_sum_and_loss(layer, *args)
            written, as_written = clipped_sum_and_loss(Behind(layer), *args)  # a subclass: no shortcut
            torch.testing.assert_close(quick, written, rtol=1e-5, atol=1e-5 * clip)
            assert loss == pytest.approx(as_written, rel=1e-4, nan_ok=True)
        assert clipped_sum_and_loss(layer, args[0], entropy, f[2:3], y[2:3], clip)[0].double().norm() <= clip


class Behind(nn.Linear):
    """A linear layer of another class that shares the parameters of a given one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(1, 1)
        self.weight, self.bias = layer.weight, layer.bias


class Fixed(nn.Module):
    """A layer without parameters that depends on the whole batch and counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Fixed.calls += 1
        x = x.flatten(1)
        return x - 0.5 * x.mean(0)


class Whole(nn.Sequential):
    """A Sequential subclass, which may not be split into its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        return out


def test_fixed_layers_features_are_computed_once_per_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = LocalConfig(epochs=1, min_steps=5, batch=64, optimizer="sgd", lr=0.5, smoothing=0.0)

    def learned(kind: type[nn.Sequential]) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        frozen = nn.Linear(64, 9).requires_grad_(False)
        node = made(kind(Fixed(), frozen, nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3)), n=24)
        local_training.attach_optimizers([node], config)
        before, Fixed.calls = vector(node.model), 0
        assert dp_training.train_privately(node, TASK, config, COMPUTE, dp=private(clip=0.3)) == 5
        moved = vector(node.model) - before
        assert not moved[: 64 * 9 + 9].any()
        return moved, Fixed.calls

    step_by_step, calls_plain = learned(Whole)
    monkeypatch.setattr(dp_training, "FEATURE_BATCH", 24)
    at_once, calls_cached = learned(nn.Sequential)
    torch.testing.assert_close(at_once, step_by_step, rtol=1e-3, atol=1e-5)
    assert (calls_plain, calls_cached) == (5, 2), (
        "one forward pass for the feature size, and one for all examples"
    )
    monkeypatch.setattr(dp_training, "MAX_CACHED_NUMBERS", 24 * 9)
    assert learned(nn.Sequential)[1] == 2
    monkeypatch.setattr(dp_training, "MAX_CACHED_NUMBERS", 24 * 9 - 1)
    assert learned(nn.Sequential)[1] == 1 + 5


def test_gradient_sum_keeps_full_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    node = made("random-conv:16", n=1000)
    alike = torch.randn(1, *SHAPE, generator=generator) + 0.02 * torch.randn(
        1000, *SHAPE, generator=generator
    )
    node.data = TensorData(alike, torch.zeros(1000, dtype=torch.int64))
    node.data.inputs[0] = torch.randn(SHAPE, generator=generator)
    low = Compute(EngineConfig(precision="bfloat16"))
    with low.autocast():
        by = (total(node, 0.25) - total(node, 0.25, range(1, 1000))).norm().item()
    assert 0.9 * 0.25 < by <= 0.25 * (1 + 1e-3)


# --- augmentation ---------------------------------------------------------------------------------

ONE_STEP = LocalConfig(epochs=1, batch=64, optimizer="sgd", lr=1.0, momentum=0.0, smoothing=0.0)


def first_step(node: Node, augment: Any, secret: int = 0, query_hash: str = "") -> torch.Tensor:
    """Return the change by the first step times the records: minus the sum of the gradients."""
    node.query_context_hash = query_hash
    before, config = vector(node.model), dataclasses.replace(ONE_STEP, augment=augment)
    assert dp_training.train_privately(node, TASK, config, COMPUTE, dp=private(clip=0.3, secret=secret)) == 1
    return (vector(node.model) - before) * len(node.data)


def test_augmented_step_sensitivity_is_at_most_the_clip() -> None:
    def stepped(rows: Sequence[int]) -> torch.Tensor:
        node = made(n=24, scale=10.0)
        node.data = node.data.subset(torch.tensor(rows))
        return first_step(node, "shift-flip")

    full = stepped(range(24))
    by = [(full - stepped([r for r in range(24) if r != row])).norm().item() for row in range(24)]
    assert 0.9 * 0.3 < max(by) <= 0.3 * (1 + 1e-3)
    torch.testing.assert_close(stepped(range(23, -1, -1)), full, rtol=1e-3, atol=1e-4)


def test_augmentation_depends_on_secret_not_seed() -> None:
    def stepped(seed: int = 0, **how: Any) -> torch.Tensor:
        node = made(n=24)
        node.seed = seed
        return first_step(node, "shift-flip", **how)

    one = stepped()
    assert torch.equal(stepped(seed=1), one)
    assert not torch.allclose(stepped(secret=1), one, atol=1e-2)
    assert not torch.allclose(stepped(query_hash="another query"), one, atol=1e-2)


def test_augmentation_numbers_depend_on_content_and_are_uniform() -> None:
    inputs = torch.randn(6000, 2, 3, 3)
    numbers = dp_training.augmentation_numbers(inputs, seeded_sampler(0, "a"))
    assert (numbers.shape, numbers.dtype) == ((4, 6000), torch.int64)
    assert numbers.min() >= 0
    order = torch.randperm(6000)[:50]
    some = inputs[order].to(memory_format=torch.channels_last)
    assert torch.equal(dp_training.augmentation_numbers(some, seeded_sampler(0, "a")), numbers[:, order])
    assert not (dp_training.augmentation_numbers(inputs, seeded_sampler(0, "b")) == numbers).any()
    cells = 6 * (numbers[0] % 3) + 2 * (numbers[1] % 3) + numbers[2] % 2
    cells = 4 * cells + numbers[3] % 4
    assert stats.chisquare(torch.bincount(cells, minlength=72).numpy()).pvalue > 0.01


# --- sampling -------------------------------------------------------------------------------------


def test_samples_are_poisson() -> None:
    n, q, times = 12, 0.3, 4000
    data = TensorData(torch.zeros(n, 1, 4, 4), torch.arange(n))
    selected = torch.zeros(times, n)
    for index in range(times):
        selected[index, dp_training.poisson_sample(data, q, seeded_sampler(0, index)).targets] += 1
    assert selected.max() == 1, "no record is sampled twice"
    sizes = selected.sum(1).long()
    counts = torch.bincount(sizes, minlength=n + 1).double().numpy()
    expected = times * stats.binom(n, q).pmf(range(n + 1))
    few = expected < 5
    counts = [*counts[~few], counts[few].sum()]
    expected = [*expected[~few], expected[few].sum()]
    assert stats.chisquare(counts, expected).pvalue > 0.01, "sample sizes are binomial"
    spread = math.sqrt(q * (1 - q) / times)
    assert (selected.mean(0) - q).abs().max() < 4 * spread, "records have equal sampling rates"
    covariance = selected.T.cov() - q * (1 - q) * torch.eye(n)
    assert covariance.abs().max() < 5 * q * (1 - q) / math.sqrt(times) + 0.01, (
        "records are sampled independently"
    )


def test_step_divides_sample_sum_by_expected_size() -> None:
    node, dp = made(n=30), private(clip=0.5)
    before = total(node, 0.5, rows := sampled_rows(node, dp, 0.4, 3))
    assert 0 < len(rows) < 30
    torch.testing.assert_close(
        moved(node, dp, 0.4, 3, batch=12.0), -before.float() / 12, rtol=1e-4, atol=1e-6
    )


def sampled_rows(node: Node, dp: DPParameters, q: float, number: int) -> list[int]:
    chosen = dp.sampler(node.query_context_hash, number, "sample").uniform((len(node.data),)) < q
    return chosen.nonzero().flatten().tolist()


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "clip", "batch"), [(1.0, 1.0, 1.0), (0.7, 3.0, 5.0), (8.0, 0.1, 2.0)])
def test_step_noise_matches_charged_distribution(noise: float, clip: float, batch: float) -> None:
    quiet, loud = (moved(made("mlp:32"), private(z, clip), 0.5, batch=batch).double() for z in (0.0, noise))
    z = (loud - quiet) * batch / (noise * clip)
    assert len(z) > 3000
    assert stats.kstest(z.numpy(), "norm").pvalue > 0.01


def test_empty_sample_step_is_noise_only() -> None:
    z = moved(made("mlp:32"), private(2.0, 0.5), 1e-9).double()
    assert stats.kstest(z.numpy(), "norm").pvalue > 0.01
    assert moved(made(), private(0.0), 1e-9).abs().max() == 0


def test_noise_and_samples_depend_on_names_and_secret() -> None:
    one = moved(made(), private(1.0), 0.5, 1)
    torch.testing.assert_close(moved(made(), private(1.0), 0.5, 1), one, rtol=0, atol=0)
    for other in (moved(made(), private(1.0), 0.5, 2), moved(made(), private(1.0, secret=1), 0.5, 1)):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.2, "other names give other noise"
    node = made()
    node.query_context_hash = "another query"
    assert abs(torch.corrcoef(torch.stack([one, moved(node, private(1.0), 0.5, 1)]))[0, 1]) < 0.2


def test_different_sums_never_share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def noise(scale: float = 1.0) -> torch.Tensor:
        loud, quiet = (moved(made("mlp:32", scale=scale), private(z), 1.0, 1) for z in (1.0, 0.0))
        return loud - quiet

    def alike(some: torch.Tensor, other: torch.Tensor) -> float:
        return torch.corrcoef(torch.stack([some, other]))[0, 1].abs().item()

    one = noise()
    assert torch.equal(noise(), one)
    assert alike(noise(scale=2.0), one) < 0.1, "other records"
    exact = dp_training.clipped_sum_and_loss

    def rounded(*args: Any) -> tuple[torch.Tensor, float]:
        total, loss = exact(*args)
        total[-1] = torch.nextafter(total[-1], torch.full_like(total[-1], math.inf))
        return total, loss

    monkeypatch.setattr(dp_training, "clipped_sum_and_loss", rounded)
    assert alike(noise(), one) < 0.1, "the same records with another last digit"


# --- against Opacus -------------------------------------------------------------------------------


def opacus_step(network: nn.Module, data: TensorData, noise: float, clip: float, batch: int) -> None:
    from opacus import GradSampleModule  # a slow import
    from opacus.optimizers import DPOptimizer

    module = GradSampleModule(network, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(network.parameters(), 1.0),
        noise_multiplier=noise,
        max_grad_norm=clip,
        expected_batch_size=batch,
        generator=torch.Generator().manual_seed(0),
    )
    entropy(module, data.inputs, data.targets).sum().backward()
    optimizer.step()
    module.to_standard_module()


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("model", ["small-cnn:4", "lenet5", "mlp:8", "random-conv:4", "scattering:2"])
def test_step_without_noise_matches_opacus(model: str) -> None:
    node, dp = made(model, n=30), private(clip=0.4)
    theirs = made(model, n=30)
    for number in range(3):
        rows = torch.tensor(sampled_rows(node, dp, 0.5, number))
        opacus_step(theirs.model.train(), theirs.data.subset(rows), 0.0, 0.4, 15)
        moved(node, dp, 0.5, number, batch=15.0)
    assert (vector(node.model) - vector(build(model, SHAPE, 3, 0))).norm() > 0.1
    torch.testing.assert_close(vector(node.model), vector(theirs.model), rtol=1e-3, atol=1e-5)


# --- other properties of a step --------------------------------------------------------------------


def test_public_loss_is_added_without_clipping() -> None:
    def public(module: nn.Module) -> torch.Tensor:
        return 50 * sum(own.square().sum() for own in module.parameters())  # type: ignore[return-value]

    first = vector(made().model)
    alone = moved(made(), private(clip=0.1), 1.0, batch=20.0)
    both = moved(made(), private(clip=0.1), 1.0, batch=20.0, public_loss=public)
    torch.testing.assert_close(both, alone - 100 * first, rtol=1e-4, atol=1e-5)


def test_public_loss_of_some_parameters() -> None:
    node = made()
    bias = node.model[1].bias.detach().clone()
    moved(node, private(clip=0.1), 1e-9, public_loss=lambda module: module[1].bias.sum())
    torch.testing.assert_close(node.model[1].bias.detach(), bias - 1)
    assert torch.equal(node.model[3].bias, made().model[3].bias)


def test_reported_loss_is_sample_mean() -> None:
    node = made()
    loss = private_step(node, "model", private(), 1.0, private_loss=entropy, batch=1.0)
    mine = made()
    assert loss == pytest.approx(
        TASK.loss(mine.model(mine.data.inputs)[None], mine.data.targets[None]).item()
    )
    assert private_step(node, "model", private(), 1e-9, private_loss=entropy, batch=1.0) == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("fixed", [(), ("0.weight", "0.bias")])
def test_clipped_sums_do_not_depend_on_memory_layout(precision: Any, fixed: tuple[str, ...]) -> None:
    """Group norm changes the memory layout, also within vmap and behind frozen layers."""
    node, compute = made("small-cnn:4"), Compute(EngineConfig(precision=precision))

    def of(model: nn.Module) -> torch.Tensor:
        trained = {name: own for name, own in model.named_parameters() if name not in fixed}
        with compute.autocast():
            return clipped_sum_and_loss(model, trained, entropy, node.data.inputs, node.data.targets, 1.0)[0]

    for name in fixed:
        node.model.get_parameter(name).requires_grad_(False)
    first, last = of(node.model), of(compute.to_device(node.model))
    assert float((last - first).norm() / first.norm()) < (1e-5 if precision == "float32" else 0.15)


def test_frozen_parameters_get_no_gradient_or_noise() -> None:
    network = build("mlp:8", SHAPE, 3, 0)
    network[1].requires_grad_(False)
    node = made(network)
    node.optimizers["model"] = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 1.0)
    first = network[1].weight.clone()
    assert moved(node, private(1.0), 1.0).count_nonzero() == sum(
        own.numel() for own in network.parameters() if own.requires_grad
    )
    assert torch.equal(network[1].weight, first)


def test_step_leaves_no_gradients() -> None:
    node = made("small-cnn:4")
    node.model.eval()
    names, attributes = list(node.model.state_dict()), [set(vars(layer)) for layer in node.model.modules()]
    moved(node, private(1.0), 0.5)
    assert list(node.model.state_dict()) == names
    assert [set(vars(layer)) for layer in node.model.modules()] == attributes
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in node.model.modules())
    assert not any(layer.training for layer in node.model.modules())
    assert all(own.grad is None for own in node.model.parameters())


def test_stacked_network_gets_equal_private_step() -> None:
    alone = made("small-cnn:4")
    moved(alone, private(1.0), 0.5)
    stacked = made("small-cnn:4")
    group = NodeGroup([stacked, made("small-cnn:4", seed=1)])
    group.module("model").train(False)
    moved(stacked, private(1.0), 0.5)
    assert group.module("model").is_current()
    torch.testing.assert_close(vector(stacked.model), vector(alone.model))
    x = stacked.data.inputs[:4].expand(2, -1, -1, -1, -1)
    torch.testing.assert_close(group.module("model")(x)[0], alone.model(x[0]), rtol=1e-4, atol=1e-4)


# --- local training -------------------------------------------------------------------------------


def prepared(model: str = "mlp:8", config: LocalConfig = PLAIN, n: int = 20) -> Node:
    node = made(COMPUTE.to_device(build(model, SHAPE, 3, 0)), n)
    local_training.attach_optimizers([node], config)
    return node


@pytest.mark.parametrize("model", ["mlp:8", "small-cnn:4"])  # the second is in channels-last format
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_full_batch_without_clipping_matches_plain_training(optimizer: Any, model: str) -> None:
    config = LocalConfig(
        epochs=6, batch=20, optimizer=optimizer, lr=0.02, lr_end=0.001, weight_decay=0.01, smoothing=0.1
    )
    ours, theirs = prepared(model, config), prepared(model, config)
    assert dp_training.train_privately(ours, TASK, config, COMPUTE, dp=private(clip=1e6)) == 6
    assert local_training.train([theirs], TASK, config, COMPUTE) == 6
    torch.testing.assert_close(vector(ours.model), vector(theirs.model), rtol=1e-3, atol=1e-4)
    (group,) = ours.optimizers["model"].param_groups
    assert group["lr"] == pytest.approx(0.001), "the schedule ends at its final value"


def test_term_of_the_loss_is_added_after_clipping_and_noise() -> None:
    """Of two steps the first is that without the term, whose gradient 30 (w - start) is 0 there."""
    config = LocalConfig(epochs=2, batch=20, optimizer="sgd", lr=0.01, lr_end=0.01, momentum=0.0)
    dp, start, calls = private(noise=0.5, clip=0.1), vector(prepared(config=config).model), []

    def term(group: Any, count: int) -> torch.Tensor:
        calls.append(count)
        w = torch.cat([each.flatten() for each in group.module("model").trainable_parameters(1).values()])
        return 15 * (w - start).square().sum().view(1)

    steps = {}
    for name, extra in (("without", None), ("with", term)):
        node, after = prepared(config=config), []
        for first in range(2):
            dp_training.train_privately(node, TASK, config, COMPUTE, dp=dp, start=first, steps=1, term=extra)
            after.append(vector(node.model))
        steps[name] = after
    assert calls == [1, 1]
    torch.testing.assert_close(steps["with"][0], steps["without"][0], rtol=0, atol=0)
    expected = steps["without"][1] - 0.01 * 30 * (steps["without"][0] - start)
    torch.testing.assert_close(steps["with"][1], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("augment", ["none", "shift-flip"])
def test_resumed_private_training_equals_uninterrupted(augment: Any) -> None:
    config = LocalConfig(epochs=3, batch=8, augment=augment)
    dp = private(1.0)
    unbroken = prepared("small-cnn:4", config)
    assert dp_training.train_privately(unbroken, TASK, config, COMPUTE, dp=dp) == 8
    stopped = prepared("small-cnn:4", config)
    assert dp_training.train_privately(stopped, TASK, config, COMPUTE, dp=dp, steps=3) == 3
    state = stopped.state_dict()
    torch.manual_seed(99)
    fresh = prepared("small-cnn:4", config)
    fresh.load_state_dict(state)
    assert dp_training.train_privately(fresh, TASK, config, COMPUTE, dp=dp, start=3) == 8
    assert torch.equal(vector(fresh.model), vector(unbroken.model))


def test_rounds_take_the_steps_of_one_call() -> None:
    dp, config = private(1.0), LocalConfig(epochs=3, batch=8)
    whole, rounds = prepared(config=config), prepared(config=config)
    dp_training.train_privately(whole, TASK, config, COMPUTE, dp=dp)
    reported: list[int] = []
    done = [
        dp_training.train_privately(
            rounds,
            TASK,
            config,
            COMPUTE,
            dp=dp,
            span=Span(r, r + 1, 3),
            report=lambda nodes, step, losses: reported.append(step),
        )
        for r in range(3)
    ]
    assert done == [2, 3, 3]
    assert reported == [1, 2, 1, 2, 3, 1, 2, 3]
    assert torch.equal(vector(whole.model), vector(rounds.model))


def test_random_layers_are_refused_in_private_training() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout(0.5))
    with pytest.raises(RuntimeError, match="random operation"):
        moved(made(network), private(), 1.0)
