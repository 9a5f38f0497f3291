"""Environment of a method at the nodes, for tests in which no function of a query looks at it."""

from __future__ import annotations

from fedstill.core.compute import Compute
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.queries import NodeSetting
from fedstill.tasks.classification import Classification

SETTING = NodeSetting(Classification(3), LocalConfig(), Compute())
