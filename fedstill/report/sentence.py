"""What happened in a run and what left the nodes, in words for people who do not know the method."""

from __future__ import annotations

from fedstill.core.words import MISSING, listed
from fedstill.report import privacy
from fedstill.report.result import Result
from fedstill.report.run import Audited

SMALL_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def plain_sentence(result: Result, audit: Audited | None = None, made_up: bool = False) -> str:
    """What happened, as far as the bytes by kind bear it out.

    ``made_up``: the server generated the inputs itself; ``audit`` tells which questions were about inputs.
    """
    count = len(result.nodes) or result.split.nodes
    if count is None:
        who = "Nodes, each with its own private data,"
    elif count == 1:
        who = "One node, with its own private data,"
    else:
        who = f"{count_word(count).capitalize()} nodes, each with its own private data,"

    central, asked = result.central, result.questions
    if central == "nodes" and asked == 0:
        return f"{who} trained {'its model' if count == 1 else 'their models'} alone. {_what_left(result)}"
    if asked is None:
        how = "by answering questions"
    elif asked == 0:
        how = "without answering any question"
    else:
        how = f"by answering {count_word(asked)} question{'' if asked == 1 else 's'}"
        how += _about_inputs(result, asked, audit, made_up)
    what, end = {
        "student": ("taught one central model", ""),
        "virtual": ("trained models of their own", "; the average of these was made only to be measured"),
        "ensemble": ("answer together, without any central model; they prepared this", ""),
        "nodes": ("trained models of their own", ""),
    }[central]
    return f"{who} {what} {how}{end}. {_what_left(result)}"


def _about_inputs(result: Result, asked: int, audit: Audited | None, made_up: bool) -> str:
    sent = (result.bytes.by_kind or {}).get("inputs")
    if sent is None or not sent.down:
        return ""
    inputs = "inputs that the server made up" if made_up else "inputs that the server sent"
    names = result.questions_by_name
    if audit is not None:
        about = sum(names.get(name, 0) for name in audit.about_inputs)
    else:
        about = asked if len(names) == 1 else 0
    if about == asked:
        return f" about {inputs}"
    if 0 < about < asked:
        return f", {count_word(about)} of them about {inputs}"
    return f", some of them about {inputs}"


def _what_left(result: Result) -> str:
    by_kind = result.bytes.by_kind
    if by_kind is None:
        return f"What left the nodes was {MISSING}."
    left = {kind for kind, sums in by_kind.items() if sums.up}
    kinds = result.kind_of()
    # Kinds that carry neither a training example nor a model. Of any other kind, and of what a method that is
    # not ours says of its own, the page claims nothing.
    ours = {kind for kind in by_kind if kind in kinds and not kinds[kind].package}
    models = {kind for kind in ours if kinds[kind].of == "model"}
    answers = {kind for kind in ours & left if kinds[kind].output or kinds[kind].of == "question"}
    of_maps = {kind for kind in ours & left if kinds[kind].of_maps}
    if "private data" in left:
        return "The nodes' training data left them."
    if "label maps" in left and not left - answers - of_maps:
        return "No image and no model left a node, but the label maps of its images did."
    if left - answers - models:
        extra = " Parameters of models are among it." if left & models else ""
        return f"What left each node is listed below, kind by kind.{extra}"
    if left & models:
        sentence = f"No training data left a node, but {listed(sorted(left & models))} of models did."
    elif not by_kind:
        sentence = "Nothing left a node."
    elif models:
        sentence = "No training data left a node; parameters of models were sent to the nodes."
    else:
        sentence = "No training data and no model left a node."
    count = "roughly, with noise, how many" if privacy.counts_are_noisy(result) else "how many"
    if "label counts" in left:
        sentence += f" Beside its answers, each node told {count} examples of each class it holds."
    elif "data sizes" in left:
        sentence += f" Each node told {count} examples it holds."
    return sentence


def count_word(count: int) -> str:
    return SMALL_NUMBERS[count] if 0 <= count < len(SMALL_NUMBERS) else f"{count:,}"
