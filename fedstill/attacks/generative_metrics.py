"""Distance of generated images from real ones, and their quality: FID, KID, inception scores.

Distances are in pixels or in a network's features, and depend on the space in which they are measured. Each
extractor therefore has a name that every result states.

A large distance from private images is no protection, as noise is far from all images. A small one is no
leak, as held-out images are near too. A node's FID is therefore reported together with that of held-out
real images. The test of memorization is in ``memorization.py``.

FID of few images is too high, by a part that grows as 1 / N and differs between generators (Chong, Forsyth:
"Effectively Unbiased FID and Inception Score and Where to Find Them", CVPR 2020). It is therefore reported
with the numbers of images, a note whether they suffice for covariances of full rank, and the kernel
distance, which has no such part (Binkowski et al.: "Demystifying MMD GANs", ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from fedstill.core.errors import ArgumentError, DataError, ModelError
from fedstill.models.module_utils import deep_copy

IMAGES_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Extractor:
    """Map from images to feature vectors, with a name for all reported numbers.

    Args:
        name: for reports.
        features: maps a batch ``(B, C, H, W)`` to vectors ``(B, d)``, without state.
        device: device of ``features``; None: that of the images.

    >>> space = pixel_extractor()
    >>> space.name, space(torch.tensor([[[[0.25, 2.0]]]])).tolist()
    ('pixels', [[0.25, 1.0]])
    """

    name: str
    features: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device | None = None

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Map normalized images ``(N, C, H, W)`` to vectors ``(N, d)``, float64, on the CPU.

        Raises:
            ArgumentError: there are no images.
            DataError: a vector holds NaN or infinity, so that distances are undefined.
        """
        if not len(images):
            raise ArgumentError("images", 0, "one or more")
        parts = (
            self.features(part.to(self.device or part.device)) for part in torch.split(images, IMAGES_AT_ONCE)
        )
        features = torch.cat([part.cpu().double() for part in parts])
        if not features.isfinite().all():
            raise DataError(f"{self.name}: NaN or infinity, so that there are no distances")
        return features


def pixel_extractor(mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> Extractor:
    """Return an extractor of pixels in 0..1 as one vector; values outside are clamped.

    Args:
        mean, std: normalization of the images, one number per channel.
    """
    scale = [torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std)]

    def flatten_pixels(images: torch.Tensor) -> torch.Tensor:
        shift, deviation = (part.to(images.device) for part in scale)
        return (images.double() * deviation + shift).clamp(0, 1).flatten(1)

    return Extractor("pixels", flatten_pixels)


