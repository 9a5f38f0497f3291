"""Files of questions and of answers, which people carry to and from nodes that allow no link at all.

A file of questions holds all that a one-round method asks, and the public inputs that it asks about; a
file of answers holds what one node's gate let out. Each is one blob of safetensors with a JSON header, and
signed (:mod:`fedstill.federation.signed`). The server learns from such files as it does from nodes that it
can reach.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError, BundleError, DataError, FedstillError, QuestionMismatch
from fedstill.core.tables import read_table
from fedstill.core.version import __version__
from fedstill.data.public import Public
from fedstill.data.spec import InputSpec, check_task
from fedstill.federation import signed
from fedstill.federation.order import natural
from fedstill.federation.replies import About
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.digests import digest
from fedstill.protocol.kinds import LOGITS
from fedstill.protocol.messages import MOST_HEADER, Tensors, kind_of, pack, refine, size, unpack
from fedstill.protocol.method import Ask, side_of
from fedstill.protocol.plan import PROTOCOL, Plan, check_public, fingerprint, public_tensors
from fedstill.protocol.questions import NodeSetting, Question
from fedstill.protocol.schedule import LocalConfig

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


FORMAT = 5  # of both kinds of file
# What a node is that has answered all there is.
READY = {"learned": True, "last": -1, "marks": [], "objections": {}, "most_questions": 0}
QUESTIONS, ANSWERS = "questions", "answers"
WAYS = ("up", "down")
PUBLIC = "public."  # begins the names of its tensors

H = TypeVar("H")


# --- what the headers say ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One question of a file: its number, its name, and the digest of its name and tensors."""

    number: int
    question: str
    content: str


@dataclass(frozen=True)
class QuestionsHeader:
    """The header of a file of questions, beside its table ``plan``."""

    questions: tuple[Asked, ...]


@dataclass(frozen=True)
class Release:
    """One entry of the node's audit log: what was released, and what was done to it before."""

    number: int
    question: str
    content: str
    mechanism: str
    price: tuple[tuple[str, int], ...] | None  # events and how often; None: no guarantee


@dataclass(frozen=True)
class Model:
    """What a server may know of a node's model, as in a live run."""

    model: str
    parameters: int


@dataclass(frozen=True)
class Versions:
    """What the node runs."""

    fedstill: str
    torch: str
    python: str


@dataclass(frozen=True)
class AnswersHeader:
    """The header of a file of answers, beside its table ``bytes``."""

    spec: InputSpec
    questions: str  # SHA-256 of the file of questions
    asked_by: str  # fingerprint of the key that signed it
    compared: bool  # whether the node knew that key beforehand
    node: str
    model: Model
    versions: Versions
    policy: PolicyConfig
    protection: str  # what the node states of its privacy, as JSON
    releases: tuple[Release, ...]


# --- questions --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Questions:
    """All that a run asks.

    Args:
        plan: method, spec of inputs and classes, fingerprint of the public data.
        public: what is asked about, or None.
        asks: the questions, in order; their places are their numbers.
        sha256: of the file, in hexadecimal digits.
        signer: fingerprint of the key that signed it.
        trusted: whether that key was expected.
    """

    plan: Plan
    public: Public | None
    asks: tuple[Ask, ...]
    sha256: str = ""
    signer: str = ""
    trusted: bool = False

    def declared(self) -> Mapping[str, Question]:
        """What the method declares about its questions."""
        setting = NodeSetting(self.plan.spec.make_task(), LocalConfig(), Compute(), self.public)
        questions: Mapping[str, Question] = side_of(self.plan.config(), setting).questions
        return questions

    @property
    def asked(self) -> tuple[Asked, ...]:
        """The questions by number, name and content."""
        return tuple(
            Asked(number, ask.question, digest(ask.question, ask.tensors))
            for number, ask in enumerate(self.asks)
        )


