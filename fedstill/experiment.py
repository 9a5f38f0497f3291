"""One experiment, phase by phase: local training, the centralised mark, distillation, evaluation.

Everything is checked before anything is written. What is done is remembered every few seconds, so a
run that was stopped at any moment goes on to the figures it would have reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstill import models
from fedstill.compute import Compute, EngineConfig
from fedstill.data.dataset import TensorData
from fedstill.errors import ArgumentError, DataError
from fedstill.federation import Answers, InProcess, choose
from fedstill.methods import method_of
from fedstill.node import training
from fedstill.node.gate import Gate, PolicyConfig
from fedstill.node.group import Group
from fedstill.node.ledger import Ledger
from fedstill.node.node import Node
from fedstill.node.training import LocalConfig
from fedstill.progress import Bars
from fedstill.records import Records
from fedstill.seeds import derive
from fedstill.tasks import Task

Shape = tuple[int, int, int]
CHUNK = 50  # local steps between two looks at the clock


@dataclass(frozen=True)
class Setting:
    """Everything that an experiment is made of, as objects; :mod:`fedstill.run` makes one from a config.

    Args:
        task: what is learned.
        parts: each node's private data.
        models: each node's network.
        student: the central network.
        test: data that no node sees.
        method: the method's config, for example ``FedIODConfig()``.
        mark: a network to train on all nodes' data together, or None.
        names: of the nodes.
        policies: of the nodes' gates.
        local: how nodes train.
        engine: how nodes are computed.
        mean, std: the data's declared normalisation, per channel; none is 0.5 and 0.5.
        seed: of every draw.
        every: distillation steps between evaluations; 0 is only at the end.
        samples: generated inputs kept at each evaluation.
    """

    task: Task
    parts: Sequence[TensorData]
    models: Sequence[nn.Module]
    student: nn.Module
    test: TensorData
    method: Any
    mark: nn.Module | None = None
    names: Sequence[str] = ()
    policies: Sequence[PolicyConfig] = ()
    local: LocalConfig = field(default_factory=LocalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    seed: int = 0
    every: int = 50
    samples: int = 12


class Experiment:
    """A setting made ready to run: every check that can be made beforehand has been made.

    Raises:
        FedstillError: data, models, policies and method do not fit together.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.task = setting, setting.task
        self.method = method_of(setting.method)
        self.compute = Compute(setting.engine)
        self.ledger = Ledger()
        names, policies = self._check()
        self.nodes = [
            Node(
                name,
                part.to(self.compute.device),
                self.compute.place(model),
                Gate(name, policy, self.ledger, secret=derive(setting.seed, name, "gate")),
                setting.seed,
            )
            for name, part, model, policy in zip(names, setting.parts, setting.models, policies, strict=True)
        ]
        self.test = setting.test.to(self.compute.device)
        self.side = self.method.node_side(setting.method, self.task)
        self.side.prepare(self.nodes)
        for node in self.nodes:
            for module in node.modules.values():
                self.compute.place(module)
        training.prepare(self.nodes, setting.local)
        # Before anything is trained or written: would every node answer what the method asks?
        self._federation([[node] for node in self.nodes]).require(list(self.side.questions))

        self.records = Records(None)
        self.bars = Bars(False)
        self.seconds = {"local_training": 0.0, "centralised": 0.0, "distillation": 0.0}
        self._earlier = 0.0  # seconds of the run before it was stopped
        self._start = time.monotonic()
        self._phase: tuple[str, float] | None = None  # the phase at work, and when it began
        self.local_steps: dict[str, int] = {}  # done, by the name of a group's first node
        self.groups: dict[str, list[list[str]]] = {}  # chosen once, and kept over stops
        self.ratios: dict[str, dict[str, float]] = {}
        self.mark: Node | None = None
        self.server: Any = None

    def run(self, out: Path | None = None, *, progress: bool = False) -> dict[str, Any]:
        """All phases, from the start or from where an earlier run in ``out`` stopped.

        Args:
            out: the run's folder, which must exist, or None to keep nothing.
            progress: show bars on a terminal.

        Returns:
            The figures: accuracies in percent, bytes, questions, seconds.
        """
        self._start = time.monotonic()
        self.records = Records(out)
        try:
            if out is not None:
                self.ledger.open(out / "ledger.jsonl")
            return self._run(self.records.load(), progress)
        finally:
            self.ledger.close()

    def _run(self, saved: dict[str, Any], progress: bool) -> dict[str, Any]:
        if saved:
            if saved["precision"] != self.compute.precision:
                begun = f"{saved['precision']}, as the run began"
                raise ArgumentError("engine.precision", self.compute.precision, begun)
            self.seconds, self.groups, self.ratios = saved["seconds"], saved["groups"], saved["ratios"]
            self._earlier = saved["total"]
            self.local_steps = saved["local_steps"]
            for node in self.nodes:
                node.load(saved["nodes"][node.name])
        with Bars(progress) as self.bars:
            self._train_locally()
            self._train_centrally(saved.get("mark"))
            self._distil(saved.get("server"))
        figures = self._figures()
        self.server.student.eval()  # as it will be used
        for node in self.nodes:  # and the nodes' models may learn on, but for what their owners froze
            for name, parameter in node.model.named_parameters():
                parameter.requires_grad_(name not in node.frozen["model"])
        return figures

    # --- phases -------------------------------------------------------------------------------------

    def _train_locally(self) -> None:
        def trial(group: Group) -> None:
            training.train(group.nodes, self.task, self.setting.local, self.compute, steps=3)

        # A node that brings a finished model, all frozen, has nothing to train and only answers.
        learning = [node for node in self.nodes if "model" in node.optimisers]
        with self._timed("local_training"):
            for group in self._parted("local_training", learning, trial):
                self._train(group, "local")
        for node in self.nodes:
            node.optimisers.pop("model", None)

    def _train_centrally(self, saved: dict[str, Any] | None) -> None:
        """The mark to reach: one model on what no server ever has, all nodes' data together."""
        if self.setting.mark is None:
            return
        together = TensorData(
            torch.cat([node.data.inputs for node in self.nodes]),
            torch.cat([node.data.targets for node in self.nodes]),
        )
        gate = Gate("centralised", PolicyConfig(), Ledger())
        model = self.compute.place(self.setting.mark)
        self.mark = Node("centralised", together, model, gate, self.setting.seed)
        training.prepare([self.mark], self.setting.local)
        if saved:
            self.mark.load(saved)
        with self._timed("centralised"):
            self._train([self.mark], "centralised")
        self.mark.optimisers.clear()

    def _distil(self, saved: dict[str, Any] | None) -> None:
        setting = self.setting
        mean, std = self._normalisation()
        with self._timed("distillation"):
            groups = self._parted("distillation", self.nodes, self.side.rehearse)
            self.server = self.method.server(
                setting.method,
                self._federation(groups),
                setting.student,
                self.task,
                tuple(self.test.inputs.shape[1:]),
                tuple(mean.flatten().tolist()),
                tuple(std.flatten().tolist()),
                self.compute,
                setting.seed,
            )
            if saved:
                self.server.load(saved)
            total = setting.method.steps
            start = time.monotonic()
            before = self.seconds["distillation"]
            while self.server.done < total:
                losses = self.server.step()
                done = self.server.done
                line = {"phase": "distillation", "step": done, "losses": losses}
                line["seconds"] = round(before + time.monotonic() - start, 3)
                note = ""
                if done == total or (setting.every and done % setting.every == 0):
                    line.update(self._score(self.server.student))
                    note = f"student {line[self.task.metric]:.1f} %"
                    self._keep_samples(done)
                self.records.metric(line)
                self.bars.show("distillation", done, total, note)
                if self.records.due():
                    self._save()

    def _train(self, nodes: Sequence[Node], phase: str) -> None:
        """Train one group to the end, from the step that it has reached."""
        local, first = self.setting.local, nodes[0].name
        longest = max(local.steps(len(node.data)) for node in nodes)
        meter = _Meter(self.records, phase)
        done = self.local_steps.get(first, 0)
        while True:
            done = training.train(
                nodes, self.task, local, self.compute, start=done, steps=CHUNK, report=meter
            )
            self.local_steps[first] = done
            self.bars.show(*self._local_progress(phase))
            if self.records.due():
                self._save()
            if done >= longest:
                return

    def _local_progress(self, phase: str) -> tuple[str, int, int]:
        local = self.setting.local
        if phase == "centralised" and self.mark is not None:
            return "centralised", self.local_steps["centralised"], local.steps(len(self.mark.data))
        sizes = {node.name: len(node.data) for node in self.nodes}
        groups = self.groups["local_training"]
        totals = {name: local.steps(sizes[name]) for group in groups for name in group}
        done = sum(min(totals[name], self.local_steps.get(group[0], 0)) for group in groups for name in group)
        return "local training", done, sum(totals.values())

    # --- evaluation ---------------------------------------------------------------------------------
    # What only a simulation can know: here, in the centralised mark and in the losses of local training,
    # nodes' data and networks are read past their gates. The student learns from none of it.

    def _score(self, model: nn.Module) -> Mapping[str, float]:
        outputs = training.predict(model, self.test.inputs, self.compute)
        return self.task.metrics(outputs, self.test.targets)

    def _score_ensemble(self) -> Mapping[str, float]:
        """The teachers' ensemble on real test data, weighed as the method weighs it."""
        parts = []
        with torch.no_grad(), self.compute.autocast():
            for inputs in torch.split(self.test.inputs, 1000):
                answer = self.side.look(self.nodes, inputs)
                names = tuple(node.name for node in self.nodes)
                parts.append(self.server.ensemble(Answers(-1, names, answer)))
        return self.task.metrics(torch.cat(parts), self.test.targets)

    def _figures(self) -> dict[str, Any]:
        metric = self.task.metric
        each = [self._score(node.model)[metric] for node in self.nodes]
        ledger = self.ledger.summary()
        by_node = ledger.pop("by_node")
        return {
            "method": self.method.name,
            "title": self.method.title,
            "task": self.task.name,
            "seed": self.setting.seed,
            "nodes": [
                {
                    "name": node.name,
                    "model": type(node.model).__name__,
                    "parameters": _size(node.model),
                    "examples": len(node.data),
                    "label_counts": [int(count) for count in self.task.counts(node.data)],
                    "bytes": by_node.get(node.name, {"up": 0, "down": 0}),
                }
                for node in self.nodes
            ],
            "student": {
                "model": type(self.server.student).__name__,
                "parameters": _size(self.server.student),
                **self._score(self.server.student),
            },
            "standalone": {
                metric: {"mean": float(np.mean(each)), "std": float(np.std(each)), "per_node": each}
            },
            "ensemble": dict(self._score_ensemble()),
            "centralised": ({metric: None} if self.mark is None else dict(self._score(self.mark.model))),
            "bytes": {key: ledger[key] for key in ("up", "down", "by_kind")},
            "questions": ledger["questions"],
            "questions_by_name": ledger["questions_by_name"],
            "seconds": {"total": self._total(), **self.seconds},
            "engine": {
                "name": self.compute.config.name,
                "device": str(self.compute.device),
                "precision": self.compute.precision,
                "threads": torch.get_num_threads(),
                "stacked_over_one_by_one": self.ratios,
                "groups": self.groups,
            },
            "privacy": {"guarantee": None, "text": "no guarantee"},
        }

    def _keep_samples(self, step: int) -> None:
        if self.setting.samples:
            images = self.server.imagine(self.setting.samples).cpu()  # (n, C, H, W)
            mean, std = self._normalisation()
            pixels = (images * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8)
            self.records.samples[f"{step:06d}"] = pixels.contiguous()  # as a file of safetensors needs it

    # --- the rest -----------------------------------------------------------------------------------

    def _check(self) -> tuple[list[str], list[PolicyConfig]]:
        """Names and policies of the nodes, once everything fits together."""
        setting = self.setting
        count = len(setting.parts)
        names = list(setting.names) or [f"node-{index}" for index in range(count)]
        policies = list(setting.policies) or [PolicyConfig()] * count
        for what, given in (("models", setting.models), ("names", names), ("policies", policies)):
            if not given or len(given) != count:
                raise ArgumentError(what, len(given), f"one for each of the {count} parts of the data")
        if len(set(names)) < count:
            raise ArgumentError("names", names, "each name once")
        self.task.check(setting.test, "test data")
        shape: Shape = tuple(setting.test.inputs.shape[1:])  # type: ignore[assignment]
        for name, part, model in zip(names, setting.parts, setting.models, strict=True):
            self.task.check(part, f"data of {name}")
            if tuple(part.inputs.shape[1:]) != shape:
                found = tuple(part.inputs.shape[1:])
                raise ArgumentError(f"input shape of {name}", found, f"{shape}, as in the test data")
            self._check_range(part, f"data of {name}")
            models.check(model, shape, self.task.classes, f"model of {name}")
        models.check(setting.student, shape, self.task.classes, "student")
        owners = [*zip(names, setting.models, strict=True), ("the student", setting.student)]
        seen: dict[int, str] = {}
        for owner, model in owners:
            for parameter in model.parameters():
                other = seen.setdefault(id(parameter), owner)
                if other != owner:
                    raise ArgumentError("models", f"{other} and {owner}", "networks that share no parameter")
        if not any(parameter.requires_grad for parameter in setting.student.parameters()):
            raise ArgumentError("student", "all frozen", "a network with something to train")
        return names, policies

    def _check_range(self, data: TensorData, what: str) -> None:
        """Refuse inputs that the generator could never make, since it makes pixels from 0 to 1."""
        mean, std = self._normalisation()
        low, high = (0 - mean) / std, (1 - mean) / std  # (C, 1, 1)
        least, most = data.inputs.amin((0, 2, 3)), data.inputs.amax((0, 2, 3))
        outside = (least < low.flatten() - 1e-3) | (most > high.flatten() + 1e-3)
        if outside.any():
            channel = int(outside.nonzero()[0])
            raise DataError(
                f"{what} has values from {least[channel]:.4g} to {most[channel]:.4g} in channel {channel}: "
                f"allowed by mean and std are {low[channel].item():.4g} to {high[channel].item():.4g}; "
                "say how inputs were normalised with mean and std"
            )

    def _normalisation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the inputs, as declared: two of (C, 1, 1)."""
        channels = self.setting.test.inputs.shape[1]
        given = {"mean": self.setting.mean, "std": self.setting.std}
        for name, values in given.items():
            if values and len(values) != channels:
                raise ArgumentError(name, values, f"one value for each of the {channels} channels, or none")
        mean, std = (torch.tensor(values or (0.5,) * channels).view(-1, 1, 1) for values in given.values())
        if (std <= 0).any():
            raise ArgumentError("std", self.setting.std, "above 0")
        return mean, std

    def _federation(self, groups: Sequence[Sequence[Node]]) -> InProcess:
        return InProcess(self.nodes, groups, self.side, self.compute)

    def _parted(self, phase: str, nodes: Sequence[Node], trial: Callable[[Group], None]) -> list[list[Node]]:
        """Nodes in the groups chosen for a phase; chosen once, so that a run goes on as it began."""
        if phase not in self.groups:
            groups, self.ratios[phase] = choose(nodes, self.compute, trial)
            self.groups[phase] = [[node.name for node in group] for group in groups]
        by_name = {node.name: node for node in self.nodes}
        return [[by_name[name] for name in group] for group in self.groups[phase]]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        self._phase = (phase, start)
        yield
        self.seconds[phase] += time.monotonic() - start
        self._phase = None

    def _total(self) -> float:
        """Seconds of the run so far, those before a stop included."""
        return self._earlier + time.monotonic() - self._start

    def _save(self) -> None:
        """Remember where the run stands."""
        seconds = dict(self.seconds)
        if self._phase is not None:
            phase, since = self._phase
            seconds[phase] += time.monotonic() - since
        self.records.save(
            {
                "seconds": seconds,
                "total": self._total(),
                "precision": self.compute.precision,
                "groups": self.groups,
                "ratios": self.ratios,
                "local_steps": self.local_steps,
                "nodes": {node.name: node.state() for node in self.nodes},
                "mark": None if self.mark is None else self.mark.state(),
                "server": None if self.server is None else self.server.state(),
            }
        )


class _Meter:
    """Writes a node's mean training loss every so many steps."""

    EVERY = 50

    def __init__(self, records: Records, phase: str) -> None:
        self.records, self.phase = records, phase

    def __call__(self, nodes: Sequence[Node], step: int, losses: torch.Tensor) -> None:
        if step % self.EVERY == 0:
            for node, loss in zip(nodes, losses.tolist(), strict=True):
                self.records.metric(
                    {"phase": self.phase, "node": node.name, "step": step, "loss": round(loss, 5)}
                )


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
