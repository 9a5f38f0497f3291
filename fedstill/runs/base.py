"""Data, models and options of a run, and the parts of it that its results need."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError, ModelError
from fedstill.core.registry import is_object_path
from fedstill.federation.secure_aggregation import AnyFederation
from fedstill.methods._recalibration import RecalibratingServer
from fedstill.methods._server import Server
from fedstill.models import example_inputs
from fedstill.models.predictors import file_fingerprint
from fedstill.node.architectures import architecture_key
from fedstill.node.model_setup import architecture_hash, prepare_model
from fedstill.privacy.statement import PrivacyStatement
from fedstill.protocol.method import NamedNetwork, method_name
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.recalibration import Recalibration, batch_norm_layers, forward_order
from fedstill.runs.build import (
    Setting,
    check_method,
    check_student_and_server_data,
    input_shape,
    normalization,
)
from fedstill.runs.evaluation import Evaluation, Outputs, student_outputs_as_reloaded
from fedstill.runs.loop import Loop
from fedstill.runs.student_file import network_name


class Run(Loop):
    """Base class of runs.

    Args:
        setting: data, models and options of the server, and in a simulation of the nodes, too.

    Attributes:
        side: the method's part at the nodes.
        configured_student: the network of ``student.model``.
        student: the network that the method delivers, which is mostly the same.
        notes: notes for the result.

    Raises:
        FedstillError: data, models and method do not fit together.
    """

    side: NodeSide

    def __init__(self, setting: Setting) -> None:
        method_name(setting.spec.method)  # raises if it is no method
        kind = type(setting.spec.method)
        if missing := kind.validate_class(kind):
            raise ArgumentError("method", kind.__name__, missing)
        super().__init__(setting)
        self.task = setting.task
        self.needs = self.method.needs()
        check_method(setting.spec.method, setting.task, setting.public)
        check_student_and_server_data(setting)
        self.shape = input_shape(setting)
        self.setting = self._with_student_of_method(setting)
        self.compute = Compute(setting.spec.engine).for_network(
            self.shape, setting.student, force_float32=self.method.needs_float32
        )
        self.mean, self.std = normalization(setting)  # (C, 1, 1) each
        self.student = self.configured_student = self._prepare_network(setting.student, "student")
        if self.setting is not setting:
            self.student = self._prepare_network(self.setting.student, "student")
        self.recalibration = self._plan_recalibration(self.has_student and self.setting is setting)
        self.test = setting.test.to(self.compute.device)
        self.public = None if setting.public is None else setting.public.to(self.compute.device)
        self.evaluation = Evaluation(self.task, self.test, self.compute, setting.spec.seed)
        self.notes: list[str] = []

    @property
    def has_student(self) -> bool:
        """True if the method trains a student; an average built only for evaluation is none."""
        return self.method.evaluated_model == "student"

    def _plan_recalibration(self, trains_network: bool) -> Recalibration | None:
        """Return the recalibration of the student, or None without one.

        Args:
            trains_network: the method delivers the network of ``student.model`` as its student.

        Raises:
            ArgumentError: it does not, or that network has no batch norm, or one that cannot be recalibrated.
        """
        options, network = self.setting.spec.student, self.setting.student
        if not options.recalibrate:
            return None
        reason = ""
        if not trains_network:
            reason = f"{self.method.title} does not train the network of student.model"
        elif not batch_norm_layers(network):
            reason = f"{options.model} has no batch norm with running statistics"
        if reason:
            raise ArgumentError("student.recalibrate", options.recalibrate, f"false, as {reason}")
        return Recalibration.of(network)

    def _with_student_of_method(self, setting: Setting) -> Setting:
        """Return the setting with the network that the method delivers as its student."""
        spec, outputs = setting.spec, setting.task.output_shape(self.shape)
        student = self.method.make_student(setting.student, self._node_models(setting), outputs, spec.seed)
        if student is setting.student:
            return setting
        name = self._network_name(student)
        spec = replace(spec, student=replace(spec.student, model=name))
        return replace(setting, student=student, spec=spec)

    def _node_models(self, setting: Setting) -> Iterator[NamedNetwork]:
        """Yield each node's model with its name, as far as they are known here."""
        entries, names = setting.spec.nodes.models, dict[Any, str]()
        for index, node in enumerate(setting.nodes):
            entry, kind = entries[index % len(entries)], architecture_key(node.model)
            if kind not in names:
                names[kind] = entry if is_object_path(entry) else self._network_name(node.model)
            yield NamedNetwork(names[kind], node.model)

    def _network_name(self, network: torch.nn.Module) -> str:
        return network_name(network, self.task, self.shape, self.setting.vocabulary)

    def _prepare_network(self, model: torch.nn.Module, what: str) -> torch.nn.Module:
        """Return a network on the device, split in two parts if the method needs them."""
        parted, words, seed = self.needs.split_models, self.setting.vocabulary, self.setting.spec.seed
        return prepare_model(model, self.compute, self.shape, seed, what, split_=parted, vocabulary=words)

    def responses(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return the global model's outputs on inputs ``(N, C, ...)``; None if there is none."""
        if not self.has_student:
            return None
        return student_outputs_as_reloaded(self.setting.student, inputs, self.compute)

    def _make_server(self, federation: AnyFederation, student: torch.nn.Module, kinds: Any) -> Server:
        """Create the server in its initial state, without sending queries."""
        space = self.setting.feature_space
        make: Callable[..., Server] = Server
        if self.recalibration is not None:
            x = example_inputs(self.shape, self.task.form).to(self.compute.device)
            make = partial(
                RecalibratingServer,
                network=self.setting.student,
                layer_order=forward_order(self.setting.student, x),
                clip=self.setting.spec.student.recalibrate_clip,
            )
        return make(
            self.method,
            federation=federation,
            student=student,
            task=self.task,
            shape=self.shape,
            mean=tuple(self.mean.flatten().tolist()),
            std=tuple(self.std.flatten().tolist()),
            compute=self.compute,
            seed=self.setting.spec.seed,
            local=self.setting.spec.nodes.local,
            public=self.public,
            architectures=kinds,
            schema=self.setting.schema,
            feature_normalization="" if space is None else space.options.normalize,
        )

    def progress_info(self) -> dict[str, str]:
        main_metric = self.task.metrics[0]
        return {
            "title": self.method.title,
            "metric": main_metric.key,
            "metric_title": main_metric.title,
            "unit": main_metric.unit,
            "better": main_metric.better,
        }

    def _save_samples(self, server: Server) -> None:
        count = self.setting.spec.evaluation.samples
        samples = server.preview_samples(count) if count else None
        if samples is None:
            return
        step_name, samples = f"{server.completed_steps:06d}", samples.cpu()
        if self.task.form != "rows":  # images as uint8
            samples = (samples * self.std + self.mean).clamp(0, 1).mul(255).round().to(torch.uint8)
        self.records.samples[step_name] = samples.contiguous()  # as safetensors requires it
        maps = server.preview_maps(count)
        if maps is not None:
            # A copy, as safetensors refuses shared memory.
            self.records.samples[f"{step_name}.maps"] = maps.cpu().contiguous().clone()

    def _model_fingerprints(self) -> dict[str, str]:
        """Return fingerprints of the student and the backbone: architecture and pretrained weights."""
        fingerprints = {"student": architecture_hash(self.student) + file_fingerprint(self.student)}
        if self.setting.feature_space is not None:
            fingerprints["the backbone"] = self.setting.feature_space.backbone.digest
        return fingerprints

    def _require_same_models(self, before: Mapping[str, str]) -> None:
        """Refuse to resume a run with other models or pretrained weights than it began with.

        Args:
            before: the fingerprints at its start.

        Raises:
            ModelError: naming those that differ.
        """
        now = self._model_fingerprints()
        if other := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
            raise ModelError(
                f"{', '.join(other)}: the model has changed since the run was started: restore it, or start "
                "a new run"
            )

    # --- for the results ------------------------------------------------------------------------------

    @abstractmethod
    def describe_nodes(self) -> list[dict[str, Any]]:
        """Describe each node, as far as it is known here."""

    @abstractmethod
    def privacy_statements(self) -> Mapping[str, PrivacyStatement]:
        """Return the nodes' privacy statements, as far as they are known."""

    def group_info(self) -> Mapping[str, Any]:
        """Return the groups in which nodes are computed."""
        return {}

    def test_outputs(self) -> Outputs:
        """Return outputs on the test set; remote nodes' models are not available."""
        return Outputs(self.responses(self.test.inputs))

    def baseline_metrics(self, outputs: Outputs) -> Mapping[str, Mapping[str, Any] | None]:
        """Return metrics of the baselines: nodes' models, their ensemble, the centralized upper bound."""
        unknown = dict.fromkeys(("local", "standalone", "ensemble"))
        return {**unknown, "centralized": {self.task.metric: None}}
