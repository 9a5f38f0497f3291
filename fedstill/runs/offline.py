"""A federation by files: all questions of a run, a node's answers to them, and the student that they teach.

What carries a file from the one to the other is people's affair. The same node side, gate and ledger answer
as in a live run, and the same server learns, to the same figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from fedstill.core import owner_only
from fedstill.core.errors import ArgumentError, BundleError, MethodRefused, QuestionRefused, RunFolderError
from fedstill.core.progress import Bars
from fedstill.core.records import write_text
from fedstill.core.tables import as_table, options
from fedstill.data.form import Form
from fedstill.data.loaders import load
from fedstill.data.public import Public, load_public
from fedstill.data.validation import check_measured_on_test
from fedstill.federation import signed
from fedstill.federation.bundles import (
    ANSWERS,
    QUESTIONS,
    WAYS,
    AnswersHeader,
    Asked,
    Files,
    Model,
    NodeAnswers,
    Questions,
    Release,
    Versions,
    pack_answers,
    read_answers,
    read_questions,
    unpack_answers,
    write_answers,
)
from fedstill.node import owner
from fedstill.node.account import DATA, Account, Entry, LedgerError
from fedstill.node.gate import Gate
from fedstill.node.host import Host
from fedstill.node.ledger import Ledger
from fedstill.node.limits import limited
from fedstill.node.session import Session
from fedstill.node.witness import released
from fedstill.protocol.messages import Tensors
from fedstill.protocol.method import METHODS, Ask, method_name, refusal
from fedstill.protocol.plan import Plan, fingerprint, public_tensors
from fedstill.runs.config import RunConfig, to_dict, to_toml
from fedstill.runs.live import Live
from fedstill.runs.run import COMMAND, check_folder
from fedstill.runs.run import _machine as machine

BEGUN = "files.json"  # in the run's folder: of which files it is
KEPT = "answers.safetensors"  # in the node's folder of the run: what was let out, and what was said of it
LET_OUT = "kept"  # the part of the row in the node's ledger that says which bytes these are
SECONDS_BETWEEN = 0.5  # between two reports of local training
# Options that may be chosen when all answers are in, beside those that the method names: whatever is here
# changes neither what was asked nor what the nodes did.
LATER = (
    *("name", "student", "engine", "evaluation", "link.wait", "link.quorum", "link.outlier"),
    *("data.root", "data.download", "public.root"),  # where the same data lie on this machine
)


# --- questions --------------------------------------------------------------------------------------


def make(config: RunConfig) -> Questions:
    """All that a run will ask; nothing is trained and nobody is asked.

    Raises:
        MethodRefused: the method needs public data, and there are none.
        ArgumentError: a method or an option of it that asks again after the first answers.
    """
    method = config.method
    if not method.one_round:
        allowed = [name for name, other in METHODS.working().items() if other.one_round]
        raise ArgumentError(
            "method.name",
            method_name(method),
            f"one that asks all at once, as files are carried once: {', '.join(allowed)}",
        )
    check_measured_on_test(config.data)
    data = load(config.data, config.task)
    _, public = load_public(config.public, data, config.task)
    needs, form = method.needs(), Form.of(config.task, data)
    reason = refusal(needs, form.make_task())
    if reason is not None:
        raise MethodRefused(method.title, "every node", reason)
    if needs.public and public is None:
        raise MethodRefused(method.title, "every node", "there is no public data: set public.name")
    if public is not None and not needs.public_labels:  # labels go nowhere without need
        public = Public(public.name, public.inputs, None, public.note)
    plan = Plan(
        QUESTIONS,
        to_dict(config)["method"],
        form,
        public=fingerprint(public),
        public_note=("", "") if public is None else (public.name, public.note),
    )
    return Questions(plan, public, tuple(method.asks(public, config.seed)))


# --- at a node ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What became of a file of questions at a node.

    Args:
        path: of the file of answers.
        header: what it says.
        bytes: that crossed the gate, by way and kind.
        signer: fingerprint of the node's own key.
        questions: what was asked.
        again: whether these answers had left before; then nothing was charged.
    """

    path: Path
    header: AnswersHeader
    bytes: Mapping[str, Mapping[str, int]]
    signer: str
    questions: Questions
    again: bool = False


