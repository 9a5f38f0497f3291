"""Group norm in every memory layout: equal to torch, with the same layout, without the slow kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedstill.models.norm_layers import GroupNorm

LAST = torch.channels_last
GRADIENT = torch.ops.aten.native_group_norm_backward.default


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Layouts(TorchDispatchMode):
    """Records whether any input of group norm, forward or backward, is in channels-last format."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.native_group_norm.default, GRADIENT):
            x = args[0] if func is not GRADIENT else args[1]
            self.last.append(not x.is_contiguous())
        return func(*args, **(kwargs or {}))


def norms() -> tuple[GroupNorm, nn.GroupNorm]:
    """Return our group norm and torch's, with equal weights."""
    ours, torchs = GroupNorm(2, 6), nn.GroupNorm(2, 6)
    with torch.no_grad():
        ours.weight.uniform_(0.5, 2.0)
        ours.bias.normal_()
    torchs.load_state_dict(ours.state_dict())
    return ours, torchs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(5, 6, 4, 3), (5, 6, 1, 1), (5, 6, 1, 3), (5, 6), (5, 6, 7)])
def test_group_norm_equals_torch(dtype: torch.dtype, last: bool, shape: tuple[int, ...]) -> None:
    ours, torchs = norms()
    x, up = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    plain, mine = x.clone().requires_grad_(), x.clone()
    mine = (mine.contiguous(memory_format=LAST) if last and len(shape) == 4 else mine).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y, wanted = ours(mine), torchs(plain)
    assert y.stride() == mine.stride()
    torch.testing.assert_close(y, wanted)
    y.backward(up)
    wanted.backward(up)
    torch.testing.assert_close(mine.grad, plain.grad)
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad)


def test_bfloat16_is_never_computed_channels_last() -> None:
    x = torch.randn(5, 6, 4, 3, dtype=torch.bfloat16).contiguous(memory_format=LAST).requires_grad_()
    with Layouts() as layouts, torch.autocast("cpu", torch.bfloat16):
        norms()[0](x).sum().backward()
    assert layouts.last == [False, False]
    with Layouts() as layouts, torch.autocast("cpu", torch.bfloat16):
        norms()[1](x).sum().backward()
    assert layouts.last == [True, True]  # the behavior of torch


def test_input_without_gradient_does_not_crash() -> None:
    ours, torchs = norms()
    x = torch.randn(5, 6, 4, 3)
    ours(x.contiguous(memory_format=LAST)).square().sum().backward()
    torchs(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad)


@pytest.mark.parametrize("last", [False, True])
def test_stacked_group_norms_equal_single_ones(last: bool) -> None:
    each = [norms()[0] for _ in range(3)]
    x = torch.randn(3, 5, 6, 4, 3)
    if last:  # no gradient with respect to the input, as after frozen layers
        x = torch.randn(3, 5, 4, 3, 6).permute(0, 1, 4, 2, 3)
    weights = {name: torch.stack([norm.state_dict()[name] for norm in each]) for name in ("weight", "bias")}
    y = vmap(lambda own, x: functional_call(each[0], own, (x,)))(weights, x)
    torch.testing.assert_close(y, torch.stack([norm(part) for norm, part in zip(each, x, strict=True)]))
