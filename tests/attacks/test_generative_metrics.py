"""FID, KID, inception scores and feature extractors: by hand, against torchmetrics, and by image quality."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedstill.attacks.generative_metrics import (
    frechet_distance,
    inception_score,
    inception_scores,
    kernel_distance,
    penultimate_extractor,
    pixel_extractor,
)
from fedstill.core.errors import DataError, ModelError
from fedstill.models.image_classifiers import LeNet5
from tests.support.errors import raises_invalid


def gauss(count: int, seed: int, size: int = 5) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(count: int, seed: int, size: int = 5) -> torch.Tensor:
    """Return vectors with correlated dimensions and a mean far from zero."""
    return gauss(count, seed, size) @ gauss(size, seed + 500, size) + gauss(1, seed + 900, size)


# --- FID and KID ------------------------------------------------------------------------------------


def test_fid_by_hand() -> None:
    """For independent dimensions, FID is the sum of (m_x - m_y)^2 + (s_x - s_y)^2."""
    corners = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])  # variances 4/3
    other = corners * torch.tensor([3.0, 0.5]) + torch.tensor([1.0, -2.0])
    expected = 1 + 4 + 4 / 3 * ((1 - 3) ** 2 + (1 - 0.5) ** 2)
    assert frechet_distance(corners, other) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.integers(3, 30), st.integers(3, 30), st.integers(1, 6))
def test_fid_is_invariant_to_order_and_rotation(seed: int, n: int, m: int, size: int) -> None:
    x, y = mixed(n, seed, size), mixed(m, seed + 1, size)
    distance = frechet_distance(x, y)
    assert distance >= 0
    assert frechet_distance(y, x) == pytest.approx(distance, rel=1e-6, abs=1e-6)
    rotation = torch.linalg.qr(gauss(size, seed, size))[0]
    assert frechet_distance(x @ rotation, y @ rotation) == pytest.approx(distance, rel=1e-6, abs=1e-6)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-5)


def test_fid_is_exact_far_from_zero() -> None:
    x, y = mixed(40, 0), mixed(60, 1)
    assert frechet_distance(x + 1e7, y + 1e7) == pytest.approx(frechet_distance(x, y), rel=1e-6)


def test_kid_matches_torchmetrics() -> None:
    from torchmetrics.image.kid import poly_mmd

    x, y = mixed(40, 0), mixed(40, 1)
    assert kernel_distance(x, y) == pytest.approx(float(poly_mmd(x, y)), rel=1e-9)


# --- inception scores -------------------------------------------------------------------------------


def test_inception_score_by_hand() -> None:
    """p(y | x) is (3/4, 1/4) and (1/4, 3/4), p(y) = (1/2, 1/2): both have KL 3/4 ln 3/2 + 1/4 ln 1/2."""
    logits = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64).log()
    expected = math.exp(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert inception_score(logits) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.integers(2, 40), st.integers(2, 10), st.sampled_from([0.1, 3.0, 1e4]))
def test_inception_score_matches_torchmetrics(seed: int, n: int, classes: int, scale: float) -> None:
    from torchmetrics.image.inception import InceptionScore

    class Given(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    logits = scale * gauss(n, seed, classes)
    score = inception_score(logits)
    assert 1 - 1e-9 <= score <= min(n, classes) + 1e-9
    if scale < 1e4:  # torchmetrics computes 0 log 0 otherwise
        metric = InceptionScore(feature=Given(), splits=1)
        metric.update(logits)
        assert score == pytest.approx(float(metric.compute()[0]), rel=1e-6)


class Knows(nn.Module):
    """Classify images by brightness; values beyond the last class count as the last."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.of = nn.Parameter(torch.arange(classes).float())
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = len(self.of) - 1
        logits: torch.Tensor = -1e3 * (x.mean((1, 2, 3)).clamp(max=last).unsqueeze(1) - self.of).square()
        return self.drop(logits)


def test_inception_scores_use_each_models_outputs() -> None:
    images = torch.arange(4.0).repeat_interleave(5).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    models = {"north": Knows(4), "south": Knows(1)}
    scores = inception_scores(images, models)
    assert scores == {"north": pytest.approx(4.0), "south": pytest.approx(1.0)}
    assert models["north"].training, "the training mode is restored"


def test_inception_score_rejects_nan() -> None:
    with pytest.raises(DataError, match="NaN"):
        inception_score(torch.full((2, 3), math.nan))


# --- extractors -------------------------------------------------------------------------------------


def test_pixel_extractor_undoes_normalization() -> None:
    x = torch.tensor([[[[-1.0, 0.0, 3.0]]]])
    assert pixel_extractor((0.5,), (0.5,))(x).tolist() == [[0.0, 0.5, 1.0]]
    colors = torch.stack([torch.zeros(2, 2), torch.ones(2, 2)]).unsqueeze(0)
    assert pixel_extractor((0.25, 0.0), (1.0, 0.5))(colors).tolist() == [[0.25] * 4 + [0.5] * 4]


def test_penultimate_features_are_last_layer_inputs() -> None:
    torch.manual_seed(0)
    net, x = LeNet5((1, 28, 28), 10), torch.randn(5, 1, 28, 28)
    net.train()
    space = penultimate_extractor(net, x[:1], "student")
    assert space.name == "features before the last layer of student"
    with torch.no_grad():
        expected = nn.Sequential(*list(net)[:-1])(x)
    assert expected.shape == (5, 84)
    torch.testing.assert_close(space(x), expected.double())
    assert net.training
    assert all(own.requires_grad for own in net.parameters())
    before = space(x)
    with torch.no_grad():
        net[-3].weight.zero_()
    torch.testing.assert_close(space(x), before, msg="the network is not changed")


class Branched(nn.Module):
    """Network with batch norm, a final convolution, and layers registered in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 2, 1)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Conv2d(1, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)).relu())
        return y


def test_penultimate_extractor_supports_any_architecture() -> None:
    net, x = Branched(), torch.randn(6, 1, 8, 8)
    net.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        features = penultimate_extractor(net, x[:2], "student")(x)
        net.eval()
        expected = net.norm(net.first(x)).relu().mean((2, 3))
    assert features.shape == (6, 4)
    torch.testing.assert_close(features, expected.double())
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    with pytest.raises(ModelError, match="2 inputs"):
        penultimate_extractor(nn.Flatten(), x[:2], "student")
    with pytest.raises(ModelError, match=r"takes \(2, 1, 8, 8\)|takes \(2, 1, 64\)"):
        penultimate_extractor(nn.Sequential(nn.Flatten(2), nn.Linear(64, 3)), x[:2], "student")


def test_extractor_rejects_nan_and_empty_input() -> None:
    with pytest.raises(DataError, match="pixels: NaN"):
        pixel_extractor()(torch.full((2, 1, 4, 4), math.nan))
    with raises_invalid("images", 0):
        pixel_extractor()(torch.zeros(0, 1, 4, 4))