def answer(
    folder: Path,
    questions: Path,
    out: Path | None = None,
    *,
    server_key: str | None = None,
    report: Callable[[int], None] = lambda percent: None,
) -> Reply:
    """Answer a file of questions at the node of a folder, through its gate, and write a signed file.

    The same file again gives the answers that were let out the first time, and what was said of them then,
    and is not charged again, even if data or model are others by then; but today's policy is asked first.
    Whoever was stopped before there were answers does it again, with the same data and model.

    Args:
        folder: of the node, as ``fedstill node init`` made it. Its key lies there, ``node.key``.
        questions: the file.
        out: the file of answers; None is ``answers-NAME.safetensors`` in the working folder.
        server_key: fingerprint of the server's key; None takes any, which is then not trusted.
        report: is told now and then how far local training has come, in percent.

    Raises:
        BundleError: the file cannot be believed.
        QuestionRefused: the owner's policy forbids a question; then nothing is trained and nothing leaves.
        FedstillError: data, model and questions do not fit.
    """
    host = Host(folder)
    policy = host.file.policy
    bytes = questions.stat().st_size if questions.is_file() else 0
    if 0 < policy.most_message < bytes:
        rule = f"most_message: {policy.most_message}, and {questions} has {bytes} bytes"
        raise QuestionRefused(host.name, QUESTIONS, rule)
    with limited(host.name, QUESTIONS):
        signers = None if server_key is None else [server_key]
        given = read_questions(questions, signers, policy.most_header, policy.methods, policy.tasks)
    # Named after what the file holds: another file is another run, and is paid for.
    plan = replace(given.plan, run=f"{QUESTIONS}-{given.sha256[:32]}")
    kept = folder / "runs" / plan.run / KEPT
    again = kept.exists()
    if not again:
        _let_out(host, plan, given, kept, report)
    header, answers, crossed = _again(host, given, kept)
    path = Path(f"{ANSWERS}-{header.node}.safetensors") if out is None else out
    key = signed.own_key(folder / "node.key")
    write_answers(path, header, answers, crossed, key)
    return Reply(path, header, crossed, signed.fingerprint(signed.public_of(key)), given, again)


def _let_out(host: Host, plan: Plan, given: Questions, kept: Path, report: Callable[[int], None]) -> None:
    """Train, answer through the gate, and keep what left with all that is to be said of it."""
    try:
        told = host.join(plan, None if given.public is None else public_tensors(given.public))
        session = host.session
        if session is None:
            raise BundleError("the public data that the questions are about are not in their file")
        _admit(host, told["objections"], given.asks, session.ledger)
        answers = _answers(session, told, given.asks, report)
        header = AnswersHeader(
            plan.form,
            given.sha256,
            given.signer,
            given.trusted,
            host.name,
            Model(told["model"], told["parameters"]),
            Versions(**host.hello()["versions"]),
            host.file.policy,
            json.dumps(told["privacy"]),
            tuple(_release(asked, session.privacy(asked.number)) for asked in given.asked),
        )
        by_kind = session.ledger.summary()["by_kind"]
        crossed = {way: {kind: sizes[way] for kind, sizes in by_kind.items() if sizes[way]} for way in WAYS}
        blob = pack_answers(header, answers, crossed)
        # First the ledger: what is kept without a row of its own does not leave.
        session.account.charge(_letting_out(plan.run, blob), lambda spent: None)
        owner_only.replace(kept, blob, sync=True)
    finally:
        host.leave()


def _letting_out(run: str, blob: bytes) -> Entry:
    """The row of the ledger that says which bytes were let out, and so may leave again; it costs nothing."""
    return Entry(
        run=run,
        node=DATA,
        number=-1,
        question="answers",
        part=LET_OUT,
        content=hashlib.sha256(blob).hexdigest(),
        after="",
        up={},
        rule="the same bytes may leave again",
        price={},
        guarantee=True,
    )


