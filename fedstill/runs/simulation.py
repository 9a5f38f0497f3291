"""Simulation: a run whose nodes are objects of this process."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, DataError, MethodRefused, RunFolderError
from fedstill.core.progress import ProgressBar
from fedstill.core.run_writer import STATE_FILE, RunWriter
from fedstill.core.seeds import derive, seeded
from fedstill.data.augmentation import require_augmentable
from fedstill.data.loading import load
from fedstill.federation.inprocess import InProcess
from fedstill.federation.malicious_nodes import InProcessWithAdversary, form_coalition
from fedstill.federation.secure_aggregation import SecureAggregation
from fedstill.methods._server import Server
from fedstill.models.backbones import RawInputs
from fedstill.models.module_utils import deep_copy, parameter_count
from fedstill.models.perceptual import load_perceptual
from fedstill.models.predictors import file_fingerprint
from fedstill.node import local_training
from fedstill.node.architectures import architecture_key as kind_of
from fedstill.node.architectures import group_by_architecture, has_only_matrix_products, stacking_key
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.gate import Gate
from fedstill.node.model_setup import architecture_hash, require_trainable_batch_size
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.node.protection import (
    group_privacy_notes,
    needs_mechanism,
    protect,
    require_unchanged_data,
    run_uncharged_preparation,
)
from fedstill.protocol.local_config import FULL_TRAINING, Span
from fedstill.protocol.method import build_node_side
from fedstill.protocol.needs import unmet_need
from fedstill.protocol.node_side import NodeSetting
from fedstill.runs.build import (
    Setting,
    build_setting,
    check_batch_size_for_batch_norm,
    check_networks,
    check_nodes,
    describe_run,
    prepare_data,
    run_task,
)
from fedstill.runs.data_digests import digest_examples, digest_run_data
from fedstill.runs.evaluation import Evaluation
from fedstill.runs.group_training import GroupTraining
from fedstill.runs.results import collect_results
from fedstill.runs.simulation_metrics import MeasuredSimulation
from fedstill.runs.spec import RunSpec, fingerprint_options
from fedstill.runs.trained_model_cache import TrainedModels

UPPER_BOUND = (
    "Training one model on the pooled data, the centralized upper bound; evaluation.centralized = false "
    "(--evaluation.centralized false) skips it."
)


class Simulation(MeasuredSimulation):
    """Run whose nodes are objects of this process.

    Args:
        setting: with data, models and policies of the nodes.

    Raises:
        FedstillError: data, models, policies and method do not fit together.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        check_nodes(setting)
        self.coalition = coalition = form_coalition(
            setting.spec.adversary,
            [node.name for node in setting.nodes],
            self.task,
            setting.spec.seed,
            setting.spec.link.secure_aggregation,
        )
        self.nodes = [
            Node(
                node.name,
                coalition.data_of(node.name, node.data, self.task).to(self.compute.device),
                self._prepare_network(node.model, f"model of {node.name}"),
                Gate(node.name, node.policy, self.audit),
                setting.spec.seed,
            )
            for node in setting.nodes
        ]
        privacies = [node.privacy for node in setting.nodes]
        for node in self.nodes:
            node.gate.output_shape = self.task.output_shape(self.shape)
        student = kind_of(self.configured_student)
        check_networks(
            self.method.title,
            self.needs,
            {node.name: node.is_frozen for node in self.nodes},
            {node.name: kind_of(node.model) == student for node in self.nodes},
        )
        networks = {f"model of {node.name}": node.model for node in self.nodes}
        require_augmentable(self.task, self.shape, setting.spec.nodes.local.augment, "nodes.local.augment")
        check_batch_size_for_batch_norm(setting, {"student": self.student, **networks})
        learning = networks if self.method.trains_models else {}
        central = (
            {} if setting.centralized_model is None else {"centralized model": setting.centralized_model}
        )
        for whose, model in {**learning, **central}.items():
            require_trainable_batch_size(
                model, setting.spec.nodes.local, self.shape, self.task.form, f"the {whose}"
            )
        self.kinds = self._nodes_by_architecture()
        self.at_nodes = NodeSetting(
            self.task,
            setting.spec.nodes.local,
            self.compute,
            self.public,
            self._perceptual_features(),
            setting.schema,
            setting.spec.link.secure_aggregation,
            recalibration=self.recalibration,
            student=None if self.recalibration is None else deep_copy(self.setting.student),
        )
        self.side = build_node_side(self.method, self.at_nodes)
        if any(query.sum_fault(setting.spec.nodes.local.optimizer) for query in self.side.queries.values()):
            expected = (
                "sgd with link.secure_aggregation: a first step of Adam shows the sign of each gradient"
            )
            raise ArgumentError("local.optimizer", setting.spec.nodes.local.optimizer, expected)
        self.notes += [*coalition.notes, *self.side.notes]
        self.notes += group_privacy_notes([node.data for node in self.nodes], privacies)
        for node, privacy in zip(self.nodes, privacies, strict=True):
            if needs_mechanism(privacy):
                key = self.secret(node.name)
                protect(node, privacy, self.side, self.method, self.at_nodes, secret=key)
        self.learners = [learner for node in self.nodes for learner in node.self_or_teachers]
        run_uncharged_preparation(self.side, self.nodes)
        learned = {
            node.name: node.data for node in self.nodes
        }  # public data among it, where these have labels
        self.evaluation = Evaluation(self.task, self.test, self.compute, setting.spec.seed, learned)
        for node in self.nodes:
            require_unchanged_data(node)
            for module in node.modules.values():
                self.compute.to_device(module)
        if self.side.initial_training is not None:
            local_training.attach_optimizers(self.learners, setting.spec.nodes.local)
        # A trial server checks that every node allows the method's queries, and that options, task, student
        # and public data fit together.
        with seeded(setting.spec.seed, "trial server"):
            self.make_server([[node] for node in self.nodes], deep_copy(self.student))
        self.local_steps: dict[str, int] = {}
        self.groups: dict[str, list[list[str]]] = {}
        self.centralized_node: Node | None = None
        self.evaluated_nodes = self.nodes

    def secret(self, name: str) -> int:
        """Return the key of a node's noise; it is no secret in a simulation, whose seed is known."""
        return derive(self.setting.spec.seed, name, "gate")

    def make_server(self, groups: Sequence[Sequence[Node]], student: nn.Module | None = None) -> Server:
        """Create the server in its initial state.

        Args:
            student: replaces the simulation's student.
        """
        chosen = self.student if student is None else student
        engine = self._federation(groups)
        is_summed = self.setting.spec.link.secure_aggregation
        federation = SecureAggregation.in_process(engine, self.nodes) if is_summed else engine
        return self._make_server(federation, chosen, self.kinds)

    def _federation(self, groups: Sequence[Sequence[Node]]) -> InProcess:
        given = (self.nodes, groups, self.side, self.compute, self.setting.spec.link)
        return InProcessWithAdversary(self.coalition, *given) if self.coalition.names else InProcess(*given)

    def _perceptual_features(self) -> nn.Module | None:
        nodes = self.setting.spec.nodes
        mean, std = (tuple(part.flatten().tolist()) for part in (self.mean, self.std))
        raw = RawInputs((len(mean), *self.shape[1:]), mean, std)
        name, weights = nodes.perceptual, nodes.perceptual_weights
        features = load_perceptual(name, weights, raw, "nodes.perceptual")
        return None if features is None else self.compute.to_device(features)

    def _nodes_by_architecture(self) -> tuple[tuple[tuple[str, ...], nn.Module], ...]:
        """Return the nodes' names by architecture, with an initial network of each."""
        kinds: dict[tuple[Any, ...], list[Node]] = {}
        for node in self.nodes:
            kinds.setdefault(kind_of(node.model), []).append(node)
        return tuple(
            (tuple(node.name for node in alike), deep_copy(alike[0].model)) for alike in kinds.values()
        )

    # --- results of earlier runs and of other processes -----------------------------------------------

    def load_finished(self, out: Path) -> None:
        """Load the models, the server and the metrics of this run, finished in a folder with its state.

        Raises:
            RunFolderError: the folder has no state.
            FedstillError: the data, architectures or pretrained weights are others than the run had.
        """
        if not (out / STATE_FILE).exists():
            raise RunFolderError(f"{out} holds this run, finished, without its models: choose another folder")
        self.records = RunWriter(out, options=fingerprint_options(self.setting.spec))
        saved = self.records.load()
        self._prepare_nodes(saved)
        self._created_server = self._create_server(saved)

    def load_remote_results(
        self, out: Path, server: Mapping[str, Any], nodes: Mapping[str, dict[str, Any]], bars: ProgressBar
    ) -> dict[str, Any]:
        """Load what other processes have trained for this setting, and evaluate it.

        Args:
            out: folder of the run, with the server's audit log and metrics.
            server: the server's last checkpoint.
            nodes: each node's checkpoint, from that moment or from before its exclusion. A node that never
                took part has none and is not evaluated.
            bars: progress bars.

        Returns:
            The results, as :meth:`run` returns them.
        """
        self.clock.start()
        self.records, self.bars = RunWriter(out, self.listeners.log), bars
        self.listeners.start(out, self.method.title, finished=True)
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        (out / "metrics.jsonl").unlink()
        self.records.metrics = [json.loads(line) for line in lines]
        self.records.samples = server["samples"]
        self.evaluated_nodes = [node for node in self.nodes if node.name in nodes]
        for node in self.evaluated_nodes:
            for learner in node.self_or_teachers:
                learner.optimizers.pop("model", None)
            node.load_state_dict(nodes[node.name])
        self._created_server = self.make_server([[node] for node in self.nodes])
        self._created_server.load_state_dict(server["server"])
        self.audit.open(out / FILE)
        self.audit.close()
        with self.bars:
            self._train_centralized({})
            return self._finish_results()

    # --- parts of the loop ----------------------------------------------------------------------------

    def _prepare_nodes(self, saved: Mapping[str, Any]) -> None:
        if not saved:
            if self.records.folder is not None:
                self.records.save(self._input_digests())  # a run that is stopped early keeps its inputs, too
            return
        if not {"data", "models"} <= saved.keys():
            raise RunFolderError(
                "the run was started with an earlier fedstill: use that version, or a new run"
            )
        if saved["data"] != self._data_digest:
            raise DataError(
                "the data have changed since the run was started: restore them, or start a new run"
            )
        self._require_same_models(saved["models"])
        if "nodes" not in saved:  # stopped before its first checkpoint
            return
        self.compute.precision = saved["precision"]  # as at the start, also on another machine
        self.local_steps, self.groups = saved["local_steps"], saved["groups"]
        for node in self.nodes:
            node.load_state_dict(saved["nodes"][node.name])

    def _train_locally(self) -> None:
        span = self.side.initial_training
        if span is None:
            return

        # A node with a frozen model has nothing to train.
        learning = [node for node in self.learners if "model" in node.optimizers]
        with self.clock.phase("local_training"):
            self._train_or_load(
                "local_training", self._grouped_nodes("local_training", learning), "local", span
            )
        for node in self.learners:
            node.optimizers.pop("model", None)

    def _train_centralized(self, saved: Mapping[str, Any]) -> None:
        """Train the centralized upper bound on the pooled data of all nodes, and on public data if the method
        uses their labels."""
        if self.setting.centralized_model is None:
            return
        parts = [node.data.to(self.compute.device) for node in self.setting.nodes]
        if self.needs.public_labels and self.public is not None and self.public.labels is not None:
            parts.append(TensorData(self.public.inputs, self.public.labels))
        together = TensorData.concat(parts)
        gate = Gate("centralized", PolicyConfig(), AuditLog())
        model = self.compute.to_device(self.setting.centralized_model)
        # The name is that of its random streams: recorded metrics depend on this spelling.
        self.centralized_node = Node("centralised", together, model, gate, self.setting.spec.seed)
        local_training.attach_optimizers([self.centralized_node], self.setting.spec.nodes.local)
        if saved.get("centralized"):
            self.centralized_node.load_state_dict(saved["centralized"])
        with self.clock.phase("centralized"):
            self._train_or_load("centralized", [[self.centralized_node]], "centralized", FULL_TRAINING)
        self.centralized_node.optimizers.clear()

    def _create_server(self, saved: Mapping[str, Any]) -> Server:
        server = self.make_server(self._grouped_nodes("distillation", self.nodes))
        if saved.get("server"):
            server.load_state_dict(saved["server"])
        return server

    def _node_state(self) -> Mapping[str, Any]:
        return {
            "precision": self.compute.precision,
            "local_steps": self.local_steps,
            "groups": self.groups,
            "nodes": {node.name: node.state_dict() for node in self.nodes},
            "centralized": None if self.centralized_node is None else self.centralized_node.state_dict(),
            **self._input_digests(),
        }

    def _input_digests(self) -> dict[str, Any]:
        return {"data": self._data_digest, "models": self._model_fingerprints()}

    @cached_property
    def _data_digest(self) -> str:
        """Digest of training, test and public data, to detect changes when a run is resumed.

        With a backbone, it is of the data before features, whose last digits depend on batch and device.
        """
        if self.setting.feature_space is not None:
            return self.setting.feature_space.run_data_digest
        return digest_run_data(self._private_data(), self.setting.test, self.public)

    def _private_data(self) -> list[TensorData]:
        return [node.data for node in self.setting.nodes]

    def _model_fingerprints(self) -> dict[str, str]:
        """Return fingerprints also of the nodes' models and of the weights of the perceptual loss."""
        fingerprints = super()._model_fingerprints()
        for node in self.nodes:
            fingerprints[node.name] = architecture_hash(node.model) + file_fingerprint(node.model)
        if self.at_nodes.perceptual is not None:
            fingerprints["nodes.perceptual"] = file_fingerprint(self.at_nodes.perceptual)
        return fingerprints

    def _close(self) -> None:
        """Do nothing: nodes of this process need no cleanup."""

    def results(self) -> dict[str, Any]:
        """See :class:`~fedstill.runs.base.Run`."""
        results = collect_results(self)
        self.student.eval()
        for node in self.nodes:  # the nodes' models can be trained again, except for frozen parameters
            for name, parameter in node.model.named_parameters():
                parameter.requires_grad_(name not in node.frozen["model"])
        space = self.setting.feature_space  # whose digest is of the data before features
        digested = digest_examples(self._private_data()) if space is None else space.data_digest
        return {**results, "data_digest": digested}

    # --- local training -------------------------------------------------------------------------------

    def _train_or_load(self, counted: str, groups: Sequence[Sequence[Node]], phase: str, span: Span) -> None:
        """Train groups, or load equal models from the cache, with their seconds and losses."""
        has_started = any(self.local_steps.get(group[0].name) for group in groups)
        nodes = [node for group in groups for node in group]
        cache_key = (phase, span, self.compute.precision, [len(node.data) for node in nodes])
        file = None if self.trained is None or has_started else self.trained.model_file(groups, *cache_key)
        if file is None:
            self._train(groups, phase, span)
        elif file.exists():
            cached = TrainedModels.load_models(file, nodes)
            self.local_steps |= cached["steps"]
            self.clock.add_seconds(counted, cached["seconds"])
            for line in cached["losses"]:
                self.records.add_metrics(line)
        else:
            start, first = time.monotonic(), len(self.records.metrics)
            self._train(groups, phase, span)
            steps = {group[0].name: self.local_steps.get(group[0].name, 0) for group in groups}
            seconds, losses = time.monotonic() - start, self.records.metrics[first:]
            with suppress(OSError):  # with a full disk the next run trains again
                TrainedModels.save_models(file, nodes, steps=steps, seconds=seconds, losses=losses)

    def _train(self, groups: Sequence[Sequence[Node]], phase: str, span: Span) -> None:
        """Train groups from the steps that they have reached to the end of a span."""
        local = self.setting.spec.nodes.local
        training = GroupTraining(groups, phase, span, self.task, local, self.compute, self.local_steps)
        if training.remaining_steps():
            if phase == "centralized":
                self.bars.print_line(UPPER_BOUND)
            self.bars.update(*self._phase_and_steps(phase))
        while training.remaining_steps():
            for line in training.advance():
                self.records.add_metrics(line)
            self.bars.update(*self._phase_and_steps(phase))
            if self.records.is_save_due():
                self.save_state()

    def _phase_and_steps(self, phase: str) -> tuple[str, int, int]:
        local = self.setting.spec.nodes.local
        if phase == "centralized" and self.centralized_node is not None:
            return (
                "centralized",
                self.local_steps.get(self.centralized_node.name, 0),
                local.steps(len(self.centralized_node.data)),
            )
        span = self.side.initial_training or FULL_TRAINING
        totals = {node.name: len(span.steps(local.steps(len(node.data)))) for node in self.learners}
        groups = self.groups["local_training"]
        done = sum(min(totals[name], self.local_steps.get(group[0], 0)) for group in groups for name in group)
        return "local training", done, sum(totals[name] for group in groups for name in group)

    def _grouped_nodes(self, phase: str, nodes: Sequence[Node]) -> list[list[Node]]:
        """Return the nodes in the groups of a phase; a resumed run keeps its groups on any machine."""
        if phase not in self.groups:
            groups = group_nodes(
                nodes, should_stack(self.compute, nodes, local_training=phase == "local_training")
            )
            self.groups[phase] = [[node.name for node in group] for group in groups]
        named = {node.name: node for node in nodes}
        groups = [[named[name] for name in group if name in named] for group in self.groups[phase]]
        return [group for group in groups if group]  # without groups that have been trained


