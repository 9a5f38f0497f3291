"""Keeps nodes' models that were trained alike and what they answer, so that runs of a comparison share both.

Methods that distil start from nodes that have trained on their own data, and the mark from all data together:
where configuration, first weights and computation are the same, so is what comes out, to the last bit. What
is kept serves the runs of one setting and seed in one process, which have read the same data and code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedstill.core.checkpoint import load_state, save_state
from fedstill.node.node import Node
from fedstill.runs.config import RunConfig, to_dict


@dataclass(frozen=True)
class TrainedModels:
    """A folder of trained models, for runs that differ in their method alone.

    Args:
        folder: of a comparison; made when there is something to keep.
    """

    folder: Path
    config: RunConfig

    def file(self, groups: Sequence[Sequence[Node]], *about: object) -> Path | None:
        """Where the models of some nodes are kept, once they are trained; None where they are no other run's.

        Noise of a node that learns privately is its run's own, and so is what it pays; and a network may keep
        what is no tensor.

        Args:
            groups: the nodes before their training, as they are computed together.
            about: what else their training follows from, beside the configuration.
        """
        nodes = [node for group in groups for node in group]
        if any(node.private_steps or node.teachers for node in nodes):
            return None
        return self._file(nodes, [[node.name for node in group] for group in groups], *about)

    def answers_file(self, nodes: Sequence[Node], *about: object) -> Path | None:
        """Where is kept what nodes' models answer on the test part; None where one keeps what is no tensor.

        Args:
            about: what else their answers follow from, beside the configuration.
        """
        return self._file(nodes, "answers", [node.name for node in nodes], *about)

    def _file(self, nodes: Sequence[Node], *about: object) -> Path | None:
        """The file named for the nodes' models as they are, the configuration and what else is said."""
        states = [node.model.state_dict() for node in nodes]
        if not all(isinstance(value, torch.Tensor) for state in states for value in state.values()):
            return None
        same = {
            key: part for key, part in to_dict(self.config).items() if key not in ("name", "method", "paper")
        }
        told = hashlib.sha256(repr((same, about, torch.get_num_threads())).encode())
        for node, state in zip(nodes, states, strict=True):
            told.update(f"{node.model}{sorted(node.frozen['model'])}".encode())
            for name, tensor in state.items():
                told.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                told.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return self.folder / f"{told.hexdigest()[:32]}.safetensors"

    @staticmethod
    def keep(file: Path, nodes: Sequence[Node], **about: Any) -> None:
        """Keep nodes' trained models, with JSON values about their training."""
        file.parent.mkdir(exist_ok=True)
        models = {node.name: dict(node.model.state_dict()) for node in nodes}
        save_state(file, {"models": models, "about": json.dumps(about)})

    @staticmethod
    def put(file: Path, nodes: Sequence[Node]) -> Mapping[str, Any]:
        """Put kept models into nodes; what was kept about their training."""
        kept = load_state(file)
        for node in nodes:
            node.model.load_state_dict(kept["models"][node.name])
        about: dict[str, Any] = json.loads(kept["about"])
        return about

    @staticmethod
    def keep_answers(file: Path, outputs: Mapping[str, torch.Tensor]) -> None:
        """Keep what models answer on the test part, each ``(N, C, ...)``, by their nodes."""
        file.parent.mkdir(exist_ok=True)
        save_state(file, dict(outputs))

    @staticmethod
    def responses(file: Path) -> dict[str, torch.Tensor]:
        """What models answer on the test part, as it was kept."""
        outputs: dict[str, torch.Tensor] = load_state(file)
        return outputs
