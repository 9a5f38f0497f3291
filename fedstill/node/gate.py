"""The gate of a node: nothing leaves except through it, under the policy of the node's owner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedstill.errors import ArgumentError, QuestionRefused
from fedstill.node.digests import digest
from fedstill.node.ledger import ANSWER, Ledger
from fedstill.privacy.bill import Bill, total
from fedstill.privacy.events import Price, as_text
from fedstill.wire import INPUTS, SCALE, WireConfig, kind_of, refine, size

if TYPE_CHECKING:
    from fedstill.node.purse import Purse
    from fedstill.node.questions import Question

# Kinds of tensor that "outputs only" refuses: what was learned, or learned from, as it is.
PARAMETERS = "parameters"
EXTRACTOR_PARAMETERS, HEAD_PARAMETERS = "extractor parameters", "head parameters"
GENERATOR_PARAMETERS = "generator parameters"
PRIVATE_DATA = "private data"
LABEL_MAPS = "label maps"  # of a node's own images, or of what a server asks about
DIFFERENCE = "difference"  # of a server's images from the node's own
OF_MAPS = (LABEL_MAPS, DIFFERENCE)  # what policy label_maps lets out
INDICES = "indices"  # of public data
NOT_OUTPUTS = (PARAMETERS, EXTRACTOR_PARAMETERS, HEAD_PARAMETERS, GENERATOR_PARAMETERS, PRIVATE_DATA)
# Kinds that it lets pass, and no others: a kind that nobody has heard of is refused.
OUTPUTS = ("attention maps", "critic", "data sizes", "gradients", "label counts", "logit range", "logits")


@dataclass(frozen=True)
class PolicyConfig:
    """What a node's owner allows."""

    questions: tuple[str, ...] = ("*",)
    """Questions that may be answered; "*" is all that the method declares."""
    outputs_only: bool = True
    """Refuse any question whose answer carries anything but outputs: parameters of a network, the data
    themselves, or a kind of tensor that is not known. What a tensor is of, the installed method declares."""
    label_maps: bool = False
    """Let label maps leave, what is where in each image, from which a server makes images of its own; and how
    far those are from the real ones of the same maps, which, asked often enough, tells the real ones. The
    maps do not stay with the server: it sends them on to all other nodes, with the images made from them
    (FedIOD; of AsynDGAN each node sees its own again). Both are data and no outputs; outputs_only = false
    allows them, too."""
    most_questions: int = 0
    """Refuse after so many questions; 0 is no limit."""
    most_bytes: int = 0
    """Refuse once so many bytes have left the node; 0 is no limit."""
    most_rows: int = 100_000
    """Refuse a question about more inputs than this at once; 0 is no limit."""
    most_parameters: int = 50_000_000
    """Refuse to make further networks (critics, generators) of more parameters than this, as a server wants
    them; 0 is no limit."""

    def __post_init__(self) -> None:
        for name in ("most_questions", "most_bytes", "most_rows", "most_parameters"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"policy.{name}", getattr(self, name), "0 (no limit) or more")


@dataclass(frozen=True)
class Asked:
    """One question as it reached the node."""

    number: int
    question: str
    content: str  # digest of the tensors that came with it
    after: str  # fingerprint of all that the node had answered before: its answer depends on that, too
    down: Mapping[str, int]  # bytes by kind


