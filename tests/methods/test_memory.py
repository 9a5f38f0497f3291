"""The server's answer memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedstill.core.state import load_state, save_state
from fedstill.methods._memory import AnswerMemory

CPU = torch.device("cpu")


def pairs(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs numbered from ``first`` on, each with its number times ten as the target."""
    numbers = torch.arange(first, first + count).float()
    return numbers.view(-1, 1, 1, 1).expand(-1, 1, 2, 2), 10 * numbers.view(-1, 1)


def held(memory: AnswerMemory) -> set[float]:
    """All that is remembered, seen through many draws; checks that pairs stay together."""
    seen: set[float] = set()
    for seed in range(200):
        inputs, targets = memory.sample(1, torch.Generator().manual_seed(seed))
        assert torch.equal(10 * inputs[:, 0, 0, 0], targets[:, 0])
        seen |= set(inputs[:, 0, 0, 0].tolist())
    return seen


def test_an_empty_memory_says_so() -> None:
    with pytest.raises(LookupError, match="empty"):
        AnswerMemory(4).sample(1, torch.Generator())


def test_it_remembers_everything_until_it_is_full_then_overwrites_the_oldest() -> None:
    memory = AnswerMemory(5)
    expected = [
        ({0, 1}, 2),
        ({0, 1, 2, 3}, 4),
        ({1, 2, 3, 4, 5}, 5),  # over the edge: 0 is gone, 5 sits in its place
        ({3, 4, 5, 6, 7}, 5),
        ({5, 6, 7, 8, 9}, 5),
    ]
    for turn, (content, length) in enumerate(expected):
        memory.add(*pairs(2 * turn, 2))
        assert held(memory) == content
        assert len(memory) == length


def test_the_same_generator_draws_the_same_pairs() -> None:
    memory = AnswerMemory(8)
    memory.add(*pairs(0, 8))
    first = memory.sample(6, torch.Generator().manual_seed(1))
    again = memory.sample(6, torch.Generator().manual_seed(1))
    other = memory.sample(6, torch.Generator().manual_seed(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_draws_do_not_depend_on_how_much_room_was_reserved() -> None:
    small, large = AnswerMemory(4), AnswerMemory(1000)
    for memory in (small, large):
        memory.add(*pairs(0, 4))
    for seed in range(5):
        draws = [memory.sample(3, torch.Generator().manual_seed(seed))[1] for memory in (small, large)]
        assert torch.equal(*draws)


@pytest.mark.parametrize("count", [2, 7])
def test_where_no_more_is_remembered_than_wanted_each_pair_comes_once(count: int) -> None:
    memory = AnswerMemory(4)
    memory.add(*pairs(0, 2))
    inputs, targets = memory.sample(count, torch.Generator())
    assert sorted(inputs[:, 0, 0, 0].tolist()) == [0, 1]
    assert sorted(targets[:, 0].tolist()) == [0, 10]


def test_a_large_memory_costs_only_what_it_holds() -> None:
    memory = AnswerMemory(10**12)  # would not fit into any machine
    for turn in range(6):
        memory.add(*pairs(3 * turn, 3))
    assert held(memory) == set(range(18))


def test_what_is_remembered_is_a_copy() -> None:
    memory = AnswerMemory(4)
    inputs, targets = (tensor.clone() for tensor in pairs(0, 2))
    memory.add(inputs, targets)
    inputs += 100
    targets += 100
    assert held(memory) == {0, 1}


@pytest.mark.parametrize("before", [0, 3, 5, 8])  # empty, partly filled, just full, gone round
def test_going_on_from_a_state_is_going_on(before: int, tmp_path: Path) -> None:
    memory, again = AnswerMemory(5), AnswerMemory(5)
    for number in range(before):
        memory.add(*pairs(number, 1))
    save_state(tmp_path / "state", memory.state())
    again.load(load_state(tmp_path / "state"), CPU)
    for number in range(before, before + 4):
        for one in (memory, again):
            one.add(*pairs(number, 1))
        draws = [one.sample(1, torch.Generator().manual_seed(number))[1] for one in (memory, again)]
        assert torch.equal(*draws)
        assert held(again) == held(memory)
        assert len(again) == len(memory)
