"""Adam and SGD that compute as torch's, without loading its compiler.

Most methods of torch's optimizers are decorated so that ``torch.compile`` leaves them out. The decorators
import ``torch._dynamo``, also in programs that compile nothing, and each process of a node would wait for it,
for 1.3 to 2.2 s. Here the methods are those below the decorators.
"""

from __future__ import annotations

from typing import Any

import torch


def _undecorated(method: Any) -> Any:
    return getattr(method, "__wrapped__", method)


class Adam(torch.optim.Adam):
    """``torch.optim.Adam``, whose steps ``torch.compile`` may not trace.

    Example:
        >>> w = torch.tensor([1.0], requires_grad=True)
        >>> optimizer = Adam([w], lr=0.1)
        >>> (2 * w).sum().backward()
        >>> optimizer.step()
        >>> w
        tensor([0.9000], requires_grad=True)
    """

    step = torch.no_grad()(_undecorated(torch.optim.Adam.step))
    add_param_group = _undecorated(torch.optim.Optimizer.add_param_group)
    zero_grad = _undecorated(torch.optim.Optimizer.zero_grad)
    state_dict = _undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = _undecorated(torch.optim.Optimizer.load_state_dict)


class SGD(torch.optim.SGD):
    """``torch.optim.SGD``, whose steps ``torch.compile`` may not trace."""

    step = torch.no_grad()(_undecorated(torch.optim.SGD.step))
    add_param_group = _undecorated(torch.optim.Optimizer.add_param_group)
    zero_grad = _undecorated(torch.optim.Optimizer.zero_grad)
    state_dict = _undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = _undecorated(torch.optim.Optimizer.load_state_dict)
