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
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from fedstill.data.public import Public
from fedstill.errors import (
    ArgumentError,
    FedstillError,
    ModelError,
    NodeFault,
    OwnDataError,
    QuestionRefused,
)
from fedstill.methods import METHODS
from fedstill.node import own_model, owner, training
from fedstill.node.account import DATA, Account
from fedstill.node.desk import Desk
from fedstill.node.digests import digest
from fedstill.node.fit import architecture, fitted
from fedstill.node.gate import INDICES, Gate
from fedstill.node.group import Group
from fedstill.node.ledger import ANSWER, Ledger
from fedstill.node.networks import limited
from fedstill.node.node import Node
from fedstill.node.plan import PLAN_FILE, Plan
from fedstill.node.protect import check_priced, protect
from fedstill.node.questions import GRADIENTS, NodeSetting, Question
from fedstill.node.training import Span
from fedstill.node.witness import released
from fedstill.records import write_text
from fedstill.state import load_state, save_state
from fedstill.wire import Tensors, refine

if TYPE_CHECKING:
    from fedstill.node.host import Host

logger = logging.getLogger("fedstill.node")

CHUNK = 20  # local steps between two looks at the clock
LEARNING = "learning.safetensors"
SALT = "salt"
MOST = 2**31  # numbers of questions are below it
MARKS = 2  # kept: a server stopped between its nodes' marks and its own goes back to the one before
SECONDS_BETWEEN = 5.0  # between two saved states of local training


