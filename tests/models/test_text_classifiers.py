"""Text networks: padding has no effect, and stacking and per-example gradients change nothing."""

from __future__ import annotations

from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedstill import models
from fedstill.core.errors import ArgumentError, ModelError
from fedstill.models.extractor_head import split_model
from fedstill.models.text_classifiers import Attention
from tests.support.errors import raises_invalid

LENGTH, CLASSES, VOCABULARY = 12, 3, 50
NAMES = ["transformer:16", "bag:16"]


def network(name: str, seed: int = 0) -> nn.Module:
    return models.build(name, (LENGTH,), CLASSES, seed, "model", vocabulary=VOCABULARY).double()


def texts(count: int, seed: int = 0) -> torch.Tensor:
    """Return texts of all lengths, including an empty one."""
    ids = torch.randint(1, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    lengths = torch.arange(count).remainder(LENGTH + 1).view(-1, 1)
    return torch.where(torch.arange(LENGTH) < lengths, ids, 0)


@pytest.mark.parametrize("name", NAMES)
@given(count=st.integers(1, LENGTH - 1), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_padding_does_not_change_outputs(name: str, count: int, seed: int) -> None:
    model = network(name)
    ids = torch.randint(1, VOCABULARY, (2, count), generator=torch.Generator().manual_seed(seed))
    padded = F.pad(ids, (0, LENGTH - count))
    torch.testing.assert_close(model(padded), model(ids))


def test_transformer_depends_on_word_order_and_bag_does_not() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    turned = ids.flip(1)
    assert (network("transformer:16")(ids) - network("transformer:16")(turned)).abs().max() > 1e-6
    torch.testing.assert_close(network("bag:16")(ids), network("bag:16")(turned))


@pytest.mark.parametrize("name", NAMES)
def test_text_of_padding_only_has_finite_output_and_gradient(name: str) -> None:
    model = network(name)
    out = model(torch.zeros(2, LENGTH, dtype=torch.int64))
    out.square().sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_attention_equals_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(8).double(), nn.MultiheadAttention(8, 4, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.inside.weight)
        theirs.in_proj_bias.copy_(ours.inside.bias)
        theirs.out_proj.weight.copy_(ours.outside.weight)
        theirs.out_proj.bias.copy_(ours.outside.bias)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    expected = theirs(x, x, x, key_padding_mask=mask == 0, need_weights=False)[0]
    torch.testing.assert_close(ours(x, mask.double()), expected)


@pytest.mark.parametrize("name", NAMES)
def test_text_classifiers_split_into_extractor_and_head(name: str) -> None:
    model = network(name)
    parts, ids = split_model(model, "model"), texts(3)
    torch.testing.assert_close(parts(ids), model(ids))
    assert sum(p.numel() for p in parts.head.parameters()) == 16 * CLASSES + CLASSES


@pytest.mark.parametrize("name", ["small-cnn", "mlp:8", "nothing", "hf:"])
def test_rejects_image_networks_for_texts(name: str) -> None:
    with pytest.raises(ArgumentError, match="transformer, bag"):
        models.build(name, (LENGTH,), CLASSES, 0, vocabulary=VOCABULARY)


@pytest.mark.parametrize("name", ["transformer", "bag"])
def test_rejects_text_networks_for_images(name: str) -> None:
    with raises_invalid("model", ANY, "images"):
        models.build(name, (1, 8, 8), CLASSES, 0)


def custom_network(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(vocabulary, 4), nn.Flatten(), nn.Linear(4 * shape[0], classes))


def without_vocabulary(shape: tuple[int, ...], classes: int) -> nn.Module:
    return custom_network(shape, classes, 5)


def test_custom_network_receives_vocabulary_size() -> None:
    model = models.build(f"{__name__}:custom_network", (LENGTH,), CLASSES, 0, vocabulary=VOCABULARY)
    models.check_module(model, (LENGTH,), (CLASSES,), "model", "texts")
    with pytest.raises(ModelError, match="without_vocabulary' cannot be built"):
        models.build(f"{__name__}:without_vocabulary", (LENGTH,), CLASSES, 0, vocabulary=VOCABULARY)
