"""Queries for the nodes' numbers of examples, each by itself."""

from __future__ import annotations

from fedstill.core.compute import Compute
from fedstill.methods import count_labels_query, count_samples_query
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.queries import NodeSetting, Query
from fedstill.tasks import Task


def count_labels(task: Task) -> Query:
    return count_labels_query(NodeSetting(task, LocalConfig(), Compute()))


def count_samples() -> Query:
    return count_samples_query()