def build_simulation(
    spec: RunSpec,
    kind: type[Simulation] = Simulation,
    *,
    progress: bool = False,
    placeholder: bool = False,
) -> tuple[Simulation, dict[str, Any]]:
    """Build a simulation from a configuration, with all checks.

    Args:
        kind: class of the simulation.
        progress: show the progress of features that are computed first.
        placeholder: take zeros as features of a backbone, so that a run is checked without computing them.

    Returns:
        The simulation, and its description for the result.
    """
    data = load(spec.data, spec.task)
    if len(data.classes) < spec.task.task_class.min_classes:
        expected = f"{spec.task.task_class.min_classes} or more classes"
        raise DataError(f"{data.name}: the only class is {', '.join(data.classes)} (expected {expected})")
    task, method = run_task(spec, data.classes), spec.method
    reason = unmet_need(method.needs(), task)
    if reason is not None:  # first, as it cannot be fixed by other options
        raise MethodRefused(method.title, "", reason)
    loaded = prepare_data(spec, data, progress=progress, placeholder=placeholder)
    simulation = kind(build_setting(spec, loaded))
    if loaded.feature_space is not None:
        simulation.notes += loaded.feature_space.notes
    if spec.data.validation:
        simulation.notes.append(
            "evaluated on validation data (data.validation): the test data of this run are training examples "
            "that no node has"
        )
    split_config, sites = spec.split, [node.site for node in simulation.setting.nodes]
    value_info = {"values": sites} if any(sites) else {}
    split_info = {
        "name": split_config.registered_name,
        "about": split_config.about,
        **split_config.specific_options,
        "nodes": len(loaded.parts),
        **value_info,
    }
    about = describe_run(spec, loaded.data, sum(map(len, loaded.parts)), split_info)
    if loaded.feature_space is not None:
        about["features"] = loaded.feature_space.to_record()
    return simulation, about