def write_questions(path: Path, questions: Questions, key: Ed25519PrivateKey) -> str:
    """Write and sign a file of questions; the same questions give the same bytes.

    Returns:
        Its SHA-256.

    Raises:
        BundleError: the place is taken by other questions, on which nodes may be at work.
    """
    tensors = {
        f"{number}.{name}": tensor.clone()
        for number, ask in enumerate(questions.asks)
        for name, tensor in ask.tensors.items()
    }
    if questions.public is not None:
        given = public_tensors(questions.public)
        tensors |= {PUBLIC + name: tensor for name, tensor in given.items()}
    header = asdict(QuestionsHeader(questions.asked))
    blob = _pack(QUESTIONS, {**header, "plan": questions.plan.to_dict()}, tensors)
    if path.exists() and path.read_bytes() != blob:
        raise BundleError(f"{path} holds something else already: choose another place for these questions")
    signed.write(path, blob, key)
    return hashlib.sha256(blob).hexdigest()


def read_questions(
    path: Path,
    signers: Collection[str] | None = None,
    most_header: int = MOST_HEADER,
    methods: Collection[str] = (),
    tasks: Collection[str] = (),
) -> Questions:
    """The questions in a file, once its signature has been found good.

    Args:
        path: the file.
        signers: fingerprints of keys of which one must have signed; None is any.
        most_header: bytes before its tensors; 0 is no limit.
        methods, tasks: names that may be looked up beside the package's own.

    Raises:
        BundleError: missing, changed, unsigned, of a key that is not expected, or no questions that this
            version knows.
    """
    file = signed.read(path, signers)
    table, tensors = _unpack(path, QUESTIONS, file.blob, most_header)
    plan = _plan(path, table.pop("plan", None), methods, tasks)
    header = _header(path, QuestionsHeader, table)
    given = {name: tensors.pop(PUBLIC + name) for name in ("inputs", "labels") if PUBLIC + name in tensors}
    public = None
    if "inputs" in given:
        public = Public(plan.public_note[0], given["inputs"], given.get("labels"), plan.public_note[1])
        _check_public(path, public, plan.spec)
    if fingerprint(public) != plan.public:
        raise BundleError(f"{path}: its public data are not those of its plan")
    parts = _by_number(path, tensors)
    asks = tuple(Ask(asked.question, parts.pop(asked.number, {})) for asked in header.questions)
    sha256 = hashlib.sha256(file.blob).hexdigest()
    questions = Questions(plan, public, asks, sha256, file.signer, file.trusted)
    if parts or questions.asked != header.questions:
        raise BundleError(f"{path}: its header does not list the questions that it holds")
    return questions


def _plan(path: Path, table: object, methods: Collection[str], tasks: Collection[str]) -> Plan:
    if not isinstance(table, dict):
        raise BundleError(f"{path} has no plan")
    try:
        return Plan.from_dict(table, methods, tasks)
    except (FedstillError, ValueError, TypeError, LookupError) as error:
        raise BundleError(f"{path} has no plan that this version of fedstill can follow: {error}") from error


def _check_public(path: Path, public: Public, spec: InputSpec) -> None:
    """Refuse public inputs that no model of this spec could take.

    Raises:
        BundleError: it could not.
    """
    try:
        check_public(public, spec, 0)
    except DataError as error:
        raise BundleError(f"{path}: {error}") from error


# --- answers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NodeAnswers:
    """What one node answered.

    Args:
        path: of the file.
        header: what it says about itself.
        tensors: the answers, by the questions' numbers.
        bytes: that crossed its gate, by way (``up``, ``down``) and kind.
        signer: fingerprint of the key that signed it.
        trusted: whether that key was known to be the node's.
        sha256: of the file, in hexadecimal digits.
    """

    path: Path
    header: AnswersHeader
    tensors: Mapping[int, Tensors]
    bytes: Mapping[str, Mapping[str, int]]
    signer: str
    trusted: bool
    sha256: str


def write_answers(
    path: Path,
    header: AnswersHeader,
    answers: Mapping[int, Tensors],
    bytes: Mapping[str, Mapping[str, int]],
    key: Ed25519PrivateKey,
) -> str:
    """Write and sign a file of answers; the same answers give the same bytes.

    Returns:
        Its SHA-256.
    """
    blob = pack_answers(header, answers, bytes)
    signed.write(path, blob, key)
    return hashlib.sha256(blob).hexdigest()


def pack_answers(
    header: AnswersHeader, answers: Mapping[int, Tensors], crossed: Mapping[str, Mapping[str, int]]
) -> bytes:
    """What a file of answers holds; the same answers give the same bytes."""
    tensors = {
        f"{number}.{name}": tensor.clone()
        for number, answer in answers.items()
        for name, tensor in answer.items()
    }
    return _pack(ANSWERS, {**asdict(header), "spec": header.spec.to_dict(), "bytes": crossed}, tensors)


