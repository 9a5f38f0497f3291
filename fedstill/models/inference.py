"""Outputs of a model for many inputs, in batches of a size that suits the device."""

from __future__ import annotations

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.models.module_utils import in_mode


def inference_batch_size(inputs: torch.Tensor) -> int:
    """Return the batch size for inference: 1000, and less for large images.

    On a CPU the batch is so small that activations stay in the cache: a thousand 32 x 32 images at once may
    take twice as long as a dozen batches of 85 (``benchmarks/at_once.py``).

    >>> inference_batch_size(torch.empty(1, 3, 32, 32)), inference_batch_size(torch.empty(1, 3, 256, 256))
    (85, 1)
    """
    max_numbers = 2**18 if inputs.device.type == "cpu" else 2**22
    return max(1, min(1000, max_numbers // max(inputs[0].numel(), 1)))


def predict(model: nn.Module, inputs: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Return a model's outputs for many inputs, in evaluation mode, without gradients: ``(N, ...)``
    float32.
    """
    with in_mode(model, False), torch.no_grad(), compute.autocast():
        return torch.cat([model(part).float() for part in torch.split(inputs, inference_batch_size(inputs))])
