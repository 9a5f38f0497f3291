"""Diversity losses, worked by hand on a batch of three."""

from __future__ import annotations

import math

import pytest
import torch

from fedstill.methods._diversity import div0, div1, div2, diversity

# Three outputs, their noise and labels 0, 0, 1. Distances: of f 5, 10 and 5; of z 1, 4 and 5.
F = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]) / 10
Z = torch.tensor([[0.0], [1.0], [-4.0]])
Y = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
PAIRS = ((0.5, 1.0, 0), (1.0, 4.0, 1), (0.5, 5.0, 1))  # ||f_j - f_k||, ||z_j - z_k||, labels differ


def test_eq_7() -> None:
    exponent = sum(-2 * f * z for f, z, _ in PAIRS) / 9  # each pair both ways, and three of no distance
    assert div0(F, Z).item() == pytest.approx(math.exp(exponent), rel=1e-5)


def test_l_div_1_measures_noise_and_label_together() -> None:
    # One-hot labels that differ are sqrt 2 apart.
    exponent = sum(-2 * f * math.sqrt(z**2 + 2 * other) for f, z, other in PAIRS) / 9
    assert div1(F, Z, Y).item() == pytest.approx(math.exp(exponent), rel=1e-5)


def test_eq_8_weighs_pairs_of_two_labels_e_squared_times() -> None:
    exponent = sum(-2 * f * z * (math.e**2 if other else 1.0) for f, z, other in PAIRS) / 9
    assert div2(F, Z, Y).item() == pytest.approx(math.exp(exponent), rel=1e-5)


def test_with_one_label_all_forms_agree() -> None:
    same = torch.tensor([[1.0, 0.0]]).expand(3, 2)
    assert div1(F, Z, same).item() == pytest.approx(div0(F, Z).item(), rel=1e-6)
    assert div2(F, Z, same).item() == pytest.approx(div0(F, Z).item(), rel=1e-6)


def test_a_scale_multiplies_the_exponent() -> None:
    assert div0(F, Z, 0.25).log().item() == pytest.approx(div0(F, Z).log().item() / 4, rel=1e-5)


def test_distances_per_value_do_not_grow_with_the_number_of_values() -> None:
    wide = (F.repeat(1, 50), Z.repeat(1, 8))
    for form in ("div0", "div2"):
        assert diversity(form, *wide, Y, True).item() == pytest.approx(
            diversity(form, F, Z, Y, True).item(), rel=1e-4
        )
        assert diversity(form, *wide, Y, False).item() < 1e-12  # as printed, nothing is left


def test_forms_by_name() -> None:
    assert torch.equal(diversity("none", F, Z, Y, False), torch.zeros(()))
    for form, value in (("div0", div0(F, Z)), ("div1", div1(F, Z, Y)), ("div2", div2(F, Z, Y))):
        assert torch.equal(diversity(form, F, Z, Y, False), value)


@pytest.mark.parametrize("form", ["div0", "div1", "div2"])
def test_groups_are_apart_and_equal_outputs_get_finite_gradients(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(4, 30, 6, generator=generator)
    f[1] = f[1, :1]  # a generator that has collapsed
    f.requires_grad_()
    z = torch.randn(4, 30, 2, generator=generator)
    y = torch.nn.functional.one_hot(torch.randint(3, (4, 30), generator=generator), 3).float()
    values = diversity(form, f, z, y, True)  # type: ignore[arg-type]
    assert values[1].item() == pytest.approx(1.0, abs=1e-3)
    for index in range(4):
        alone = diversity(form, f[index], z[index], y[index], True)  # type: ignore[arg-type]
        assert values[index].item() == pytest.approx(alone.item(), rel=1e-4)
    values.sum().backward()
    assert f.grad is not None
    assert f.grad.isfinite().all()
    assert (f.grad[[0, 2, 3]] != 0).any()