def unpack_answers(
    path: Path, blob: bytes, tasks: Collection[str] = ()
) -> tuple[AnswersHeader, Mapping[int, Tensors], Mapping[str, Mapping[str, int]]]:
    """What :func:`pack_answers` was given.

    Args:
        path: where the bytes are from, for the error.
        blob: the bytes.
        tasks: names that may be looked up beside the package's own.

    Raises:
        BundleError: they are no answers, or those of another version.
    """
    table, tensors = _unpack(path, ANSWERS, blob)
    crossed = table.pop("bytes", None)
    try:
        check_task(table.get("spec"), tasks)
    except ArgumentError as error:
        raise BundleError(f"{path}: {error}") from error
    return _header(path, AnswersHeader, table), _by_number(path, tensors), crossed


def read_answers(path: Path, questions: Questions, keys: Mapping[str, str] | None = None) -> NodeAnswers:
    """One node's answers, once signature, spec and content have been found to fit the questions.

    Args:
        path: the file.
        questions: that it must answer, all of them.
        keys: fingerprints of the nodes' keys by name; None takes any key, and trusts none.

    Raises:
        BundleError: missing, changed, unsigned, of an unknown key, for other questions, or not the answers
            that it says it holds.
    """
    file = signed.read(path, None if keys is None else set(keys.values()))
    header, parts, said = unpack_answers(path, file.blob, [questions.plan.spec.task.called])
    if keys is not None and keys.get(header.node) != file.signer:
        raise BundleError(
            f"{path} says that it is of node {header.node!r}, and is signed by a key that is not that "
            f"node's: {file.signer}"
        )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", header.node):
        raise BundleError(f"{path} names its node {header.node!r}: allowed are letters, digits, '-' and '_'")
    try:
        About.read({**READY, "privacy": json.loads(header.protection)}, {})
    except (ValueError, TypeError, FedstillError) as error:
        raise BundleError(f"{path} states its protection in another form: {error}") from error
    _fit(path, header, questions)
    declared = questions.declared()
    counted: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    for asked, ask in zip(questions.asked, questions.asks, strict=True):
        if asked.number not in parts:
            raise BundleError(f"{path} has no answer to question {asked.number} ({asked.question})")
        question, answer = declared[asked.question], parts[asked.number]
        if set(refine(answer)) != set(question.releases):
            raise BundleError(
                f"{path} answers question {asked.number} ({asked.question}) with "
                f"{', '.join(sorted(answer))}: allowed are {', '.join(sorted(question.releases))}"
            )
        for name, tensor in refine(answer).items():
            if question.releases[name] == LOGITS and tuple(tensor.shape[1:]) != questions.plan.spec.outputs:
                raise BundleError(
                    f"{path} answers question {asked.number} ({asked.question}) with {name} of shape "
                    f"{tuple(tensor.shape)}: allowed are outputs of {questions.plan.spec.outputs}"
                )
        for way, held, kinds in (
            ("up", answer, question.releases),
            ("down", ask.tensors, question.sends),
        ):
            for name, tensor in held.items():
                counted[way][kind_of(name, kinds)] += size(tensor)
    told = [(release.number, release.question, release.content) for release in header.releases]
    if told != [(asked.number, asked.question, asked.content) for asked in questions.asked]:
        raise BundleError(f"{path}: it does not list one release for each question")
    if len(parts) != len(questions.asks) or said != {way: dict(kinds) for way, kinds in counted.items()}:
        raise BundleError(f"{path}: it does not hold the bytes that it lists")
    sha256 = hashlib.sha256(file.blob).hexdigest()
    return NodeAnswers(path, header, parts, said, file.signer, file.trusted, sha256)


