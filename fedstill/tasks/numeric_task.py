"""What tasks share whose outputs are numbers, not classes: of a row one, of an image one a pixel."""

from __future__ import annotations

import torch

from fedstill.core.dataset import TensorData
from fedstill.tasks.task import Task


class NumericTask(Task):
    """Outputs are numbers ``(B, 1, ...)``.

    FedIOD's losses are written for distributions over classes. Here an output y_k stands for a Gaussian
    around it with variance 1/2: its entropy is the same whatever it is, so that there is no confidence to
    gain, and the divergence of the nodes from their mean is the variance of their outputs. The ensemble is
    their weighted mean.
    """

    def counts(self, data: TensorData) -> torch.Tensor:
        """How many examples: ``(1,)`` float32."""
        return torch.tensor([float(len(data))], device=data.inputs.device)

    # --- FedIOD: answers of K nodes ---

    def confidence_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """0: a number says nothing of how sure its network is."""
        return responses.new_zeros(())

    def uniqueness_loss(self, responses: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """``-sum_k pi_k (y_k - y)^2`` around the mean ``y = sum_k pi_k y_k``, a mean over inputs and pixels.

        The Jensen-Shannon divergence's counterpart: ``sum_k pi_k KL(N(y_k, 1/2) || N(y, 1/2))``.
        """
        mean = torch.tensordot(pi, responses, dims=([0], [0]))  # (B, 1, ...)
        variance: torch.Tensor = pi @ (responses - mean).square().flatten(1).mean(1)
        return -variance

    def balance_loss(self, ensembled: torch.Tensor) -> torch.Tensor:
        """0: there are no classes."""
        return ensembled.new_zeros(())

    def expertise(self, ensembled: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The importance weights themselves, ``(K, B)``."""
        return weights[..., 0].expand(len(weights), len(ensembled))
