"""CUDA graph of a training step of one node's model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedstill.core.compute import Compute
from fedstill.core.cuda_graphs import CudaGraphStep, ModelAndOptimizerTensors, make_capturable
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup, TrainStep

MIN_STEPS_TO_CAPTURE = 50  # steps from which capturing a CUDA graph pays off


def can_capture_training(nodes: Sequence[Node], steps: int, compute: Compute) -> bool:
    """Return whether the training of some nodes is captured: that of one node, if it is long enough."""
    return len(nodes) == 1 and steps >= MIN_STEPS_TO_CAPTURE and compute.uses_cuda_graphs(nodes[0].model)


def capture_train_step(node: Node, compute: Compute, train_step: TrainStep) -> TrainStep:
    """Return a training step of one node's model as a CUDA graph, kept until its training ends."""
    optimizer = node.optimizers["model"]
    make_capturable(optimizer)
    if node.captured_step is None:

        def one_step(inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"losses": train_step(NodeGroup([node]), 0, inputs, targets)}

        node.captured_step = CudaGraphStep(
            one_step, ModelAndOptimizerTensors([node.model], [optimizer]), compute.cuda_graphs
        )
    graph = node.captured_step
    return lambda group, one_step, inputs, targets: graph(inputs=inputs, targets=targets)["losses"]
