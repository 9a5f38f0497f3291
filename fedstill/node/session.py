"""One run at a node: what it takes up, learns, answers and remembers, in the node's own folder.

What a run needs to go on lies in ``runs/RUN/``: its ledger, how far its local training has come, and the
node's state at each mark that the server asked it to remember. A server that was stopped goes back to its
last mark, and every node with it: so nothing is trained twice, and what was released already is neither
charged nor counted again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch

from fedstill.core import owner_only
from fedstill.core.compute import Compute
from fedstill.core.errors import (
    ArgumentError,
    FedstillError,
    ModelError,
    NodeFault,
    OwnDataError,
    QuestionRefused,
    TooLarge,
)
from fedstill.core.state import load_state, save_state
from fedstill.data.memory import fits
from fedstill.data.public import Public
from fedstill.node import memory, own_model, owner, training
from fedstill.node.account import DATA, Account
from fedstill.node.disk import RUNS, Disk
from fedstill.node.fit import architecture, fitted
from fedstill.node.gate import Gate
from fedstill.node.group import Group
from fedstill.node.ledger import ANSWER, GRADIENT, Ledger
from fedstill.node.limits import limited
from fedstill.node.networks import within_parameters
from fedstill.node.node import Node
from fedstill.node.node_file import NodeFile
from fedstill.node.protect import check_priced, protect
from fedstill.node.requests import RequestHandler
from fedstill.node.witness import released
from fedstill.protocol.digests import digest
from fedstill.protocol.kinds import GRADIENTS, INDICES, INPUTS
from fedstill.protocol.messages import SCALE, Tensors, size
from fedstill.protocol.method import side_of
from fedstill.protocol.plan import PLAN_FILE, Plan
from fedstill.protocol.questions import NodeSetting, Question
from fedstill.protocol.schedule import Span

logger = logging.getLogger("fedstill.node")

CHUNK = 20  # local steps between two looks at the clock
LEARNING = "learning.safetensors"
SALT = "salt"
MOST = 2**31  # numbers of questions are below it
MOST_PARTS = 100_000  # of the local training before the first question
MARKS = 2  # kept: a server stopped between its nodes' marks and its own goes back to the one before
SECONDS_BETWEEN = 5.0  # between two saved states of local training


class Session:
    """One run at a node.

    Args:
        folder: the node's own.
        file: what its owner says.
        compute: device and precision.
        plan: the run.
        public: its public data.

    Raises:
        FedstillError: data or model do not have the plan's spec, or another process is at work on the run.
    """

    def __init__(
        self, folder: Path, file: NodeFile, compute: Compute, plan: Plan, public: Public | None
    ) -> None:
        spec = plan.spec
        self.plan, self.compute, self.local, self._file = plan, compute, file.local, file
        self.folder = folder / RUNS / plan.run
        self.disk = Disk(folder, file.name, file.policy, plan.run)
        self._most = memory.allowed(file.policy.most_memory, compute.device)
        method = plan.config()
        self.task = spec.make_task()
        self.needs = method.needs()
        self.ledger = Ledger()
        try:
            data = owner.load_data(file, folder, spec, self._most)
            self.task.check(data, f"data of {file.name}")
            model = own_model.make_model(file, folder, spec, self._most)
            owner.require_sound(file, data, model)
            shared = 0 if public is None else len(public)
            memory.check_run(model, spec, len(data), file.local.batch, shared, self._most)
            secret = owner.secret(folder)
            features = own_model.perceptual(file, folder, spec)
            whose = f"model of {file.name}"
            parted, vocabulary = self.needs.split, spec.vocabulary
            network = fitted(
                model, compute, spec.shape, file.seed, whose, parted=parted, vocabulary=vocabulary
            )
        except (QuestionRefused, TooLarge):  # what the plan asks for is too much
            raise
        except FedstillError as error:
            raise OwnDataError(str(error)) from error
        gate = Gate(file.name, file.policy, self.ledger)
        self.node = Node(file.name, data.to(compute.device), network, gate, file.seed)
        placed = None if public is None else public.to(compute.device)
        features = None if features is None else compute.place(features)
        self.setting = NodeSetting(self.task, file.local, compute, placed, features)
        side = side_of(method, self.setting)
        self.side = within_parameters(side, file.policy.most_parameters, file.name)
        examples = digest("data", {"inputs": data.inputs, "targets": data.targets})
        told = {"plan": plan.to_dict(), "data": examples, "model": architecture(network)}
        self._alone: IO[bytes] | None = None
        seen = released(folder)  # before the account is opened
        path = folder / Path(file.privacy.ledger).expanduser()
        self.account = Account(path, secret, witness=seen)
        with ExitStack() as undo:  # whatever fails, nothing stays open or locked
            undo.callback(self.close)
            self.account.require_sound()
            self._open(folder, method, secret, told)
            undo.pop_all()

    def _open(self, folder: Path, config: Any, secret: int, told: Mapping[str, Any]) -> None:
        """Put the node under its protection, and take up the run where it stopped."""
        file, account, run = self._file, self.account, self.plan.run
        own = (file.privacy, self.side, config, self.setting)
        salt = _salt(folder, self.folder)
        parts = 0 if self.side.first is None else self.side.first.of
        if parts > MOST_PARTS:  # each takes a step at least: it would learn for ever
            rule = f"rounds: {MOST_PARTS} at most, and the plan parts local training into {parts}"
            raise QuestionRefused(file.name, "join", rule)
        try:
            protect(self.node, *own, account=account, run=run, secret=secret, salt=salt, holder=DATA)
        except (ArgumentError, ModelError) as error:  # they quote the owner's model and options
            raise OwnDataError(str(error)) from error
        self.side.prepare([self.node])
        check_priced(self.node)
        for module in self.node.modules.values():
            self.compute.place(module)
        self.first = self.side.first
        if self.first is not None:
            training.prepare(self.node.learners, file.local)
            if not any(
                "model" in learner.optimisers for learner in self.node.learners
            ):  # used as it is: its owner lets nothing of it be trained
                self.first = None
        self._last = {file.name: -1}
        self.handler = self._new_handler()
        owner_only.make_folder(self.folder)
        self._alone = _locked(folder / "busy", file.name)  # before anything of the run is changed
        self._bind({**told, "options": self._binding()})
        self.steps = 0  # of local training
        self._half_way = False  # in the midst of some
        self.learned = self.first is None
        self._saved = time.monotonic()
        self._take_up()
        begun = (self.folder / "ledger.jsonl").exists()
        self.ledger.open(self.folder / "ledger.jsonl")  # and lock it
        self.ledger.sign = lambda line: account.sign(run, line)
        if begun:
            self._hold_back()

    def _bind(self, told: Mapping[str, Any]) -> None:
        """Keep what a run was begun with. With other options, data or model the same question would have
        another answer, which the ledger takes for one that has left already.

        What nothing has left of binds nothing: its owner may change options until the first answer. What was
        learned by then, under the old ones, goes.

        Raises:
            NodeFault: a run of this name was begun with something else, and answers have left or are paid.
        """
        path, text = self.folder / PLAN_FILE, json.dumps(told, sort_keys=True)
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            other = [name for name, value in json.loads(text).items() if before.get(name) != value]
            if not other:
                return
            if self._has_left():
                changed = f"it was begun with another {' and '.join(other)}: allowed is a new run"
                raise NodeFault(self.node.name, "join", f"run {self.plan.run!r} is known here, and {changed}")
            for learned in (self.folder / LEARNING, *self.folder.glob("mark-*.safetensors")):
                learned.unlink(missing_ok=True)
        owner_only.replace(path, text.encode())

    def _has_left(self) -> bool:
        """Whether anything has left of this run, or is paid for; either ledger may be lost."""
        path = self.folder / "ledger.jsonl"
        answered = path.exists() and bool(Ledger.read(path).nodes)
        return answered or any(entry["run"] == self.plan.run for entry in self.account.entries())

    def close(self) -> None:
        """Let others at this run, and other runs at this node."""
        budgets = self.node.gate.budgets
        own = None if budgets is None else budgets.data_dependent(self.ledger.votes(self.node.name))
        if own is not None:
            logger.info("by the votes themselves the labels cost epsilon %.3f: not to be published", own)
        self.ledger.close()
        self.account.close()
        if self._alone is not None:
            self._alone.close()

    def about(self) -> dict[str, Any]:
        """What a server may know beforehand."""
        gate = self.node.gate
        return {
            "name": self.node.name,
            "model": type(self.node.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.node.model.parameters()),
            "architecture": architecture(self.node.model),
            "frozen": len(self.node.frozen["model"]) == sum(1 for _ in self.node.model.parameters()),
            "objections": self._objections(),
            "privacy": self._statement(),
            "notes": list(self.side.notes),
            "most_questions": max(gate.policy.most_questions - self._elsewhere(), 0),
            "learned": self.learned,
            "marks": self._marks(),
            "last": self._last[self.node.name],
        }

    def _binding(self) -> str:
        """Of how it learns and how it is protected."""
        budgets = self.node.gate.budgets
        return "" if budgets is None else budgets.mechanism.binding

    def _statement(self) -> dict[str, Any]:
        """How its records are protected, as the server may know."""
        budgets = self.node.gate.budgets
        return {} if budgets is None else budgets.mechanism.statement().to_dict()

    def learn(self, seconds: float) -> dict[str, Any]:
        """Go on with the local training that the method wants first, for some seconds.

        How well it goes is nobody's to know, nor how many steps there are, which would tell the number of
        examples: only how far it has come, in tens of percent, is told.
        """
        if self.first is not None and not self.learned:
            # So short that it counts steps, none is.
            most = min(60, self.node.gate.policy.most_seconds or 60)
            until = time.monotonic() + min(max(seconds, 1.0), most)
            total = self._first_steps()
            while self.steps < total and time.monotonic() < until:
                self._learn_some(self.first)
                if time.monotonic() - self._saved > SECONDS_BETWEEN:
                    self._save(LEARNING)
            if self.steps >= total:
                self._learned()
                self._save(LEARNING, learned=True)  # before anything leaves: it would not come out the same
                self.learned = True
                logger.info("local training is done: %d steps", self.steps)
        return {"percent": self._percent(), "learned": self.learned}

    def _percent(self) -> int:
        """How far local training has come."""
        if self.learned or self.first is None:
            return 100
        return 10 * (10 * self.steps // self._first_steps())

    def _first_steps(self) -> int:
        """Steps of the training before the first question, of all who learn from the node's data."""
        learners = self.node.learners if self.first is not None else ()
        return sum(len(self._steps_of(learner)) for learner in learners)

    def _steps_of(self, learner: Node) -> range:
        return range(0) if self.first is None else self.first.steps(self.local.steps(len(learner.data)))

    def _learn_some(self, span: Span) -> None:
        """A few steps of the learner whose turn it is: one after the other.

        Raises:
            NodeFault: an earlier call failed: what it learned would be learned, and told, on top.
        """
        if self._half_way:
            raise NodeFault(self.node.name, "learn", "its training failed half-way: start the node again")
        before = 0
        for learner in self.node.learners:
            mine = len(self._steps_of(learner))
            if self.steps < before + mine:
                start, own = self.steps - before, (self.task, self.local, self.compute)
                self._half_way = True
                done = training.train([learner], *own, span=span, start=start, steps=CHUNK)
                self.steps, self._half_way = before + done, False
                return
            before += mine

    def _learned(self) -> None:
        for learner in self.node.learners:
            learner.optimisers.pop("model", None)

    def answer(self, name: str, number: int, tensors: Tensors, differentiable: bool) -> Tensors:
        """What the gate lets out in answer to a question: named tensors.

        Raises:
            QuestionRefused: by the owner's policy, or because no sound server asks this.
            QuestionMismatch: the number was used with other content.
            NodeFault: the node's own training is not done yet.
        """
        question = self.side.questions.get(name)
        if question is None:
            raise ArgumentError("question", short(name), f"one of {', '.join(self.side.questions)}")
        if not self.learned:
            raise NodeFault(self.node.name, name, "its local training is not done yet")
        objection = self._objections().get(name)
        if objection is not None:
            raise QuestionRefused(self.node.name, name, objection)
        if not 0 <= number < MOST:
            raise ArgumentError("number", number, f"from 0 to {MOST - 1}")
        shape = self.node.data.inputs.shape[1:]
        self.disk.require(name)
        start = time.perf_counter()
        with limited(self.node.name, name, self.node.gate.policy.most_seconds):
            self.node.gate.inspect(name, tensors, question.sends, shape)
            self._refuse_rows(question, tensors)
            self._refuse_large(question, tensors)
            (release,) = self.handler.answer(name, number, self.compute.here(tensors), differentiable)
        self._log(name, number, release, start)
        return release

    def _refuse_rows(self, question: Question, tensors: Tensors) -> None:
        """Refuse rows that the public data do not have.

        Raises:
            QuestionRefused: there are such rows.
        """
        most = 0 if self.setting.public is None else len(self.setting.public)
        for name, kind in question.sends.items():
            rows = tensors[name] if kind == INDICES else torch.empty(0)
            # Up to the end, which is no row itself, and where a range may stop.
            if rows.numel() and not (most and 0 <= int(rows.min()) <= int(rows.max()) <= most):
                rule = f"rows: {name} names rows outside the {most} of the public data"
                raise QuestionRefused(self.node.name, question.name, rule)

    def _refuse_large(self, question: Question, tensors: Tensors) -> None:
        """Refuse more inputs at once than the node's networks have memory for.

        Raises:
            TooLarge: there are more.
        """
        rows = max([0, *(len(tensors[name]) for name, kind in question.sends.items() if kind == INPUTS)])
        if rows and self._most:
            fits(f"a question about {rows} inputs at once", rows * self._each_input, self._most)
        public = self.setting.public
        named = sum(tensors[name].numel() for name, kind in question.sends.items() if kind == INDICES)
        if named and public is not None:  # one may be named often, and is copied each time
            each = size(public.inputs[0]) + 2 * 4 * math.prod(self.plan.spec.outputs)
            fits(f"a question about {named} public inputs at once", named * each, self._most)

    @cached_property
    def _each_input(self) -> int:
        """Bytes that the node's networks keep of one input that they are asked about."""
        shape, modules = tuple(self.node.data.inputs.shape[1:]), self.node.modules
        each = memory.of_input(modules["model"], shape)
        weight = next(modules["critic"].parameters()) if "critic" in modules else None
        if weight is not None and weight.ndim == 4:  # it learns on as many real ones before it answers
            each += 2 * memory.of_input(modules["critic"], (weight.shape[1], *shape[1:]))
        return each

    def pull_back(self, number: int, tensors: Tensors) -> Tensors:
        """The gradients that the gate lets out, by the names of the question's inputs.

        Raises:
            QuestionRefused: gradients that are not finite.
            QuestionMismatch: the question was pulled with other gradients, or is not known any more.
        """
        start, name = time.perf_counter(), self.node.name
        self.disk.require("gradient")
        with limited(name, "gradient", self.node.gate.policy.most_seconds):
            names = (key for key in tensors if not key.endswith(SCALE))
            self.node.gate.inspect("gradient", tensors, dict.fromkeys(names, GRADIENTS), ())
            release = self.handler.pull_back(number, {name: self.compute.here(tensors)})[name]
        self._log("gradient", number, release, start)
        return release

    def privacy(self, number: int, part: str = ANSWER) -> dict[str, Any]:
        """Under which mechanism a release left, and at which price: as the ledger has it."""
        return dict(self.ledger.privacy(self.node.name, number, part))

    def remember(self, mark: int) -> None:
        """Keep the state as it is before question ``mark``, on disk.

        Raises:
            NodeFault: the node is not there: still learning, or further already; or a question failed while
                it learned for it.
        """
        self.handler.require_whole("remember")
        if not self.learned or not 0 <= self._last[self.node.name] + 1 <= mark < MOST:
            raise NodeFault(self.node.name, "remember", f"it is not before question {short(mark)}")
        self._save(f"mark-{mark}.safetensors")
        for old in self._marks()[:-MARKS]:
            (self.folder / f"mark-{old}.safetensors").unlink()

    def recall(self, mark: int) -> None:
        """Go back to the state before question ``mark``; 0 is before the first one.

        Raises:
            NodeFault: that state is not kept.
        """
        path = self.folder / (f"mark-{mark}.safetensors" if mark else LEARNING)
        if not path.exists():
            kept = f"has {', '.join(map(str, self._marks())) or 'none'}"
            raise NodeFault(self.node.name, "recall", f"mark {mark} is not kept here: {kept}")
        self._load(path)
        for later in self._marks():
            if later > mark:  # of a time that is undone
                (self.folder / f"mark-{later}.safetensors").unlink()
        self._last[self.node.name] = mark - 1
        self.handler = self._new_handler()
        logger.info("back at question %d", mark)

    # --- the rest -----------------------------------------------------------------------------------

    def _objections(self) -> dict[str, str]:
        """The rule by which each question that will never be answered here is refused."""
        limit = self.node.gate.policy.most_questions
        if limit and self._elsewhere() >= limit:
            return dict.fromkeys(self.side.questions, f"most_questions: {limit}, over all runs")
        rules = owner.objections(self._file, self.node.model, self.side.questions)
        gate, questions = self.node.gate, self.side.questions
        priced = {name: gate.objection(question) for name, question in questions.items() if name not in rules}
        return {**rules, **{name: rule for name, rule in priced.items() if rule is not None}}

    def _hold_back(self) -> None:
        """Write down what was charged, and not handed over: whoever was stopped in between could not.

        That is the last release of the run, if any; that others have no line, no stop explains.
        """
        released = [row for row in self.account.entries() if row["part"] in (ANSWER, GRADIENT)]
        last = next((row for row in reversed(released) if row["run"] == self.plan.run), None)
        if last is not None and last["row"] not in self.ledger.rows:
            about = {name: last[name] for name in ("number", "question", "row")}
            self.ledger.hold(node=self.node.name, **about)

    def _elsewhere(self) -> int:
        """Questions about these data that other runs have answered."""
        spent = self.account.spent(DATA, self.plan.run)
        return spent.questions - spent.questions_run

    def _new_handler(self) -> RequestHandler:
        return RequestHandler(Group([self.node]), self.side, self.compute, self._last, self.plan.wire)

    def _log(self, name: str, number: int, release: Tensors, start: float) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in release.values())
        seconds = time.perf_counter() - start
        logger.info("number %d, %s: %d bytes left, %.3f s", number, name, size, seconds)

    def _marks(self) -> list[int]:
        paths = self.folder.glob("mark-*.safetensors")
        return sorted(int(path.stem.removeprefix("mark-")) for path in paths)

    def _save(self, name: str, learned: bool = False) -> None:
        state = {"steps": self.steps, "learned": self.learned or learned, "node": self.node.state()}
        self.disk.require("remember", _bytes(state))
        save_state(self.folder / name, state)
        self._saved = time.monotonic()

    def _load(self, path: Path) -> None:
        state = load_state(path)
        self.steps, self.learned = state["steps"], state["learned"]
        if self.learned:
            self._learned()
        self.node.load(state["node"])

    def _take_up(self) -> None:
        """Where an earlier process stopped: in local training, or behind it. Marks are the server's."""
        budgets = self.node.gate.budgets
        if (self.folder / LEARNING).exists():
            self._load(self.folder / LEARNING)
        elif self.first is not None and budgets is not None and budgets.trained():
            # Trained once more, it would be another model, with the same draws on other last digits.
            lost = f"answers of run {self.plan.run!r} have left, and their model ({LEARNING}) is gone"
            raise NodeFault(self.node.name, "join", f"{lost}: it can be asked in a new run alone")
        elif self.learned:  # to go back to: nothing is trained before the first question
            self._save(LEARNING)


def _bytes(state: Any) -> int:
    """Bytes of the tensors in a nested state."""
    if isinstance(state, torch.Tensor):
        return size(state)
    if isinstance(state, Mapping):
        return sum(map(_bytes, state.values()))
    return sum(map(_bytes, state)) if isinstance(state, list | tuple) else 0


def _locked(path: Path, node: str) -> IO[bytes]:
    """A file that one process holds at a time: one run at a node, so that its limits hold over all of them.

    Raises:
        NodeFault: another has it.
    """
    file = os.fdopen(owner_only.opener(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise NodeFault(node, "join", "another run is at work here") from error
    return file


def _salt(folder: Path, run: Path) -> str:
    """A run's own part of what names its noise: made up once, kept in the run's folder, told to nobody.

    The nodes of a rehearsal have one for all runs in their folder, so that it gives a simulation's figures.
    """
    path = folder / SALT
    if not path.exists():
        path = run / SALT
    if not path.exists():
        owner_only.make_folder(run)
        owner_only.replace(path, secrets.token_hex(16).encode())
    return path.read_text(encoding="utf-8").strip()


def short(value: object, most: int = 200) -> str:
    """What a server sent, for a line of a log or ledger: never more than one line, and not a long one."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)[:most]).split())
