"""Check of a custom method: :func:`check_method` runs it in a small federation and reports what it breaks.

Each check compares runs that must be equal: with the same seed, with stacked nodes, after a stop, and without
labels of the public data. Others compare what was sent and released with the declarations.
"""

from __future__ import annotations

import inspect
import math
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.core.checkpoint import load_state, save_state
from fedstill.core.compute import EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError, MethodCheckError
from fedstill.data.in_memory_data import InMemoryData, InMemorySplit
from fedstill.data.public import PublicData
from fedstill.federation.inprocess import InProcess
from fedstill.federation.responses import Responses
from fedstill.methods._server import Server
from fedstill.models import build
from fedstill.models.module_utils import deep_copy
from fedstill.node import local_training
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.protocol.method import Method
from fedstill.protocol.needs import unmet_need
from fedstill.protocol.payload_kinds import INDICES, INPUTS
from fedstill.protocol.queries import Query
from fedstill.runs.build import Setting, make_nodes
from fedstill.runs.simulation import Simulation
from fedstill.runs.spec import EvaluationConfig, NodesConfig, RunSpec, StudentConfig
from fedstill.tasks.classification import Classification

SHAPE, CLASSES = (1, 8, 8), 10
SIZES = (40, 24, 33)  # unequal, and none a multiple of the batch
NEAR = 1e-4  # largest difference between weights of stacked and single nodes
UNLIKE = ("seconds", "engine")  # results that differ between equal runs

MakeSetting = Callable[[], Setting]


def check_method(method: Method | type[Method], make_setting: MakeSetting | None = None) -> None:
    """Check a method in a small federation of three nodes, in some seconds.

    The checks are:

    - ``run``: it runs to its end, and its losses are numbers.
    - ``times`` and ``rows``: no query is sent more often, or about more inputs, than it declares, and each
      declared query is sent.
    - ``span``: functions of queries take the steps of the local training that their ``span`` declares, which
      privacy mechanisms charge. Queries without ``depends_on_records`` need not declare it, as no mechanism
      can protect them.
    - ``records``: no function of a query reads the node's records if ``depends_on_records`` is ``()``, except
      in queries with ``trains``.
    - ``state``: the server's state is equal after it was saved and restored.
    - ``determinism``: a second run is equal, whatever torch's global random generator holds.
    - ``stacked``: nodes that are computed in one call reach the same weights.
    - ``resume``: a run that stops after a step, or within one, resumes to equal results.
    - ``public labels``: results do not depend on labels of the public data unless the method needs them.

    Args:
        method: the method with few and small rounds, or its class.
        make_setting: returns a new setting with this method at each call, for methods that need other data or
            networks; None: images of 8 x 8 pixels in ten classes.

    Raises:
        MethodCheckError: naming each check that fails, and why.
        ArgumentError: the method cannot learn from images, and there is no ``make_setting``.

    Example::

        def test_method() -> None:
            fedstill.check_method(EntropyFedMD(rounds=3))
    """
    checked = method() if isinstance(method, type) else method
    title = getattr(checked, "title", type(checked).__name__)
    if make_setting is None:
        reason = unmet_need(checked.needs(), Classification(CLASSES))
        if reason is not None:
            raise ArgumentError("make_setting", None, f"a function that returns a setting: {reason}")

        def make_setting() -> Setting:
            return _small_setting(checked)

    with _one_thread(), _steady_adam():
        try:
            subject = _Subject(checked, make_setting, _run(make_setting()))
        except Exception as error:
            raise MethodCheckError(title, {"run": _describe(error, checked)}) from error
        faults = {}
        for name, check in CHECKS.items():
            try:
                fault = check(subject)
            except Exception as error:  # of the method: the others may still pass
                fault = _describe(error, checked)
            if fault is not None:
                faults[name] = fault
    if faults:
        raise MethodCheckError(title, faults)


# --- runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SentQuery:
    """One query of a run.

    Args:
        query: its declaration.
        nodes: nodes that responded.
        rows: number of inputs that it is about.
        reads_records: a node's function has read its records.
        declared_span: part of the local training that it declares; None: none.
        trained_spans: parts that each node's model has trained for it.
    """

    query: Query
    nodes: tuple[str, ...]
    rows: int
    reads_records: bool
    declared_span: Span | None
    trained_spans: Mapping[str, Sequence[Span]]


