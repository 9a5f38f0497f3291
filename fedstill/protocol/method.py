"""A method, as server and nodes know it: its options, its part at the nodes and its program at the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.errors import ArgumentError
from fedstill.core.registry import OURS, Registered, Registry
from fedstill.core.text_format import brief_repr
from fedstill.data.public import PublicData
from fedstill.protocol.digests import chain_digest
from fedstill.protocol.local_config import WHOLE, Span
from fedstill.protocol.queries import NodeSetting, NodeSide, Query, declared
from fedstill.tasks import Task

SUMMED = "secure aggregation: the server saw only sums of the nodes' responses (link.secure_aggregation)"


@dataclass(frozen=True)
class Needs:
    """What a method needs, as data; a federation that lacks it is refused before any training.

    Args:
        same_architecture: the nodes' networks and the student are equal in architecture.
        public: public data, without labels.
        public_labels: labels of it, from the task's own classes.
        split: networks that part into extractor and head.
        trains_on_public: these public data become a part of what each node learns from, so that no mechanism can
            say what its own records cost.
        student_architecture: a student of one of the nodes' architectures.
        trainable: nodes' networks that are not frozen as a whole, since rounds train them.
        images: inputs that are images.
        makes: inputs that a server can make: images or rows of a table, and not texts.
        rows: inputs that are rows of a table.
        single_label: tasks in which each input has one class.
        maps: tasks whose inputs can be made from label maps.
        no_label_maps: tasks whose inputs are not made from label maps.
        vectors: tasks whose outputs are one vector an input, and not maps or images.
    """

    same_architecture: bool = False
    public: bool = False
    public_labels: bool = False
    trains_on_public: bool = False
    split: bool = False
    student_architecture: bool = False
    trainable: bool = False
    images: bool = False
    makes: bool = False
    rows: bool = False
    single_label: bool = False
    maps: bool = False
    no_label_maps: bool = False
    vectors: bool = False


def refusal(needs: Needs, task: Task) -> str | None:
    """Why a method with such needs cannot learn a task, or None."""
    called = {"texts": "texts", "rows": "rows of a table"}.get(task.form, "")
    if needs.images and called:
        return f"it works on images, and the inputs of this task are {called}"
    if needs.makes and task.form == "texts":
        return "it makes the inputs that it asks about, and the inputs of this task are texts"
    if needs.rows and task.form != "rows":
        return f"it works on rows of a table, and the inputs of this task are {task.form}"
    if needs.single_label and task.kind != "class":
        return "it needs one class for each input, and this task has none"
    if needs.maps and not task.condition_channels:
        return "it makes images from label maps, and this task has none"
    if needs.no_label_maps and task.condition_channels:
        return "it makes inputs from noise, and here (as by fediod-maps) they are made from label maps"
    if needs.vectors and task.kind in ("map", "image"):
        return "it needs one vector of outputs for each input, and this task has one for each pixel"
    return None


@dataclass(frozen=True)
class QueryCall:
    """One query as a server asks it: its name and the tensors that go down with it."""

    query: str
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    __repr__ = brief_repr


class Method(Registered):
    """A method, all of it: its options, its part at the nodes and its program at the server.

    A method is a frozen dataclass; its fields are its options, whose types say what they may be
    (:mod:`fedstill.core.config_tables`). Its queries are functions that are marked with
    :func:`fedstill.protocol.queries.query` and run at the nodes. Its program is :meth:`begin` and
    then :meth:`turn`, again and again; between two turns a run may be stopped, and goes on from there with
    all that stands in what :meth:`begin` gave.

    Attributes:
        title: in tables.
        paper: where it comes from.
        unit: what a turn is, in reports.
        central: the model it is judged by. ``student`` is trained at the server; ``virtual`` is the average
            of the nodes' models, weighed by their data, made only to evaluate and kept by nobody (FedMD-CG,
            section 3.1); ``ensemble`` asks all nodes each time; ``nodes`` has none: the nodes' mean.
        learns: whether the nodes' own models are trained at all, then or later.
        one_round: whether all that it asks can be known before the first answer (:meth:`planned_queries`), so that
            queries may be carried by hand.
        exact: whether ``engine.precision = "auto"`` is float32 for it, as it loses accuracy in bfloat16.
        longer: options by which a run asks more often, whichever of them it has.
        later: options that change nothing at the nodes, so that they may be chosen when all answers are in.
        batch_options: options that say of how many examples the student, or a node's model outside its local
            training, learns in a step: batch norm needs two.
    """

    under: ClassVar[str] = "method"
    title: ClassVar[str]
    paper: ClassVar[str] = ""
    unit: ClassVar[Literal["step", "epoch", "round"]] = "round"
    central: ClassVar[Literal["student", "virtual", "ensemble", "nodes"]] = "student"
    learns: ClassVar[bool] = True
    one_round: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    longer: ClassVar[tuple[str, ...]] = ("rounds",)
    later: ClassVar[tuple[str, ...]] = ()
    batch_options: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def lacks(kind: Any) -> str | None:
        """As of all that have a name; and what asks all at once must say what that is."""
        if missing := Registered.lacks(kind):
            return missing
        silent = kind.one_round and kind.planned_queries is Method.planned_queries
        return "one with a method asks, as one_round says that all it asks is known" if silent else None

    def needs(self) -> Needs:
        """What a federation must have; it is refused before any training where it has not."""
        return Needs()

    # --- at the nodes -----------------------------------------------------------------------------------

    @property
    def before(self) -> Span | None:
        """The part of the local training before the first query: all of it; None is nothing."""
        return WHOLE

    def queries(self, at: NodeSetting) -> Iterable[Query]:
        """What nodes are asked. Those that are declared, unless a method says otherwise."""
        return declared(self, at)

    def prepare(self, nodes: Any, at: NodeSetting) -> None:
        """What nodes do before anything else, as to make further networks; ``nodes`` are all, one by one."""

    def look(
        self, nodes: Any, x: torch.Tensor, z: torch.Tensor, at: NodeSetting
    ) -> Mapping[str, torch.Tensor]:
        """What nodes would be answering about inputs ``(B, ...)``: ``(K, B, ...)`` a tensor.

        For evaluation in a simulation only: nothing is trained, released or counted. A method with an
        ensemble has one.

        Args:
            z: what the nodes' models give on ``x``: ``(K, B, C, ...)``.
        """
        return {}

    def notes(self, at: NodeSetting) -> tuple[str, ...]:
        """What a run should be told: what is switched off here, and why."""
        return ()

    def node_side(self, at: NodeSetting) -> NodeSide:
        """Its part at the nodes as one: what they are asked, and what they do before."""
        looks = type(self).look is not Method.look
        return NodeSide(
            {query.name: query for query in self.queries(at)},
            prepare=lambda nodes: self.prepare(nodes, at),
            look=(lambda nodes, x, z: self.look(nodes, x, z, at)) if looks else None,
            first=self.before,
            learns=self.learns,
            notes=(*self.notes(at), *((SUMMED,) if at.secure_aggregation else ())),
        )

    # --- at the server ----------------------------------------------------------------------------------

    @property
    def turns(self) -> int:
        """Turns of a whole run: rounds, unless a method says otherwise.

        Raises:
            ArgumentError: not one round, as an option without a range lets one ask for.
        """
        rounds: int = getattr(self, "rounds", 0)
        if hasattr(self, "rounds") and rounds < 1:
            raise ArgumentError("method.rounds", rounds, "1 or more")
        return rounds

    def begin(self, server: Any) -> Any:
        """What the server has before its first turn. It asks nobody, and would be refused: it runs before
        nodes have learned anything, and anew at each resume.

        Args:
            server: a :class:`fedstill.methods._server.Server`.

        Returns:
            An object whose attributes are all that changes from turn to turn, beside the student: networks,
            optimizers, tensors, numbers, None, and what has ``state()`` and ``load(state)``.
        """
        return SimpleNamespace()

    def turn(self, server: Any, state: Any, t: int) -> Mapping[str, float]:
        """Turn number ``t``, from 0; gives its losses."""
        return {}

    def ensembled(self, server: Any, state: Any, responses: Any) -> torch.Tensor | None:
        """The nodes' answers about some inputs as one, ``(B, classes)``; None where there is no ensemble."""
        return None

    def preview_samples(self, server: Any, state: Any, count: int) -> torch.Tensor | None:
        """Inputs ``(count, C, H, W)`` that the server has made, the same each time; None if it makes none."""
        return None

    def preview_maps(self, server: Any, state: Any, count: int) -> torch.Tensor | None:
        """The maps ``(count, H, W)`` uint8 that :meth:`preview_samples` makes its inputs from; None: from none."""
        return None

    def files(self, server: Any, state: Any) -> Mapping[str, str]:
        """What a run leaves beside its figures and its student: texts, by the name of their file."""
        return {}

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        """All that a ``one_round`` method asks, in order; every such method says it.

        Raises:
            ArgumentError: an option makes a query depend on an answer.
        """
        return ()


