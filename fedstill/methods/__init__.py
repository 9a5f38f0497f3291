"""Methods, one file each, and the names that a custom method needs (docs/custom-method.md).

A method is a frozen dataclass. Its fields are its options, ``queries`` declares the functions that run at the
nodes, and ``init_state`` and ``step`` run at the server. Files whose names begin with ``_`` hold shared
parts; ``_server`` is the server that a method uses.

May import federation and lower packages. A new method is a file here, a line in ``protocol.method.METHODS``
and one in this package's ``__init__``, or a file anywhere else.
"""

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, NodeFault
from fedstill.core.options import NonNegativeFloat, PositiveFloat, PositiveInt, Share
from fedstill.core.seeds import seeded, torch_generator
from fedstill.data.public import PublicData
from fedstill.federation.responses import Responses
from fedstill.methods._data_sizes import Tensors, count_samples_query, fetch_sizes
from fedstill.methods._label_histogram import LabelHistogram, LabelHistogramState, count_labels_query
from fedstill.methods._optimizers import adam, descend
from fedstill.methods._server import Server
from fedstill.models.inference import predict
from fedstill.node.node import Node
from fedstill.node.node_view import NodeView
from fedstill.protocol import payload_kinds
from fedstill.protocol.local_config import Span, SpanOfRound, cosine_lr, set_lr
from fedstill.protocol.method import Method, NamedNetwork, QueryCall
from fedstill.protocol.needs import Needs
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.payload_kinds import PayloadKind
from fedstill.protocol.queries import Query, QueryDetails

__all__ = [
    "ArgumentError",
    "LabelHistogram",
    "LabelHistogramState",
    "Method",
    "NamedNetwork",
    "Needs",
    "Node",
    "NodeFault",
    "NodeSetting",
    "NodeView",
    "NonNegativeFloat",
    "PayloadKind",
    "PositiveFloat",
    "PositiveInt",
    "PublicData",
    "Query",
    "QueryCall",
    "QueryDetails",
    "Responses",
    "Server",
    "Share",
    "Span",
    "SpanOfRound",
    "TensorData",
    "Tensors",
    "adam",
    "cosine_lr",
    "count_labels_query",
    "count_samples_query",
    "descend",
    "fetch_sizes",
    "payload_kinds",
    "predict",
    "seeded",
    "set_lr",
    "torch_generator",
]
