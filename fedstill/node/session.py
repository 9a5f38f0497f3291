"""One run at a node: what it takes up, learns, answers and remembers, in the node's own folder.

What a run needs to go on lies in ``runs/RUN/``: how far its local training has come, and the node's state at
each mark that the server asked it to remember. A server that was stopped goes back to its last mark, and
every node with it: so nothing is trained twice, and what was released already, as the audit log shows, is
neither charged nor counted again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedstill.core.compute import Compute
from fedstill.core.errors import (
    ArgumentError,
    FedstillError,
    ModelError,
    NodeFault,
    OwnDataError,
    QueryRefused,
    RunFolderError,
    TooLarge,
)
from fedstill.core.registry import OWN, first_line
from fedstill.core.run_writer import holding
from fedstill.core.text_format import clip
from fedstill.data import node_data
from fedstill.data.public import PublicData
from fedstill.models import carries_gradient
from fedstill.models.module_utils import parameter_count
from fedstill.models.predictors import file_of, tell_no_failures
from fedstill.node import audit_file, memory_limits, owner_folder, owner_model
from fedstill.node.admission import require_records
from fedstill.node.audit_entries import NODE_DATA
from fedstill.node.gate import Gate
from fedstill.node.initial_training import FirstTraining
from fedstill.node.masked_handler import MaskedHandler
from fedstill.node.message_limits import Sizes, limited
from fedstill.node.network_limits import within_parameters
from fedstill.node.network_setup import architecture, check_local_batch, fitted
from fedstill.node.node import Node
from fedstill.node.node_file import NodeFile
from fedstill.node.node_group import NodeGroup
from fedstill.node.policy import EACH_RUN
from fedstill.node.protection import check_priced, prepare, protect
from fedstill.node.replies import NodeStatus, TrainingProgress
from fedstill.node.request_handler import RequestHandler
from fedstill.node.run_folder import LEARNING, TOLD, RunFolder, of_mark
from fedstill.node.sum_masks import SumMasks
from fedstill.privacy.statement import Statement
from fedstill.protocol.digests import digest, keyed_digest
from fedstill.protocol.method import build_node_side
from fedstill.protocol.payload_kinds import GRADIENTS
from fedstill.protocol.queries import NodeSetting
from fedstill.protocol.run_plan import RunDescription, RunPlan
from fedstill.protocol.secure_aggregation import SumRequest
from fedstill.protocol.wire_format import SCALE, Tensors, size

logger = logging.getLogger("fedstill.node")

MOST_PARTS = 100_000  # of the local training before the first query
SECONDS_BETWEEN = 5.0  # between two saved states of local training


class Session:
    """One run at a node, of its folder and its owner's file.

    Args:
        approved: all that its owner wants asked; None: policy alone decides.
        server: the identity of the server that asks, as ``Host.asker`` has it.

    Raises:
        FedstillError: data or model do not have the plan's spec, or another process is at work on the run.
    """

    def __init__(
        self,
        folder: Path,
        file: NodeFile,
        compute: Compute,
        plan: RunPlan,
        public: PublicData | None,
        approved: RunDescription | None = None,
        server: str = "",
    ) -> None:
        self.approved, self.server = approved, server
        self._told: set[str] = set()  # which of the counts that weigh its answers are on disk
        self.plan, self.compute, self._file, self._folder = plan, compute, file, folder
        with ExitStack() as held:  # whatever fails, nothing stays open or locked
            try:  # before anything of the run is read or changed
                held.enter_context(holding(folder, "node"))
            except RunFolderError as error:
                raise NodeFault(file.name, "join", "another run is at work here") from error
            self._prepare(folder, public, held)
            self._held = held.pop_all()

    def _prepare(self, folder: Path, public: PublicData | None, held: ExitStack) -> None:
        """Load all that the owner's file names, and take up the run with it."""
        file, plan, spec, compute = self._file, self.plan, self.plan.spec, self.compute
        self.kept = RunFolder(folder, file, plan.run)
        if self.approved is not None and self.kept.begun_by not in (None, self.server):
            why = "another server began it: allowed is a new run"  # whose state and answers these are
            raise NodeFault(file.name, "join", f"run {plan.run!r} is known here, and {why}")
        self._most = memory_limits.allowed(file.policy.max_memory, compute.device)
        method = plan.config()
        self.task = spec.make_task()
        try:
            data, _ = node_data.load_node_data(file.data, folder, spec, most=self._most)
            require_records(file.name, file.policy, len(data))
            model = owner_model.make_model(file, folder, spec, self._most)
            owner_folder.require_sound(file, data, model)
            shared = 0 if public is None else len(public)
            memory_limits.check_run(model, spec, len(data), file.local.batch, shared, self._most)
            secret = owner_folder.secret(folder)
            features = owner_model.perceptual(file, folder, spec)
            self.compute = compute = compute.suited(spec.shape, model, exact=method.exact)
            about = (compute, spec.shape, file.seed, f"model of {file.name}")
            network = fitted(model, *about, parted=method.needs().split, vocabulary=spec.vocabulary)
            if method.learns:
                check_local_batch(network, file.local, spec.shape, self.task.form, "model")
        except (QueryRefused, TooLarge):  # what the plan asks for is too much
            raise
        except FedstillError as error:
            raise OwnDataError(str(error)) from error
        self.audit = audit_file.open_audit(file, folder)
        held.callback(self.audit.close)
        gate = Gate(file.name, file.policy, self.audit, plan.run, NODE_DATA)
        gate.approved = self.approved
        gate.outputs = self.task.output_shape(spec.shape)
        self.node = Node(file.name, data.to(compute.device), network, gate, file.seed)
        placed = None if public is None else public.to(compute.device)
        features = None if features is None else compute.place(features)
        at = NodeSetting(
            self.task, file.local, compute, placed, features, spec.schema, plan.secure_aggregation
        )
        self.setting = at
        side = build_node_side(method, self.setting)
        for name, query in side.queries.items():
            if (rule := query.sum_fault(file.local.optimizer)) is not None:
                raise QueryRefused(file.name, name, rule)
        self.side = within_parameters(side, file.policy.max_parameters, file.name)
        examples = keyed_digest(secret, digest("data", {"inputs": data.inputs, "targets": data.targets}))
        told = {"plan": plan.to_dict(), "data": examples, "model": architecture(network) + file_of(network)}
        self.audit.require_sound()
        self._open(method, secret, told)

    def _open(self, config: Any, secret: int, told: Mapping[str, Any]) -> None:
        """Put the node under its protection, and take up the run where it stopped."""
        file, run = self._file, self.plan.run
        own = (file.privacy, self.side, config, self.setting)
        parts = 0 if self.side.first is None else self.side.first.of
        if parts > MOST_PARTS:  # each takes a step at least: it would learn for ever
            rule = f"rounds: {MOST_PARTS} at most, and the plan parts local training into {parts}"
            raise QueryRefused(file.name, "join", rule)
        try:
            protect(self.node, *own, secret=secret, salt=self.kept.salt(), group=file.data.group)
        except (ArgumentError, ModelError) as error:  # they quote the owner's model and options
            raise OwnDataError(str(error)) from error
        prepare(self.side, [self.node])
        check_priced(self.node)
        for module in self.node.modules.values():
            self.compute.place(module)
        self.training = FirstTraining(self.node, self.side.first, self.task, file.local, self.compute)
        self._last = {file.name: -1}
        masked = (self._folder, file.name, file.policy, self.plan, self.setting.public)
        self.masks = SumMasks.from_folder(*masked) if self.plan.secure_aggregation else None
        budgets = self.node.gate.budgets
        if self.masks is not None or (budgets is not None and budgets.mechanism.protects):
            tell_no_failures(self.node.model)  # that it fails would leave beside them, unnoised and unmasked
        self.sizes = Sizes(self.node, self.setting.public, self.plan.spec, self._most)
        self.handler = self._new_handler()
        asked = any(query.differentiable for query in self.side.queries.values())
        self._through = not asked or carries_gradient(self.node.model, self.plan.spec.shape)
        has_left = self.audit.totals.has_charged(run)
        if file.policy.approve == EACH_RUN and has_left and not self.kept.known:
            rule = f"approve: run {run!r} was approved once, has had answers, and is no longer in runs/"
            raise QueryRefused(file.name, "join", rule)
        binding = "" if budgets is None else budgets.mechanism.binding
        if other := self.kept.bind({**told, "options": binding}, has_left, self.server):
            logger.warning("run %s was begun with another %s", run, other)
            # No more is told: whether the records are what they were is the owner's to know.
            changed = "it was begun otherwise: allowed is a new run"
            raise NodeFault(file.name, "join", f"run {run!r} is known here, and {changed}")
        self._take_up()

    def close(self) -> None:
        """Let others at this run, and other runs at this node."""
        self._held.close()

    def about(self) -> NodeStatus:
        """What a server may know beforehand."""
        gate = self.node.gate
        limit = gate.policy.max_queries
        return NodeStatus(
            objections=self.objections(),
            max_queries=max(limit - self._elsewhere(), 0) if limit else None,
            learned=self.training.done,
            marks=tuple(self.kept.marks()),
            last=self._last[self.node.name],
            model=type(self.node.model).__name__,
            parameters=parameter_count(self.node.model),
            architecture=architecture(self.node.model),
            frozen=self.node.is_frozen,
            privacy=Statement() if gate.budgets is None else gate.budgets.mechanism.statement(),
            notes=tuple(self.side.notes),
        )

    def learn(self, seconds: float) -> TrainingProgress:
        """Go on with the local training that the method wants first, for some seconds.

        How well it goes is nobody's to know, nor how many steps there are, which would tell the number of
        examples: only how far it has come, in tens of percent, is told.
        """
        if not self.training.done:
            # So short that it counts steps, none is.
            most = min(60, self.node.gate.policy.max_seconds or 60)
            before = self.training.percent
            if self.training.go_on(time.monotonic() + min(max(seconds, 1.0), most), self._save_now_and_then):
                self.training.forget_optimizers()
                # Before anything leaves: it would not come out the same.
                self.kept.save(LEARNING, self._state(True))
                self.training.done = True
                logger.info("local training is done: %d steps", self.training.steps)
            elif self.training.percent > before:
                logger.info("local training: %d %% done", self.training.percent)
        return TrainingProgress(self.training.percent, self.training.done)

    def _save_now_and_then(self) -> None:
        if time.monotonic() - self.kept.saved > SECONDS_BETWEEN:
            self.kept.save(LEARNING, self._state(self.training.done))

    def answer(
        self, name: str, number: int, tensors: Tensors, differentiable: bool, call: SumRequest | None = None
    ) -> Tensors:
        """What the gate lets out in answer to a query: named tensors.

        Raises:
            QueryRefused: by the owner's policy, or because no sound server asks this.
            QueryMismatch: the number was used with other content.
            NodeFault: the node's own training is not done yet.
        """
        query = self.side.queries.get(name)
        if query is None:
            raise ArgumentError("query", clip(name), f"one of {', '.join(self.side.queries)}")
        if not self.training.done:
            raise NodeFault(self.node.name, name, "its local training is not done yet")
        objection = self.objections().get(name)
        if objection is not None:
            raise QueryRefused(self.node.name, name, objection)
        shape = self.node.data.inputs.shape[1:]
        self.kept.require(name)
        start = time.perf_counter()
        with limited(self.node.name, name, self.node.gate.policy.max_seconds):
            self.node.gate.inspect(name, tensors, query.sends, shape)
            self.sizes.require(query, tensors)
            arrived = self.compute.here(tensors)
            (release,) = self.handler.answer(name, number, arrived, differentiable, call)
            if (
                set(self.node.released_counts) != self._told
            ):  # on disk before it leaves: no process weighs by others
                self.kept.save(TOLD, self.node.released_counts)
                self._told = set(self.node.released_counts)
        self._log(name, number, release, start)
        return release

    def pull_back(self, number: int, tensors: Tensors, call: SumRequest | None = None) -> Tensors:
        """The gradients that the gate lets out, by the names of the query's inputs.

        Raises:
            QueryRefused: gradients that are not finite.
            QueryMismatch: the query was pulled with other gradients, or is not known any more.
        """
        start, name = time.perf_counter(), self.node.name
        self.kept.require("gradient")
        with limited(name, "gradient", self.node.gate.policy.max_seconds):
            names = (key for key in tensors if not key.endswith(SCALE))
            self.node.gate.inspect("gradient", tensors, dict.fromkeys(names, GRADIENTS), ())
            release = self.handler.pull_back(number, {name: self.compute.here(tensors)}, call)[name]
        self._log("gradient", number, release, start)
        return release

    def remember(self, mark: int) -> None:
        """Keep the state as it is before query ``mark``, on disk.

        Raises:
            NodeFault: the node is not there: still learning, or further already; or a query failed while
                it learned for it.
        """
        self.handler.require_whole("save_checkpoint")
        if not self.training.done or not self._last[self.node.name] + 1 <= mark:
            raise NodeFault(self.node.name, "save_checkpoint", f"it is not before query {mark}")
        self.kept.save_mark(mark, self._state(True))

    def recall(self, mark: int) -> None:
        """Go back to the state before query ``mark``; 0 is before the first one.

        Raises:
            NodeFault: that state is not kept.
        """
        name = of_mark(mark) if mark else LEARNING
        state = self.kept.load(name)
        if state is None:
            kept = f"has {', '.join(map(str, self.kept.marks())) or 'none'}"
            raise NodeFault(self.node.name, "load_checkpoint", f"mark {mark} is not kept here: {kept}")
        self._load(state, name)
        self.kept.forget_after(mark)
        self._last[self.node.name] = mark - 1
        self.handler = self._new_handler()
        logger.info("back at query %d", mark)

    # --- the rest -----------------------------------------------------------------------------------

    def objections(self) -> dict[str, str]:
        """The rule by which each query that will never be answered here is refused."""
        limit = self.node.gate.policy.max_queries
        if limit and self._elsewhere() >= limit:
            return dict.fromkeys(self.side.queries, f"max_queries: {limit}, over all runs")
        rules = owner_folder.objections(self._file, self._through, self.side.queries)
        if isinstance(self.handler, MaskedHandler):
            rules = {**self.handler.objections(), **rules}
        gate, queries = self.node.gate, self.side.queries
        priced = {name: gate.objection(query) for name, query in queries.items() if name not in rules}
        return {**rules, **{name: rule for name, rule in priced.items() if rule is not None}}

    def _elsewhere(self) -> int:
        """Queries about these data that other runs have answered."""
        spent = self.audit.spending(DATA, self.plan.run)
        return spent.queries - spent.queries_run

    def _new_handler(self) -> RequestHandler:
        about = (Group([self.node]), self.side, self.compute, self._last, self.plan.wire)
        return RequestHandler(*about) if self.masks is None else MaskedHandler(self.masks, *about)

    def _log(self, name: str, number: int, release: Tensors, start: float) -> None:
        left, seconds = sum(map(size, release.values())), time.perf_counter() - start
        logger.info("number %d, %s: %d bytes left, %.3f s", number, name, left, seconds)

    def _state(self, done: bool) -> dict[str, Any]:
        return {"steps": self.training.steps, "learned": done, "node": self.node.state_dict()}

    def _load(self, state: Any, name: str) -> None:
        """Go on from a state that was kept under a name; :class:`RunFolderError` where it is damaged."""
        try:
            self.training.take_up(state["steps"], state["learned"])
            self.node.load_state_dict(state["node"])
        except OWN as error:
            told = f"{type(error).__name__}: {first_line(error)}"
            raise RunFolderError(f"{self.kept.path / name} is no state of this node: {told}") from error

    def _take_up(self) -> None:
        """Where an earlier process stopped: in local training, or behind it. Marks are the server's."""
        self.kept.marks()  # a file that is none is told of before anything is answered
        self.node.released_counts = self.kept.load(TOLD) or {}
        self._told = set(self.node.released_counts)
        budgets = self.node.gate.budgets
        if (state := self.kept.load(LEARNING)) is not None:
            self._load(state, LEARNING)
        elif self.training.wanted and budgets is not None and budgets.trained():
            # Trained once more, it would be another model, with the same draws on other last digits.
            lost = f"answers of run {self.plan.run!r} have left, and their model ({LEARNING}) is gone"
            raise NodeFault(self.node.name, "join", f"{lost}: it can be asked in a new run alone")
        elif self.training.done:  # to go back to: nothing is trained before the first query
            self.kept.save(LEARNING, self._state(True))