# --- how nodes are grouped for computation: engine.batching ------------------------------------------------

NodeGroups = list[list[Node]]


def group_nodes(nodes: Sequence[Node], stacked: bool) -> NodeGroups:
    """Group nodes: by equal architecture if ``stacked``, otherwise each node alone."""
    return list(group_by_architecture(nodes)) if stacked else [[node] for node in nodes]


LARGE_NETWORK = 2_000_000  # parameters of a network that fills a GPU by itself


def should_stack(compute: Compute, nodes: Sequence[Node], *, local_training: bool = False) -> bool:
    """Return whether networks of equal architecture are stacked
    (:class:`~fedstill.core.compute.EngineConfig`).

    On a GPU ``auto`` stacks networks that are too small to fill it. It does not stack them for local
    training, which runs as captured CUDA graphs: one network after another is faster there
    (``benchmarks/gpu.py``). On a CPU it stacks only networks of matrix products, and only if each core has
    more than three of each architecture. Stacked convolutions are grouped convolutions, which take two to
    three times as long on a CPU (``benchmarks/grid.py``); nodes that are not stacked are computed on all
    cores at once (:mod:`fedstill.core.compute`).

    Args:
        local_training: the networks are grouped for local training, without queries.
    """
    if compute.config.batching != "auto":
        return compute.config.batching == "stacked"
    if compute.device.type == "cuda":
        models = [node.model for node in nodes]
        if local_training and compute.uses_cuda_graphs(*models):
            return False
        return all(parameter_count(model) < LARGE_NETWORK for model in models)
    networks = [network for node in nodes for network in node.modules.values()]
    kinds = len({stacking_key(node.model) for node in nodes})
    return len(nodes) > 3 * compute.workers.count * kinds and all(
        has_only_matrix_products(each) for each in networks
    )
