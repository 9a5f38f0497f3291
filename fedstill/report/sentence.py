"""What happened in a run and what left the nodes, in words for people who do not know the method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.core.words import MISSING, listed, pick, whole
from fedstill.report import privacy
from fedstill.report.files import Ledger
from fedstill.report.table import central_of

SMALL_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

# What each kind of message says, for a reader who has to answer for it.
KINDS = {
    "private data": "training examples themselves, as they are",
    "logits": "the score that a node's model gives each class, for each input it was asked about",
    "critic": "how unlike its own data a node's critic finds each input, part by part",
    "inputs": "the inputs that the server asked about",
    "gradients": "slopes of the server's loss, which tell it how to change its inputs",
    "label counts": "how many examples of each class a node holds",
    "logit range": "the largest score in a node's answers, which sets the steps they are rounded to",
    "data sizes": "how many examples a node holds",
    "indices": "which rows of the public data a question is about",
    "schedule": "the number of the round",
    "label maps": "what is where in each of a node's training images, or of what the server asks about",
    "difference": "how far an image that the server made is from the node's own of the same label map",
    "attention maps": "where a node's model looks in each public image",
    "latent features": "what a node's model makes of its own training examples, half-way through",
    "parameters": "the weights of a model",
    "extractor parameters": "the weights of a model but for its last part, the head",
    "head parameters": "the weights of a model's last part, which tells the classes apart",
    "generator parameters": "the weights of a network that makes inputs or features like the node's",
}
MODELS = {kind for kind in KINDS if kind.endswith("parameters")}
# Kinds that carry neither a training example nor a model. Of any other kind the page claims nothing.
ANSWERS = {
    "logits",
    "critic",
    "gradients",
    "label counts",
    "data sizes",
    "indices",
    "schedule",
    "logit range",
    "attention maps",
}
OF_MAPS = {"label maps", "difference"}  # what is told of training images, but for the images themselves


def plain_sentence(result: Mapping[str, Any], ledger: Ledger | None = None, made_up: bool = False) -> str:
    """What happened, in words for people who do not know the method.

    It claims only what the bytes by kind bear out. ``made_up`` says that the server generated the
    inputs itself; ``ledger`` tells which questions were about inputs.
    """
    nodes = pick(result, "nodes")
    count = len(nodes) if isinstance(nodes, list) else whole(result, "split", "nodes")
    if count is None:
        who = "Nodes, each with its own private data,"
    elif count == 1:
        who = "One node, with its own private data,"
    else:
        who = f"{count_word(count).capitalize()} nodes, each with its own private data,"

    central, asked = central_of(result), whole(result, "questions")
    if central == "nodes" and asked == 0:
        return f"{who} trained {'its model' if count == 1 else 'their models'} alone. {_what_left(result)}"
    if asked is None:
        how = "by answering questions"
    elif asked == 0:
        how = "without answering any question"
    else:
        how = f"by answering {count_word(asked)} question{'' if asked == 1 else 's'}"
        how += _about_inputs(result, asked, ledger, made_up)
    what, end = {
        "student": ("taught one central model", ""),
        "virtual": ("trained models of their own", "; the average of these was made only to be measured"),
        "ensemble": ("answer together, without any central model; they prepared this", ""),
        "nodes": ("trained models of their own", ""),
    }[central]
    return f"{who} {what} {how}{end}. {_what_left(result)}"


def _about_inputs(result: Mapping[str, Any], asked: int, ledger: Ledger | None, made_up: bool) -> str:
    if not whole(result, "bytes", "by_kind", "inputs", "down"):
        return ""
    inputs = "inputs that the server made up" if made_up else "inputs that the server sent"
    names = pick(result, "questions_by_name")
    names = names if isinstance(names, Mapping) else {}
    if ledger is not None:
        about = sum(whole(names, name) or 0 for name in ledger.about_inputs)
    else:
        about = asked if len(names) == 1 else 0
    if about == asked:
        return f" about {inputs}"
    if 0 < about < asked:
        return f", {count_word(about)} of them about {inputs}"
    return f", some of them about {inputs}"


def _what_left(result: Mapping[str, Any]) -> str:
    by_kind = pick(result, "bytes", "by_kind")
    if not isinstance(by_kind, Mapping):
        return f"What left the nodes was {MISSING}."
    left = {kind for kind in by_kind if whole(by_kind, kind, "up") != 0}
    if "private data" in left:
        return "The nodes' training data left them."
    if "label maps" in left and not left - ANSWERS - OF_MAPS:
        return "No image and no model left a node, but the label maps of its images did."
    if left - ANSWERS - MODELS:
        extra = " Parameters of models are among it." if left & MODELS else ""
        return f"What left each node is listed below, kind by kind.{extra}"
    if left & MODELS:
        sentence = f"No training data left a node, but {listed(sorted(left & MODELS))} of models did."
    elif not by_kind:
        sentence = "Nothing left a node."
    elif MODELS & set(by_kind):
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