class _Stopped(Exception):
    """The run stops here, as if its process ended."""


class _RecordedFederation(InProcess):
    """Federation that notes its queries, and stops the run after a number of them."""

    sent: list[_SentQuery]
    stop_after: float = math.inf

    def query(
        self, query: str, *, nodes: Sequence[str] | None = None, number: int | None = None, **inputs: Any
    ) -> Responses:
        with _recorded_spans() as spans:
            responses = super().query(query, nodes=nodes, number=number, **inputs)
        declared = self.queries[query]
        span = None if declared.span is None else declared.span(inputs)
        rows = [len(inputs[name]) for name, kind in declared.sends.items() if kind in (INPUTS, INDICES)]
        reads = any(self._members[name].records_read for name in responses.nodes if name in self._members)
        self.sent.append(_SentQuery(declared, responses.nodes, max(rows, default=0), reads, span, spans))
        if len(self.sent) >= self.stop_after:
            raise _Stopped
        return responses


class _CheckedRun(Simulation):
    """Run that saves a checkpoint after each step, and can stop after a step or after a query."""

    def __init__(
        self, setting: Setting, *, stop_step: float = math.inf, stop_query: float = math.inf
    ) -> None:
        self.sent: list[_SentQuery] = []
        self.stop_step, self.stop_query = stop_step, stop_query
        super().__init__(setting)

    def _federation(self, groups: Sequence[Sequence[Node]]) -> InProcess:
        link = self.setting.spec.link
        federation = _RecordedFederation(self.nodes, groups, self.side, self.compute, link)
        federation.sent, federation.stop_after = self.sent, self.stop_query
        return federation

    def _run_steps(self, server: Server) -> None:
        while server.completed_steps < server.total_steps:
            losses = dict(server.step())
            self.records.add_metrics({"step": server.completed_steps, "losses": losses})
            self.save_state()
            if server.completed_steps >= self.stop_step:
                raise _Stopped

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The student and the nodes' networks, by name."""
        roles = {f"{role} of {node.name}": node.modules[role] for node in self.nodes for role in node.modules}
        return {"student": self.student, **roles}


@dataclass(frozen=True)
class _Outcome:
    run: _CheckedRun
    results: Mapping[str, Any]

    @property
    def losses(self) -> list[Any]:
        """Losses of each step."""
        return [line["losses"] for line in self.run.records.metrics if "losses" in line]


def _run(setting: Setting, out: Path | None = None) -> _Outcome:
    run = _CheckedRun(setting)
    results = run.run(out)
    return _Outcome(run, {key: value for key, value in results.items() if key not in UNLIKE})


@dataclass(frozen=True)
class _Subject:
    """A method with its finished run."""

    method: Method
    make_setting: MakeSetting
    base: _Outcome


# --- checks: each returns the fault, or None --------------------------------------------------------------


def _check_losses(subject: _Subject) -> str | None:
    for step, losses in enumerate(subject.base.losses):
        for name, loss in losses.items():
            if not (isinstance(loss, int | float) and math.isfinite(loss)):
                return f"loss {name!r} of step {step} is {loss!r} (expected a finite number)"
    return None


def _check_times(subject: _Subject) -> str | None:
    """Check the declared numbers of queries, which nodes with a limit compare with it in advance."""
    sent = Counter((each.query.name, node) for each in subject.base.run.sent for node in each.nodes)
    for name, query in subject.base.run.side.queries.items():
        most = max((count for (sent_name, _), count in sent.items() if sent_name == name), default=0)
        if query.times and most > query.times:
            return f"query {name} was sent {most} times (expected {query.times}, as declared)"
        if query.times and not most:
            return f"query {name} was never sent (expected no declaration, as nodes may refuse it)"
    return None


def _check_rows(subject: _Subject) -> str | None:
    for each in subject.base.run.sent:
        if each.query.rows and each.rows > each.query.rows:
            return (
                f"query {each.query.name} was about {each.rows} inputs (expected {each.query.rows} at most)"
            )
    return None


