"""``fedstill node check``: what a node is, what it would answer and refuse, and everything that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fedstill.cli.usage import Given
from fedstill.core.errors import DataError, FedstillError

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.core.dataset import TensorData
    from fedstill.data.public import Public
    from fedstill.data.spec import InputSpec
    from fedstill.node.owner import Examined
    from fedstill.protocol.method import Method
    from fedstill.protocol.questions import NodeSide
    from fedstill.runs.config import RunConfig
    from fedstill.tasks import TaskConfig

FEW = 20  # classes that are shown one by one


@dataclass(frozen=True)
class Asking:
    """A run as far as a node's machine can know it."""

    target: str
    config: RunConfig
    spec: InputSpec | None
    public: Public | None
    note: str  # why the spec is not known


def check(given: Given) -> None:
    """Say it; nothing is trained."""
    folder = Path(given.places[0])

    from rich.console import Console

    from fedstill.node import owner
    from fedstill.runs.config import load

    asking = asked_by(given.places[1], load(given.places[1])) if given.places[1:] else None
    known = (asking.spec, asking.config.task) if asking else (None, None)
    found = owner.examine(folder, known[0], task=known[1])
    if found.file is None:
        leave_faulty(folder, found.faults)
    console = Console(highlight=False, markup=False, emoji=False)
    _print_node(console, folder, found)
    if asking is not None:
        _print_questions(console, folder, asking, found)
    elif not found.untold:  # else which methods serve follows from a task that is not known
        _print_methods(console, found)
    if found.faults:
        leave_faulty(folder, found.faults)
    if found.untold:
        print(f"Not checked: {found.untold}. Nothing else is wrong.")
        sys.exit(1)
    print("No faults.")


def leave_faulty(folder: Path, faults: Sequence[str]) -> NoReturn:
    """End the command with what is wrong with a node."""
    if len(faults) == 1:
        raise FedstillError(faults[0])
    print(f"fedstill: {len(faults)} faults in {folder}:", file=sys.stderr)
    for fault in faults:
        print(f"  {' '.join(fault.split())}", file=sys.stderr)
    sys.exit(2)


def asked_by(target: str, config: RunConfig) -> Asking:
    """A run with its input spec and public data, where its own data are here."""
    from fedstill.data import load as load_data
    from fedstill.data.public import load_public
    from fedstill.data.spec import InputSpec

    try:
        data = load_data(config.data, config.task)
        public = load_public(config.public, data, config.task)[1]
    except DataError as error:
        return Asking(target, config, None, None, str(error))
    return Asking(target, config, InputSpec.of(config.task, data), public, "")


def _print_node(console: Console, folder: Path, found: Examined) -> None:
    from rich.table import Table

    from fedstill.node.own_audit import audit_file
    from fedstill.node.rights import open_to_others

    if found.file is None:
        return
    console.print(f"node {found.file.name}, in {folder.resolve()}", soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, min_width=9)
    table.add_column()
    for head, lines in _facts(folder, found).items():
        for number, line in enumerate(lines):
            table.add_row(f"  {head}" if number == 0 else "", line)
    console.print(table)
    if (told := open_to_others(folder, audit_file(found.file, folder))) is not None:
        console.print(told, soft_wrap=True)
    console.print()


