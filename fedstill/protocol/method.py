"""Methods: the base class, their requirements and the registry of named methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from fedstill.core.errors import ArgumentError
from fedstill.core.registry import Registrable, Registry
from fedstill.core.text_format import brief_repr
from fedstill.data.public import PublicData
from fedstill.protocol.declaration_checks import checked_declarations, with_declaring_class
from fedstill.protocol.digests import chain_digest
from fedstill.protocol.local_config import FULL_TRAINING, Span
from fedstill.protocol.needs import Needs
from fedstill.protocol.node_side import NodeSetting, NodeSide
from fedstill.protocol.queries import Query

SECURE_AGGREGATION_NOTE = (
    "secure aggregation (experimental): the server saw only sums of the nodes' responses "
    "(link.secure_aggregation)"
)


class NamedNetwork(NamedTuple):
    """A network with its name, as :func:`fedstill.models.build` takes it, or with its class if it is a custom
    one."""

    name: str
    network: nn.Module


@dataclass(frozen=True)
class QueryCall:
    """One query with its tensors, as the server sends it."""

    query: str
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    __repr__ = brief_repr


class Method(Registrable):
    """Base class of all methods: options, queries at the nodes, and the algorithm at the server.

    A method is a frozen dataclass. Its fields are its options, and their types define the valid values
    (:mod:`fedstill.core.config_tables`). :meth:`queries` declares the requests to nodes, with the functions
    that nodes run for them. The server calls :meth:`init_state` once and then :meth:`step` repeatedly. A run
    can stop after any step; the state is saved, and the run resumes from it.

    Attributes:
        title: name in tables.
        paper: source of the method.
        query_names: names of all queries that it can declare, whatever its options.
        unit: name of a step in reports.
        evaluated_model: the model that is evaluated. ``student``: the model trained at the server.
            ``virtual``: the average of the nodes' models weighted by their data sizes, computed for
            evaluation only (FedMD-CG, section 3.1). ``ensemble``: all nodes answer each time. ``nodes``: the
            mean over the nodes' models.
        trains_models: the nodes' own models are trained at all.
        one_round: all queries are known before the first response (:meth:`planned_queries`), so that they can
            be exchanged as files.
        has_ensemble: the nodes' responses to any inputs can be combined (:meth:`ensemble_responses`).
        needs_float32: ``engine.precision = "auto"`` is float32 for this method, which loses accuracy in
            bfloat16.
        length_options: options that set the number of queries, as far as the method has them.
        server_only_options: options without influence on the nodes, which may be chosen after all responses.
        batch_options: options with the batch size of the student, or of node models outside of local
            training; batch norm needs batches of 2 or more.

    Example:
        A method whose server averages one number of each node::

            @dataclass(frozen=True, kw_only=True)
            class MeanSize(Method):
                title: ClassVar[str] = "Mean size"
                rounds: PositiveInt = 1

                def queries(self, setting):
                    yield Query(
                        self.count_samples,
                        releases={"sizes": DATA_SIZES},
                        times=1,
                        depends_on_records=("sizes",),
                    )

                def count_samples(self, node):
                    return {"sizes": torch.tensor(float(len(node.data)))}

                def step(self, server, state, t):
                    return {"size": server.query("count_samples")["sizes"].mean().item()}
    """

    section: ClassVar[str] = "method"
    title: ClassVar[str]
    paper: ClassVar[str] = ""
    query_names: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[Literal["step", "epoch", "round"]] = "round"
    evaluated_model: ClassVar[Literal["student", "virtual", "ensemble", "nodes"]] = "student"
    trains_models: ClassVar[bool] = True
    one_round: ClassVar[bool] = False
    needs_float32: ClassVar[bool] = False
    has_ensemble: ClassVar[bool] = False
    length_options: ClassVar[tuple[str, ...]] = ("rounds",)
    server_only_options: ClassVar[tuple[str, ...]] = ()
    batch_options: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **given: Any) -> None:
        """Note in each declaration of a query which class makes it."""
        super().__init_subclass__(**given)
        if "queries" in vars(cls):
            cls.queries = with_declaring_class(cls, cls.queries)  # type: ignore[assignment]

    @staticmethod
    def validate_class(kind: Any) -> str | None:
        """Return the fault of a class as a named method, or None. With ``one_round`` it must plan its
        queries."""
        if missing := Registrable.validate_class(kind):
            return missing
        undeclared = kind.one_round and kind.planned_queries is Method.planned_queries
        return "a class with planned_queries, as one_round is true" if undeclared else None

    def needs(self) -> Needs:
        """Return the requirements of the method. A federation that does not meet them is refused."""
        return Needs()

    # --- at the nodes -----------------------------------------------------------------------------------

    @property
    def initial_training(self) -> Span | None:
        """Part of the local training before the first query; all of it by default. None: none."""
        return FULL_TRAINING

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        """Return the queries that nodes answer."""
        return ()

    def prepare(self, node: Any, setting: NodeSetting) -> None:
        """Prepare a node before anything else, for example by adding networks.

        Args:
            node: a :class:`fedstill.node.node.Node`.
            setting: environment of the method.
        """

    def preview_response(self, node: Any, x: torch.Tensor, z: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a node's response to inputs ``(B, ...)``.

        Used for evaluation in a simulation only: nothing is trained, released or counted. A method with
        ``has_ensemble`` implements it.

        Args:
            node: a :class:`fedstill.node.node_view.NodeView`.
            x: inputs.
            z: outputs of the node's model for ``x``: ``(B, C, ...)``.
        """
        return {}

    def decode_scores(self, scores: torch.Tensor, sent: Mapping[str, Any]) -> torch.Tensor:
        """Return the values of released scores, as the server reads them; attacks on responses use it.

        Args:
            scores: released tensor, such as indices of a quantizer's levels.
            sent: tensors of the query, by name.
        """
        return scores

    def notes(self, setting: NodeSetting) -> tuple[str, ...]:
        """Return messages for the user about parts that are switched off, and why."""
        return ()

    def node_side(self, setting: NodeSetting) -> NodeSide:
        """Return the part of the method that runs at the nodes."""
        return NodeSide(
            {query.name: query for query in checked_declarations(self, self.queries(setting), setting)},
            setting,
            prepare=lambda node: self.prepare(node, setting),
            preview_response=self.preview_response if self.has_ensemble else None,
            initial_training=self.initial_training,
            trains_models=self.trains_models,
            notes=(*self.notes(setting), *((SECURE_AGGREGATION_NOTE,) if setting.secure_aggregation else ())),
        )

    # --- at the server ----------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """Number of steps of a whole run; ``rounds`` by default.

        Raises:
            ArgumentError: less than one round.
        """
        rounds: int = getattr(self, "rounds", 0)
        if hasattr(self, "rounds") and rounds < 1:
            raise ArgumentError("method.rounds", rounds, "1 or more")
        return rounds

    def make_student(
        self, network: nn.Module, nodes: Iterable[NamedNetwork], output_shape: Sequence[int], seed: int
    ) -> nn.Module:
        """Return the network that a run delivers as its student: by default the one of ``student.model``.

        A method whose student consists of the nodes' models overrides it. Such a student is a new network,
        and the one of ``student.model`` keeps its weights.

        Args:
            network: the network of ``student.model``.
            nodes: each node's model with initial weights, in the order of the nodes. A run with remote nodes
                only knows ``student.model``, and takes it for all nodes.
            output_shape: shape of the task's outputs for one input.
            seed: seed of the run.
        """
        return network

    def init_state(self, server: Any) -> Any:
        """Return the initial state of the server.

        It must not send queries: it runs before the nodes have trained, and again at each resume.

        Args:
            server: a :class:`fedstill.methods._server.Server`.

        Returns:
            An object whose attributes are all that changes from step to step, besides the student: networks,
            optimizers, tensors, numbers, None, and objects with ``state_dict()`` and ``load_state_dict(state,
            device)``.
        """
        return SimpleNamespace()

    def step(self, server: Any, state: Any, t: int) -> Mapping[str, float]:
        """Run step ``t``, counted from 0, and return its losses by name."""
        return {}

    def ensemble_responses(self, server: Any, state: Any, responses: Any) -> torch.Tensor | None:
        """Return the nodes' responses to some inputs as one, ``(B, classes)``; None without an ensemble."""
        return None

    def preview_samples(self, server: Any, state: Any, count: int) -> torch.Tensor | None:
        """Return ``count`` generated inputs ``(count, C, H, W)``, the same at each call; None without a
        generator."""
        return None

    def preview_maps(self, server: Any, state: Any, count: int) -> torch.Tensor | None:
        """Return the maps ``(count, H, W)`` uint8 that :meth:`preview_samples` generates its inputs from;
        None without maps.
        """
        return None

    def output_files(self, server: Any, state: Any) -> Mapping[str, str]:
        """Return texts that the run writes as files, by file name."""
        return {}

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        """Return all queries of a ``one_round`` method, in order.

        Raises:
            ArgumentError: an option makes a query depend on a response.
        """
        return ()


