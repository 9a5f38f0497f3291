"""Settings of runs from objects, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fedstill.core.compute import EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.data.in_memory_data import InMemoryData, InMemorySplit
from fedstill.federation.link_config import LinkConfig
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import PrivacyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method
from fedstill.runs.build import Setting, make_nodes
from fedstill.runs.spec import EvaluationConfig, NodesConfig, RunSpec


def make_setting(
    *,
    method: Method,
    parts: Sequence[TensorData],
    models: Sequence[nn.Module],
    names: Sequence[str] = (),
    policies: Sequence[PolicyConfig] = (),
    privacies: Sequence[PrivacyConfig] = (),
    local: LocalConfig | None = None,
    engine: EngineConfig | None = None,
    link: LinkConfig | None = None,
    seed: int = 0,
    every: int | None = None,
    samples: int = 12,
    perceptual: str = "",
    **objects: Any,
) -> Setting:
    """Return the setting of a simulation; ``objects`` are further fields of :class:`Setting`."""
    spec = RunSpec(
        method=method,
        seed=seed,
        data=InMemoryData(),
        split=InMemorySplit(nodes=len(parts)),
        nodes=NodesConfig(local=local or LocalConfig(), perceptual=perceptual),
        engine=engine or EngineConfig(),
        link=link or LinkConfig(),
        evaluation=EvaluationConfig(every=every, samples=samples, centralized=False),
    )
    nodes = make_nodes(parts, models, names, policies, privacies)
    return Setting(spec=spec, nodes=nodes, **objects)


def node_models(setting: Setting) -> list[nn.Module]:
    return [node.model for node in setting.nodes]


def node_data(setting: Setting) -> list[TensorData]:
    return [node.data for node in setting.nodes]