def _release(asked: Asked, privacy: Mapping[str, Any]) -> Release:
    """A line of the file's ledger."""
    price = privacy["price"]
    told = None if price is None else tuple(sorted(price.items()))
    return Release(**asdict(asked), mechanism=privacy["mechanism"], price=told)


def _again(
    host: Host, given: Questions, kept: Path
) -> tuple[AnswersHeader, Mapping[int, Tensors], Mapping[str, Mapping[str, int]]]:
    """What was let out, byte for byte, if policy and ledger still allow it; who asked is said as it is now.

    Neither data nor model are read: they may be others by now, and nothing of them leaves.

    Raises:
        QuestionRefused: the policy does not.
        LedgerError: the ledger is gone, another node's, or not sound.
        RunFolderError: the ledger does not know these bytes, or another process is at work on the run.
    """
    gate = Gate(host.name, host.file.policy, Ledger())
    rules = {name: gate.objection(question) for name, question in given.declared().items()}
    ledger = Ledger()
    ledger.open(kept.parent / "ledger.jsonl")
    try:
        _admit(host, {name: rule for name, rule in rules.items() if rule is not None}, given.asks, ledger)
    finally:
        ledger.close()
    blob = kept.read_bytes()
    _check_let_out(host, kept, blob)
    header, answers, crossed = unpack_answers(kept, blob, host.file.policy.tasks)
    return replace(header, asked_by=given.signer, compared=given.trusted), answers, crossed


def _check_let_out(host: Host, kept: Path, blob: bytes) -> None:
    """Refuse bytes that the node's own ledger, which must be sound, does not show as let out.

    Raises:
        LedgerError: it is gone, another node's, or not sound.
        RunFolderError: it does not show them.
    """
    witness = released(host.folder)
    path = host.folder / Path(host.file.privacy.ledger).expanduser()
    if not path.exists():
        told = f"put it back, or `fedstill ledger settle {host.folder}` starts it anew"
        raise LedgerError(path, f"is gone, and what it let out is kept in {kept}: {told}")
    account = Account(path, owner.secret(host.folder), read_only=True, witness=witness)
    try:
        account.require_sound()
        known = account.row(_letting_out(kept.parent.name, blob))
    finally:
        account.close()
    if not known:
        raise RunFolderError(
            f"{kept} is not what was let out, or {path.name} is not the ledger that knows: it has no row of "
            "these bytes. Put the one that was changed back as it was. Or delete the answers: then the "
            "questions are answered anew, and charged anew"
        )


def _answers(
    session: Session, told: Mapping[str, Any], asks: Sequence[Ask], report: Callable[[int], None]
) -> Mapping[int, Tensors]:
    """What the gate lets out, after the training that comes first."""
    learned = told["learned"]
    while not learned:
        done = session.learn(SECONDS_BETWEEN)
        learned = done["learned"]
        report(done["percent"])
    return {
        number: session.answer(ask.question, number, ask.tensors, False) for number, ask in enumerate(asks)
    }


def _admit(host: Host, objections: Mapping[str, str], asks: Sequence[Ask], ledger: Ledger) -> None:
    """Refuse before any training what would be refused after it, and what is refused today.

    Raises:
        QuestionRefused: naming the first question and rule.
    """
    most = host.file.policy.most_questions
    for number, ask in enumerate(asks):
        rule = objections.get(ask.question)
        if rule is None and 0 < most < len(asks):
            rule = f"most_questions: {most}, and the file asks {len(asks)}"
        if rule is not None:
            ledger.refuse(node=host.name, number=number, question=ask.question, rule=rule)
            raise QuestionRefused(host.name, ask.question, rule)


# --- at the server, in the end ----------------------------------------------------------------------