def _check_span(subject: _Subject) -> str | None:
    run = subject.base.run
    totals = {node.name: run.setting.spec.nodes.local.steps(len(node.data)) for node in run.nodes}
    for each in run.sent:
        declared = each.declared_span
        if declared is None and each.query.depends_on_records is None:
            continue  # no mechanism protects it, so that none charges its training
        for node in each.nodes:
            spans = each.trained_spans.get(node, ())
            taken = [step for span in spans for step in span.steps(totals[node])]
            if taken != ([] if declared is None else list(declared.steps(totals[node]))):
                listed = ", ".join(map(str, spans)) or "nothing"
                expected = f"expected span to return it, and not {declared}"
                return f"query {each.query.name} trains {listed} of the local training ({expected})"
    return None


def _check_records(subject: _Subject) -> str | None:
    for each in subject.base.run.sent:
        query = each.query
        if each.reads_records and query.depends_on_records == () and query.releases and not query.trains:
            expected = "expected the tensors that depend on them in depends_on_records"
            return f"query {query.name} reads the node's records ({expected})"
    return None


def _check_state(subject: _Subject) -> str | None:
    """Save the state, restore it in a new server, and compare."""
    saved = subject.base.run.server.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        save_state(path, saved)
        loaded = load_state(path)
    run = _CheckedRun(subject.make_setting())
    server = run.make_server([[node] for node in run.nodes], deep_copy(run.student))
    server.load_state_dict(loaded)
    return _difference(saved["method"], server.state_dict()["method"], "state")


def _check_determinism(subject: _Subject) -> str | None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)  # which no result may depend on
        again = _run(subject.make_setting())
    return _unequal(again, subject.base, "a second run")


def _check_stacked(subject: _Subject) -> str | None:
    setting = subject.make_setting()
    engine = replace(setting.spec.engine, batching="stacked")
    stacked = _run(replace(setting, spec=replace(setting.spec, engine=engine)))
    for key in ("bytes", "queries_by_name", "releases", "iterations"):
        if stacked.results[key] != subject.base.results[key]:
            return f"{key} are {stacked.results[key]} (expected {subject.base.results[key]})"
    return _different_networks(stacked, subject.base, "stacked nodes", NEAR)


