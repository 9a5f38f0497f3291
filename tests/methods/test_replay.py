"""Replay memory of the server's queries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedstill.core.checkpoint import load_state, save_state
from fedstill.methods._replay_memory import Replay
from fedstill.tasks.classification import Classification

CPU = torch.device("cpu")


def memory_of(size: int) -> Replay:
    return Replay(size, "none", Classification(2), (1, 2, 2), 0)


def pairs(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs numbered from ``first``, with ten times their number as the target."""
    numbers = torch.arange(first, first + count).float()
    return numbers.view(-1, 1, 1, 1).expand(-1, 1, 2, 2), 10 * numbers.view(-1, 1)


def held(memory: Replay) -> set[float]:
    """Return all stored inputs, found by repeated sampling; check that pairs stay together."""
    values: set[float] = set()
    for step in range(200):
        inputs, targets, _ = memory.sample(1, step)
        assert torch.equal(10 * inputs[:, 0, 0, 0], targets[:, 0])
        values |= set(inputs[:, 0, 0, 0].tolist())
    return values


def test_replay_overwrites_the_oldest_when_full() -> None:
    memory = memory_of(5)
    expected = [
        ({0, 1}, 2),
        ({0, 1, 2, 3}, 4),
        ({1, 2, 3, 4, 5}, 5),  # wraps around: 5 replaces 0
        ({3, 4, 5, 6, 7}, 5),
        ({5, 6, 7, 8, 9}, 5),
    ]
    for step, (content, length) in enumerate(expected):
        memory.add(*pairs(2 * step, 2))
        assert held(memory) == content
        assert len(memory) == length


def test_replay_samples_do_not_depend_on_reserved_memory() -> None:
    small, large = memory_of(8), memory_of(10**12)  # more than any machine's memory
    for memory in (small, large):
        memory.add(*pairs(0, 8))
    draws = [memory.sample(6, 1)[1] for memory in (small, large)]
    assert torch.equal(*draws)
    assert not torch.equal(small.sample(6, 2)[1], draws[0])


@pytest.mark.parametrize("count", [2, 7])
def test_small_replay_returns_each_pair_once(count: int) -> None:
    memory = memory_of(4)
    memory.add(*pairs(0, 2))
    inputs, targets, _ = memory.sample(count, 0)
    assert inputs[:, 0, 0, 0].tolist() == [0, 1]
    assert targets[:, 0].tolist() == [0, 10]


@pytest.mark.parametrize("before", [0, 3, 5, 8])  # empty, partly filled, full, wrapped around
def test_restored_replay_continues_equally(before: int, tmp_path: Path) -> None:
    memory, again = memory_of(5), memory_of(5)
    for number in range(before):
        memory.add(*pairs(number, 1))
    save_state(tmp_path / "state", memory.state_dict())
    again.load_state_dict(load_state(tmp_path / "state"), CPU)
    for number in range(before, before + 4):
        for one in (memory, again):
            one.add(*pairs(number, 1))
        assert torch.equal(memory.sample(1, number)[1], again.sample(1, number)[1])
        assert held(again) == held(memory)
        assert len(again) == len(memory)
