"""A node's network as a method's functions see it."""

from __future__ import annotations

import torch
from torch import nn

from fedstill.models.module_utils import integer_mask
from fedstill.node.stacked_calls import NodeCall
from fedstill.node.stacked_modules import StackedModules


class NetworkView:
    """A node's network of one role."""

    def __init__(self, call: NodeCall, role: str) -> None:
        self._call, self._role = call, role

    def __call__(self, x: torch.Tensor, submodule: str = "") -> torch.Tensor:
        """Return the outputs for inputs ``(B, ...)`` in float32; ``submodule`` names a part, such as
        ``"head"``.
        """
        output: torch.Tensor = self._call.on_group(lambda x: self._network(x, submodule), x)
        return output

    def train(self, mode: bool = True) -> None:
        """Switch to training mode with gradients of the parameters, or to evaluation mode without."""
        self._call.act_on_group(lambda: self._network.train(mode))

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters by name, with gradients."""
        names: list[str] = []

        def run() -> tuple[torch.Tensor, ...]:
            parameters = self._network.trainable_parameters(self._call.count)
            names.extend(parameters)
            return tuple(parameters.values())

        return dict(zip(names, self._call.on_group(run), strict=True))

    @property
    def structure(self) -> nn.Module:
        """A network of the same architecture, to look at its layers; its parameters are of any node."""
        return self._call.group.nodes[0].modules[self._role]

    def integer_mask(self, submodule: str = "") -> torch.Tensor:
        """Return which entries of :meth:`NodeView.parameters` are integers, ``(P,)``."""
        return integer_mask(self.structure.get_submodule(submodule)).to(self._call.group.device)

    @property
    def _network(self) -> StackedModules:
        return self._call.group.module(self._role)
