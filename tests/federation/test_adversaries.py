"""Changes of data and responses by adversaries, against values by hand."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.dataset import TensorData
from fedstill.federation.adversaries import ADVERSARIES, Adversary
from fedstill.tasks import Task
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel


def corrupted(name: str, z: torch.Tensor, honest: torch.Tensor | None = None, seed: int = 0) -> torch.Tensor:
    adversary: Adversary = ADVERSARIES[name]()
    given = z.new_zeros(0, *z.shape) if honest is None else honest
    return adversary.corrupt(z, given, torch.Generator().manual_seed(seed))


def log(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


@pytest.mark.parametrize(
    ("task", "targets", "flipped"),
    [
        (Classification(10), [0, 3, 9], [9, 6, 0]),
        (MultiLabel(3), [[0, 1, -1], [1, 1, 0]], [[1, 0, -1], [0, 0, 1]]),
    ],
)
def test_labels_are_flipped_unless_unknown(task: Task, targets: list[int], flipped: list[int]) -> None:
    data = TensorData(torch.zeros(len(targets), 4), torch.tensor(targets))
    assert ADVERSARIES["label-flipping"]().poison(data, task).targets.tolist() == flipped
    assert ADVERSARIES["lma"]().poison(data, task) is data


def test_scores_are_negated_and_scaled() -> None:
    z = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    assert corrupted("logit-flipping", z).tolist() == [[-1.0, 2.0], [-0.5, -3.0]]
    assert corrupted("logit-scaling", z).tolist() == [[20.0, -40.0], [10.0, 60.0]]


def test_fdla_moves_scores_by_one_rank() -> None:
    """Ranks of the first row: class 0 (3.0), class 2 (2.0), class 1 (1.0)."""
    z = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert corrupted("fdla", z).tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 5.0]]


def test_wrong_inputs_are_a_permutation_of_rows() -> None:
    z = torch.arange(40.0).view(20, 2)
    found = corrupted("wrong-inputs", z)
    assert not torch.equal(found, z)
    assert sorted(found.tolist()) == z.tolist()


def test_garbage_has_the_mean_and_deviation_of_the_response() -> None:
    z = 3 + 2 * torch.randn(2000, 5, generator=torch.Generator().manual_seed(1))
    found = corrupted("garbage", z)
    assert found.mean().item() == pytest.approx(z.mean().item(), abs=0.1)
    assert found.std().item() == pytest.approx(z.std().item(), abs=0.1)
    assert abs(torch.corrcoef(torch.stack([z.flatten(), found.flatten()]))[0, 1]) < 0.05
    assert not torch.equal(found, corrupted("garbage", z, seed=1))


def test_lma_responds_the_class_that_honest_nodes_find_least_likely() -> None:
    """Mean probabilities are (.5, .1, .4) and (.2, .7, .1); the largest spread of logits is log(8)."""
    honest = torch.stack([log([0.6, 0.1, 0.3], [0.1, 0.8, 0.1]), log([0.4, 0.1, 0.5], [0.3, 0.6, 0.1])])
    found = corrupted("lma", torch.zeros(2, 3), honest)
    spread = torch.tensor(8.0).log().item()
    torch.testing.assert_close(found, torch.tensor([[0.0, spread, 0.0], [0.0, 0.0, spread]]))
    own = corrupted("lma", honest[0])  # without honest nodes
    assert own.argmax(1).tolist() == [1, 0]


def test_cpa_responds_the_class_least_similar_to_the_predicted_one() -> None:
    """Over these inputs classes 0 and 1 are never likely together, and class 2 hardly changes."""
    p = log([0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.75, 0.1, 0.15])
    found = corrupted("cpa", torch.zeros(3, 3), p.unsqueeze(0))
    assert found.argmax(1).tolist() == [1, 0, 1]
    assert (found > 0).sum(1).tolist() == [1, 1, 1]