def build_node_side(method: Method, setting: NodeSetting) -> NodeSide:
    """Return a method's part at the nodes, with its name if it is a plug-in, and with the query of a
    recalibration.

    Raises:
        ArgumentError: the method has a query of the same name.
    """
    side, name = method.node_side(setting), method_name(method)
    if setting.recalibration is not None:
        query = setting.recalibration.query(setting.student, is_summed=setting.secure_aggregation)
        if query.name in side.queries:
            raise ArgumentError("name of a query", query.name, "another name, as recalibration has this one")
        side = replace(side, queries={**side.queries, query.name: query})
    if name in METHODS.builtin:
        return side
    # Any of its options may choose the summed statistic, and the server chooses the options.
    sum_source = f"{name} (options {chain_digest('options', repr(method))})" if side.sums else ""
    return replace(side, plugin=name, sum_source=sum_source)


METHODS: Registry[type[Method]] = Registry(
    "method",
    {
        "standalone": "fedstill.methods.standalone:Standalone",
        "centralized": "fedstill.methods.centralized:Centralized",
        "public-only": "fedstill.methods.public_only:PublicOnly",
        "ensemble": "fedstill.methods.ensemble:NodeEnsemble",
        "fediod": "fedstill.methods.fediod:FedIOD",
        "fediod-maps": "fedstill.methods.fediod_maps:FedIODMaps",
        "asyndgan": "fedstill.methods.asyndgan:AsynDGAN",
        "fedkd": "fedstill.methods.fedkd:FedKD",
        "fedmd-cg": "fedstill.methods.fedmd_cg:FedMDCG",
        "fedavg": "fedstill.methods.fedavg:FedAvg",
        "fedprox": "fedstill.methods.fedprox:FedProx",
        "fedavgm": "fedstill.methods.fedavgm:FedAvgM",
        "feddf": "fedstill.methods.feddf:FedDF",
        "fedftg": "fedstill.methods.fedftg:FedFTG",
        "fedmd": "fedstill.methods.fedmd:FedMD",
        "fedgen": "fedstill.methods.fedgen:FedGEN",
        "fedper": "fedstill.methods.fedper:FedPer",
        "lg-fedavg": "fedstill.methods.lg_fedavg:LGFedAvg",
        "fedcg": "fedstill.methods.fedcg:FedCG",
        "fedzge": "fedstill.methods.fedzge:FedZGE",
        "dense": "fedstill.methods.dense:DENSE",
        "co-boosting": "fedstill.methods.co_boosting:CoBoosting",
        "fedhydra": "fedstill.methods.fedhydra:FedHydra",
        "co-dream": "fedstill.methods.co_dream:CoDream",
        "fl-mrcm": "fedstill.methods.fl_mrcm:FLMRCM",
        "fedad": "fedstill.methods.fedad:FedAD",
        "dsfl": "fedstill.methods.dsfl:DSFL",
        "fd": "fedstill.methods.fd:FD",
        "fedproto": "fedstill.methods.fedproto:FedProto",
        "fedtgp": "fedstill.methods.fedtgp:FedTGP",
        "fedcgs": "fedstill.methods.fedcgs:FedCGS",
        "fedpft": "fedstill.methods.fedpft:FedPFT",
        "fedsd2c": "fedstill.methods.fedsd2c:FedSD2C",
        "fens": "fedstill.methods.fens:FENS",
        "column-sums": "fedstill.methods.column_sums:ColumnSums",
    },
    base=Method,
)


Method.registry = METHODS


def method_name(method: object) -> str:
    """Return the registered name of a method, or ``module:Name``.

    Raises:
        ArgumentError: the object is not a method.
    """
    if not isinstance(method, Method):
        names = ", ".join(path.partition(":")[2] for path in METHODS.builtin.values())
        raise ArgumentError("method", method, f"one of {names}, or another Method")
    return method.registered_name