class Session:
    """One run at a node.

    Args:
        host: the node's folder, file and device.
        plan: the run.
        public: its public data.

    Raises:
        FedstillError: data or model do not have the plan's form, or another process is at work on the run.
    """

    def __init__(self, host: Host, plan: Plan, public: Public | None) -> None:
        file, form, compute = host.file, plan.form, host.compute
        self.plan, self.compute, self.local, self._file = plan, compute, file.local, file
        self.folder = host.folder / "runs" / plan.run
        method, config = METHODS[plan.method["name"]], plan.config()
        self.task = form.make_task()
        self.needs = method.needs(config)
        self.ledger = Ledger()
        try:
            data = owner.load_data(file, host.folder, form)
            self.task.check(data, f"data of {file.name}")
            model = own_model.make_model(file, host.folder, form)
            secret = owner.secret(host.folder)
            features = own_model.perceptual(file, host.folder, form)
            whose = f"model of {file.name}"
            parted, vocabulary = self.needs.split, form.vocabulary
            network = fitted(
                model, compute, form.shape, file.seed, whose, parted=parted, vocabulary=vocabulary
            )
        except FedstillError as error:
            raise OwnDataError(str(error)) from error
        gate = Gate(file.name, file.policy, self.ledger)
        self.node = Node(file.name, data.to(compute.device), network, gate, file.seed)
        placed = None if public is None else public.to(compute.device)
        features = None if features is None else compute.place(features)
        self.setting = NodeSetting(self.task, file.local, compute, placed, features)
        side = method.node_side(config, self.setting)
        self.side = limited(side, file.policy.most_parameters, file.name)
        examples = digest("data", {"inputs": data.inputs, "targets": data.targets})
        told = {"plan": plan.to_dict(), "data": examples, "model": architecture(network)}
        self._alone: IO[bytes] | None = None
        seen = released(host.folder)  # before the account is opened
        path = host.folder / Path(file.privacy.ledger).expanduser()
        self.account = Account(path, secret, witness=seen)
        with ExitStack() as undo:  # whatever fails, nothing stays open or locked
            undo.callback(self.close)
            self.account.require_sound()
            self._open(host.folder, config, secret, told)
            undo.pop_all()

    def _open(self, folder: Path, config: Any, secret: int, told: Mapping[str, Any]) -> None:
        """Put the node under its protection, and take up the run where it stopped."""
        file, account, run = self._file, self.account, self.plan.run
        own = (file.privacy, self.side, config, self.setting)
        salt = _salt(folder, self.folder)
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
        self.desk = self._new_desk()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._bind({**told, "options": self._binding()})
        self.steps = 0  # of local training
        self._half_way = False  # in the midst of some
        self.learned = self.first is None
        self._saved = time.monotonic()
        self._take_up()
        self._alone = _locked(folder / "busy", file.name)
        self._earlier = self._count_other_runs()
        self.ledger.open(self.folder / "ledger.jsonl")  # and lock it

    def _bind(self, told: Mapping[str, Any]) -> None:
        """Keep what a run was begun with. With other options, data or model the same question would have
        another answer, which the ledger takes for one that has left already.

        Raises:
            NodeFault: a run of this name was begun with something else.
        """
        path, text = self.folder / PLAN_FILE, json.dumps(told, sort_keys=True)
        if not path.exists():
            write_text(path, text)
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        other = [name for name, value in json.loads(text).items() if before.get(name) != value]
        if other:
            changed = f"it was begun with another {' and '.join(other)}: allowed is a new run"
            raise NodeFault(self.node.name, "join", f"run {self.plan.run!r} is known here, and {changed}")

    def close(self) -> None:
        """Let others at this run, and other runs at this node."""
        purse = self.node.gate.purse
        own = None if purse is None else purse.data_dependent(self.ledger.votes(self.node.name))
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
            "most_questions": max(gate.policy.most_questions - self._earlier, 0),
            "learned": self.learned,
            "marks": self._marks(),
            "last": self._last[self.node.name],
        }

    def _binding(self) -> str:
        """Of how it learns and how it is protected."""
        purse = self.node.gate.purse
        return "" if purse is None else purse.guard.binding

    def _statement(self) -> dict[str, Any]:
        """How its records are protected, as the server may know."""
        purse = self.node.gate.purse
        return {} if purse is None else purse.guard.statement().to_dict()

    def learn(self, seconds: float) -> dict[str, Any]:
        """Go on with the local training that the method wants first, for some seconds.

        How well it goes is nobody's to know, nor how many steps there are, which would tell the number of
        examples: only how far it has come, in tens of percent, is told.
        """
        if self.first is not None and not self.learned:
            until = time.monotonic() + min(max(seconds, 1.0), 60.0)  # so short that it counts steps, none is
            total = self._first_steps()
            while self.steps < total and time.monotonic() < until:
                self._learn_some(self.first)
                if time.monotonic() - self._saved > SECONDS_BETWEEN:
                    self._save(LEARNING)
            if self.steps >= total:
                self._learned()
                self.learned = True
                self._save(LEARNING)
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
            raise ArgumentError("question", name, f"one of {', '.join(self.side.questions)}")
        if not self.learned:
            raise NodeFault(self.node.name, name, "its local training is not done yet")
        objection = self._objections().get(name)
        if objection is not None:
            raise QuestionRefused(self.node.name, name, objection)
        if not 0 <= number < MOST:
            raise ArgumentError("number", number, f"from 0 to {MOST - 1}")
        shape = self.node.data.inputs.shape[1:]
        self.node.gate.inspect(name, tensors, question.sends, shape)
        self._refuse_rows(question, tensors)
        start = time.perf_counter()
        (release,) = self.desk.answer(name, number, self.compute.here(tensors), differentiable)
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

    def pull_back(self, number: int, tensors: Tensors) -> Tensors:
        """The gradients that the gate lets out, by the names of the question's inputs.

        Raises:
            QuestionRefused: gradients that are not finite.
            QuestionMismatch: the question was pulled with other gradients, or is not known any more.
        """
        start, name = time.perf_counter(), self.node.name
        self.node.gate.inspect("gradient", tensors, dict.fromkeys(refine(tensors), GRADIENTS), ())
        release = self.desk.pull_back(number, {name: self.compute.here(tensors)})[name]
        self._log("gradient", number, release, start)
        return release

    def privacy(self, number: int, part: str = ANSWER) -> dict[str, Any]:
        """Under which mechanism a release left, and at which price: as the ledger has it."""
        return dict(self.ledger.privacy(self.node.name, number, part))

    def remember(self, mark: int) -> None:
        """Keep the state as it is before question ``mark``, on disk.

        Raises:
            NodeFault: the node is not there: still learning, or further already.
        """
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
        self.desk = self._new_desk()
        logger.info("back at question %d", mark)

    # --- the rest -----------------------------------------------------------------------------------

    def _objections(self) -> dict[str, str]:
        """The rule by which each question that will never be answered here is refused."""
        limit = self.node.gate.policy.most_questions
        if limit and self._earlier >= limit:
            return dict.fromkeys(self.side.questions, f"most_questions: {limit}, over all runs")
        rules = owner.objections(self._file, self.node.model, self.side.questions)
        gate, questions = self.node.gate, self.side.questions
        priced = {name: gate.objection(question) for name, question in questions.items() if name not in rules}
        return {**rules, **{name: rule for name, rule in priced.items() if rule is not None}}

    def _count_other_runs(self) -> int:
        """Let the owner's limits hold over all runs of this folder; how many questions others answered."""
        for path in sorted(self.folder.parent.glob("*/ledger.jsonl")):
            if path.parent != self.folder:
                self.ledger.carry(self.node.name, path)
        return self.ledger.answers(self.node.name)

    def _new_desk(self) -> Desk:
        return Desk(Group([self.node]), self.side, self.compute, self._last, self.plan.wire)

    def _log(self, name: str, number: int, release: Tensors, start: float) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in release.values())
        seconds = time.perf_counter() - start
        logger.info("number %d, %s: %d bytes left, %.3f s", number, name, size, seconds)

    def _marks(self) -> list[int]:
        paths = self.folder.glob("mark-*.safetensors")
        return sorted(int(path.stem.removeprefix("mark-")) for path in paths)

    def _save(self, name: str) -> None:
        state = {"steps": self.steps, "learned": self.learned, "node": self.node.state()}
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
        if (self.folder / LEARNING).exists():
            self._load(self.folder / LEARNING)
        elif self.learned:  # to go back to: nothing is trained before the first question
            self._save(LEARNING)


def _locked(path: Path, node: str) -> IO[bytes]:
    """A file that one process holds at a time: one run at a node, so that its limits hold over all of them.

    Raises:
        NodeFault: another has it.
    """
    file = path.open("ab")
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
        run.mkdir(parents=True, exist_ok=True)
        write_text(path, secrets.token_hex(16))
    return path.read_text(encoding="utf-8").strip()


def short(value: object, most: int = 200) -> str:
    """What a server sent, for a line of a log or ledger: never more than one line, and not a long one."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)[:most]).split())