def build_node_side(method: Method, at: NodeSetting) -> NodeSide:
    """A method's part at the nodes. What a method that is not the package's own releases bears its package's
    name, whatever the method calls it: so an owner lets out by name what nobody here has vouched for. Answers
    that are the package's own and ``closed``, as label counts, keep their names."""
    side, package = method.node_side(at), METHODS.origin(method_name(method))
    if package == OURS:
        return side
    named = {name: each if each.closed else each.from_package(package) for name, each in side.queries.items()}
    # Any of its options may choose the statistic, and the server chooses the options.
    adds = f"{method.called} (options {chain_digest('options', repr(method))})" if side.sums else ""
    return replace(side, queries=named, adds=adds)


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
        "fedmd": "fedstill.methods.fedmd:FedMD",
        "fedgen": "fedstill.methods.fedgen:FedGEN",
        "fedper": "fedstill.methods.fedper:FedPer",
        "lg-fedavg": "fedstill.methods.lg_fedavg:LGFedAvg",
        "fedcg": "fedstill.methods.fedcg:FedCG",
        "fedzge": "fedstill.methods.fedzge:FedZGE",
        "dense": "fedstill.methods.dense:DENSE",
        "co-boosting": "fedstill.methods.co_boosting:CoBoosting",
        "co-dream": "fedstill.methods.co_dream:CoDream",
        "fl-mrcm": "fedstill.methods.fl_mrcm:FLMRCM",
        "fedad": "fedstill.methods.fedad:FedAD",
        "dsfl": "fedstill.methods.dsfl:DSFL",
        "fd": "fedstill.methods.fd:FD",
        "fedproto": "fedstill.methods.fedproto:FedProto",
        "fedtgp": "fedstill.methods.fedtgp:FedTGP",
        "column-sums": "fedstill.methods.column_sums:ColumnSums",
    },
    base=Method,
)


Method.registry = METHODS


def method_name(method: object) -> str:
    """The name by which a method can be asked for: ``module:Name``, where it has no shorter one.

    Raises:
        ArgumentError: it is no method.
    """
    if not isinstance(method, Method):
        names = ", ".join(place.partition(":")[2] for place in METHODS.own.values())
        raise ArgumentError("method", method, f"one of {names}, or another Method")
    return method.called
