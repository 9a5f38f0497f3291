"""Parameter vectors: round trip, copies and weighted means."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedstill.core.errors import ArgumentError
from fedstill.models import build
from fedstill.models.module_utils import load_vector, to_vector, weighted_mean

SHAPE = (1, 8, 8)


def trained_network(spec: str, seed: int) -> nn.Module:
    """Return a network whose buffers differ from their initial values."""
    model = build(spec, SHAPE, 3, seed).train()
    with torch.no_grad():
        for _ in range(seed + 2):
            model(torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(seed)))
    return model


@pytest.mark.parametrize("spec", ["mlp:8", "small-cnn:4", "resnet8:4"])
def test_vector_round_trip_restores_network(spec: str) -> None:
    one, other = trained_network(spec, 1), trained_network(spec, 2)
    vector = to_vector(one)
    assert vector.dtype == torch.float32
    assert vector.shape == (sum(tensor.numel() for tensor in one.state_dict().values()),)
    load_vector(other, vector)
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
        assert other.state_dict()[name].dtype == tensor.dtype
    assert torch.equal(to_vector(other), vector)


def test_vector_keeps_batch_counts_as_integers() -> None:
    one, other = trained_network("resnet8:4", 1), trained_network("resnet8:4", 2)
    assert one.state_dict()["1.num_batches_tracked"] == 3
    mean = weighted_mean(torch.stack([to_vector(one), to_vector(other)]), torch.tensor([1.0, 3.0]))
    load_vector(one, mean)
    state = one.state_dict()
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert state["1.num_batches_tracked"] == 4  # (3 + 3 * 4) / 4 = 3.75, rounded and not truncated
    torch.testing.assert_close(
        state["1.running_var"], mean[state["0.weight"].numel() + 12 :][:4], rtol=0, atol=0
    )  # after the convolution: 4 weights, 4 biases, 4 means


def test_vector_is_a_copy_and_loading_is_in_place() -> None:
    model = nn.Linear(2, 3)
    vector = to_vector(model)
    original, address = vector.clone(), model.weight.data_ptr()
    load_vector(model, vector + 1)
    assert torch.equal(vector, original)
    assert model.weight.data_ptr() == address
    assert torch.equal(to_vector(model), original + 1)
    vector.zero_()
    assert torch.equal(to_vector(model), original + 1)
    assert not vector.requires_grad
    assert model.weight.requires_grad


def test_channels_last_network_has_equal_vector() -> None:
    model = build("small-cnn:4", (3, 8, 8), 3, 0)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert torch.equal(to_vector(other), to_vector(model))
    load_vector(other, to_vector(model) + 1)
    assert torch.equal(other.state_dict()["0.weight"], model.state_dict()["0.weight"] + 1)


@pytest.mark.parametrize("length", [0, 8, 10])
def test_rejects_vector_of_wrong_length_without_changes(length: int) -> None:
    model = nn.Linear(2, 3)
    before = to_vector(model)
    with pytest.raises(ArgumentError, match=rf"invalid parameters = \({length},\) \(expected \(9,\)"):
        load_vector(model, torch.zeros(length))
    with pytest.raises(ArgumentError):
        load_vector(model, torch.zeros(9, 1))
    assert torch.equal(to_vector(model), before)


def test_weighted_mean_by_hand() -> None:
    vectors = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, -8.0]])
    mean = weighted_mean(vectors, torch.tensor([1.0, 2.0, 1.0]))
    torch.testing.assert_close(mean, torch.tensor([3.0, 0.0]))
    torch.testing.assert_close(weighted_mean(vectors[:1], torch.tensor([7.0])), vectors[0])