def _check_resume(subject: _Subject) -> str | None:
    steps, queries = subject.base.run.server.total_steps, len(subject.base.run.sent)
    stops: list[tuple[str, dict[str, float]]] = []
    if steps > 1:
        stops.append(("a run that stopped after a step", {"stop_step": (steps + 1) // 2}))
    if queries > 1:
        stops.append(("a run that stopped after a query", {"stop_query": max(3 * queries // 4, 1)}))
    for name, stop in stops:
        with tempfile.TemporaryDirectory() as folder:
            try:
                _CheckedRun(subject.make_setting(), **stop).run(Path(folder))
            except _Stopped:
                fault = _unequal(_run(subject.make_setting(), Path(folder)), subject.base, name)
            else:
                fault = f"{name} did not stop: it sends other queries than an unbroken run"
        if fault is not None:
            return fault
    return None


def _check_public_labels(subject: _Subject) -> str | None:
    needs, setting = subject.method.needs(), subject.make_setting()
    if needs.public_labels or setting.public is None:
        return None
    blind = _run(replace(setting, public=replace(setting.public, labels=None)))
    return _unequal(blind, subject.base, "a run without labels of the public data")


CHECKS: Mapping[str, Callable[[_Subject], str | None]] = {
    "run": _check_losses,
    "times": _check_times,
    "rows": _check_rows,
    "span": _check_span,
    "records": _check_records,
    "state": _check_state,
    "determinism": _check_determinism,
    "stacked": _check_stacked,
    "resume": _check_resume,
    "public labels": _check_public_labels,
}


# --- comparisons ------------------------------------------------------------------------------------------


def _unequal(one: _Outcome, other: _Outcome, subject: str) -> str | None:
    """Return the first difference between two runs, or None."""
    for step, (mine, theirs) in enumerate(zip(one.losses, other.losses, strict=False)):
        if mine != theirs:
            return f"{subject} has the losses {mine} in step {step} (expected {theirs})"
    for key, value in other.results.items():
        if one.results.get(key) != value and key != "public":
            return f"{subject} has another {key} in its results"
    return _different_networks(one, other, subject, 0.0)


def _different_networks(one: _Outcome, other: _Outcome, subject: str, tolerance: float) -> str | None:
    networks = one.run.networks
    for name, network in other.run.networks.items():
        tensors = networks[name].state_dict()
        for key, value in network.state_dict().items():
            distance = float((tensors[key].double() - value.double()).abs().max()) if value.numel() else 0.0
            if not distance <= tolerance:
                return f"{subject} differ by {distance:.3g} in {key} of the {name} (expected {tolerance:g})"
    return None


def _difference(one: Any, other: Any, name: str) -> str | None:
    """Return the first difference between two states, or None."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
        return None if same else f"{name} has other values once restored"
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return f"{name} has {sorted(map(str, other))} once restored (expected {sorted(map(str, one))})"
        parts = [_difference(one[key], other[key], f"{name}.{key}") for key in one]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{name} has {len(other)} entries once restored (expected {len(one)})"
        parts = [_difference(*pair, f"{name}[{k}]") for k, pair in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else f"{name} is {other!r} once restored (expected {one!r})"
    return next((part for part in parts if part is not None), None)


def _describe(error: Exception, method: Method) -> str:
    """Return the message of an error, and the line of the method's file where it happened."""
    text = " ".join(str(error).split())
    text = text if isinstance(error, FedstillError) else f"{type(error).__name__}: {text}"
    file, line = inspect.getfile(type(method)), 0
    cause: BaseException | None = error
    while cause is not None:  # an error at a node is the cause of the one at the server
        own = [frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == file]
        line = (own[-1] or line) if own else line
        cause = cause.__cause__
    return f"{text} ({Path(file).name}, line {line})" if line else text


# --- the federation ---------------------------------------------------------------------------------------


def _small_setting(method: Method) -> Setting:
    needs, images = method.needs(), _images(37, 4)
    public = PublicData("made", images.inputs, images.targets)
    spec = RunSpec(
        data=InMemoryData(),
        split=InMemorySplit(nodes=len(SIZES)),
        nodes=NodesConfig(models=("mlp:12",), local=LocalConfig(epochs=2, batch=16, lr=5e-3)),
        method=method,
        student=StudentConfig(model="mlp:12"),
        engine=EngineConfig(batching="one-by-one"),
        evaluation=EvaluationConfig(centralized=False, samples=2),
    )
    nodes = make_nodes(
        [_images(size, index) for index, size in enumerate(SIZES)],
        [build("mlp:12", SHAPE, CLASSES, 0, index) for index in range(len(SIZES))],
        policies=[PolicyConfig(outputs_only=False)] * len(SIZES),
    )
    return Setting(
        spec=spec,
        task=Classification(CLASSES),
        nodes=nodes,
        student=build("mlp:12", SHAPE, CLASSES, 0, "student"),
        test=_images(150, 3),
        public=public if needs.public or needs.public_labels else None,
    )


def _images(count: int, seed: int) -> TensorData:
    """Return dark images with one bright row or column, which is their class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    x = -0.8 + 0.2 * torch.rand(count, *SHAPE, generator=generator)
    for image, label in zip(x, y.tolist(), strict=True):
        image[0, label if label < 8 else slice(None), slice(None) if label < 8 else label - 5] = 0.8
    return TensorData(x, y)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: equal runs are then equal to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _recorded_spans() -> Iterator[Mapping[str, Sequence[Span]]]:
    """Record the parts of the local training that each node's model trains."""
    train, spans = local_training.train, defaultdict[str, list[Span]](list)

    def recorded(nodes: Sequence[Node], *arguments: Any, **options: Any) -> int:
        for node in nodes if "model" in options["roles"] else ():
            spans[node.name].append(options["span"])
        return train(nodes, *arguments, **options)

    local_training.train = recorded
    try:
        yield spans
    finally:
        local_training.train = train


@contextmanager
def _steady_adam() -> Iterator[None]:
    """Make Adam's steps follow the gradients, so that runs with other rounding stay near each other.

    Adam takes a whole step for any gradient, also for rounding noise in place of a gradient of 0. With an eps
    between both, such a weight stays where it is.
    """
    make = torch.optim.Adam.__init__

    def steady(self: torch.optim.Adam, params: Any, lr: Any = 1e-3, **options: Any) -> None:
        make(self, params, lr, **{"eps": 1e-3, **options})

    torch.optim.Adam.__init__ = steady  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.optim.Adam.__init__ = make  # type: ignore[method-assign]
