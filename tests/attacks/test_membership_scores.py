"""Membership scores, shadow models and ROC metrics: by hand, against loops, and on an overfitted model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm
from sklearn.metrics import roc_auc_score, roc_curve
from torch import nn

from fedstill.attacks.membership_scores import (
    RecordLogits,
    attack_metrics,
    auc_with_interval,
    coop_lira_attack,
    lira_attack,
    lira_offline_attack,
    logit_confidence,
    loss_attack,
    rmia_attack,
    shadow_halves,
    tpr_at_fpr,
    train_proxies,
    train_shadows,
)
from fedstill.core.compute import Compute, EngineConfig, Workers
from fedstill.core.dataset import TensorData
from fedstill.core.seeds import derive, torch_generator
from fedstill.data import Digits, load
from fedstill.models import build
from fedstill.models.inference import predict
from fedstill.node import local_training
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks.classification import Classification
from tests.support.errors import raises_invalid
from tests.support.runs import predict_records

SEEDS = st.integers(0, 2**32)


def two_class_logits(
    target: list[float], shadows: list[list[float]], inside: list[list[int]]
) -> RecordLogits:
    """Return logits of two classes for records of the first, so that the first logit is the confidence."""

    def logits(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, torch.zeros_like(values)], -1)

    return RecordLogits(
        logits(torch.tensor(target)),
        logits(torch.tensor(shadows)),
        torch.tensor(inside).bool(),
        torch.zeros(len(target), dtype=torch.int64),
    )


def random_logits(seed: int, models: int = 6, records: int = 5, classes: int = 3) -> RecordLogits:
    generator = torch_generator(seed, "records_")
    return RecordLogits(
        3 * torch.randn(records, classes, generator=generator),
        3 * torch.randn(models, records, classes, generator=generator),
        shadow_halves(records, models, seed),
        torch.randint(classes, (records,), generator=generator),
    )


def population_logits(seed: int, models: int = 6, records: int = 8) -> RecordLogits:
    records_ = random_logits(seed, models, records)
    return RecordLogits(records_.target, records_.shadows, torch.zeros_like(records_.inside), records_.labels)


def first_shadows(records_: RecordLogits, models: int) -> RecordLogits:
    return RecordLogits(records_.target, records_.shadows[:models], records_.inside[:models], records_.labels)


# --- scores -----------------------------------------------------------------------------------------


@given(SEEDS)
def test_logit_confidence_matches_definition(seed: int) -> None:
    records_ = random_logits(seed)
    p = (
        records_.shadows.double()
        .softmax(-1)
        .gather(-1, records_.labels.expand(6, 5).unsqueeze(-1))
        .squeeze(-1)
    )
    torch.testing.assert_close(logit_confidence(records_.shadows, records_.labels), (p / (1 - p)).log())
    shifted = logit_confidence(records_.target.double() + 7.0, records_.labels)
    torch.testing.assert_close(shifted, logit_confidence(records_.target, records_.labels))


def test_logit_confidence_near_probability_one() -> None:
    logits = torch.tensor([[100.0, 0.0, 0.0], [300.0, 0.0, 0.0]])
    labels = torch.tensor([0, 0])
    assert float(logits.double().softmax(1)[0, 0]) == 1.0
    assert logit_confidence(logits, labels).tolist() == pytest.approx([100 - math.log(2), 300 - math.log(2)])


def test_lira_by_hand() -> None:
    records_ = two_class_logits([3.0], [[2.0], [4.0], [0.0], [-2.0]], [[1], [1], [0], [0]])
    # Inside: mean 3, variance 2. Outside: mean -1, variance 2. Score: 16 / (2 * 2).
    for own in (True, False):
        assert lira_attack(records_, own).item() == pytest.approx(4.0)
    assert lira_offline_attack(records_).item() == pytest.approx(4 / math.sqrt(2))


def test_shared_variance_uses_record_means() -> None:
    inside = [[1, 1], [1, 1], [0, 0], [0, 0]]
    records_ = two_class_logits([1.0, 11.0], [[0.0, 10.0], [2.0, 14.0], [0.0, 10.0], [2.0, 14.0]], inside)
    # Deviations 1, 1 and 2, 2, each pair with one degree of freedom: variance (2 + 8) / 2.
    assert lira_offline_attack(records_, False).tolist() == pytest.approx([0.0, -1 / math.sqrt(5)])
    assert lira_offline_attack(records_, True).tolist() == pytest.approx([0.0, -1 / math.sqrt(8)])


def test_coop_lira_by_hand() -> None:
    nodes = two_class_logits([3.0, 0.0], [[0.0, 2.0], [2.0, 6.0]], [[0, 0], [0, 0]])
    # Of the two other nodes: means 1 and 4, variances 2 and 8. All records share (2 + 8) / 2.
    score = partial(coop_lira_attack, nodes.target)
    assert score(nodes.shadows, nodes.labels).tolist() == pytest.approx([2 / 5**0.5, -4 / 5**0.5])
    # Of the other class: confidences -3 and 0; means -1 and -4.
    assert score(nodes.shadows, 1 - nodes.labels).tolist() == pytest.approx([-2 / 5**0.5, 4 / 5**0.5])
    with raises_invalid("nodes", 1, "2 or more"):
        score(nodes.shadows[:1], nodes.labels)


@given(SEEDS)
def test_lira_matches_loops(seed: int) -> None:
    records_ = random_logits(seed)
    phi = logit_confidence(records_.shadows, records_.labels).numpy()
    here, own = logit_confidence(records_.target, records_.labels).numpy(), lira_attack(records_, True)
    offline = lira_offline_attack(records_, True)
    for record in range(5):
        inside = records_.inside[:, record].numpy()
        one, other = phi[inside, record], phi[~inside, record]
        score = norm(one.mean(), one.std(ddof=1)).logpdf(here[record])
        score -= norm(other.mean(), other.std(ddof=1)).logpdf(here[record])
        assert own[record].item() == pytest.approx(score, rel=1e-6, abs=1e-9)
        below = norm(other.mean(), other.std(ddof=1)).cdf(here[record])
        assert norm.cdf(offline[record].item()) == pytest.approx(below)


def test_shrinkage_by_hand() -> None:
    inside = [[1, 1], [1, 1], [0, 0], [0, 0]]
    records_ = two_class_logits([0.0, 0.0], [[0.0, 4.0], [2.0, 6.0], [-2.0, -2.0], [0.0, 0.0]], inside)
    # All variances are 2. The means 1 and -1, 5 and -1 differ by 2 and 6, with an error variance of 2 / 2 + 2
    # / 2. The differences have variance 4, so half of their deviation from 4 is kept: the means become 1.5,
    # -1.5 and 4.5, -0.5.
    assert lira_attack(records_, True).tolist() == pytest.approx([0.0, (1 - 25) / 4])
    assert lira_attack(records_, False).tolist() == pytest.approx([0.0, (0.25 - 20.25) / 4])


def test_shared_variance_below_64_shadows() -> None:
    few, many = random_logits(0, 62), random_logits(0, 64)
    assert torch.equal(lira_attack(few), lira_attack(few, False))
    assert not torch.equal(lira_attack(few), lira_attack(few, True))
    assert torch.equal(lira_attack(many), lira_attack(many, True))


def test_rmia_by_hand() -> None:
    odds = math.log(3)  # probability 3/4; logit 0 is 1/2
    records_ = two_class_logits([odds], [[odds], [0.0]], [[1], [0]])
    others = two_class_logits([0.0, odds, -odds], [[0.0, 0.0, 0.0]] * 2, [[0, 0, 0]] * 2)
    # r(x) = (3/4) / (5/8) = 6/5; with alpha 0.6, Pr(z) = (1.6 / 2 + 0.4) / 2 = 3/5: r(z) = 5/6, 5/4, 5/12
    score = partial(rmia_attack, records_, others, alpha=0.6, temperature=1.0)
    tie = (6 / 5) / (1 + 6 / 5)
    assert score(gamma=1.0).item() == pytest.approx((2 + tie) / 4)  # exceeds 5/6 and 5/12
    assert score(gamma=2.0).item() == pytest.approx((1 + tie) / 4)  # 6/5 / (5/6) = 1.44


@given(SEEDS, st.sampled_from([0.5, 1.0, 2.0]))
def test_rmia_matches_loops_except_ties(seed: int, gamma: float) -> None:
    records_, others, alpha, temperature = random_logits(seed), population_logits(seed), 0.3, 2.0
    scores = rmia_attack(records_, others, gamma=gamma, alpha=alpha, temperature=temperature)

    def probability(logits: torch.Tensor, label: torch.Tensor) -> float:
        return float((logits.double() / temperature).softmax(0)[label])

    def ratio(of: RecordLogits, record: int, online: bool) -> float:
        label, column = of.labels[record], of.inside[:, record]
        probabilities = [probability(of.shadows[model, record], label) for model in range(6)]
        out = np.mean([p for p, is_member in zip(probabilities, column, strict=True) if not is_member])
        at_large = ((1 + alpha) * out + 1 - alpha) / 2
        if online:
            at_large = (
                out + np.mean([p for p, is_member in zip(probabilities, column, strict=True) if is_member])
            ) / 2
        return probability(of.target[record], label) / at_large

    beaten = [
        sum(ratio(records_, x, True) / ratio(others, z, False) >= gamma for z in range(8)) for x in range(5)
    ]
    assert (scores * 9).floor().tolist() == beaten
    order = [ratio(records_, x, True) for x in range(5)]
    assert scores.argsort().tolist() == np.argsort(order).tolist(), "same order as r(x) for one target"


# --- errors -----------------------------------------------------------------------------------------


def test_rejects_non_finite_logits() -> None:
    records_ = random_logits(0)
    with raises_invalid("target", "NaN or infinity"):
        RecordLogits(records_.target / 0, records_.shadows, records_.inside, records_.labels)


def test_rejects_too_few_shadows() -> None:
    records_, others = random_logits(0), population_logits(0)
    with raises_invalid("shadows inside", 0):
        rmia_attack(others, others)
    with raises_invalid("shadows inside", 0):
        lira_attack(others)
    with raises_invalid("shadows outside", 1, "variance"):
        lira_offline_attack(first_shadows(records_, 2))
    with raises_invalid("shadows outside", 1, "2 or more"):
        lira_offline_attack(first_shadows(records_, 2), True)
    assert rmia_attack(first_shadows(records_, 2), first_shadows(others, 2)).shape == (5,), (
        "one shadow inside and one outside are enough"
    )


# --- strength ---------------------------------------------------------------------------------------

Leak = list[
    tuple[RecordLogits, RecordLogits, torch.Tensor]
]  # for each target: candidate records, population records, and mask of members
N, TARGETS, SHADOWS = 100, 3, 12


@pytest.fixture(scope="module")
def leak() -> tuple[Leak, Leak]:
    """Return overfitted targets, each trained on 100 of 200 digits, and a target trained on none of the 200.

    The latter has the same member masks, which are meaningless for it.
    """
    data = load(Digits())
    order = torch.randperm(len(data.train), generator=torch_generator(0, "pool"))
    pool, elsewhere = data.train.subset(order[: 2 * N]), data.train.subset(order[2 * N : 4 * N])
    others = data.train.subset(order[4 * N : 4 * N + 500])
    inside, theirs = shadow_halves(2 * N, TARGETS + 1, 1)[:TARGETS], shadow_halves(2 * N, SHADOWS, 2)
    pools: list[TensorData] = [pool] * TARGETS + [elsewhere] + [pool] * SHADOWS
    compute = Compute(EngineConfig(batching="stacked"))
    models = train_shadows(
        lambda seed: build("mlp:64", (1, 8, 8), 10, seed),
        pools,
        torch.cat([inside, inside[:1], theirs]),
        Classification(10),
        LocalConfig(epochs=400, batch=N, lr=3e-3, smoothing=0.0),
        0,
        compute=compute,
    )
    shadows = models[TARGETS + 1 :]
    records_ = [predict_records(model, shadows, pool, theirs, compute) for model in models[: TARGETS + 1]]
    public = [predict_records(model, shadows, others, compute=compute) for model in models[: TARGETS + 1]]
    blind = [(records_[-1], public[-1], inside[target]) for target in range(TARGETS)]
    return list(zip(records_[:-1], public[:-1], inside, strict=True)), blind


Attack = Callable[[RecordLogits, RecordLogits], torch.Tensor]


def by_loss(records_: RecordLogits, others: RecordLogits) -> torch.Tensor:
    return loss_attack(records_)


def by_lira(records_: RecordLogits, others: RecordLogits) -> torch.Tensor:
    return lira_attack(records_)


def by_lira_offline(records_: RecordLogits, others: RecordLogits) -> torch.Tensor:
    return lira_offline_attack(records_)


def with_wrong_masks(records_: RecordLogits, others: RecordLogits) -> torch.Tensor:
    """LiRA with masks that do not match the training of the shadows."""
    return lira_attack(
        RecordLogits(records_.target, records_.shadows, shadow_halves(2 * N, SHADOWS, 3), records_.labels)
    )


def with_few_shadows(records_: RecordLogits, others: RecordLogits) -> torch.Tensor:
    """LiRA with two shadows inside, two outside, and per-record variances."""
    return lira_attack(first_shadows(records_, 4), True)


def against_one_population(records_: RecordLogits, others: RecordLogits) -> torch.Tensor:
    """RMIA with the shadow outputs of other records, as if all records were equally hard."""
    return rmia_attack(
        RecordLogits(
            records_.target, records_.shadows.roll(1, 1), records_.inside.roll(1, 1), records_.labels
        ),
        others,
    )


def mean_auc(attack: Attack, leaks: Leak) -> float:
    aucs = [
        attack_metrics(attack(records_, others), inside)["auc"]["value"] for records_, others, inside in leaks
    ]
    return sum(aucs) / len(aucs)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("attack", "least", "weakened", "most"),
    [
        (by_lira, 0.79, by_loss, 0.76),
        (rmia_attack, 0.77, by_loss, 0.76),
        (by_lira, 0.79, with_wrong_masks, 0.70),
        (by_lira, 0.79, with_few_shadows, 0.75),
        (by_lira_offline, 0.75, by_loss, 0.74),
        (rmia_attack, 0.77, against_one_population, 0.70),
    ],
)
def test_attacks_detect_leaking_model(
    attack: Attack, least: float, weakened: Attack, most: float, leak: tuple[Leak, Leak]
) -> None:
    strong, weak = mean_auc(attack, leak[0]), mean_auc(weakened, leak[0])
    print(f"\n{attack.__name__} {strong:.3f}, {weakened.__name__} {weak:.3f}")
    assert strong > least
    assert weak < most < least


@pytest.mark.parametrize("attack", [by_loss, by_lira, by_lira_offline, rmia_attack])
def test_attacks_guess_on_model_without_members(attack: Attack, leak: tuple[Leak, Leak]) -> None:
    for leaks, chance in zip(leak, (False, True), strict=True):
        for records_, others, inside in leaks:
            metrics = attack_metrics(attack(records_, others), inside, 0.99)
            assert (metrics["auc"]["low"] <= 0.5 <= metrics["auc"]["high"]) == chance
            assert metrics["auc"]["high"] - metrics["auc"]["low"] < 0.25, (
                "enough records for a narrow interval"
            )


TASK, LOCAL = Classification(3), LocalConfig(epochs=6, batch=5, smoothing=0.0)


def records(n: int = 20) -> TensorData:
    generator = torch_generator(0, "records")
    return TensorData(
        torch.randn(n, 1, 4, 4, generator=generator), torch.randint(3, (n,), generator=generator)
    )


def make(seed: int) -> nn.Module:
    return build("mlp:8", (1, 4, 4), 3, seed)


def engine(name: str) -> Compute:
    return Compute(EngineConfig(batching="stacked" if name == "stacked" else "one-by-one"))


# --- halves -----------------------------------------------------------------------------------------


@given(st.integers(2, 50), st.integers(0, 6), st.integers(0, 2**32))
def test_each_record_is_in_half_of_the_shadows(n: int, pairs: int, seed: int) -> None:
    inside = shadow_halves(n, 2 * pairs, seed)
    assert inside.shape == (2 * pairs, n)
    assert inside.sum(0).tolist() == [pairs] * n
    assert inside.sum(1).tolist() == [n // 2, n - n // 2] * pairs
    assert torch.equal(inside, shadow_halves(n, 2 * pairs, seed))


def test_shadow_halves_depend_on_pair_and_seed() -> None:
    inside = shadow_halves(100, 4, 0)
    assert not torch.equal(inside[0], inside[2])
    assert not torch.equal(inside, shadow_halves(100, 4, 1))


# --- training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stacked", "one-by-one"])
def test_shadow_training_matches_local_training(name: str) -> None:
    pool, inside = records(), shadow_halves(20, 4, 0)
    models = train_shadows(make, pool, inside, TASK, LOCAL, 3, compute=engine(name))
    for number, (model, row) in enumerate(zip(models, inside, strict=True)):
        node_name, compute = f"shadow-{number}", Compute()
        network = make(derive(3, "shadow", number))
        node = Node(node_name, pool.subset(row.nonzero().flatten()), network, _gate(node_name), 3)
        local_training.attach_optimizers([node], LOCAL)
        local_training.train([node], TASK, LOCAL, compute)
        for mine, theirs in zip(model.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_shadows_with_dropout_after_others() -> None:
    """One attack trains shadows with dropout after other shadows."""

    def dropping(seed: int) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), make(seed))

    pool, inside = records(), shadow_halves(20, 4, 0)
    expected = train_shadows(dropping, pool, inside, TASK, LOCAL, 3, compute=engine("one-by-one"))
    compute = engine("one-by-one")
    compute.workers = Workers(2)
    train_shadows(make, pool, inside, TASK, LOCAL, 3, compute=compute)
    shadows = train_shadows(dropping, pool, inside, TASK, LOCAL, 3, compute=compute)
    for mine, theirs in zip(shadows, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_shadow_learns_from_its_records_only() -> None:
    pool, inside = records(), shadow_halves(20, 2, 0)
    changed = pool.inputs.clone()
    changed[inside[1]] += 1.0
    one = train_shadows(make, pool, inside, TASK, LOCAL, 0, compute=engine("stacked"))
    two = train_shadows(
        make, TensorData(changed, pool.targets), inside, TASK, LOCAL, 0, compute=engine("stacked")
    )
    assert all(map(torch.equal, one[0].parameters(), two[0].parameters()))
    assert not any(map(torch.equal, one[1].parameters(), two[1].parameters()))


def test_rejects_shadow_without_records() -> None:
    pool, inside = records(), shadow_halves(20, 2, 0)
    with raises_invalid("inside", "a model without a record"):
        train_shadows(make, pool, inside & inside[:1], TASK, LOCAL, 0)


def _gate(name: str) -> Gate:
    return Gate(name, PolicyConfig(), AuditLog())


TEN = Classification(10)
COMPUTE = Compute(EngineConfig(batching="stacked"))
PROXY_RECORDS, PROXY_SHADOWS = 100, 8
DISTIL = LocalConfig(epochs=60, batch=100, lr=3e-3, smoothing=0.0)


def network(seed: int) -> nn.Module:
    return build("mlp:64", (1, 8, 8), 10, seed)


class ProxyTarget:
    """A node overfitted on 100 of 200 digits, the shadows of a server, and 500 unused digits."""

    def __init__(self) -> None:
        data = load(Digits())
        order = torch.randperm(len(data.train), generator=torch_generator(0, "proxies"))
        self.pool = data.train.subset(order[: 2 * PROXY_RECORDS])
        self.public = data.train.subset(order[2 * PROXY_RECORDS : 2 * PROXY_RECORDS + 500])
        self.inside, self.theirs = (
            shadow_halves(2 * PROXY_RECORDS, 2, 1)[0],
            shadow_halves(2 * PROXY_RECORDS, PROXY_SHADOWS, 2),
        )
        local = LocalConfig(epochs=300, batch=PROXY_RECORDS, lr=3e-3, smoothing=0.0)
        masks = torch.cat([self.inside[None], self.theirs])
        self.node, *self.shadows = train_shadows(network, self.pool, masks, TEN, local, 0, compute=COMPUTE)

    def respond(self, inputs: torch.Tensor) -> torch.Tensor:
        return predict(self.node, inputs, COMPUTE)

    def train_proxies(self, responses: torch.Tensor) -> tuple[list[nn.Module], RecordLogits]:
        inputs = self.public.inputs
        copies = train_proxies(
            network, inputs, responses, self.shadows, TEN, 5, local=DISTIL, compute=COMPUTE
        )
        return copies, predict_records(copies[0], copies[1:], self.pool, self.theirs, COMPUTE)


@pytest.fixture(scope="module")
def target() -> ProxyTarget:
    return ProxyTarget()


@pytest.mark.slow
def test_proxy_matches_logits_up_to_a_constant(target: ProxyTarget) -> None:
    inputs = target.public.inputs[:100]
    responses = torch.stack([target.respond(inputs), predict(target.shadows[0], inputs, COMPUTE)])
    local = LocalConfig(epochs=400, batch=100, lr=3e-3, smoothing=0.0)
    copies = train_proxies(
        network, inputs, responses[0] + 3.0, target.shadows[:1], TEN, 0, local=local, compute=COMPUTE
    )
    outputs = torch.stack([predict(proxy, inputs, COMPUTE) for proxy in copies])
    outputs, responses = (values - values.mean(2, keepdim=True) for values in (outputs, responses))
    errors = (outputs - responses).square().mean((1, 2)) / responses.var((1, 2))
    swapped = (outputs - responses.flip(0)).square().mean((1, 2)) / responses.var((1, 2))
    assert errors.max() < 0.02
    assert swapped.min() > 2 * errors.max(), "each proxy copies its own model"


def test_proxy_reveals_membership(target: ProxyTarget) -> None:
    copies, records_ = target.train_proxies(target.respond(target.public.inputs))
    metrics = attack_metrics(lira_attack(records_), target.inside)
    assert len(copies) == 1 + PROXY_SHADOWS
    assert metrics["auc"]["value"] > 0.7
    # RMIA uses a population without responses, because the proxies are fitted to the queried records.
    others = predict_records(copies[0], copies[1:], load(Digits()).test)
    assert attack_metrics(rmia_attack(records_, others), target.inside)["auc"]["value"] > 0.7
    direct = predict_records(target.node, target.shadows, target.pool, target.theirs)
    assert metrics["auc"]["value"] < attack_metrics(lira_attack(direct), target.inside)["auc"]["value"]


def test_shuffled_responses_reveal_less(target: ProxyTarget) -> None:
    _, records_ = target.train_proxies(target.respond(target.public.inputs).roll(1, 0))
    assert attack_metrics(lira_attack(records_), target.inside)["auc"]["value"] < 0.65


def test_rejects_mismatched_responses(target: ProxyTarget) -> None:
    inputs = target.public.inputs
    responses = torch.zeros(len(inputs), 10)
    with raises_invalid("responses", (3, 10)):
        train_proxies(network, inputs, responses[:3], [], TEN, 0)
    with raises_invalid("responses", (3, 10)):
        train_proxies(network, inputs, responses, [], TEN, 0, others=[(inputs[:3], responses[:3])])


# --- co-op LiRA -------------------------------------------------------------------------------------

NODES = 6


@pytest.fixture(scope="module")
def copies() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits ``(NODES, 200, 10)`` of copies of nodes for 200 records, and their labels.

    The copies are distilled from responses to 500 other digits. The first 100 records are those of node 0;
    no node learned from the others. Each node is overfitted on 100 records of its own.
    """
    data = load(Digits())
    order = torch.randperm(len(data.train), generator=torch_generator(0, "co-op"))
    own = [data.train.subset(order[100 * node : 100 * (node + 1)]) for node in range(NODES)]
    unseen = data.test.subset(torch.arange(100))
    public = data.train.subset(order[100 * NODES : 100 * NODES + 500]).inputs
    local = LocalConfig(epochs=300, batch=100, lr=3e-3, smoothing=0.0)
    nodes = train_shadows(network, own, torch.ones(NODES, 100).bool(), TEN, local, 0, compute=COMPUTE)
    pairs = [(public, predict(node, public, COMPUTE)) for node in nodes]
    models = train_proxies(network, *pairs[0], [], TEN, 5, others=pairs[1:], local=DISTIL, compute=COMPUTE)
    records = TensorData.concat([own[0], unseen])
    return torch.stack([predict(model, records.inputs, COMPUTE) for model in models]), records.targets


