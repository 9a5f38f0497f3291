"""A node as its owner started it: data, model and policy from its own folder, and what a server may ask.

Every wire (FLARE, files, loopback) ends here. What a run needs to go on lies in the node's own folder,
``runs/RUN/``: its ledger, how far its local training has come, and its state at each mark that the server
asked it to remember. A server that was stopped goes back to its last mark, and every node with it: so
nothing is trained twice, and what was released already is neither charged nor counted again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import platform
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch

import fedstill
from fedstill.data.public import Public
from fedstill.errors import (
    ArgumentError,
    DataError,
    FedstillError,
    ModelError,
    NodeFault,
    OwnDataError,
    QuestionRefused,
    RunFolderError,
)
from fedstill.imports import OWN
from fedstill.methods import METHODS
from fedstill.node import owner, training
from fedstill.node.account import DATA, Account, LedgerError
from fedstill.node.desk import Desk
from fedstill.node.digests import digest
from fedstill.node.fit import architecture, fitted
from fedstill.node.gate import INDICES, Gate
from fedstill.node.group import Group
from fedstill.node.ledger import ANSWER, Ledger
from fedstill.node.networks import limited
from fedstill.node.node import Node
from fedstill.node.plan import PLAN_FILE, PROTOCOL, Plan, check_public, fingerprint, public_tensors
from fedstill.node.protect import check_priced, protect
from fedstill.node.questions import GRADIENTS, NodeSetting, Question
from fedstill.node.training import Span
from fedstill.node.witness import released
from fedstill.records import write_text
from fedstill.state import load_state, save_state
from fedstill.tasks import make_task
from fedstill.wire import Tensors, pack, refine, unpack

logger = logging.getLogger("fedstill.node")

CHUNK = 20  # local steps between two looks at the clock
LEARNING = "learning.safetensors"
SALT = "salt"
MOST = 2**31  # numbers of questions are below it
OWN_TROUBLES = (LedgerError, OwnDataError, RunFolderError)  # errors whose texts are the owner's alone
MARKS = 2  # kept: a server stopped between its nodes' marks and its own goes back to the one before
SECONDS_BETWEEN = 5.0  # between two saved states of local training


class Host:
    """One node, ready to be asked.

    Args:
        folder: its owner's, with ``node.toml`` and ``secret``.

    Raises:
        FedstillError: the folder does not describe a node.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, owner.read(folder)
        self.compute = owner.make_compute(self.file)
        self.session: Session | None = None
        self._lock = threading.Lock()
        self._server, self._heard = "", -1  # the server process that asks, and the last of its messages
        self._over: set[str] = set()  # server processes before it

    @property
    def name(self) -> str:
        """The node's name."""
        return self.file.name

    # --- messages -----------------------------------------------------------------------------------

    def serve(self, message: bytes) -> bytes:
        """Answer one message, with an error if need be: what a wire carries in and out.

        One at a time: a server that asks again while an answer is still computed waits for that one.
        """
        with self._lock:
            start = time.perf_counter()
            header: dict[str, Any] = {}
            try:
                header, tensors = unpack(message)
                told, released = self._serve(header, tensors)
            except (FedstillError, *OWN) as error:
                return pack({"error": self._refused(header, error)})
            return pack({"told": told, "seconds": self._told_seconds(time.perf_counter() - start)}, released)

    def _told_seconds(self, seconds: float) -> float:
        """Of the time that a reply took, what is told: only tenths where records are drawn in secret."""
        private = self.session is not None and bool(self.session.node.private)
        return math.ceil(10 * seconds) / 10 if private else seconds

    def _serve(self, header: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
        what = header.get("do")
        if what == "hello":
            return self.hello(), {}
        if what == "join":
            told = self.join(Plan.from_dict(header["plan"]), tensors)
            self._begin_with(str(header.get("server", "")))
            return told, {}
        if self.session is None or self.session.plan.run != header.get("run"):
            raise ArgumentError("run", header.get("run"), "a run that this node has joined")
        if what in ("remember", "recall", "leave") and self._late(header):
            return {}, {}
        if what == "learn":
            return self.session.learn(float(header["seconds"])), {}
        if what == "answer":
            through = bool(header["differentiable"])
            released = self.session.answer(str(header["question"]), int(header["number"]), tensors, through)
            return {"privacy": self.session.privacy(int(header["number"]))}, released
        if what == "pull back":
            number = int(header["number"])
            released = self.session.pull_back(number, tensors)
            return {"privacy": self.session.privacy(number, "gradient")}, released
        if what == "remember":
            self.session.remember(int(header["mark"]))
            return {}, {}
        if what == "recall":
            self.session.recall(int(header["mark"]))
            return {}, {}
        if what == "leave":
            self.leave()
            return {}, {}
        raise ArgumentError("do", what, "hello, join, learn, answer, pull back, remember, recall or leave")

    def _begin_with(self, server: str) -> None:
        """Count messages from a server process anew; one that was followed by another is over."""
        if server in self._over:
            raise ArgumentError("server", server, "a server process that none has followed")
        if server != self._server:
            self._over.add(self._server)
            self._server, self._heard = server, -1

    def _late(self, header: Mapping[str, Any]) -> bool:
        """Whether a message that changes a state has come before, or after a later one: it was sent twice."""
        if str(header.get("server", "")) != self._server:
            return True
        heard, self._heard = self._heard, max(self._heard, int(header.get("message", self._heard + 1)))
        return heard >= self._heard

    def _refused(self, header: Mapping[str, Any], error: Exception) -> dict[str, Any]:
        """An error as a message carries it; in the owner's log and ledger it stands whole.

        The server is told what it did wrong, and of the node's own troubles only that there are some: their
        texts may quote paths, columns of a table, or what an owner's own code says.
        """
        text = " ".join(str(error).split()) or type(error).__name__
        question = _short(header.get("question") or header.get("do"))
        number = header.get("number")
        asked = number if isinstance(number, int) and abs(number) < MOST else -1
        logger.warning("refused %s (number %d): %s", question, asked, _short(text, 1000))
        if isinstance(error, OWN_TROUBLES):
            text = "its data or model fail here: its own log says more"
        elif not isinstance(error, FedstillError):
            text = getattr(error, "strerror", None) or f"{type(error).__name__}: its own log says more"
        if header.get("do") in ("answer", "pull back") and self.session is not None:
            rule = _short(error.rule if isinstance(error, QuestionRefused) else text)
            try:
                self.session.ledger.refuse(node=self.name, number=asked, question=question, rule=rule)
            except OSError as full:  # the refusal stands all the same
                logger.error("the ledger cannot be written: %s", full)
        kind = OwnDataError if isinstance(error, OWN_TROUBLES) else type(error)
        told: dict[str, Any] = {"kind": kind.__name__, "text": _short(text), "question": question}
        for name in ("rule", "number"):
            if hasattr(error, name):
                told[name] = getattr(error, name)
        return told

    # --- the same from Python ------------------------------------------------------------------------

    def hello(self) -> dict[str, Any]:
        """Who this is."""
        return {
            "name": self.name,
            "protocol": PROTOCOL,
            "versions": {
                "fedstill": fedstill.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def join(self, plan: Plan, public: Tensors | None = None) -> dict[str, Any]:
        """Make ready for a run, or for its going on; nothing is trained, asked or released.

        Args:
            plan: the run.
            public: the public data as named tensors; without them, where the plan needs some that are not
                in this node's folder, nothing is made ready and ``wants_public`` is true.

        Returns:
            What the server may know: the kind of model, and which questions will be refused by which rule.

        Raises:
            FedstillError: this node's data or model do not have the plan's form.
        """
        kept = self._public(plan, public or {})
        if kept is None and plan.public:
            return {"wants_public": True}
        if self.session is None or self.session.plan != plan:
            self.leave()
            self.session = Session(self, plan, kept)
            logger.info("joined run %s: %s", plan.run, plan.method["name"])
        return self.session.about()

    def leave(self) -> None:
        """End with a run; its files stay."""
        if self.session is not None:
            logger.info("left run %s", self.session.plan.run)
            self.session.close()
            self.session = None

    def _public(self, plan: Plan, given: Tensors) -> Public | None:
        """A plan's public data: given, or kept from an earlier time."""
        if not plan.public:
            return None
        path = self.folder / "public" / f"{plan.public}.safetensors"
        if given:
            public = Public(plan.public_note[0], given["inputs"], given.get("labels"), plan.public_note[1])
            if fingerprint(public) != plan.public:
                raise DataError("the public data that came are not those of the plan")
            check_public(public, plan.form, self.file.policy.most_rows)
            path.parent.mkdir(exist_ok=True)
            for other in path.parent.glob("*.safetensors"):  # a server could fill the disk with them
                other.unlink()
            save_state(path, public_tensors(public))
        elif not path.exists():
            return None
        kept = load_state(path)
        return Public(plan.public_note[0], kept["inputs"], kept.get("labels"), plan.public_note[1])


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
        self.task = make_task(form.task, len(form.classes))
        self.needs = method.needs(config)
        self.ledger = Ledger()
        try:
            data = owner.load_data(file, host.folder, form)
            self.task.check(data, f"data of {file.name}")
            model = owner.make_model(file, host.folder, form)
            secret = owner.secret(host.folder)
            whose = f"model of {file.name}"
            network = fitted(model, compute, form.shape, file.seed, whose, parted=self.needs.split)
        except FedstillError as error:
            raise OwnDataError(str(error)) from error
        gate = Gate(file.name, file.policy, self.ledger)
        self.node = Node(file.name, data.to(compute.device), network, gate, file.seed)
        placed = None if public is None else public.to(compute.device)
        self.setting = NodeSetting(self.task, file.local, compute, placed)
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
            raise NodeFault(self.node.name, "remember", f"it is not before question {_short(mark)}")
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


def _short(value: object, most: int = 200) -> str:
    """What a server sent, for a line of a log or ledger: never more than one line, and not a long one."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)[:most]).split())
