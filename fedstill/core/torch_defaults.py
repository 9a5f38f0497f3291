"""Torch's own defaults for a while, whatever the caller's notebook has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from fedstill.core.seeds import alone


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Compute with gradients, float32 and tensors on the CPU where nothing else is said.

    A caller may be inside ``torch.no_grad`` or ``torch.inference_mode``, or have set another default dtype or
    device; all of it is restored. The dtype is one for all threads, which wait for each other.

    >>> torch.set_default_dtype(torch.float64)
    >>> with torch.no_grad(), torch_defaults():
    ...     torch.zeros(1, requires_grad=True).add(1).requires_grad, torch.zeros(1).dtype
    (True, torch.float32)
    >>> torch.zeros(1).dtype
    torch.float64
    >>> torch.set_default_dtype(torch.float32)
    """
    with alone(), torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, before)
        if torch.get_default_device().type != "cpu":  # as a context it costs a hook at each call
            stack.enter_context(torch.device("cpu"))
        yield