def coop_auc(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return the AUC with its interval of co-op LiRA on the first model."""
    scores = coop_lira_attack(logits[0], logits[1:], labels)
    auc: dict[str, float] = attack_metrics(scores, torch.arange(200) < 100)["auc"]
    return auc


def test_coop_lira_detects_members(copies: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = copies
    found = coop_auc(logits, labels)["value"]
    never_inside = torch.zeros(0, 200, dtype=torch.bool)
    loss = loss_attack(RecordLogits(logits[0], logits[:0], never_inside, labels))
    by_loss = attack_metrics(loss, torch.arange(200) < 100)["auc"]["value"]
    few = coop_auc(logits[:3], labels)["value"]
    print(f"\nco-op LiRA {found:.3f}, of two other nodes {few:.3f}, by loss {by_loss:.3f}")
    assert found > 0.67
    assert few > 0.67
    assert found > by_loss + 0.04


@pytest.mark.parametrize("node", range(1, NODES))
def test_coop_lira_guesses_on_node_without_the_records(
    node: int, copies: tuple[torch.Tensor, torch.Tensor]
) -> None:
    logits, labels = copies
    others = [other for other in range(1, NODES) if other != node]
    auc = coop_auc(logits[[node, *others]], labels)
    assert auc["low"] < 0.5 < auc["high"]


# Few distinct values, so that many scores are equal.
SCORES = st.lists(st.integers(0, 12), min_size=1, max_size=40).map(lambda s: torch.tensor(s).float())


# --- AUC ------------------------------------------------------------------------------------------


@given(SCORES, SCORES)
def test_auc_matches_pairs_and_scikit_learn(members: torch.Tensor, others: torch.Tensor) -> None:
    pairs = [float(a > b) + float(a == b) / 2 for a in members for b in others]
    interval = auc_with_interval(members, others)
    assert interval["value"] == pytest.approx(sum(pairs) / len(pairs))
    labels = [1] * len(members) + [0] * len(others)
    assert interval["value"] == pytest.approx(roc_auc_score(labels, torch.cat([members, others]).numpy()))
    assert 0 <= interval["low"] <= interval["value"] <= interval["high"] <= 1
    assert interval["low"] < interval["high"], "the interval of finitely many records has positive width"


@given(SCORES, SCORES)
def test_auc_variance_matches_pairs(members: torch.Tensor, others: torch.Tensor) -> None:
    psi = np.array([[float(a > b) + float(a == b) / 2 for b in others] for a in members])
    interval = auc_with_interval(members, others)
    if min(psi.shape) < 2 or not 0 < psi.mean() < 1:
        return
    variance = psi.mean(1).var(ddof=1) / len(members) + psi.mean(0).var(ddof=1) / len(others)
    if variance < 1e-12:
        return
    width = 2 * 1.959964 * math.sqrt(variance) / (psi.mean() * (1 - psi.mean()))
    ends = [math.log(end / (1 - end)) for end in (interval["low"], interval["high"])]
    assert ends[1] - ends[0] == pytest.approx(width, rel=1e-4)


def test_perfect_auc_has_interval() -> None:
    interval = auc_with_interval(torch.arange(10.0) + 10, torch.arange(5.0))
    assert (interval["value"], interval["high"]) == (1.0, 1.0)
    assert interval["low"] == pytest.approx(0.025 ** (1 / 5)), "five pairs of distinct records"
    below = auc_with_interval(torch.arange(5.0), torch.arange(10.0) + 10)
    assert (below["low"], below["value"]) == (0.0, 0.0)
    assert below["high"] == pytest.approx(1 - 0.025 ** (1 / 5))


# --- true positives at low false positive rates -----------------------------------------------------


@given(SCORES, SCORES, st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 1.0]))
def test_tpr_at_fpr_matches_roc_curve(members: torch.Tensor, others: torch.Tensor, rate: float) -> None:
    at = tpr_at_fpr(members, others, rate)
    labels = [1] * len(members) + [0] * len(others)
    fpr, tpr, _ = roc_curve(labels, torch.cat([members, others]).numpy(), drop_intermediate=False)
    best = tpr[fpr <= rate + 1e-9].max()
    assert at["true_positives"]["value"] == pytest.approx(best)
    assert at["accused"] <= at["allowed"] <= rate * len(others) + 1e-6


def test_tpr_at_fpr_handles_floating_point_rates() -> None:
    assert 0.29 * 100 < 29
    assert tpr_at_fpr(torch.ones(1), torch.arange(100.0), 0.29)["allowed"] == 29


def test_equal_scores_are_accused_together() -> None:
    at = tpr_at_fpr(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 0.0, 0.0]), 0.25)
    assert (at["accused"], at["found"]) == (0, 1)


@pytest.mark.parametrize(("successes", "n"), [(0, 20), (3, 20), (20, 20), (7, 300)])
def test_intervals_match_clopper_pearson(successes: int, n: int) -> None:
    members = torch.cat([torch.ones(successes), -torch.ones(n - successes)])
    share = tpr_at_fpr(members, torch.zeros(10), 0.0, 0.95)["true_positives"]
    exact = binomtest(successes, n).proportion_ci(0.95, "exact")
    assert (share["value"], share["low"], share["high"]) == pytest.approx(
        (successes / n, exact.low, exact.high)
    )
