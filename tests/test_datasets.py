"""Data sets divided over nodes for Python: equal to those of a run with the same options."""

from __future__ import annotations

import pytest
import torch

import fedstill
from fedstill.core.errors import UnknownName
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import from_dict
from tests.support.errors import raises_invalid


def test_nodes_have_the_examples_of_a_run() -> None:
    given = fedstill.datasets.load(
        "digits", nodes=3, partition="dirichlet", alpha=0.3, seed=4, public="held-out",
        options={"train_limit": 600, "public.limit": 40},
    )  # fmt: skip
    table = {
        "seed": 4, "method": {"name": "standalone"}, "data": {"name": "digits", "train_limit": 600},
        "split": {"name": "dirichlet", "nodes": 3, "alpha": 0.3}, "public": {"name": "held-out", "limit": 40},
    }  # fmt: skip
    simulation, _ = build_simulation(from_dict(table))
    for mine, node in zip(given.nodes, simulation.setting.nodes, strict=True):
        assert torch.equal(mine.inputs, node.data.inputs)
        assert torch.equal(mine.targets, node.data.targets)
    assert torch.equal(given.test.inputs, simulation.test.inputs)
    assert given.public is not None
    assert simulation.public is not None
    assert torch.equal(given.public.inputs, simulation.public.inputs)
    assert torch.equal(given.arguments()["public"][0], given.public.inputs)


def test_seed_and_partition_change_the_division() -> None:
    def sizes(**options: object) -> list[int]:
        return [len(part) for part in fedstill.datasets.digits(nodes=3, **options).nodes]  # type: ignore[arg-type]

    assert sizes(alpha=0.1) != sizes(alpha=0.1, seed=1)
    assert max(sizes(partition="iid")) - min(sizes(partition="iid")) <= 1


def test_invalid_options_are_named() -> None:
    with raises_invalid("options", "nodes.models"):
        fedstill.datasets.load("digits", options={"nodes.models": ["mlp"]})
    for given in ("method.name", "split.nodes", "name"):
        with raises_invalid("options", given):
            fedstill.datasets.load("digits", options={given: 3})
    with pytest.raises(UnknownName):
        fedstill.datasets.digits(alhpa=0.1)
    with raises_invalid("data.name", "digitz"):
        fedstill.datasets.load("digitz")
