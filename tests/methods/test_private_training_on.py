"""Training under DP-SGD on given examples, or with a term of the loss, that may depend on the node's records
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import fedstill
from fedstill.core.errors import QueryRefused
from fedstill.methods import Method, NodeSetting, NodeView, Query, Server, payload_kinds
from fedstill.models.module_utils import to_vector
from fedstill.privacy.config import DPTrainingConfig
from fedstill.protocol.local_config import FULL_TRAINING
from tests.support.bright_rows import bright_rows, few


def fit(node: NodeView, x: torch.Tensor, y: torch.Tensor) -> None:
    node.train_on(x, y, None, "fit", epochs=1, batch=16, lr=0.1)


def on_public(node: NodeView) -> None:
    fit(node, node.public.inputs, node.predict(node.public.inputs).argmax(1))


def before_records(node: NodeView) -> None:
    on_public(node)
    node.sample(4, "later")


def on_sample(node: NodeView) -> None:
    fit(node, *node.sample(32, "own"))


def on_data(node: NodeView) -> None:
    fit(node, node.data.inputs, node.data.targets)


def on_separate_data(node: NodeView) -> None:
    x = node.separately(lambda alone: alone.data.inputs[:8].clone())
    fit(node, x, torch.zeros(8, dtype=torch.int64))


def on_targets_of_records(node: NodeView) -> None:
    label = int(node.data.targets.bincount().argmax())
    x = node.public.inputs
    fit(node, x, torch.full((len(x),), label))


def on_cached_records(node: NodeView) -> None:
    x = node.cached("own", 0, lambda: node.data.inputs[:8].clone())
    fit(node, x, torch.zeros(8, dtype=torch.int64))


FUNCTIONS: dict[str, Callable[[NodeView], None]] = {
    each.__name__: each
    for each in (
        on_public,
        before_records,
        on_sample,
        on_data,
        on_separate_data,
        on_targets_of_records,
        on_cached_records,
    )
}
ALLOWED = ("on_public", "before_records")


def toward_zero(node: NodeView, step: int) -> torch.Tensor:
    return torch.stack([w.square().sum() for w in node.model.named_parameters().values()]).sum()


def toward_sample(node: NodeView, step: int) -> torch.Tensor:
    x, y = node.sample(4, "term", step)
    return node.loss(node.model(x), y)


def toward_data(node: NodeView, step: int) -> torch.Tensor:
    return node.loss(node.model(node.data.inputs), node.data.targets)


TERMS = {term.__name__: term for term in (toward_zero, toward_sample, toward_data)}


@dataclass(frozen=True, kw_only=True)
class Trains(Method):
    """One query that trains on some examples; with ``warm_up``, an earlier query only reads the records."""

    title: ClassVar[str] = "Trains"
    initial_training: ClassVar[None] = None
    rounds: int = 1
    how: str = ""
    warm_up: bool = False

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        logits = {"logits": payload_kinds.LOGITS}
        yield Query(self.read, releases=logits, times=1, depends_on_records=())
        yield Query(self.learn, releases=logits, times=1, depends_on_records=())
        if self.how in TERMS:
            whole = {"span": lambda sent: FULL_TRAINING}
            yield Query(self.learn_with_term, releases=logits, times=1, depends_on_records=(), **whole)

    def read(self, node: NodeView) -> Mapping[str, torch.Tensor]:
        node.cached("own", 0, lambda: node.data.inputs[:8].clone())
        return {"logits": node.predict(node.public.inputs)}

    def learn(self, node: NodeView) -> Mapping[str, torch.Tensor]:
        FUNCTIONS[self.how](node)
        return {"logits": node.predict(node.public.inputs)}

    def learn_with_term(self, node: NodeView) -> Mapping[str, torch.Tensor]:
        node.train(FULL_TRAINING, term=TERMS[self.how])
        return {"logits": node.predict(node.public.inputs)}

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        if self.warm_up:
            server.query("read")
        query = "learn" if self.how in FUNCTIONS else "learn_with_term"
        return {"mean": server.query(query)["logits"].mean().item()}


def run(how: str, private: bool = True, warm_up: bool = False) -> list[bool]:
    """Return for each node whether its model has changed."""
    changes: dict[str, Any] = {"public": bright_rows(20, 5)[0], "method": Trains(how=how, warm_up=warm_up)}
    if private:
        training = DPTrainingConfig(noise=1.0)
        changes["privacies"] = [fedstill.DPSGD(training=training, delta=1e-5)] * 2
    arguments = few(**changes)
    before = [to_vector(model) for model in arguments["models"]]
    fedstill.distil(**arguments)
    after = [to_vector(model) for model in arguments["models"]]
    return [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]


@pytest.mark.parametrize("how", ALLOWED)
def test_private_nodes_train_on_public_examples(how: str) -> None:
    assert run(how) == [True, True]


@pytest.mark.parametrize("how", sorted(FUNCTIONS.keys() - set(ALLOWED)))
def test_private_nodes_refuse_examples_that_may_depend_on_records(how: str) -> None:
    with pytest.raises(QueryRefused, match=r"train_on.* DP-SGD"):
        run(how)
    assert run(how, private=False) == [True, True]


def test_cached_records_of_an_earlier_query_are_refused() -> None:
    with pytest.raises(QueryRefused, match=r"train_on.* DP-SGD"):
        run("on_cached_records", warm_up=True)


def test_each_query_tracks_its_own_reads() -> None:
    assert run("on_public", warm_up=True) == [True, True]


def test_private_nodes_train_with_a_term_that_reads_no_record() -> None:
    assert run("toward_zero") == [True, True]


@pytest.mark.parametrize("how", ["toward_sample", "toward_data"])
def test_private_nodes_refuse_terms_that_read_records(how: str) -> None:
    with pytest.raises(QueryRefused, match="has read the node's records"):
        run(how)
    assert run(how, private=False) == [True, True]
