"""The server's half of a run whose nodes are elsewhere: it has a method, a student and test data of its own.

It knows no node's data, model or policy, and cannot name them. Its folder is a run's folder like any other;
a run that was stopped in it goes on from it, and its nodes go back to the mark that it had reached.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedstill import models
from fedstill.core.compute import Compute
from fedstill.core.errors import MethodRefused
from fedstill.core.progress import Bars
from fedstill.core.records import Records
from fedstill.core.version import __version__
from fedstill.data.form import Form
from fedstill.data.loaders import load
from fedstill.data.public import Public, load_public
from fedstill.federation.remote import Link, Meter, Remote
from fedstill.federation.replies import About
from fedstill.methods._histogram import LabelHistogram
from fedstill.methods.server import Server, ServerSetting
from fedstill.node.fit import architecture, fitted
from fedstill.node.ledger import Ledger
from fedstill.protocol.kinds import LABEL_COUNTS
from fedstill.protocol.messages import WireConfig
from fedstill.protocol.method import Method, refusal, side_of
from fedstill.protocol.plan import Plan, fingerprint
from fedstill.protocol.questions import NodeSetting
from fedstill.protocol.schedule import LocalConfig
from fedstill.runs.config import RunConfig, to_dict
from fedstill.runs.evaluation import Evaluation, plain
from fedstill.runs.result import common, told_cases
from fedstill.runs.turns import drive


class Live:
    """A run at the server, ready to begin.

    Args:
        config: the run. Its tables ``nodes`` and ``split`` are not read, but for ``nodes.local``, by which a
            server trains that does so by itself.
        link: to the nodes.
        run: its name, by which the nodes know it again.
        folder: where its files are written.
        bars: show progress; None shows none.

    Raises:
        FedstillError: data, student and method do not fit together.
    """

    def __init__(
        self, config: RunConfig, link: Link, run: str, folder: Path, bars: Bars | None = None
    ) -> None:
        self.config, self.link, self.run_name, self.folder = config, link, run, folder
        self.bars = bars or Bars(False)
        self.method: Method = config.method
        self.needs = self.method.needs()
        self.data = load(config.data, config.task, train_needed=False)
        self.task = config.task.make(self.data.classes)
        reason = refusal(self.needs, self.task)
        if reason is not None:
            raise MethodRefused(self.method.title, "every node", reason)
        self.task.check(self.data.test, "test data")
        self.compute = Compute(dataclasses.replace(config.engine, name="one-by-one", startup_kit=""))
        form = Form.of(config.task, self.data)
        self.shape = shape = form.shape
        classes, parted, vocabulary = len(form.classes), self.needs.split, form.vocabulary
        made = models.build(
            config.student.model, shape, classes, config.seed, "student", vocabulary=vocabulary
        )
        models.check(made, shape, form.outputs, "student")
        self.whole = made
        self.student = fitted(
            made, self.compute, shape, config.seed, "student", parted=parted, vocabulary=vocabulary
        )
        self.evaluation = Evaluation(
            self.task, self.data.test.to(self.compute.device), self.compute, config.seed
        )
        _, public = load_public(config.public, self.data, config.task)
        if (self.needs.public or self.needs.public_labels) and public is None:
            raise MethodRefused(self.method.title, "every node", "there is no public data: set public.name")
        self.public: Public | None = None if public is None else public.to(self.compute.device)
        self.plan = Plan(
            run,
            to_dict(config)["method"],
            form,
            WireConfig(config.link.inputs, config.link.gradients),
            fingerprint(public),
            ("", "") if public is None else (public.name, public.note),
        )
        # What the nodes are asked is the method's declaration; what they have is not known here.
        at_nodes = NodeSetting(self.task, LocalConfig(), self.compute, self.public)
        side = side_of(self.method, at_nodes)
        self.side = side
        self.ledger = Ledger()
        self.federation = Remote(
            link, self.plan, side.questions, config.link, self.ledger, self.compute, public
        )
        self.seconds = {"local_training": 0.0, "distillation": 0.0}
        self.records, self.server = Records(None), None
        self._earlier, self._start = 0.0, time.monotonic()
        self._since: tuple[str, float] | None = None  # the phase at work, and when it began

    server: Server | None

    def run(self) -> dict[str, Any]:
        """The whole run, from its beginning or from where it stopped in this folder.

        Returns:
            Its figures: accuracies in percent, bytes, questions, seconds, what the link cost.

        Raises:
            FedstillError: a node cannot take part, refuses or fails; the run can go on from its last mark.
        """
        self._start = time.monotonic()
        self.records = Records(self.folder)
        try:
            self.ledger.open(self.folder / "ledger.jsonl")
            with self.bars as bars:
                return self._run(self.records.load(), bars)
        finally:
            self.federation.leave()
            self.ledger.close()

    def _run(self, saved: Mapping[str, Any], bars: Bars) -> dict[str, Any]:
        if saved:
            self.seconds, self._earlier = dict(saved["seconds"]), saved["total"]
            self.federation.meter = Meter(**saved["meter"])
        self.federation.join()
        self._check_nodes()
        server = self._make_server()
        self._begin("local_training")
        self.federation.learn(lambda percent: bars.show("local training", percent, 100))
        self._end()
        # Also without a saved state: nodes may have answered before the server was stopped.
        self.federation.recall(saved["mark"] if saved else 0)
        if saved:
            server.take_up(saved["server"])
        self.server = server
        self._begin("distillation")
        drive(
            server,
            self.records,
            bars,
            metric=self.task.metric,
            every=self.config.evaluation.every,
            samples=self.config.evaluation.samples,
            pixels=self._pixels,
            before=self.seconds["distillation"],
            look=self._look,
            save=self._save,
        )
        self._end()
        self._save()
        return self._figures(server)

    # --- the parts ------------------------------------------------------------------------------------

    def _check_nodes(self) -> None:
        """Refuse nodes with which the method cannot work, before anything is trained."""
        title, about = self.method.title, self.federation.about
        kind = architecture(self.student)
        equal = [node for node, told in about.items() if told.architecture == kind]
        reasons: dict[str, list[str]] = {}
        for node, told in about.items():
            if self.needs.trainable and told.frozen:
                reasons.setdefault("its model is frozen, and every round trains it", []).append(node)
            elif (self.needs.same_architecture or self.needs.student_kind) and node not in equal:
                reasons.setdefault("its model is not of the student's architecture", []).append(node)
        if reasons:  # all of them at once, for those who see to it
            (reason, nodes), *others = reasons.items()
            also = "".join(f"; {', '.join(who)}: {why}" for why, who in others)
            raise MethodRefused(title, ", ".join(nodes), f"{reason}{also}")

    def _make_server(self) -> Server:
        """The method's program; refuses what a node would refuse later."""
        mean, std = self.data.mean, self.data.std
        setting = ServerSetting(
            federation=self.federation,
            student=self.student,
            task=self.task,
            shape=self.shape,
            mean=tuple(mean),
            std=tuple(std),
            compute=self.compute,
            seed=self.config.seed,
            local=self.config.nodes.local,  # of networks that the server trains by itself, on public data
            public=self.public,
            kinds=((self.federation.nodes, self.student),),
        )
        return Server(self.method, setting)

    def _look(self) -> Mapping[str, float]:
        """What the server can measure by itself: its student on its own test data."""
        if not self.has_student:
            return {}
        outputs = self.evaluation.outputs(self.student)
        return {self.task.metric: self.evaluation.metrics(outputs)[self.task.metric]}

    @property
    def has_student(self) -> bool:
        """Whether the method ends with a model at the server."""
        return self.method.central == "student"

    def _figures(self, server: Server) -> dict[str, Any]:
        metric, total, look = self.task.metric, self._total(), self.evaluation
        outputs = look.outputs(self.student) if self.has_student else None
        reached = {} if outputs is None else plain(look.metrics(outputs))
        notes = self._notes()
        told, by_node = common(
            method=self.method,
            needs=self.needs,
            task=self.task,
            seed=self.config.seed,
            side=self.side,
            server=server,
            public=self.public,
            ledger=self.ledger,
            compute=self.compute,
            engine=self.config.engine.name,
            parted={},
            statements={name: about.privacy for name, about in self.federation.about.items()},
        )
        parameters = sum(parameter.numel() for parameter in self.student.parameters())
        student = {"model": self.config.student.model, "parameters": parameters, **reached}
        return {
            **told,
            metric: None,
            **reached,
            **({"notes": notes} if notes else {}),
            "nodes": [self._about_node(name, server, by_node.get(name)) for name in self.federation.nodes],
            "student": student if self.has_student else None,
            "local": None,  # the nodes' own to know
            "standalone": None,
            "ensemble": None,
            "centralised": {metric: None},
            **look.details(outputs, {}, None, self.data.classes),
            "pictures": look.portray(outputs, {}, self.data.mean, self.data.std, self.records),
            "seconds": {"total": total, "centralised": 0.0, **self.seconds},
            "link": self.federation.meter.figures(total, self.seconds["local_training"]),
        }

    def _about_node(self, name: str, server: Server, sizes: Mapping[str, int] | None) -> dict[str, Any]:
        """What is known here of a node: what it said of itself, and the label counts that it answered."""
        about = self.federation.about.get(name, About())
        told = getattr(server.state, "histogram", None)
        known = isinstance(told, LabelHistogram) and LABEL_COUNTS in self.side.leaves() and name in told.names
        row = told.of([name]) if isinstance(told, LabelHistogram) and known else None
        return {
            "name": name,
            "model": about.model,
            "parameters": about.parameters,
            "examples": None if row is None else round(float(row.sizes[0])),
            "label_counts": None if row is None else [round(float(count)) for count in row.counts[0]],
            "bytes": sizes or {"up": 0, "down": 0},
            "versions": dict(about.versions) or None,
        }

    def _notes(self) -> list[str]:
        """What nodes said is switched off there, each once; by whom, unless all said it."""
        said: dict[str, list[str]] = {}
        for node, about in self.federation.about.items():
            for note in about.notes:
                said.setdefault(note, []).append(node)
        everyone = len(self.federation.about)
        return [n if len(who) == everyone else f"{', '.join(who)}: {n}" for n, who in said.items()]

    def about(self) -> dict[str, Any]:
        """What the result says beside the figures."""
        return {
            "fedstill": __version__,
            "name": self.config.name,
            "command": "",
            "data": {
                "name": self.data.name,
                "classes": list(self.data.classes),
                "train": None,
                "test": len(self.data.test),
                **told_cases(self.data.test),
                "shape": list(self.shape),
                "note": self.data.note,
            },
            "split": {"how": "as it is", "alpha": None, "nodes": len(self.federation.nodes)},
        }

    def trained(self) -> nn.Module | None:
        """The student, if there is one."""
        return self.whole if self.has_student else None

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.data.mean, self.data.std))
        return (images * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8).contiguous()

    def _begin(self, phase: str) -> None:
        self._since = phase, time.monotonic()

    def _end(self) -> None:
        if self._since is not None:
            phase, since = self._since
            self.seconds[phase] += time.monotonic() - since
            self._since = None

    def _total(self) -> float:
        return self._earlier + time.monotonic() - self._start

    def _save(self) -> None:
        """Remember where the run stands, first at the nodes: the server's mark is always one of theirs."""
        if self.server is None:
            return
        start, mark = time.monotonic(), self.federation.number
        self.federation.remember(mark)
        seconds = dict(self.seconds)
        if self._since is not None:
            phase, since = self._since
            seconds[phase] += time.monotonic() - since
        self.records.save(
            {
                "mark": mark,
                "seconds": seconds,
                "total": self._total(),
                "meter": dataclasses.asdict(self.federation.meter),
                "server": self.server.kept(),
            },
            since=start,
        )
