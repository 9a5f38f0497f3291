"""One run at a node: joining, training, responding and checkpoints, in the node's folder.

``runs/RUN/`` holds the state that a resumed run needs: progress of local training, and a checkpoint of the
node for each query at which the server asked for one. A stopped server returns to its last checkpoint, and
every node with it. So nothing is trained twice, and releases that the audit log already holds are neither
charged nor counted again.
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
    MemoryLimitExceeded,
    ModelError,
    NodeDataError,
    NodeFault,
    QueryRefused,
    RunFolderError,
)
from fedstill.core.registry import USER_CODE_ERRORS, first_line
from fedstill.core.run_writer import lock_folder
from fedstill.core.text_format import to_printable_line
from fedstill.data import node_data
from fedstill.data.public import PublicData
from fedstill.models import carries_gradient
from fedstill.models.module_utils import parameter_count
from fedstill.models.predictors import file_fingerprint, return_nan_on_failure
from fedstill.node import folder_check, limits, model_setup, owner_folder
from fedstill.node.admission import (
    NODE_RULES,
    SIZE_RULES,
    QueryFacts,
    RunSizes,
    SizeFacts,
    first_reason,
    min_records,
    refuse,
    require,
    training_parts,
)
from fedstill.node.audit_entries import NODE_DATA
from fedstill.node.audit_log import AuditLog
from fedstill.node.features import compute_own_features, load_run_backbone
from fedstill.node.gate import Gate
from fedstill.node.initial_training import InitialTraining
from fedstill.node.limits import enforce_limits, limit_parameters_of_queries
from fedstill.node.model_setup import architecture_hash, prepare_model, require_trainable_batch_size
from fedstill.node.node import Node
from fedstill.node.node_file import NodeFile
from fedstill.node.node_group import NodeGroup
from fedstill.node.plain_releases import PlainReleases
from fedstill.node.policy import EACH_RUN
from fedstill.node.protection import protect, require_unchanged_data, run_uncharged_preparation
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.replies import NodeStatus, TrainingProgress
from fedstill.node.request_handler import RequestHandler
from fedstill.node.run_folder import TRAINING_STATE, RunFolder, checkpoint_name
from fedstill.node.secure_aggregation import MaskedReleases, SumMasks
from fedstill.privacy.statement import PrivacyStatement
from fedstill.protocol.digests import digest, keyed_digest
from fedstill.protocol.method import build_node_side
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.run_plan import RunDescription, RunPlan
from fedstill.protocol.secure_aggregation import SumRequest
from fedstill.protocol.wire_format import Tensors, tensor_bytes

logger = logging.getLogger("fedstill.node")

SECONDS_BETWEEN_SAVES = 5.0  # between two saved states of local training


class Session:
    """One run at a node, described by its folder and ``node.toml``.

    Args:
        folder: the node's folder.
        file: the node's configuration.
        compute: device and precision.
        plan: the server's plan of the run.
        public: public data, or None.
        approved: description that the owner approved; None: policy alone decides.
        server: identity of the server, as in ``NodeService.server_fingerprint``.
        audit: the node's audit log, which the caller closes.

    Raises:
        FedstillError: data or model do not fit the plan, or another process works on the run.
    """

    def __init__(
        self,
        folder: Path,
        file: NodeFile,
        compute: Compute,
        plan: RunPlan,
        public: PublicData | None,
        approved: RunDescription | None,
        server: str,
        audit: AuditLog,
    ) -> None:
        self.approved, self.server, self.audit = approved, server, audit
        self.plan, self.compute, self._file, self._folder = plan, compute, file, folder
        with ExitStack() as resources:  # release locks and files on any failure
            try:
                resources.enter_context(lock_folder(folder, "node"))
            except RunFolderError as error:
                raise NodeFault(file.name, "join", "another run is active here") from error
            self._load_and_start(folder, public, resources)
            self._open_resources = resources.pop_all()

    def _load_and_start(self, folder: Path, public: PublicData | None, resources: ExitStack) -> None:
        """Load everything that the configuration names, and start or resume the run."""
        file, plan, spec, compute = self._file, self.plan, self.plan.model_spec, self.compute
        self.run_folder = RunFolder(folder, file, plan.run)
        if self.approved is not None and self.run_folder.begun_by not in (None, self.server):
            reason = "another server began it: start a new run"
            raise NodeFault(file.name, "join", f"run {plan.run!r} exists here, but {reason}")
        self._max_memory = limits.allowed_memory_bytes(file.policy.max_memory, compute.device)
        method = plan.make_method()
        self.task = spec.make_task()
        try:
            backbone = load_run_backbone(file, folder, plan, compute)
            data, _ = node_data.load_node_data(file.data, folder, plan.spec, max_bytes=self._max_memory)
            refuse(file.name, "join", min_records(file.policy, len(data)))
            data_digest = digest("data", {"inputs": data.inputs, "targets": data.targets})
            if backbone is not None:
                data = compute_own_features(data, backbone, file, folder, public, compute)
            model = model_setup.make_model(file, folder, spec, self._max_memory)
            folder_check.require_valid(file, data, model, self.task)
            public_count = 0 if public is None else len(public)
            limits.check_run(model, spec, len(data), file.local.batch, public_count, self._max_memory)
            secret = owner_folder.read_secret(folder)
            perceptual = model_setup.load_perceptual(file, folder, plan.spec)
            self.compute = compute = compute.for_network(
                spec.shape, model, force_float32=method.needs_float32
            )
            model_arguments = (compute, spec.shape, file.seed, f"model of {file.name}")
            network = prepare_model(
                model, *model_arguments, split_=method.needs().split_models, vocabulary=spec.vocabulary
            )
            if method.trains_models:
                require_trainable_batch_size(network, file.local, spec.shape, self.task.form, "model")
        except (QueryRefused, MemoryLimitExceeded):  # the plan's own fault
            raise
        except FedstillError as error:
            raise NodeDataError(str(error)) from error
        gate = Gate(file.name, file.policy, self.audit, plan.run, NODE_DATA)
        gate.ledger.approved = self.approved
        gate.output_shape = self.task.output_shape(spec.shape)
        self.node = Node(file.name, data.to(compute.device), network, gate, file.seed)
        perceptual = None if perceptual is None else compute.to_device(perceptual)
        self.setting = NodeSetting(
            *(self.task, file.local, compute, None if public is None else public.to(compute.device)),
            *(perceptual, spec.schema, plan.secure_aggregation, plan.recalibration),
            model_setup.make_student(file, plan, self._max_memory),
        )
        side = build_node_side(method, self.setting)
        for name, query in side.queries.items():
            refuse(file.name, name, query.sum_fault(file.local.optimizer))
            refuse(file.name, name, None if self.approved is None else self.approved.release_fault(query))
        self.side = limit_parameters_of_queries(side, file.policy.max_parameters, file.name)
        run_facts = {
            "plan": plan.to_dict(),
            "data": keyed_digest(secret, data_digest),
            "model": architecture_hash(network) + file_fingerprint(network, perceptual),
        }
        self.audit.require_sound()
        self._protect_and_resume(method, secret, run_facts)

    def _protect_and_resume(self, config: Any, secret: int, run_facts: Mapping[str, Any]) -> None:
        """Set up the node's privacy protection, and resume an earlier run."""
        file, run = self._file, self.plan.run
        privacy_arguments = (file.privacy, self.side, config, self.setting)
        part_count = 0 if self.side.initial_training is None else self.side.initial_training.parts
        refuse(file.name, "join", training_parts(part_count))
        try:
            protect(
                self.node,
                *privacy_arguments,
                secret=secret,
                salt=self.run_folder.salt(),
                group=file.data.group,
            )
        except (ArgumentError, ModelError) as error:  # the messages quote the owner's model and options
            raise NodeDataError(str(error)) from error
        run_uncharged_preparation(self.side, [self.node])
        require_unchanged_data(self.node)
        for module in self.node.modules.values():
            self.compute.to_device(module)
        self.training = InitialTraining(
            self.node, self.side.initial_training, self.task, file.local, self.compute
        )
        self.releases = self._make_releases()
        budgets = self.node.gate.budgets
        if self.plan.secure_aggregation or (budgets is not None and budgets.mechanism.protects):
            return_nan_on_failure(self.node.model)  # a reported failure would bypass noise and masks
        self.sizes = RunSizes(self.node.modules, self.setting.public, self.plan.model_spec, self._max_memory)
        self.handler = self._new_handler()
        is_differentiable = any(query.differentiable for query in self.side.queries.values())
        self._passes_gradients = not is_differentiable or carries_gradient(
            self.node.model, self.plan.model_spec.shape
        )
        has_released = self.audit.totals.has_charged(run)
        if file.policy.approve == EACH_RUN and has_released and not self.run_folder.has_begun:
            rule = (
                f"approve: run {run!r} was approved once, has released responses, and is no longer in runs/"
            )
            refuse(file.name, "join", rule)
        binding = "" if budgets is None else budgets.mechanism.setup_hash
        if difference := self.run_folder.bind({**run_facts, "options": binding}, has_released, self.server):
            logger.warning("run %s was begun with another %s", run, difference)
            # The server gets no details: only the owner may know whether the records changed.
            message = "it was begun with another setup: start a new run"
            raise NodeFault(file.name, "join", f"run {run!r} exists here, but {message}")
        self._resume()

    def _make_releases(self) -> PlainReleases | MaskedReleases:
        if not self.plan.secure_aggregation:
            return PlainReleases()
        file, setting = self._file, self.setting
        masks = SumMasks.from_folder(self._folder, file.name, file.policy, self.plan, setting.public)
        return MaskedReleases(masks, self.node.gate, self.side, self.run_folder)

    def close(self) -> None:
        """Release the locks of this run and node."""
        self._open_resources.close()

    def status(self) -> NodeStatus:
        """Return the node's status for the server."""
        gate = self.node.gate
        max_queries = gate.policy.max_queries
        return NodeStatus(
            refused_queries={q: to_printable_line(rule) for q, rule in self.rules_by_refused_query().items()},
            max_queries=max(max_queries - self._count_queries_in_other_runs(), 0) if max_queries else None,
            is_trained=self.training.is_done,
            checkpoints=tuple(self.run_folder.checkpoints()),
            last_query=gate.ledger.last_number,
            model=type(self.node.model).__name__,
            parameters=parameter_count(self.node.model),
            architecture=architecture_hash(self.node.model),
            is_frozen=self.node.is_frozen,
            privacy=PrivacyStatement() if gate.budgets is None else gate.budgets.mechanism.statement(),
            notes=tuple(self.side.notes),
        )

    def train_locally(self, seconds: float) -> TrainingProgress:
        """Continue the local training before the first query for some seconds.

        The reply holds the progress in tens of percent only. Losses are private, and the number of steps
        would reveal the number of examples.
        """
        if not self.training.is_done:
            # A call lasts at least a second, so that calls do not count steps.
            max_seconds = min(60, self.node.gate.policy.max_seconds or 60)
            percent_before = self.training.percent
            if self.training.run(
                time.monotonic() + min(max(seconds, 1.0), max_seconds), self._save_periodically
            ):
                self.training.drop_optimizers()
                # Save before any release: repeated training would differ.
                self.run_folder.save_state(TRAINING_STATE, self._state(True))
                self.training.is_done = True
                logger.info("local training is done: %d steps", self.training.steps)
            elif self.training.percent > percent_before:
                logger.info("local training: %d %% done", self.training.percent)
        return TrainingProgress(self.training.percent, self.training.is_done)

    def _save_periodically(self) -> None:
        if time.monotonic() - self.run_folder.saved_at > SECONDS_BETWEEN_SAVES:
            self.run_folder.save_state(TRAINING_STATE, self._state(self.training.is_done))

    def respond(
        self,
        name: str,
        number: int,
        tensors: Tensors,
        differentiable: bool,
        request: SumRequest | None = None,
    ) -> Tensors:
        """Return the released tensors of a response.

        Raises:
            QueryRefused: the owner's policy forbids the query, or it is malformed.
            QueryMismatch: the number was used with other content.
            NodeFault: local training is not done yet.
        """
        query = self.side.queries.get(name)
        if query is None:
            raise ArgumentError("query", to_printable_line(name), f"one of {', '.join(self.side.queries)}")
        if not self.training.is_done:
            raise NodeFault(self.node.name, name, "its local training is not done yet")
        refuse(self.node.name, name, self.rules_by_refused_query().get(name))
        inputs, received = self.node.data.inputs, ReceivedTensors.of_query(query, tensors)
        self.run_folder.require_space(name)
        started = time.perf_counter()
        with enforce_limits(self.node.name, name, self.node.gate.policy.max_seconds):
            self.node.gate.check_tensors(received, inputs.shape[1:], inputs.dtype)
            require(self.node.name, name, SIZE_RULES, SizeFacts(self.sizes, query, received.decompressed))
            received.move_to(self.compute.device)
            release = self.releases.respond(self.handler, number, received, differentiable, request)
        self._log_release(name, number, release, started)
        return release

    def backward(self, number: int, tensors: Tensors, request: SumRequest | None = None) -> Tensors:
        """Return the released input gradients for the server's output gradients.

        Raises:
            QueryRefused: gradients that are not finite.
            QueryMismatch: other gradients came for this query before, or the query is no longer known.
        """
        start, name = time.perf_counter(), self.node.name
        self.run_folder.require_space("gradient")
        with enforce_limits(name, "gradient", self.node.gate.policy.max_seconds):
            received = ReceivedTensors.of_gradients(self.handler.query_name(number), tensors)
            self.node.gate.check_tensors(received, ())
            received.move_to(self.compute.device)
            release = self.releases.backward(self.handler, number, received, request)
        self._log_release("gradient", number, release, start)
        return release

    def save_checkpoint(self, query_number: int) -> None:
        """Save the state before query ``query_number``, on disk.

        Raises:
            NodeFault: the node is still training or further already, or a query failed during private
                training.
        """
        ledger = self.node.gate.ledger
        ledger.require_complete_training("save_checkpoint")
        if not self.training.is_done or not ledger.last_number + 1 <= query_number:
            raise NodeFault(self.node.name, "save_checkpoint", f"it is not before query {query_number}")
        self.run_folder.save_checkpoint(query_number, self._state(True))

    def load_checkpoint(self, query_number: int) -> None:
        """Restore the state before query ``query_number``; 0 is before the first one.

        Raises:
            NodeFault: there is no such checkpoint.
        """
        name = checkpoint_name(query_number) if query_number else TRAINING_STATE
        state = self.run_folder.load_state(name)
        if state is None:
            message = f"the node has {', '.join(map(str, self.run_folder.checkpoints())) or 'none'}"
            raise NodeFault(
                self.node.name, "load_checkpoint", f"checkpoint {query_number} does not exist: {message}"
            )
        self._load(state, name)
        self.run_folder.delete_checkpoints_after(query_number)
        self.node.gate.ledger.restart(query_number)
        self.handler = self._new_handler()  # recorded CUDA graphs belong to the former state
        self.releases.restart()
        logger.info("restored the state before query %d", query_number)

    # --- helpers --------------------------------------------------------------------------------------

    def rules_by_refused_query(self) -> dict[str, str]:
        """Return the rule that refuses each forbidden query, by name."""
        gate, conflicts = self.node.gate, self.releases.rules_by_refused_query()
        earlier = self._count_queries_in_other_runs() if gate.policy.max_queries else 0
        facts = (self._file.local.optimizer, self._passes_gradients, conflicts, earlier)
        reasons = {
            name: first_reason(NODE_RULES, QueryFacts(query, gate.policy, gate.budgets, *facts))
            for name, query in self.side.queries.items()
        }
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def _count_queries_in_other_runs(self) -> int:
        """Return the number of queries about these data in other runs."""
        spending = self.audit.spending(NODE_DATA, self.plan.run)
        return spending.total_queries - spending.run_queries

    def _new_handler(self) -> RequestHandler:
        return RequestHandler(NodeGroup([self.node]), self.side, self.compute, self.plan.wire)

    def _log_release(self, name: str, number: int, release: Tensors, start: float) -> None:
        byte_count, seconds = sum(map(tensor_bytes, release.values())), time.perf_counter() - start
        logger.info("number %d, %s: %d bytes released, %.3f s", number, name, byte_count, seconds)

    def _state(self, is_trained: bool) -> dict[str, Any]:
        return {"steps": self.training.steps, "is_trained": is_trained, "node": self.node.state_dict()}

    def _load(self, state: Any, name: str) -> None:
        """Restore a saved state; :class:`RunFolderError` if it is damaged."""
        try:
            self.training.resume(state["steps"], state["is_trained"])
            self.node.load_state_dict(state["node"])
        except USER_CODE_ERRORS as error:
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise RunFolderError(
                f"{self.run_folder.path / name} is not a state of this node: {cause}"
            ) from error

    def _resume(self) -> None:
        """Continue at the point where an earlier process stopped. The server decides about checkpoints."""
        self.run_folder.checkpoints()  # an invalid file is reported before any response
        self.releases.resume()
        if (state := self.run_folder.load_state(TRAINING_STATE)) is not None:
            self._load(state, TRAINING_STATE)
        elif self.training.is_needed and self.node.gate.ledger.has_trained():
            # Repeated training would give another model, with the same noise on other last digits.
            message = (
                f"run {self.plan.run!r} has released responses, and its model ({TRAINING_STATE}) is missing"
            )
            raise NodeFault(self.node.name, "join", f"{message}: start a new run")
        elif self.training.is_done:  # state 0, for runs without training before the first query
            self.run_folder.save_state(TRAINING_STATE, self._state(True))