def _fit(path: Path, header: AnswersHeader, questions: Questions) -> None:
    """Refuse answers that are not about these questions, or of other data, or to somebody else.

    Raises:
        BundleError: they are not.
    """
    if header.spec != questions.plan.spec:
        for name, mine in vars(questions.plan.spec).items():
            other = getattr(header.spec, name)
            if other != mine:
                what = f"{len(other)} classes" if name == "classes" else f"{name} {other}"
                wanted = len(mine) if name == "classes" and len(mine) != len(other) else mine
                raise BundleError(f"{path} is about data of {what}: allowed is {wanted}, as in the questions")
    if header.questions != questions.sha256:
        raise BundleError(
            f"{path} answers another file of questions (SHA-256 {header.questions[:16]}..., "
            f"not {questions.sha256[:16]}...)"
        )
    if header.asked_by != questions.signer:
        raise BundleError(
            f"{path} answers these questions as signed by another key ({header.asked_by}): what its node was "
            f"given had a signature that is not that of {questions.signer}"
        )


# --- as a link ---------------------------------------------------------------------------------------


class Files:
    """A link to nodes that have answered everything beforehand: what carries questions to files.

    Args:
        questions: what they were asked.
        answers: of each node.

    Raises:
        BundleError: no answers, or two files of one node.
    """

    def __init__(self, questions: Questions, answers: Sequence[NodeAnswers]) -> None:
        if not answers:
            raise BundleError("there are no answers: name one file or more")
        self.bundles: dict[str, NodeAnswers] = {}
        for each in sorted(answers, key=lambda each: natural(each.header.node)):
            other = self.bundles.setdefault(each.header.node, each)
            if other is not each:
                raise BundleError(f"{other.path} and {each.path} are both of node {each.header.node!r}")
        self.nodes: Sequence[str] = list(self.bundles)
        self._contents = {asked.number: asked.content for asked in questions.asked}

    def call(self, node: str, message: bytes, seconds: float) -> bytes:
        """What a node's file replies: see :class:`fedstill.federation.remote.Link`."""
        header, tensors = unpack(message)
        mine = self.bundles[node].header
        told: dict[str, Any] = {}
        answer: Tensors = {}
        if header["do"] == "hello":
            told = {"name": node, "protocol": PROTOCOL, "versions": asdict(mine.versions)}
        elif header["do"] == "join":
            ready = {**READY, "privacy": json.loads(mine.protection)}
            told = {"name": node, "architecture": "", "frozen": True, **asdict(mine.model), **ready}
        elif header["do"] in ("answer", "pull back"):
            number, question = header["number"], header["question"]
            if header.get("differentiable", True) or self._contents.get(number) != digest(question, tensors):
                refusal = QuestionMismatch(node, question, number)
                error = {"kind": "QuestionMismatch", "text": str(refusal), "question": question}
                return pack({"error": {**error, "number": number}})
            release = next(release for release in mine.releases if release.number == number)
            price = None if release.price is None else dict(release.price)
            told = {"privacy": {"mechanism": release.mechanism, "price": price}}
            answer = self.bundles[node].tensors[number]
        return pack({"told": told, "seconds": 0.0}, answer)


# --- both -------------------------------------------------------------------------------------------


def _pack(kind: str, header: Mapping[str, Any], tensors: Tensors) -> bytes:
    return pack({"bundle": kind, "format": FORMAT, "fedstill": __version__, **header}, tensors)


def _unpack(
    path: Path, kind: str, blob: bytes, most_header: int = MOST_HEADER
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The header, less what all files say, and the tensors."""
    try:
        header, tensors = unpack(blob, most_header)
    except (DataError, RecursionError) as error:
        raise BundleError(f"{path} holds no {kind}: {error}") from error
    found, version = header.pop("bundle", None), header.pop("format", None)
    header.pop("fedstill", None)
    if found != kind:
        raise BundleError(f"{path} holds {found or 'something else'}: allowed are {kind}")
    if version != FORMAT:
        raise BundleError(f"{path} is of format {version}: this version of fedstill reads {FORMAT}")
    return header, tensors


def _header(path: Path, kind: type[H], table: dict[str, Any]) -> H:
    try:
        return read_table(kind, table)
    except FedstillError as error:
        raise BundleError(f"{path}: {error}") from error


def _by_number(path: Path, tensors: Tensors) -> dict[int, dict[str, torch.Tensor]]:
    """Tensors named ``NUMBER.NAME`` by number and name."""
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for whole, tensor in tensors.items():
        number, dot, name = whole.partition(".")
        if not (dot and name and number.isdecimal() and len(number) < 10):
            raise BundleError(f"{path} holds a tensor {whole!r}, which belongs to no question")
        parts.setdefault(int(number), {})[name] = tensor
    return parts
