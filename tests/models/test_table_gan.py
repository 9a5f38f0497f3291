"""The generator of rows and the critic of rows."""

from __future__ import annotations

import torch
from torch.func import functional_call, vmap

from fedstill.core.table_schema import Schema, SchemaColumn
from fedstill.data.tables import check_rows
from fedstill.models.table_gan import TableCritic, TableGenerator, chosen

SCHEMA = Schema(
    "ill",
    (
        SchemaColumn(name="age", range=(0.0, 100.0), missing=True),
        SchemaColumn(name="dose", range=(-5.0, 5.0)),
        SchemaColumn(name="ward", type="category", categories=("a", "b", "c")),
        SchemaColumn(name="ill", type="category", categories=("no", "yes")),
    ),
)


def test_rows_that_are_made_are_rows_that_the_schema_allows() -> None:
    torch.manual_seed(0)
    G = TableGenerator(SCHEMA, noise=6, width=8)
    w = torch.randn(200, 6)
    x = G(w)
    assert x.shape == (200, 6)
    check_rows(x.detach(), SCHEMA, "made")
    assert x[:, 3:].sum(1).eq(1).all()
    empty = x[:, 1] == 1
    assert 0 < empty.sum() < 200
    assert (x[empty, 0] == 0).all()
    assert (x[~empty, 0] != 0).all()
    assert torch.equal(G(w), x), "nothing is drawn but the noise"


def test_every_output_teaches_the_generator() -> None:
    torch.manual_seed(0)
    G = TableGenerator(SCHEMA, noise=6, width=8)
    last = G.body[-1]
    for feature in range(6):
        (grad,) = torch.autograd.grad(G(torch.randn(50, 6))[:, feature].sum(), last.weight)
        assert grad.abs().sum() > 0


def test_a_choice_has_the_gradient_of_its_softmax() -> None:
    scores = torch.tensor([[0.5, 2.0, 1.0]], requires_grad=True)
    (hard,) = torch.autograd.grad(chosen(scores)[0, 1], scores)
    (soft,) = torch.autograd.grad(scores.softmax(1)[0, 1], scores)
    assert torch.equal(hard, soft)


def test_a_critic_says_one_value_a_row_and_with_group_norm_row_by_row() -> None:
    x = torch.randn(5, 6)
    assert TableCritic(6, 8)(x).shape == (5, 1)
    critic = TableCritic(6, 8, "group")
    alone = vmap(lambda row: functional_call(critic, dict(critic.named_parameters()), (row[None],))[0])(x)
    assert torch.allclose(critic(x), alone, atol=1e-6)