class Gate:
    """Checks the policy, then bounds, noises, charges and audits each release, in this order.

    Args:
        node: the node's name.
        policy: its owner's policy.
        ledger: where releases are written.
    """

    def __init__(self, node: str, policy: PolicyConfig, ledger: Ledger) -> None:
        self.node, self.policy, self.ledger = node, policy, ledger
        self.purse: Purse | None = None  # privacy: what protects its releases, and pays for them

    def objection(self, question: Question) -> str | None:
        """The rule by which this question could never be answered, or None. Asks nothing, counts nothing."""
        allowed, kinds = self.policy.questions, question.kinds()
        if "*" not in allowed and question.name not in allowed:
            return f"questions: {', '.join(allowed) or 'none'}"
        if self.policy.outputs_only:
            let_out = {*OUTPUTS, *(OF_MAPS if self.policy.label_maps else ())}
            told = sorted(set(kinds.values()) - let_out)
            if told and set(OF_MAPS).issuperset(told):
                cure = 'with method.conditions = "drawn" none is asked for'
                return f"label_maps: no {' and '.join(told)}, unless its owner sets it to true; {cure}"
            if told:
                return f"outputs_only: no {' and '.join(told)}"
        return None if self.purse is None else self.purse.objection(question)

    def inspect(
        self,
        question: str,
        tensors: Mapping[str, torch.Tensor],
        sends: Mapping[str, str],
        shape: Sequence[int],
    ) -> None:
        """Refuse a question that no sound server asks, before anything is computed.

        Args:
            question: its name.
            tensors: that came with it.
            sends: the kind of each.
            shape: of one of the node's own inputs.

        Raises:
            QuestionRefused: other tensors than declared, inputs of another shape, too many of them, or
                numbers that are not finite.
        """
        most = self.policy.most_rows or math.inf
        rule, names = None, {name.removesuffix(SCALE) for name in tensors}
        if names != set(sends):
            rule = f"tensors: exactly {sorted(sends)}, not {sorted(names)}"
        for name, tensor in (tensors if rule is None else {}).items():
            if name.endswith(SCALE):
                continue
            kind = kind_of(name, sends)
            if kind == INPUTS and tuple(tensor.shape[1:]) != tuple(shape):
                here = f"(B, {', '.join(map(str, shape))})"
                rule = f"inputs: {name} is {tuple(tensor.shape)}, and inputs here are {here}"
            elif kind == INPUTS and f"{name}{SCALE}" not in tensors and tensor.dtype != torch.float32:
                rule = f"inputs: {name} is {tensor.dtype}, and inputs here are torch.float32"
            elif kind == INPUTS and not 1 <= len(tensor) <= most:
                rule = f"most_rows: {most}, and {name} has {len(tensor)}"
            elif kind == LABEL_MAPS and (tensor.dtype != torch.uint8 or tensor.shape[1:] != tuple(shape)[1:]):
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                rule = f"label maps: {name} is {found}, and maps here are uint8, one number a pixel"
            elif kind == INDICES and tensor.numel() > most:
                rule = f"most_rows: {most}, and {name} names {tensor.numel()}"
        for name, tensor in (refine(tensors) if rule is None else {}).items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                rule = f"finite numbers: {name} holds NaN or infinity"
        if rule is not None:
            raise QuestionRefused(self.node, question, rule)

    def admit(self, asked: Asked, question: Question, sent: Mapping[str, torch.Tensor]) -> None:
        """Let a question in, or refuse it before anything is computed.

        Raises:
            QuestionRefused: by the policy's list, its refusal of parameters, a limit reached, or a budget
                that the answer would pass.
        """
        rule = self.objection(question)
        # What was answered once may be again; other content under the same number is another question.
        again = self.ledger.released(self.node, asked.number, ANSWER, asked.content, asked.after)
        limit = self.policy.most_questions
        if rule is None and not again:
            if limit and self.ledger.answers(self.node) >= limit:
                rule = f"most_questions: {limit}"
            elif self.policy.most_bytes and self.ledger.up(self.node) >= self.policy.most_bytes:
                rule = f"most_bytes: {self.policy.most_bytes}"
        if rule is not None:
            raise QuestionRefused(self.node, asked.question, rule)
        if self.purse is not None:
            if not again:
                self.purse.afford(asked, question, sent)
            self.purse.pay_learning(asked, question, sent)  # before it happens, whatever comes of it

    def release(
        self,
        asked: Asked,
        part: str,
        tensors: Mapping[str, torch.Tensor],
        question: Question,
        sent: Mapping[str, torch.Tensor],
        wire: WireConfig | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """Hand over tensors: bound, noise, charge and audit on disk, then release.

        Args:
            asked: the question they answer.
            part: ``"answer"`` or ``"gradient"``.
            tensors: by name, what would leave.
            question: as the method declares it.
            sent: the tensors that came with it.
            wire: the form in which they travel; None is float32.

        Raises:
            QuestionRefused: a tensor of undeclared kind, more bytes than the policy allows, or more privacy
                than the budget.
            OSError: a ledger cannot be written; nothing is released then.
        """
        kinds = question.kinds()
        undeclared = sorted(set(tensors) - set(kinds))
        if undeclared:
            raise QuestionRefused(self.node, asked.question, f"undeclared: {', '.join(undeclared)}")
        noised, price, rule, stamp = self._protected(asked, part, tensors, question)
        finished = noised
        if part == ANSWER and question.finish is not None:
            finished = question.finish(noised, sent)
        leaving = (wire or WireConfig()).coarsen(finished, kinds)
        votes = () if self.purse is None else self.purse.votes(question, tensors, noised)
        self._charge(asked, part, leaving, kinds, question, sent, price, rule, stamp, votes)
        return {name: tensor.detach() for name, tensor in leaving.items()}

    def _protected(
        self,
        asked: Asked,
        part: str,
        tensors: Mapping[str, torch.Tensor],
        question: Question,
    ) -> tuple[Mapping[str, torch.Tensor], Price | None, str, str]:
        """Tensors as they may leave, what that costs, what was done, and a stamp of what they were."""
        if self.purse is None:
            return tensors, None, "none", ""
        guard = self.purse.guard
        rules = {name: guard.rule(question, name) for name in tensors}
        bounded = {name: rule.bound(tensors[name]) for name, rule in rules.items()}
        # Noise is named after all that it hides, to the last digit: equal noise on two answers would cancel.
        stamp = digest(part, bounded)
        about = ("gate", asked.number, part, asked.content, asked.after, stamp)
        noised = {name: rule.noise(bounded[name], guard.draws(*about, name)) for name, rule in rules.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        price = total(guard.release(question, shapes, noised))
        return noised, price, "; ".join(f"{name}: {rule.text}" for name, rule in rules.items()), stamp

    def _charge(
        self,
        asked: Asked,
        part: str,
        tensors: Mapping[str, torch.Tensor],
        kinds: Mapping[str, str],
        question: Question,
        sent: Mapping[str, torch.Tensor],
        price: Price | None,
        rule: str,
        stamp: str,
        votes: Sequence[Sequence[int]],
    ) -> None:
        up: Counter[str] = Counter()
        for name, tensor in tensors.items():
            up[kind_of(name, kinds)] += size(tensor)
        again = self.ledger.released(self.node, asked.number, part, asked.content, asked.after)
        limit = self.policy.most_bytes or math.inf
        if not again and self.ledger.up(self.node) + sum(up.values()) > limit:
            raise QuestionRefused(self.node, asked.question, f"most_bytes: {self.policy.most_bytes}")
        anew = self.purse is not None and self.purse.pay(asked, part, up, price, rule, stamp)
        if again and not anew:
            return  # the same release once more, after a stop: written and paid for already
        if price is not None and self.purse is not None:
            # What was learned for this release, and before the first one, has been paid for by itself.
            learns = part == ANSWER and not again
            learned = self.purse.guard.learning(question, sent) if learns else Bill()
            first = self.purse.guard.first() if self.ledger.silent(self.node) else Bill()
            price = total({"release": price, "learned": total(learned), "first": total(first)})
        self.ledger.write(
            node=self.node,
            number=asked.number,
            question=asked.question,
            part=part,
            content=asked.content,
            after=asked.after,
            down=asked.down,
            up=up,
            votes=votes,
            privacy={
                "mechanism": "none" if self.purse is None else self.purse.guard.name,
                "price": None if price is None else as_text(price),
            },
        )
