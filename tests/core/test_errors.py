"""Error messages: owners of one or several nodes, methods that cannot run, and advice for each caller."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.dataset import TensorData, check_inputs
from fedstill.core.errors import DataError, MethodRefused, QueryRefused, caller_context, combine_refusals

RULE = "outputs_only: parameters may not leave"


def test_refusal_of_several_nodes_addresses_all_owners() -> None:
    one = QueryRefused("a", "train", RULE)
    assert f"node 'a' refuses query 'train' by rule {RULE}. " in str(one)
    assert "its owner sets policy.outputs_only" in str(one)
    both = combine_refusals([one, QueryRefused("b", "train", RULE)])
    assert f"nodes 'a', 'b' refuse query 'train' by rule {RULE}. " in str(both)
    assert "their owners set policy.outputs_only" in str(both)


@pytest.mark.parametrize(
    ("caller", "advice"),
    [
        ("command line", "--nodes.policy.outputs_only false"),
        ("options", '{"nodes.policy.outputs_only": False}'),
        ("distil", "policies=["),
    ],
)
def test_refusal_advises_the_caller_before_the_owner(caller: str, advice: str) -> None:
    with caller_context(caller):  # type: ignore[arg-type]
        text = str(QueryRefused("a", "train", RULE))
    assert 0 < text.index(advice) < text.index("node.toml")


def test_refused_method_names_node_only_if_it_is_the_reason() -> None:
    assert str(MethodRefused("FedKD", "", "there is no public data")) == (
        "FedKD cannot run here: there is no public data"
    )
    assert str(MethodRefused("FedAvg", "clinic", "a forest")) == "FedAvg cannot run here: clinic: a forest"


@pytest.mark.parametrize(
    ("caller", "advice"),
    [("command line", "--data.size resizes"), ("options", "option data.size"), ("distil", "interpolate")],
)
def test_advice_on_image_sizes_depends_on_caller(caller: str, advice: str) -> None:
    images = TensorData(torch.zeros(1, 1, 7, 7), torch.tensor([0]))
    with caller_context(caller), pytest.raises(DataError, match=f"multiples of 4: .*{advice}"):  # type: ignore[arg-type]
        check_inputs(images, "test")