def _facts(folder: Path, found: Examined) -> dict[str, list[str]]:
    """What a node is, in lines by what they are about."""
    from fedstill.cli.node_privacy import privacy_facts
    from fedstill.core.words import times
    from fedstill.data.private_config import SOURCES
    from fedstill.node import kit

    file = found.file
    facts: dict[str, list[str]] = {}
    if file is None:
        return facts
    if found.data is not None and found.spec is not None:
        source = file.data.path if file.data.source in SOURCES else file.data.source
        facts["data"] = [f"{len(found.data)} examples, {times(found.spec.shape)}, from {source}"]
        if counts := _counts(found.spec, found.data):
            facts["data"].append(counts)
    elif found.untold:
        facts["data"] = [found.untold.removeprefix("data ")]
    if found.model is not None:
        facts["model"] = [f"{file.model.name}, {_about_model(found)}"]
    if found.compute is not None:
        facts["compute"] = [f"{found.compute.device}, {found.compute.precision}"]
    policy = file.policy
    limits = {
        "questions": policy.most_questions,
        "bytes": policy.most_bytes,
        "inputs a question": policy.most_rows,
    }
    facts["policy"] = [
        f"questions {', '.join(policy.questions) or 'none'}; "
        + ("outputs only; " if policy.outputs_only else "parameters may leave; ")
        + (", ".join(f"at most {most} {what}" for what, most in limits.items() if most) or "no limits")
    ]
    facts["privacy"] = privacy_facts(folder, found)
    if not file.online:
        facts["link"] = ["none: it answers files of questions"]
    elif not kit.faults(folder, None):
        until = kit.valid_until(folder)
        facts["link"] = [
            f"dials out to {kit.read(folder)[1]}; its certificate is valid until {until:%Y-%m-%d}"
        ]
    return facts


def _counts(spec: InputSpec, data: TensorData) -> str:
    """How much there is of each class, in one line; empty where there are no classes."""
    task, classes = spec.make_task(), spec.classes
    if task.kind == "image":
        return ""
    counts = task.counts(data).tolist()
    if task.kind == "map":
        shares = (
            f"{name}: {100 * count / len(data):.3g}%" for name, count in zip(classes, counts, strict=True)
        )
        return f"{', '.join(shares)} of all pixels"
    if len(classes) > FEW:
        there = [round(count) for count in counts if count]
        least, most = min(there, default=0), max(there, default=0)
        return f"{len(there)} of {len(classes)} classes, {least} to {most} of each"
    return ", ".join(f"{name}: {count:.0f}" for name, count in zip(classes, counts, strict=True))


def _about_model(found: Examined) -> str:
    from fedstill.models.foreign import Predictor

    model = found.model
    if model is None or isinstance(model, Predictor):
        told = "" if model is None else model.extra_repr()
        return f"{told}: it only predicts, and nothing of it is trained"
    sizes = [parameter.numel() for parameter in model.parameters()]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = "all" if trained == sum(sizes) else f"{trained:,}" if trained else "none"
    weights = (
        "" if found.file is None or not found.file.model.weights else f", from {found.file.model.weights}"
    )
    return f"{sum(sizes):,} parameters{weights}, {share} trained here"


def _side(method: Method, found: Examined, public: Public | None, task_config: TaskConfig) -> NodeSide:
    """A method's part at this node; of the task that is named where the data do not say their spec."""
    from fedstill.core.compute import Compute
    from fedstill.protocol.method import side_of
    from fedstill.protocol.questions import NodeSetting, stand_in

    task = found.spec.make_task() if found.spec else task_config.example()
    local = found.file.local if found.file else None
    known = public or stand_in(task, found.spec.shape if found.spec else ())
    setting = NodeSetting(task, local, found.compute or Compute(), known)  # type: ignore[arg-type]
    return side_of(method, setting)


def _print_questions(console: Console, folder: Path, asking: Asking, found: Examined) -> None:
    """What one run asks, and what this node would say."""
    from rich.table import Table

    from fedstill.cli.node_privacy import payment, unprotected

    config = asking.config
    method = config.method
    if asking.note:
        whose = "those of yours" if found.spec else "not known"
        console.print(f"The run's own data are not here, so shape and classes are {whose} ({asking.note}).")
        console.print()
    side = _side(method, found, asking.public, config.task)
    questions = side.questions
    rules, against = _rules(method, found, questions, _student(asking, found))
    bare, dear, mechanism = unprotected(found, side, folder)
    rules = {**bare, **rules}
    against = _stranger(config, found) or against or _first_refusal(bare) or dear
    console.print(f"In {asking.target} ({method.title}) it would be asked:")
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    for name, question in questions.items():
        kinds = ", ".join(dict.fromkeys(question.kinds().values()))
        often = f"x{question.times}" if question.times > 1 else ""
        says = f"refuses ({rules[name]})" if name in rules else f"answers with {kinds or 'nothing'}"
        table.add_row(f"  {name}", often, says)
    console.print(table)
    if against is None and found.untold:
        console.print("Whether it can take part is not known, as your data were not looked at.")
    elif against is None and found.faults:
        console.print("Whether it can take part is not known before the faults are mended.")
    elif against is None:
        console.print("It can take part.")
    else:
        console.print(f"It cannot take part: {against}.", soft_wrap=True)
    if mechanism is not None and mechanism.protects and not bare:
        console.print(payment(mechanism), soft_wrap=True)
    console.print()


