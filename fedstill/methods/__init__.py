"""Methods, one file each; and all that a file with a method of one's own imports (docs/own-method.md).

A method is a frozen dataclass: its fields are its options, its functions that are marked as questions run at
the nodes, ``begin`` and ``turn`` at the server. What several methods share is in the files that begin with
``_``.
"""

from fedstill.core.errors import ArgumentError
from fedstill.core.seeds import seeded, torch_generator
from fedstill.federation.contract import Answers
from fedstill.methods._histogram import CountsLabels, LabelHistogram
from fedstill.methods.server import Server
from fedstill.node.group import Group
from fedstill.node.node import Node
from fedstill.node.training import Work, predict, train_round
from fedstill.protocol import kinds
from fedstill.protocol.kinds import Kind
from fedstill.protocol.method import Method, Needs
from fedstill.protocol.questions import NodeSetting, question
from fedstill.protocol.schedule import Span

__all__ = [
    "Answers",
    "ArgumentError",
    "CountsLabels",
    "Group",
    "Kind",
    "LabelHistogram",
    "Method",
    "Needs",
    "Node",
    "NodeSetting",
    "Server",
    "Span",
    "Work",
    "kinds",
    "predict",
    "question",
    "seeded",
    "torch_generator",
    "train_round",
]
