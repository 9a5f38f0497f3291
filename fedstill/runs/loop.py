"""The one loop of every run, wherever its nodes are: local training, the mark, the server's turns, figures.

What is done is remembered every few seconds, so a run that was stopped at any moment goes on to the figures
it would have reached. With nodes in this process it is a :class:`~fedstill.runs.simulation.Simulation`, with
nodes elsewhere a :class:`~fedstill.runs.remote_run.RemoteRun`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.progress import Bars
from fedstill.core.run_writer import Records, holding
from fedstill.core.text_format import finite
from fedstill.core.timing import Clock
from fedstill.federation.federation import Federation
from fedstill.methods._server import Server
from fedstill.models.module_check import needs_two_examples
from fedstill.models.module_utils import parameter_count
from fedstill.node.audit_entries import ALL_RUNS
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.network_setup import prepare_network
from fedstill.privacy.statement import Statement, summarize_privacy
from fedstill.protocol.method import Method, method_name
from fedstill.protocol.queries import NodeSide
from fedstill.runs.evaluation import Evaluation, Outputs, mean, student_outputs
from fedstill.runs.predictions import FILE as PREDICTIONS
from fedstill.runs.predictions import TestNames, predictions
from fedstill.runs.run_warnings import best, collect_warnings
from fedstill.runs.setting import Setting, check_method, check_server, normalization, shape_of
from fedstill.runs.student_file import header
from fedstill.track.listeners import Listeners

UNITS = {"step": "distillation", "epoch": "distillation", "round": "rounds"}  # turns, in the progress bar


class Run(ABC):
    """One run of a setting.

    Args:
        setting: what the server has, and in a simulation the nodes too.

    Attributes:
        clock: seconds of each phase and in all.
        records: the files of the run's folder, or of none.
        listeners: who else hears the metrics, where there is a folder.
        notes: what the result says beside its figures.

    Raises:
        FedstillError: what the server has and the method do not fit together.
    """

    side: NodeSide

    def __init__(self, setting: Setting) -> None:
        method_name(setting.method)  # which refuses what is none
        kind = type(setting.method)
        if missing := kind.lacks(kind):
            raise ArgumentError("method", kind.__name__, missing)
        self.setting, self.task = setting, setting.task
        self.method: Method = setting.method
        self.needs = self.method.needs()
        self.audit = AuditLog(durable=False)
        check_method(setting.method, setting.task, setting.public)
        check_server(setting)
        self.shape = shape_of(setting)
        self.compute = Compute(setting.engine).suited(
            self.shape, setting.student, exact=self.method.needs_float32
        )
        self.mean, self.std = normalization(setting)  # (C, 1, 1) each
        self.student = self._fitted(setting.student, "student")
        self.test = setting.test.to(self.compute.device)
        self.public = None if setting.public is None else setting.public.to(self.compute.device)
        self.evaluation = Evaluation(self.task, self.test, self.compute, setting.seed)
        self.notes: list[str] = []
        self.records, self.bars, self.clock = Records(None), Bars(False), Clock()
        self.listeners = Listeners()
        self._made: Server | None = None

    def check_batches(self, networks: Mapping[str, nn.Module]) -> None:
        """Refuse a method's batches of one example where a network cannot learn from one.

        Raises:
            ArgumentError: naming the option, or the public data.
        """
        alone = [f"method.{name}" for name in self.method.batch_options if getattr(self.method, name) == 1]
        needed = self.needs.public or self.needs.public_labels
        if needed and self.method.batch_options and self.public is not None and len(self.public) == 1:
            alone.append("public.name")
        for whose, model in networks.items():
            learns = any(own.requires_grad for own in model.parameters())
            if alone and learns and needs_two_examples(model, self.shape, self.task.form):
                raise ArgumentError(alone[0], "1 example", f"2 or more, for the batch norm of the {whose}")

    @property
    def server(self) -> Server:
        """The method's program, once local training is done; a FedstillError before."""
        if self._made is None:
            raise FedstillError("the run has no server yet: it begins once local training is done")
        return self._made

    @property
    def has_student(self) -> bool:
        """Whether the server ends with a whole model; an average made to evaluate is none."""
        return self.method.evaluated_model == "student"

    def run(self, out: Path | None = None, *, bars: Bars | None = None) -> dict[str, Any]:
        """The whole run, from the start or from where an earlier one in ``out`` stopped.

        Args:
            out: the run's folder, which must exist, or None to keep nothing.
            bars: show progress; None shows none.

        Returns:
            The figures: metrics in their units, bytes, queries, seconds.

        Raises:
            FedstillError: a node cannot take part, refuses or fails; the run can go on.
        """
        self.clock.start()
        self.records = Records(out, self.listeners.log, self.setting.options)
        self.bars = bars or Bars(False)
        with ExitStack() as at_last:
            at_last.enter_context(self.compute.few_threads(self.shape, self.setting.student))
            if out is not None:
                at_last.enter_context(holding(out, "run"))
                self.audit.open(out / FILE)
                at_last.callback(self.audit.close)
                self.audit.require_sound()
            at_last.callback(self._close)
            if out is not None:
                at_last.push(self._unless_done)
                self.listeners.start(out, self.method.title)
            self.bars.describe(self._described())
            with self.bars:
                saved = self.records.load()
                self.clock.load(saved.get("clock"))
                self._open(saved)
                self._learn()
                self._train_centrally(saved)
                with self.clock.phase("distillation"):
                    self._made = self._serve(saved)
                    self._take_turns(self._made)
                return self._measured()

    def _measured(self) -> dict[str, Any]:
        """The figures, at the end."""
        self.bars.show("evaluation", 0, 1)
        results = self.results()
        self.bars.show("evaluation", 1, 1)
        return results

    def _unless_done(self, kind: object, *_: object) -> None:
        """A run that stops before its end tells its listeners; one that does not ends in :meth:`finish`."""
        if kind is not None:
            self.listeners.close(None)

    # --- what depends on where the nodes are ----------------------------------------------------------

    @abstractmethod
    def _open(self, saved: Mapping[str, Any]) -> None:
        """Have the nodes ready, as they were when ``saved`` was; it is empty at the beginning."""

    @abstractmethod
    def _learn(self) -> None:
        """What the method wants trained before its first query."""

    @abstractmethod
    def _train_centrally(self, saved: Mapping[str, Any]) -> None:
        """The mark to reach, where all nodes' data are here."""

    @abstractmethod
    def _serve(self, saved: Mapping[str, Any]) -> Server:
        """The method's program, at its beginning or where it was; nodes are where they were for it."""

    @abstractmethod
    def look(self) -> Mapping[str, float]:
        """What can be measured now, by key; of what the method is judged by, by the task's metric."""

    @abstractmethod
    def _nodes(self) -> Mapping[str, Any]:
        """What must be remembered of the nodes, who keep their own state if they are elsewhere."""

    @abstractmethod
    def _about_nodes(self) -> list[dict[str, Any]]:
        """What is known here of each node, by key."""

    @abstractmethod
    def _statements(self) -> Mapping[str, Statement]:
        """How nodes protect their records, as far as they have said."""

    def _grouped(self) -> Mapping[str, Any]:
        """How nodes were grouped to be computed, and what that was chosen by."""
        return {}

    def _outputs(self) -> Outputs:
        """What models answer on the test part; the nodes' own models are theirs to know."""
        return Outputs(self.responses(self.test.inputs))

    def _beside(self, told: Outputs) -> Mapping[str, Mapping[str, Any] | None]:
        """Figures beside the central model's: of the nodes' models, of their ensemble, of the mark."""
        unknown = dict.fromkeys(("local", "standalone", "ensemble"))
        return {**unknown, "centralized": {self.task.metric: None}}

    @abstractmethod
    def _close(self) -> None:
        """Let the nodes go."""

    def _described(self) -> dict[str, str]:
        """What is to be known of the run while it goes on."""
        judged = self.task.metrics[0]
        metric = {
            "metric": judged.key,
            "metric_title": judged.title,
            "unit": judged.unit,
            "better": judged.better,
        }
        return {"title": self.method.title, **metric}

    # --- what does not --------------------------------------------------------------------------------

    def _fitted(self, model: torch.nn.Module, what: str) -> torch.nn.Module:
        """A network on the device, in two parts if the method needs them."""
        parted, words, seed = self.needs.split_models, self.setting.vocabulary, self.setting.seed
        return prepare_network(model, self.compute, self.shape, seed, what, parted=parted, vocabulary=words)

    def responses(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """What the central model answers about inputs ``(N, C, ...)``; None where nothing stands for one."""
        return student_outputs(self.setting.student, inputs, self.compute) if self.has_student else None

    def _server(self, federation: Federation, student: torch.nn.Module, kinds: Any) -> Server:
        """The method's program at its beginning; nobody is asked yet."""
        return Server(
            self.method,
            federation=federation,
            student=student,
            task=self.task,
            shape=self.shape,
            mean=tuple(self.mean.flatten().tolist()),
            std=tuple(self.std.flatten().tolist()),
            compute=self.compute,
            seed=self.setting.seed,
            local=self.setting.local,
            public=self.public,
            kinds=kinds,
            schema=self.setting.schema,
        )

    def finish(self, result: Mapping[str, Any], *, keep_state: bool = False) -> None:
        """Write what the run came to: its result, and its student as a file that says how it is used."""
        for name, text in self.method.output_files(self.server, self.server.state).items():
            self.records.text(name, text)
        student = self.setting.student if self.has_student else None
        self.records.finish(result, student, header(self.setting), keep_state=keep_state)
        self.listeners.close(result)

    def results(self) -> dict[str, Any]:
        """What ``result.json`` says of models, bytes, queries and privacy."""
        look, metric, public = self.evaluation, self.task.metric, self.public
        told = self._outputs()
        reached: Mapping[str, Any] = {metric: None}
        if told.central is not None:
            reached = finite(look.compute_metrics(told.central))
        elif told.own:
            reached = finite(mean([look.compute_metrics(each, node=name) for name, each in told.own.items()]))
        self._keep_predictions(told)
        sums = self.audit.summary()
        by_node: Mapping[str, dict[str, int]] = sums["by_node"]
        nothing = {"up": 0, "down": 0}
        nodes = [{**about, "bytes": by_node.get(about["name"]) or nothing} for about in self._about_nodes()]
        model = self.setting.student_name or type(self.setting.student).__name__
        student = {"model": model, "parameters": parameter_count(self.student), **reached}
        scale = [tuple(values.flatten().tolist()) for values in (self.mean, self.std)]
        names = tuple(self.setting.classes) or tuple(map(str, range(self.task.classes)))
        advice = self.task.metric_advice(self.test.targets, names)
        privacy = summarize_privacy(self._statements(), self._spent())
        told_of = collect_warnings(self.setting, list(self.server.federation.nodes), privacy, told, names)
        notes = [*self.notes, *self.listeners.notes, *told_of, *([advice] if advice else ())]
        notes += best(self.records.metrics, self.task, self.server.unit) if self.setting.best else ()
        return {
            "method": method_name(self.method),
            "title": self.method.title,
            "task": self.task.name,
            "kind": self.task.kind,
            "metric": metric,
            "metrics": [asdict(each) for each in self.task.metrics],
            "seed": self.setting.seed,
            "central": self.method.evaluated_model,
            "needs": asdict(self.needs),
            "leaves": list(self.side.released_kinds()),
            "kinds": {
                kind: {
                    "description": kind.description,
                    "category": kind.category,
                    "from_label_maps": kind.from_label_maps,
                    "package": kind.package,
                }
                for kind in self.side.transmitted_kinds()
            },
            "returned": sorted(
                {each.sends[name] for each in self.side.queries.values() for name in each.owner_only}
            ),
            "turn": self.server.unit,
            "turns": self.server.total_steps,
            "public": None if public is None else public.to_record(),
            "bytes": {key: sums[key] for key in ("up", "down", "by_kind")},
            "queries": sums["queries"],
            "queries_by_name": sums["queries_by_name"],
            "events": self.server.federation.events,
            "engine": {
                "name": self.setting.engine.name,
                "device": str(self.compute.device),
                "precision": self.compute.precision,
                "threads": self.compute.threads,
                **self._grouped(),
            },
            "privacy": privacy,
            **reached,
            "notes": notes,
            "nodes": nodes,
            "student": student if self.has_student else None,
            **self._beside(told),
            "majority": look.guess(),
            "intervals": look.resampled(told, self.records),
            **look.details(told, self.setting.classes),
            "pictures": look.portray(told, scale[0], scale[1], self.records),
            "seconds": {"total": self.clock.total, **self.clock.seconds},
        }

    def _keep_predictions(self, told: Outputs) -> None:
        """A line for each test case: of what the run is judged by. No example of a node is among them."""
        if self.records.folder is None:
            return
        look = self.evaluation
        judged = {name: (outputs, look.asked_of(name)) for name, outputs in told.own.items()}
        if told.central is not None:
            judged = {self.method.evaluated_model: (told.central, self.test)}
        about = TestNames(self.setting.test_names, self.setting.classes, self.setting.schema)
        text = predictions(self.task, judged, about)
        if text is not None:
            self.records.text(PREDICTIONS, text)

    def _spent(self) -> dict[str, tuple[Counter[str], int]]:
        """What each node's releases cost, and how many of them have no guarantee."""
        paid = {name: self.audit.spending(name, ALL_RUNS) for name in self.server.federation.nodes}
        return {name: (Counter(spent.total_events), spent.total_no_guarantee) for name, spent in paid.items()}

    def _take_turns(self, server: Server) -> None:
        """The server's turns, from where it is to the last."""
        total = server.total_steps
        every = max(total // 10, 1) if self.setting.every is None else self.setting.every
        if server.completed_steps < total:
            self.bars.show(UNITS[server.unit], server.completed_steps, total)
        while server.completed_steps < total:
            losses = server.step()
            done = server.completed_steps
            self.bars.go_without(list(server.federation.excluded))
            line = {"phase": "distillation", "step": done, "losses": losses}
            line["seconds"] = round(self.clock.now("distillation"), 3)
            note = ""
            if done == total or (every and done % every == 0):
                told, metric = self.look(), self.task.metric
                line.update(told)
                note = f"{metric} {told[metric]:.1f} %" if metric in told else ""
                self._keep_samples(server)
            self.records.metric(line)
            self.bars.show(UNITS[server.unit], done, total, note)
            if self.records.due():
                self._save()

    def _keep_samples(self, server: Server) -> None:
        """Some inputs that the server has made, with the label maps that they were made from."""
        count = self.setting.samples
        images = server.preview_samples(count) if count else None
        if images is None:
            return
        turn = f"{server.completed_steps:06d}"
        self.records.samples[turn] = self.pixels(images.cpu())
        maps = server.preview_maps(count)
        if maps is not None:
            # A copy: a file takes no two names for one memory.
            self.records.samples[f"{turn}.maps"] = maps.cpu().contiguous().clone()

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Normalized inputs ``(n, C, H, W)`` as bytes; rows of a table as they are."""
        if self.task.form == "rows":
            return images.contiguous()
        # Contiguous, as a file of safetensors needs it.
        return (images * self.std + self.mean).clamp(0, 1).mul(255).round().to(torch.uint8).contiguous()

    def _save(self) -> None:
        since = time.monotonic()
        nodes = self._nodes()  # first, as a node that is lost meanwhile is out of the server's state, too
        server = None if self._made is None else self._made.state_dict()
        self.records.save({**nodes, "clock": self.clock.kept(), "server": server}, since=since)
