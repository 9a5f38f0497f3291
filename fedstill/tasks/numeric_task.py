"""Base of tasks whose outputs are numbers: one per row, or one per pixel."""

from __future__ import annotations

import torch

from fedstill.core.dataset import TensorData
from fedstill.tasks.task import Task


class NumericTask(Task):
    """Base of tasks whose outputs are numbers ``(B, 1, ...)``.

    FedIOD's losses are written for distributions over classes. Here an output y_k stands for a Gaussian with
    mean y_k and variance 1/2. Its entropy is constant, so the confidence loss is 0. The divergence of the
    nodes from their mean is the variance of their outputs. The ensemble is the weighted mean.
    """

    def counts(self, data: TensorData) -> torch.Tensor:
        """Return the number of examples, ``(1,)`` float32."""
        return torch.tensor([float(len(data))], device=data.inputs.device)

    # --- FedIOD: responses of K nodes ---

    def confidence_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """Return 0: a number does not express confidence."""
        return responses.new_zeros(())

    def uniqueness_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """Return ``-sum_k pi_k (y_k - y)^2`` with ``y = sum_k pi_k y_k``, averaged over inputs and pixels.

        This is minus the counterpart of the Jensen-Shannon divergence,
        ``sum_k pi_k KL(N(y_k, 1/2) || N(y, 1/2))``.
        """
        mean = torch.tensordot(pi, responses, dims=([0], [0]))  # (B, 1, ...)
        variance: torch.Tensor = pi @ (responses - mean).square().flatten(1).mean(1)
        return -variance

    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """Return 0: there are no classes."""
        return ensembled.new_zeros(())

    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the importance weights, ``(K, B)``."""
        return weights[..., 0].expand(len(weights), len(ensembled))
