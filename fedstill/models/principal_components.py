"""Whitened principal components of features, as in scikit-learn's ``PCA(whiten=True)``."""

from __future__ import annotations

import torch

from fedstill.core.errors import ArgumentError

LEAST_DEVIATION = 0.1  # of a feature or component, relative to the root mean square of all deviations
MIN_FEATURE_STD = 1e-6  # of a feature that does not vary
SIGN_TOLERANCE = 1e-6  # relative difference of entries that count as equally large


def whitening_projection(features: torch.Tensor, components: int) -> torch.Tensor:
    """Return the projection ``(F, M)`` float64 of centered features to their whitened principal components.

    Column i is v_i / sqrt(l_i), where l_i is the i-th largest eigenvalue of the features' covariance and v_i
    its eigenvector, whose largest entry is positive. The features are not scaled before: those of a backbone
    have a common unit, and a scaled feature that hardly varies would count as much as the others.

    On these features all components have variance 1 and are uncorrelated. A component that hardly varies on
    them may vary on others, and would then be larger than all others, so that it is refused.

    Args:
        features: ``(N, F)``.
        components: M, at least 1.

    Raises:
        ArgumentError: fewer than M components have a standard deviation of at least a tenth of the root mean
            square of all F.

    Source:
        Kessy, Lewin and Strimmer 2018, "Optimal whitening and decorrelation" (PCA whitening).

    Example:
        >>> f = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])  # variances 6 and 2 / 3
        >>> whitening_projection(f, 2).square().round(decimals=4)
        tensor([[0.1667, 0.0000],
                [0.0000, 1.5000]], dtype=torch.float64)
    """
    centered = features.double() - features.double().mean(0)
    covariance = centered.T @ centered / max(len(features) - 1, 1)
    eigenvalues, eigenvectors = (each.flip(-1) for each in torch.linalg.eigh(covariance))  # largest first
    std = eigenvalues.clamp_min(0).sqrt()
    least = max(LEAST_DEVIATION * float(std.square().mean().sqrt()), MIN_FEATURE_STD)
    most = int((std >= least).sum())
    if components > most:
        reason = f"so many of {len(std)} components vary enough on {len(features)} public examples"
        raise ArgumentError("features.components", components, f"0 to {most}, as {reason}")
    v = eigenvectors[:, :components]
    projection: torch.Tensor = v * _signs(v) / std[:components]
    return projection.contiguous()  # eigenvectors come in another memory layout


def _signs(v: torch.Tensor) -> torch.Tensor:
    """Return the sign of each column's largest entry, and of the first of several."""
    size = v.abs()
    first = (size >= (1 - SIGN_TOLERANCE) * size.amax(0)).int().argmax(0)
    return v.gather(0, first.unsqueeze(0)).sign()