def penultimate_extractor(model: nn.Module, example: torch.Tensor, model_name: str) -> Extractor:
    """Return an extractor of the inputs of a network's last layer, from a copy in evaluation mode.

    The last layer is the last one with parameters of its own that an input passes, so that any architecture
    is supported. Features with positions ``(B, p, h, w)`` are averaged over them.

    Args:
        model: any network; it is copied.
        example: one input or more ``(B, ...)``, to find the layer.
        model_name: for the extractor's name, such as "student".

    Raises:
        ModelError: no layer has parameters, or the last one takes inputs other than ``(B, p)`` or ``(B, p,
            h, w)``.
    """
    network = deep_copy(model).eval().requires_grad_(False)
    device = next((parameter.device for parameter in network.parameters()), None)
    layers = [layer for layer in network.modules() if next(layer.parameters(recurse=False), None) is not None]

    def last_layer(x: torch.Tensor, candidates: Sequence[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
        visited: list[tuple[nn.Module, object]] = [(network, None)]

        def record_input(layer: nn.Module, args: tuple[object, ...]) -> None:
            visited.append((layer, args[0] if args else None))

        with ExitStack() as hooks:
            for layer in candidates:
                hooks.enter_context(layer.register_forward_pre_hook(record_input))
            network(x)
        layer, features = visited[-1]
        if not isinstance(features, torch.Tensor) or features.ndim not in (2, 4) or len(features) != len(x):
            shape = tuple(features.shape) if isinstance(features, torch.Tensor) else "no tensor"
            expected = f"for {len(x)} inputs (expected (B, p) or (B, p, h, w))"
            raise ModelError(f"the last layer of {model_name} takes {shape} {expected}")
        return layer, features if features.ndim == 2 else features.mean((2, 3))

    with torch.no_grad():
        layer, _ = last_layer(example.to(device or example.device), layers)
    return Extractor(
        f"features before the last layer of {model_name}", lambda x: last_layer(x, [layer])[1], device
    )


def frechet_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Frechet distance of the Gaussians with the means and covariances of two sets: ``(N, d)``, ``(M, d)``.

    ``|m_x - m_y|^2 + tr(S_x + S_y - 2 (S_x S_y)^(1/2))``, S with N - 1 (Heusel et al.: "GANs Trained by a
    Two Time-Scale Update Rule", NeurIPS 2017), 0 or more; by torchmetrics, in float64.

    >>> x = torch.tensor([[-1.0], [1.0]])  # variance 2
    >>> round(frechet_distance(x, 2 * x + 3), 6)  # 3^2 + 2 + 8 - 2 * sqrt(2 * 8)
    11.0
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    center = y.double().mean(0)  # centering avoids the loss of digits in sums of squares
    metric = FrechetInceptionDistance(feature=_IdentityFeatureExtractor(x.shape[1]))
    metric.update(x.double() - center, real=False)
    metric.update(y.double() - center, real=True)
    return max(float(metric.compute()), 0.0)  # below 0 by rounding alone


def kernel_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Unbiased squared maximum mean discrepancy of the kernel ``(x . y / d + 1)^3``: KID.

    It is computed from all pairs at once, not as a mean over subsets, and may be below 0 for similar sets.

    >>> kernel_distance(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [1.0]]))  # 1 + 8 - 2 * (1 + 8) / 2
    0.0
    """

    from sklearn.metrics.pairwise import polynomial_kernel  # of degree 3, as KID's

    def mean_within(a: torch.Tensor) -> float:
        """The mean over pairs of two different vectors."""
        pairs = polynomial_kernel(a.numpy())
        return float((pairs.sum() - pairs.trace()) / (len(a) * (len(a) - 1)))

    x, y = x.double(), y.double()
    return mean_within(x) + mean_within(y) - 2 * float(polynomial_kernel(x.numpy(), y.numpy()).mean())


@torch.no_grad()
def inception_score(logits: torch.Tensor) -> float:
    """Inception score ``exp(E KL(p(y | x) || p(y)))`` of a classifier's logits ``(N, classes)``: 1 ..
    classes, higher is better.

    Salimans et al.: "Improved Techniques for Training GANs", NeurIPS 2016. It uses all images at once, not
    the mean over ten parts, which would depend on their size (Barratt, Sharma: "A Note on the Inception
    Score", 2018).

    Raises:
        DataError: the logits hold NaN or infinity.

    >>> round(inception_score(100 * torch.eye(4)), 4), round(inception_score(torch.ones(5, 4)), 4)
    (4.0, 1.0)
    """
    if not logits.isfinite().all():
        raise DataError("logits of generated images: NaN or infinity, so that there is no inception score")
    log_p = logits.double().log_softmax(1)  # (N, classes)
    p = log_p.exp()
    marginal = p.mean(0)  # p(y)
    marginal_entropy = -torch.special.xlogy(marginal, marginal).sum()
    return float((marginal_entropy + (p * log_p).sum(1).mean()).exp())


def inception_scores(images: torch.Tensor, classifiers: Mapping[str, nn.Module]) -> dict[str, float]:
    """Inception scores of images ``(N, C, H, W)`` by each of several classifiers, by name.

    FedIOD's adapted score is the mean of the scores by the nodes' models. "Evaluated by each locally
    trained model T_k (taking average of all local models)" is read as follows: each model gives a score, at
    temperature 1, and all nodes have equal weight. Copies in evaluation mode are used.

    Raises:
        DataError: logits hold NaN or infinity.
    """
    scores: dict[str, float] = {}
    for name, model in classifiers.items():
        device = next((parameter.device for parameter in model.parameters()), None)
        logits = Extractor(f"logits of {name}", deep_copy(model).eval(), device)(images)
        scores[name] = inception_score(logits)
    return scores


class _IdentityFeatureExtractor(nn.Module):
    """Stand-in for torchmetrics' network: the inputs are the features."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x
