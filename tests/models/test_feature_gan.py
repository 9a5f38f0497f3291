"""Networks in the space of features."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstill.models import build
from fedstill.models.extractor_head import features, split
from fedstill.models.feature_gan import FeatureCritic, FeatureGenerator, condition, hidden_widths


def test_a_condition_is_the_vector_and_then_the_one_hot_label() -> None:
    v = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # (1, 2, 2)
    c = condition(v, torch.tensor([[2, 0]]), 3)
    assert c.tolist() == [[[1.0, 2.0, 0.0, 0.0, 1.0], [3.0, 4.0, 1.0, 0.0, 0.0]]]


def test_the_generator_is_three_linear_layers_with_batch_norm() -> None:
    G = FeatureGenerator(noise=4, classes=3, features=7, width=5)
    assert [type(layer).__name__ for layer in G if not isinstance(layer, nn.ReLU)] == [
        "Linear",
        "BatchNorm1d",
        "Linear",
        "BatchNorm1d",
        "Linear",
    ]
    assert G(torch.randn(6, 7)).shape == (6, 7)
    size = sum(parameter.numel() for parameter in G.parameters())
    assert size == 7 * 5 + 2 * 5 + 5 * 5 + 2 * 5 + (5 * 7 + 7)  # no bias before batch norm


@pytest.mark.parametrize(("spec", "widths"), [("lenet5", (120, 84)), ("small-cnn", ())])
def test_the_critic_has_the_heads_layers_and_one_output(spec: str, widths: tuple[int, ...]) -> None:
    parts = split(build(spec, (1, 28, 28), 10, 0), "model")
    assert hidden_widths(parts.head) == widths
    p = features(parts, torch.zeros(2, 1, 28, 28), "model")
    critic = FeatureCritic(p, 10, widths)
    linear = [layer for layer in critic if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in linear] == [*widths, 1]
    assert critic(torch.randn(2, p + 10)).shape == (2, 1)


@pytest.mark.parametrize("training", [True, False])
def test_under_autocast_the_generator_stays_in_float32(training: bool) -> None:
    G = FeatureGenerator(noise=4, classes=3, features=7, width=5).train(training)
    with torch.autocast("cpu", torch.bfloat16):
        f = G(torch.randn(6, 7))
    assert f.dtype == torch.float32