def distil(
    config: RunConfig,
    questions: Path,
    answers: Sequence[Path],
    out: Path,
    *,
    keys: Mapping[str, str] | None = None,
    command: str = "",
    progress: bool = False,
) -> dict[str, Any]:
    """Student and report from the nodes' answers; whoever was stopped does it again, and it goes on.

    Args:
        config: the run whose questions these are. Options that change nothing at the nodes may be others.
        questions: the file.
        answers: one file a node.
        out: the run's folder.
        keys: fingerprints of the nodes' keys by name; None takes any, and the result says so.
        command: the exact command that repeats it, for the report.
        progress: show bars on a terminal.

    Returns:
        What ``result.json`` holds.

    Raises:
        BundleError: a file cannot be believed, or does not belong to the others.
        ArgumentError: an option is not the one that the nodes were asked with.
        RunFolderError: the folder holds something else.
    """
    given = read_questions(questions, methods=[method_name(config.method)], tasks=[config.task.called])
    _same_questions(config, given, questions)
    read = [read_answers(path, given, keys) for path in answers]
    files = Files(given, read)
    told = {
        "questions": {
            "sha256": given.sha256,
            "bytes": questions.stat().st_size,
            "signed_by": given.signer,
            "public_inputs": 0 if given.public is None else len(given.public),
        },
        "answers": [_about(files.bundles[node]) for node in files.nodes],
        "missing": [node for node in keys or () if node not in files.nodes],
    }
    _take_up(out, {**told, "config": to_toml(config)})
    whole = replace(config, link=replace(config.link, inputs="float32", gradients="float32"))  # as in files
    live = Live(whole, files, given.plan.run, out, Bars(progress))
    figures = live.run()
    figures["engine"]["name"] = "files"
    del figures["link"], figures["seconds"]["local_training"], figures["seconds"]["centralised"]
    result = {**live.about(), **figures, "files": told, "command": command, **machine()}
    write_text(out / "config.toml", f"{COMMAND}{command}\n\n{to_toml(config)}")
    live.records.finish(result, live.trained())
    return result


def check_later(asked: RunConfig, config: RunConfig) -> None:
    """Refuse options that questions were asked with, or that only nodes have, once the questions are out.

    Args:
        asked: the run as the questions were made from it.
        config: the run as it is to learn from the answers.

    Raises:
        ArgumentError: naming the first such option, and what it was.
    """
    method = config.method
    free = (*LATER, *(f"method.{name}" for name in method.later))
    tables = as_table(asked), as_table(config)
    for name in options(config):
        before, now = (reduce(dict.get, name.split("."), table) for table in tables)
        if now != before and not any(name == each or name.startswith(f"{each}.") for each in free):
            raise ArgumentError(name, now, f"{before!r}, which the questions were made with")


def _same_questions(config: RunConfig, given: Questions, path: Path) -> None:
    """Refuse a run that would have asked something else.

    Raises:
        ArgumentError: an option of the method is another one.
        BundleError: data or seed are others.
    """
    mine, method = make(config), config.method
    for name, value in given.plan.method.items():
        own = mine.plan.method.get(name)
        if own != value and name not in method.later:
            raise ArgumentError(f"method.{name}", own, f"{value!r}, which the nodes were asked with")
    if mine.asked != given.asked or replace(mine.plan, method=given.plan.method) != given.plan:
        raise BundleError(
            f"{path} does not hold what this run asks: its data, public data or seed are others"
        )


def _about(node: NodeAnswers) -> dict[str, Any]:
    """What a result says of one file of answers."""
    return {
        "node": node.header.node,
        "sha256": node.sha256,
        "bytes": node.path.stat().st_size,
        "signed_by": node.signer,
        "key_known": node.trusted,
        "asker_known": node.header.compared,
        "policy": asdict(node.header.policy),
        "noise": sorted({release.mechanism for release in node.header.releases}),
        "versions": asdict(node.header.versions),
    }


def _take_up(out: Path, told: Mapping[str, Any]) -> None:
    """Make the run's folder, or find in it the same run, not finished yet.

    Raises:
        RunFolderError: it holds something else.
    """
    path, text = out / BEGUN, json.dumps(told, indent=2) + "\n"
    if path.exists() and not (out / "result.json").exists() and path.read_text(encoding="utf-8") == text:
        return
    check_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
