"""A node as a method's functions see it: one node, which may stand for several that compute together.

A method's functions are written for one node. The engine calls such a function for each node by itself. If
the function is declared as ``stackable``, one call may serve all nodes of one architecture
(:mod:`fedstill.node.stacked_calls`). The function cannot see the difference, and the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import vmap

from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data.public import PublicData
from fedstill.models.inference import inference_batch_size
from fedstill.node import dp_training, local_training
from fedstill.node.given_examples import GivenExamples
from fedstill.node.network_view import NetworkView
from fedstill.node.node_group import NodeGroup
from fedstill.node.stacked_calls import (
    NodeCall,
    Purpose,
    QuerySamples,
    View,
    group_term,
    group_train_step,
    holds_stacked_tensor,
    with_data,
)
from fedstill.node.stacked_modules import stack_tensors
from fedstill.privacy.dpsgd import sampling_rate
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.protocol.node_side import NodeSetting
from fedstill.tasks import Task

T = TypeVar("T")
# One training step of a node: node, number of the step in this round, inputs (B, ...) and targets (B, ...),
# and the tensors that NodeView.train was given; returns the loss ().
NodeTrainStep = Callable[..., torch.Tensor]
PUBLIC_BATCH = 250  # public inputs that each node of a group computes at once, and fewer where they are large


class NodeView:
    """A node as a function of a method sees it.

    Args:
        group: the node, or the nodes of one architecture that one call of the function computes.
        setting: environment of the method.
        number: number of the query.
        index: row of the node in the group, inside of a stacked call; None outside.
        samples: samples that were taken before the call.
    """

    def __init__(
        self,
        group: NodeGroup,
        setting: NodeSetting,
        number: int = 0,
        *,
        index: torch.Tensor | None = None,
        count: int | None = None,
        samples: QuerySamples | None = None,
    ) -> None:
        self.setting = setting
        self._call = NodeCall(group, number, index, len(group) if count is None else count, samples)

    # --- networks and training ----------------------------------------------------------------------------

    @property
    def model(self) -> NetworkView:
        """The node's model T_k: ``node.model(x)`` maps inputs ``(B, ...)`` to outputs ``(B, C, ...)``."""
        return self.module("model")

    def module(self, role: str) -> NetworkView:
        """Return the node's network of a role, such as ``"model"`` or ``"critic"``.

        Raises:
            ArgumentError: at the first call, the node has no network of this role.
        """
        return NetworkView(self._call, role)

    def step(self, role: str, loss: torch.Tensor) -> None:
        """Take one optimizer step of the node's network on its own loss.

        A model has an optimizer only inside the ``step`` of :meth:`train`; :meth:`train_on` trains it on
        given examples. Networks of :meth:`Node.add_module` always have theirs.

        Args:
            role: role of the network.
            loss: a scalar, or losses of any shape, whose mean is taken.

        Raises:
            QueryRefused: the network trains privately, and this step has no noise.
            ArgumentError: the network has no optimizer now.
        """
        call = self._call

        def take_step(losses: torch.Tensor) -> None:
            for node in call.group.nodes[: len(losses)] if call.samples is None else ():
                node.set_learning_rates([role])  # a captured step has them set before it
            call.group.step(role, losses.flatten(1).mean(1) if losses.ndim > 1 else losses)

        call.act_on_group(take_step, loss)

    def loss(self, z: torch.Tensor, y: torch.Tensor, smoothing: float | None = None) -> torch.Tensor:
        """Return the task's loss of outputs ``(B, C, ...)`` for targets ``(B, ...)``.

        Args:
            z: outputs.
            y: targets.
            smoothing: label smoothing; None: that of the local training.
        """
        smoothing = self.setting.local.smoothing if smoothing is None else smoothing
        loss: torch.Tensor = self.on_group(lambda z, y: self.task.loss(z, y, smoothing), z, y)
        return loss

    def train(
        self,
        span: Span,
        step: NodeTrainStep | None = None,
        *,
        term: Callable[..., torch.Tensor] | None = None,
        roles: Sequence[str] = ("model",),
        purpose: str = "local",
        local: LocalConfig | None = None,
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Train on the node's own data for a part of its local training.

        The model's optimizer starts with a new state, since the old state belongs to weights that were
        replaced. The optimizers of other networks keep theirs.

        Args:
            span: the part of the local training.
            step: one training step, ``step(node, number, x, y, **given)``: it calls :meth:`step` and
                returns the loss. None: a step of the model on the task's loss.
            term: term that is added to the task's loss, ``term(node, number, **given)``. It must depend on no
                record. A model that trains privately adds its gradient after the noise, at no cost.
            roles: networks in training mode during a step.
            purpose: name of the random streams of batches and augmentation.
            local: options of the training; None: those of the setting.
            given: further tensors of the node that ``step`` or ``term`` needs, by name.

        Raises:
            ArgumentError: ``step`` holds a tensor of the node itself in a stacked call, or is given together
                with ``term``, or to a model that trains privately.
            QueryRefused: the model trains privately, and the function or ``term`` has read the records.
        """
        call, setting, given = self._call, self.setting, given or {}
        call.require_no_capture("node.train")
        if step is not None and term is not None:
            raise ArgumentError("term of node.train", "given with a step", "a step that adds it itself")
        if call.index is not None and holds_stacked_tensor(step or term):
            expected = "each tensor of the node in given, from which it gets it as an argument"
            raise ArgumentError("step of node.train", "a function that holds a tensor of the node", expected)
        config = setting.local if local is None else local

        def train_group(*values: torch.Tensor) -> None:
            by_name = dict(zip(given, values, strict=True))
            make_view = partial(NodeView, setting=setting, number=call.number)
            train_step = None if step is None else group_train_step(step, call.nodes, by_name, make_view)
            if "model" in roles:
                local_training.attach_optimizers(call.nodes, config)
            local_training.train(
                call.nodes,
                self.task,
                config,
                setting.compute,
                span=span,
                train_step=train_step,
                term=None if term is None else group_term(term, call.nodes, by_name, make_view),
                roles=roles,
                purpose=purpose,
            )
            for node in call.nodes if "model" in roles else ():
                node.optimizers.pop("model", None)

        call.act_on_group(train_group, *given.values())

    def train_on(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        *purpose: str | int,
        epochs: int,
        batch: int,
        lr: float,
    ) -> None:
        """Train the node's model on given examples in place of its own, with a new Adam.

        These steps have no noise and are not charged. The examples can be public data, or inputs and targets
        that the server sent. A node whose model trains privately refuses the training if the query's function
        has read its records before, by :meth:`sample` or :attr:`data`: the examples could depend on them.

        Args:
            x: inputs ``(N, ...)``, the same for all nodes.
            targets: their targets ``(N, ...)``, the same for all nodes.
            loss: maps outputs ``(B, C, ...)`` and targets ``(B, ...)`` to losses, whose mean is taken; None:
                the task's loss.
            purpose: names the random stream of the order.
            epochs: passes over the examples.
            batch: examples in a batch.
            lr: learning rate.

        Raises:
            QueryRefused: the model trains privately, and the query's function has read the node's records.
        """
        self._call.require_no_capture("node.train_on")

        def losses_of(z: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            if loss is None:
                return self.task.loss(z, wanted, self.setting.local.smoothing)  # (G,)
            each = vmap(loss)(z, wanted) if len(z) > 1 else loss(z[0], wanted[0]).unsqueeze(0)  # (G, B)
            return each.flatten(1).mean(1)

        examples = GivenExamples(x, targets, purpose, epochs, batch, lr)
        self._call.act_on_group(
            lambda: examples.train(self._call.group, self._call.nodes, losses_of, self.setting.compute)
        )

    def private_step(
        self,
        role: str,
        private_loss: Callable[..., torch.Tensor],
        public_loss: Callable[[nn.Module], torch.Tensor],
        *,
        batch: int,
        data: View | None = None,
    ) -> None:
        """Take one DP-SGD step of a network that trains privately. Not in a stacked call.

        Args:
            role: role of the network.
            private_loss: loss of each example, of the network, inputs and targets.
            public_loss: loss of the network that is added to the mean of the private one; costs nothing.
            batch: mean number of sampled examples.
            data: returns other data of the same examples, from which to sample; None: the node's data.
        """
        node = self._call.node
        node.set_learning_rates([role])
        node.records_read = node.records_read or data is not None
        dp_training.private_step(
            node if data is None else with_data(node, data(node.data)),
            role,
            node.dp_sgd_parameters[role],
            sampling_rate(len(node.data), batch),
            self._call.number,
            private_loss=private_loss,
            public_loss=public_loss,
            batch=min(len(node.data), batch),
        )

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs for many inputs ``(N, ...)``, computed in batches: ``(N, C, ...)``."""
        size = min(PUBLIC_BATCH, inference_batch_size(x))
        return torch.cat([self.model(part) for part in torch.split(x, size)])

    def cached(self, name: str, key: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the node, which is computed at the first call with a key.

        The tensor of the last key is kept, under a name, until the run ends.
        """
        self._call.require_no_capture("node.cached")
        cache: dict[Any, tuple[Any, torch.Tensor, bool]] = self.setting.cached(name, dict)
        nodes = self._call.nodes
        names = tuple(node.name for node in nodes)
        if names not in cache or cache[names][0] != key:

            def keep(values: torch.Tensor) -> None:
                cache[names] = key, values, any(node.records_read for node in nodes)

            self._call.act_on_group(keep, compute())
        for node in nodes:
            node.records_read = node.records_read or cache[names][2]
        result: torch.Tensor = self.on_group(lambda: cache[names][1])
        return result

    def cache_rows(self, role: str, name: str, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write rows that are the same at all nodes into a buffer of :meth:`Node.add_buffers`; return it.

        Args:
            role: role of the buffers.
            name: name of the buffer ``(N, ...)``.
            rows: row numbers ``(B,)``, the same for all nodes.
            values: their values ``(B, ...)``, the same for all nodes.
        """
        buffers = [node.buffers(role)[name] for node in self._call.nodes]
        for buffer in buffers:
            buffer[rows] = values
        return buffers[0]

    def buffers(self, role: str) -> dict[str, torch.Tensor]:
        """Return the tensors of :meth:`Node.add_buffers` by name. Not in a stacked call."""
        return self._call.node.buffers(role)

    def parameters(self, part: str = "", role: str = "model") -> torch.Tensor:
        """Return the parameters and buffers of a network, or of one submodule, as one vector: ``(P,)``."""
        call = self._call
        vector: torch.Tensor = call.on_group(lambda: call.group.parameter_vectors(role, part)[: call.count])
        return vector

    def load_parameters(self, vector: torch.Tensor, part: str = "", role: str = "model") -> None:
        """Load a vector ``(P,)`` into a network, or into one submodule."""
        group = self._call.group
        self._call.act_on_group(lambda vectors: group.load_parameters(role, vectors, part), vector)

    # --- data and random numbers --------------------------------------------------------------------------

    def sample(
        self, size: int, *purpose: str | int, data: View | None = None, each_query: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample own examples with replacement: inputs ``(size, ...)`` and targets ``(size, ...)``.

        Args:
            size: number of examples.
            purpose: names the random stream.
            each_query: the query's number names the random stream, too, so that each query has samples of its
                own.
            data: returns other data of the same examples, from which to sample; None: the node's data. The
                same function object in each query, as samples of captured queries are known by it.
        """
        name: Purpose = (*purpose, None) if each_query else purpose
        inputs, targets = self.on_group(lambda: self._call.sample(size, name, data))
        return inputs, targets

    def random(self, sample: Callable[[torch.Generator], torch.Tensor], *purpose: str | int) -> torch.Tensor:
        """Return random numbers of the node: ``sample`` of its generator for one purpose.

        Example::

            z = node.random(lambda generator: torch.randn(64, 100, generator=generator), "z", step)
        """
        self._call.require_no_capture("node.random")

        def sample_each() -> torch.Tensor:
            numbers = [sample(node.random_generator(*purpose)) for node in self._call.nodes]
            return stack_tensors(numbers).to(self.device)

        result: torch.Tensor = self.on_group(sample_each)
        return result

    def outside(self, function: Callable[[], T]) -> T:
        """Return ``function()``, called outside of a stacked call, such as a new network for all nodes."""
        results: list[T] = []
        self._call.act_on_group(lambda: results.append(function()))
        return results[0]

    def shared(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor that is the same for all nodes, with random numbers that are the same for all.

        A function that samples random numbers itself cannot run inside a stacked call.
        """
        self._call.require_no_capture("node.shared")

        def run() -> torch.Tensor:
            value = function()
            return value.unsqueeze(0).expand(self._call.count, *value.shape)

        result: torch.Tensor = self.on_group(run)
        return result

    # --- properties of the environment --------------------------------------------------------------------

    @property
    def task(self) -> Task:
        """Losses and metrics."""
        return self.setting.task

    @property
    def public(self) -> PublicData:
        """Public data.

        Raises:
            ArgumentError: there are none.
        """
        if self.setting.public is None:
            raise ArgumentError("public", None, "public data")
        return self.setting.public

    @property
    def device(self) -> torch.device:
        """Device of the node's data."""
        return self._call.group.device

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self._call.group.nodes[0].data.inputs.shape[1:])

    @property
    def is_frozen(self) -> bool:
        """True if no parameter of the model is trained."""
        return self._call.group.nodes[0].is_frozen

    # --- properties of a node by itself -------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the node. Not in a stacked call."""
        return self._call.node.name

    @property
    def data(self) -> TensorData:
        """The node's own data. Not in a stacked call."""
        self._call.node.records_read = True
        return self._call.node.data

    @property
    def seed(self) -> int:
        """Seed of the node's generators. Not in a stacked call."""
        return self._call.node.seed

    @property
    def query_number(self) -> int:
        """Number of the query. Not in a call that a CUDA graph captures, which would repeat it."""
        if self._call.samples is not None:
            raise TypeError("a stackable function has no query number; node.sample includes it in its stream")
        return self._call.number

    def network(self, role: str = "model") -> nn.Module:
        """Return a network itself, for hooks and submodules. Not in a stacked call."""
        return self._call.node.modules[role]

    def random_generator(self, *purpose: str | int) -> torch.Generator:
        """Return the node's generator for one purpose. Not in a stacked call."""
        return self._call.node.random_generator(*purpose)

    def trains_privately(self, role: str) -> bool:
        """Return whether a network of the node trains with DP-SGD. Such a node computes by itself."""
        return role in self._call.group.nodes[0].dp_sgd_parameters

    # --- computing for several nodes ----------------------------------------------------------------------

    def separately(self, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Return ``function(node, *tensors)``, computed for each node by itself also in a stacked call.

        For parts that use the node's data, its name, or values of tensors. The result, a tensor or a tuple of
        tensors, must have the same shapes at all nodes.
        """

        def run(*values: torch.Tensor) -> Any:
            results = []
            for row, node in enumerate(self._call.nodes):
                view = NodeView(NodeGroup([node]), self.setting, self._call.number)
                results.append(function(view, *(value[row] for value in values)))
            if isinstance(results[0], tuple):
                return tuple(stack_tensors(each) for each in zip(*results, strict=True))
            return stack_tensors(results)

        return self.on_group(run, *tensors)

    def on_group(self, run: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Return the node's part of ``run``, a function of the tensors of all nodes ``(G, ...)``.

        The hook for building blocks that compute a group faster than node by node.
        """
        return self._call.on_group(run, *tensors)
