"""A federation by files: all questions of a run, a node's answers to them, and the student that they teach.

What carries a file from the one to the other is people's affair. The same node side, gate and ledger answer
as in a live run, and the same server learns, to the same figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedstill.config import RunConfig, to_dict, to_toml
from fedstill.data.loaders import load
from fedstill.data.public import Public, load_public
from fedstill.errors import ArgumentError, BundleError, MethodRefused, QuestionRefused
from fedstill.federation import signed
from fedstill.federation.bundles import (
    ANSWERS,
    QUESTIONS,
    WAYS,
    AnswersHeader,
    Files,
    Model,
    NodeAnswers,
    Questions,
    Release,
    Versions,
    read_answers,
    read_questions,
    write_answers,
)
from fedstill.live import Live
from fedstill.methods import METHODS, method_of
from fedstill.methods.server import Ask
from fedstill.node.form import Form
from fedstill.node.host import Host, Session
from fedstill.node.plan import Plan, fingerprint, public_tensors
from fedstill.progress import Bars
from fedstill.records import write_text
from fedstill.report import write_report
from fedstill.run import COMMAND, check_folder
from fedstill.run import _machine as machine
from fedstill.state import load_state, save_state
from fedstill.wire import Tensors

BEGUN = "files.json"  # in the run's folder: of which files it is
KEPT = "answers.safetensors"  # in the node's folder of the run: what was let out
SECONDS_BETWEEN = 0.5  # between two reports of local training


# --- questions --------------------------------------------------------------------------------------


def make(config: RunConfig[Any]) -> Questions:
    """All that a run will ask; nothing is trained and nobody is asked.

    Raises:
        MethodRefused: the method needs public data, and there are none.
        ArgumentError: a method or an option of it that asks again after the first answers.
    """
    method = method_of(config.method)
    if method.one_round is None:
        allowed = [name for name, other in METHODS.items() if other.one_round is not None]
        raise ArgumentError(
            "method.name",
            method.name,
            f"one that asks all at once, as files are carried once: {', '.join(allowed)}",
        )
    data = load(config.data)
    _, public = load_public(config.public, data)
    needs = method.needs(config.method)
    if needs.public and public is None:
        raise MethodRefused(method.title, "every node", "there is no public data: set public.name")
    if public is not None and not needs.public_labels:  # labels go nowhere without need
        public = Public(public.name, public.inputs, None, public.note)
    channels, height, width = data.train.inputs.shape[1:]
    form = Form(config.task, data.classes, (channels, height, width), data.mean, data.std)
    plan = Plan(
        QUESTIONS,
        to_dict(config)["method"],
        form,
        public=fingerprint(public),
        public_note=("", "") if public is None else (public.name, public.note),
    )
    return Questions(plan, public, tuple(method.one_round(config.method, public, config.seed)))


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
    """

    path: Path
    header: AnswersHeader
    bytes: Mapping[str, Mapping[str, int]]
    signer: str
    questions: Questions


def answer(
    folder: Path,
    questions: Path,
    out: Path | None = None,
    *,
    server_key: str | None = None,
    report: Callable[[int], None] = lambda percent: None,
) -> Reply:
    """Answer a file of questions at the node of a folder, through its gate, and write a signed file.

    The same file again gives the answers that were let out the first time, and is not charged again, even if
    data or model are others by then. Whoever was stopped does it again.

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
    given = read_questions(questions, None if server_key is None else [server_key])
    host = Host(folder)
    # Named after what the file holds: another file is another run, and is paid for.
    plan = replace(given.plan, run=f"{QUESTIONS}-{given.sha256[:32]}")
    try:
        told = host.join(plan, None if given.public is None else public_tensors(given.public))
        session = host.session
        if session is None:
            raise BundleError(f"{questions} lacks the public data that its questions are about")
        _admit(session, told, given.asks)
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
            tuple(Release(**asdict(asked), **session.privacy(asked.number)) for asked in given.asked),
        )
        by_kind = session.ledger.summary()["by_kind"]
        crossed = {way: {kind: sizes[way] for kind, sizes in by_kind.items() if sizes[way]} for way in WAYS}
    finally:
        host.leave()
    path = Path(f"{ANSWERS}-{host.name}.safetensors") if out is None else out
    key = signed.own_key(folder / "node.key")
    write_answers(path, header, answers, crossed, key)
    return Reply(path, header, crossed, signed.fingerprint(signed.public_of(key)), given)


def _answers(
    session: Session, told: Mapping[str, Any], asks: Sequence[Ask], report: Callable[[int], None]
) -> Mapping[int, Tensors]:
    """What the gate lets out, or has let out before."""
    kept = session.folder / KEPT
    if not kept.exists():
        learned = told["learned"]
        while not learned:
            done = session.learn(SECONDS_BETWEEN)
            learned = done["learned"]
            report(done["percent"])
        released = {
            number: session.answer(ask.question, number, ask.tensors, False)
            for number, ask in enumerate(asks)
        }
        save_state(kept, released)
    answers: Mapping[int, Tensors] = load_state(kept)
    return answers


def _admit(session: Session, told: Mapping[str, Any], asks: Sequence[Ask]) -> None:
    """Refuse before any training what would be refused after it.

    Raises:
        QuestionRefused: naming the first question and rule.
    """
    most = told["most_questions"]
    for number, ask in enumerate(asks):
        rule = told["objections"].get(ask.question)
        if rule is None and 0 < most < len(asks):
            rule = f"most_questions: {most}, and the file asks {len(asks)}"
        if rule is not None:
            session.ledger.refuse(node=told["name"], number=number, question=ask.question, rule=rule)
            raise QuestionRefused(told["name"], ask.question, rule)


# --- at the server, in the end ----------------------------------------------------------------------


def distil(
    config: RunConfig[Any],
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
    given = read_questions(questions)
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
    write_report(out)
    return result


def _same_questions(config: RunConfig[Any], given: Questions, path: Path) -> None:
    """Refuse a run that would have asked something else.

    Raises:
        ArgumentError: an option of the method is another one.
        BundleError: data or seed are others.
    """
    mine, method = make(config), method_of(config.method)
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