def _print_methods(console: Console, found: Examined) -> None:
    """What each method asks, and what this node would say."""
    from rich.table import Table

    from fedstill.cli.node_privacy import unprotected
    from fedstill.data.loaders import CLASSIFICATION
    from fedstill.protocol.method import METHODS

    if found.file is None:
        return
    console.print("In a run of each method, with its default options:")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("  method", "can take part", "what the node does"):
        table.add_column(head, header_style="bold")
    unseen = found.data is None or found.model is None or found.compute is None
    for name in (*METHODS.own, *found.file.policy.methods):
        method = METHODS[name]()
        side = _side(method, found, None, CLASSIFICATION)
        questions = side.questions
        rules, against = _rules(method, found, questions, None)
        bare, dear, _ = unprotected(found, side, None)
        rules = {**bare, **rules}
        against = against or _first_refusal(bare) or dear
        told = [question for question in questions if question not in rules]
        parts = [f"answers {', '.join(told)}"] if told else []
        parts += [f"refuses {', '.join(asked)} ({rule})" for rule, asked in _by_rule(rules).items()]
        if against and not rules:
            parts = [against]
        says = "; ".join(parts) or "is asked nothing"
        table.add_row(f"  {name}", "no" if against else "not known" if unseen else "yes", says)
    console.print(table)
    console.print("Shape and classes are those of the data here; name a run to check against the run's own.")
    console.print()


def _by_rule(rules: dict[str, str]) -> dict[str, list[str]]:
    sorted_out: dict[str, list[str]] = {}
    for question, rule in rules.items():
        sorted_out.setdefault(rule, []).append(question)
    return sorted_out


def _rules(
    method: Method,
    found: Examined,
    questions: Mapping[str, Any],
    student: Any,
) -> tuple[dict[str, str], str | None]:
    """The rule by which each question is refused, if any, and why this node cannot take part, if so."""
    from torch import nn

    from fedstill.node import own_model, owner
    from fedstill.node.fit import architecture

    if found.file is None:
        return {}, None
    model = found.model or nn.Identity()
    rules = owner.objections(found.file, model, questions)
    needs = method.needs()
    limit, total = found.file.policy.most_questions, sum(question.times for question in questions.values())
    against = None
    if rules:
        against = _first_refusal(rules)
    elif limit and total > limit:
        against = f"it answers at most {limit} questions, and the run asks {total}"
    elif found.model is not None and found.spec is not None and found.compute is not None:
        against = own_model.unfit(found.model, needs, found.spec, found.compute)
        if against is None and needs.same_architecture and student is not None:
            same = architecture(student) == architecture(found.model)
            against = None if same else "its model is not of the student's architecture"
    return rules, against


def _stranger(config: RunConfig, found: Examined) -> str | None:
    """Which of a run's method and task is neither the package's own nor allowed by the owner."""
    for option, chosen in (("methods", config.method), ("tasks", config.task)):
        allowed = getattr(found.file.policy, option) if found.file else ()
        if not chosen.registry.allows(chosen.called, allowed):
            return f"policy.{option} does not name {chosen.called}"
    return None


def _first_refusal(rules: Mapping[str, str]) -> str | None:
    """Why a node that refuses some questions cannot take part."""
    for name, rule in rules.items():
        return f"it refuses {name} ({rule}), and the run needs it"
    return None


def _student(asking: Asking, found: Examined) -> Any:
    """The run's central model, to compare architectures; None where it cannot be made here."""
    from fedstill import models

    if found.spec is None:
        return None
    try:
        student, spec = asking.config.student.model, found.spec
        return models.build(student, spec.shape, len(spec.classes), 0, vocabulary=spec.vocabulary)
    except FedstillError:  # a factory of the server's own
        return None
