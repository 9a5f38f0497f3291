"""Cache of nodes' trained models and their outputs, shared by the runs of a comparison.

Distillation methods start from nodes that have trained on their own data, and the centralized upper bound is
trained on the pooled data. With equal configuration, initial weights and computation, the trained models are
equal to the last bit. The cache serves the runs of one setting and seed, with equal data and code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedstill.core.checkpoint import load_state, save_state
from fedstill.node.node import Node
from fedstill.runs.spec import RunSpec, to_dict


@dataclass(frozen=True)
class TrainedModels:
    """Folder of trained models, for runs that differ only in their method.

    Args:
        folder: of the cache; created at first use.
        spec: the run's configuration.
    """

    folder: Path
    spec: RunSpec

    def model_file(self, groups: Sequence[Sequence[Node]], *about: object) -> Path | None:
        """Return the file of some nodes' trained models; None if they cannot be shared.

        Models of private training are not shared, as each run has its own noise and privacy cost, nor are
        networks with state that is no tensor.

        Args:
            groups: the nodes before their training, in the groups in which they are computed.
            about: further values that determine their training, in addition to the configuration.
        """
        nodes = [node for group in groups for node in group]
        if any(node.dp_sgd_parameters or node.teachers for node in nodes):
            return None
        return self._file(nodes, [[node.name for node in group] for group in groups], *about)

    def outputs_file(self, nodes: Sequence[Node], *about: object) -> Path | None:
        """Return the file of models' outputs on the test set; None if a model has state that is no tensor.

        Args:
            about: further values that determine the outputs, in addition to the configuration.
        """
        return self._file(nodes, "answers", [node.name for node in nodes], *about)

    def _file(self, nodes: Sequence[Node], *about: object) -> Path | None:
        """Return the file named by a hash of the nodes' models, the configuration and further values."""
        states = [node.model.state_dict() for node in nodes]
        if not all(isinstance(value, torch.Tensor) for state in states for value in state.values()):
            return None
        config_values = {
            key: part for key, part in to_dict(self.spec).items() if key not in ("name", "method", "paper")
        }
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        digest = hashlib.sha256(repr((config_values, about, torch.get_num_threads(), device)).encode())
        for node, state in zip(nodes, states, strict=True):
            digest.update(f"{node.model}{sorted(node.frozen['model'])}".encode())
            for name, tensor in state.items():
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"

    @staticmethod
    def save_models(path: Path, nodes: Sequence[Node], **about: Any) -> None:
        """Save nodes' trained models, with JSON values about their training."""
        models = {node.name: dict(node.model.state_dict()) for node in nodes}
        TrainedModels._save(path, {"models": models, "about": json.dumps(about)})

    @staticmethod
    def load_models(path: Path, nodes: Sequence[Node]) -> Mapping[str, Any]:
        """Load saved models into nodes and return the values about their training."""
        kept = load_state(path)
        for node in nodes:
            node.model.load_state_dict(kept["models"][node.name])
        about: dict[str, Any] = json.loads(kept["about"])
        return about

    @staticmethod
    def save_outputs(path: Path, outputs: Mapping[str, torch.Tensor]) -> None:
        """Save models' outputs ``(N, C, ...)`` on the test set, by node."""
        TrainedModels._save(path, dict(outputs))

    @staticmethod
    def _save(path: Path, state: Mapping[str, Any]) -> None:
        """Save a state by a name of this process first, as two processes may save the same file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{os.getpid()}-{path.name}")
        save_state(own, state)
        own.replace(path)

    @staticmethod
    def load_outputs(path: Path) -> dict[str, torch.Tensor]:
        """Load models' outputs on the test set, by node."""
        outputs: dict[str, torch.Tensor] = load_state(path)
        return outputs
