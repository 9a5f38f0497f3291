"""Privacy mechanism of a node in a run: rules of tensors, costs computed by hand, calibrated noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from fedstill.core.errors import QueryRefused
from fedstill.methods._label_maps import DIFFERENCE, LABEL_MAPS
from fedstill.methods.fedad import ATTENTION
from fedstill.methods.fedkd import LOGIT_RANGE
from fedstill.methods.fl_mrcm import FEATURES
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import DPTrainingConfig, GradientsConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.events import Event, PrivacyCost, total_cost
from fedstill.privacy.noisy_outputs import OutputsConfig
from fedstill.privacy.pate import PateConfig
from fedstill.privacy.release_rules import Exact
from fedstill.privacy.statement import PLUGIN_METHOD_TEXT, ROUNDING_TEXT
from fedstill.protocol.local_config import LocalConfig, Span
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import PARAMETERS
from fedstill.protocol.queries import Query
from fedstill.protocol.wire_format import SCALE
from fedstill.tasks import TargetKind, Task
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel
from tests.support.errors import raises_invalid, raises_refused
from tests.support.privacy import make_mechanism
from tests.support.small_world import SETTING, count_labels

ROWS, CLASSES, EXAMPLES = 8, 4, 100
TASK = Classification(CLASSES)
LOCAL = LocalConfig(epochs=2, batch=10)  # 20 steps at rate 0.1
PREDICT_LOGITS = Query(
    lambda node: {},
    sends={"x": "inputs"},
    releases={"logits": "logits", "critic": "critic"},
    differentiable=("x",),
    times=5,
    rows=ROWS,
    depends_on_records=(),
    trains=("critic",),
    name="predict_logits",
)
PREDICT = Query(
    PREDICT_LOGITS.function,
    sends={"x": "inputs"},
    releases={"logits": "logits"},
    depends_on_records=(),
    name="predict",
)
COUNT = Query(
    PREDICT_LOGITS.function,
    releases={"counts": "label counts", "sizes": "label counts"},
    times=1,
    depends_on_records=("counts",),
    name="count_labels",
)
TRAIN = Query(
    PREDICT_LOGITS.function,
    sends={"span": "schedule"},
    releases={"theta": PARAMETERS},
    times=4,
    depends_on_records=(),
    span=lambda sent: Span(int(sent["span"]), int(sent["span"]) + 1, 4),
    name="train",
)
SHAPES = {"logits": (ROWS, CLASSES), "critic": (ROWS, 2, 2)}
INPUT_GRADIENT = {"d/dx": (ROWS, 1, 4, 4)}
GIVEN: dict[str, Any] = {
    "training": DPTrainingConfig(noise=1.5),
    "critic": DPTrainingConfig(noise=2.0, clip=0.5),
    "pate": PateConfig(teachers=20, noise=5.0),
    "gradients": GradientsConfig(noise=3.0),
    "outputs": OutputsConfig(noise=6.0, bound=2.0),
}


def side(*queries: Query, **more: Any) -> NodeSide:
    return NodeSide({query.name: query for query in queries or (PREDICT_LOGITS, COUNT)}, SETTING, **more)


def protection(
    mechanism: Any,
    *queries: Query,
    config: Mapping[str, Any] = GIVEN,
    examples: int = EXAMPLES,
    task: Task = TASK,
    **more: Any,
) -> PrivacyMechanism:
    own = {name: more.pop(name) for name in ("initial_training", "trains_models", "plugin") if name in more}
    changed = make_mechanism(mechanism, **{**config, **more})
    made = PrivacyMechanism("clinic", changed, side(*queries, **own), LOCAL, examples, task)
    made.setup_hash = "data"
    return made


def gaussian(noise: float, times: int = 1, **more: Any) -> PrivacyCost:
    return PrivacyCost({Event("gaussian", noise, **more): times})


def laplace(noise: float, times: int = 1) -> PrivacyCost:
    return PrivacyCost({Event("laplace", noise): times})


def near(one: PrivacyCost | None, other: PrivacyCost | None) -> None:
    """Assert that events are equal up to rounding."""
    assert one is not None
    assert other is not None
    mine, theirs = (
        sorted((event.kind, event.rate, event.group, times, event.noise) for event, times in cost.items())
        for cost in (one, other)
    )
    assert [row[:4] for row in mine] == [row[:4] for row in theirs]
    assert [row[4] for row in mine] == pytest.approx([row[4] for row in theirs])


def query_cost(
    made: PrivacyMechanism, query: Query, part: str, shapes: Any, sent: Any = None
) -> PrivacyCost | None:
    """Return the cost of one release, with its training."""
    return total_cost(made.query_costs(query, part, shapes, sent or {}))


def response(made: PrivacyMechanism, query: Query = PREDICT_LOGITS, noised: Any = None) -> PrivacyCost | None:
    """Return the cost of a response: expected, or actual for released tensors."""
    shapes = {name: SHAPES[name] for name in query.releases}
    if noised is not None:
        return total_cost(made.release_costs(query, shapes, noised))
    return query_cost(made, query, "response", shapes)


# --- costs by hand ------------------------------------------------------------------------------------


def test_no_mechanism_gives_no_guarantee() -> None:
    made = protection("none")
    assert response(made) is None
    assert query_cost(made, PREDICT_LOGITS, "gradient", INPUT_GRADIENT, {}) is None
    assert query_cost(made, COUNT, "response", {"counts": (CLASSES,)}, {}) is None
    assert made.dp_sgd_parameters() == {}
    assert not made.protects


def test_dp_sgd_charges_training_and_not_derived_responses() -> None:
    made = protection("dp-sgd")
    assert made.initial_training_costs() == {"training": gaussian(1.5, 20, rate=0.1)}
    assert response(made) == gaussian(2.0, rate=0.08)  # the critic's step: 8 of 100 records
    # no declared rows count as 1
    assert response(made, replace(PREDICT_LOGITS, rows=0)) == gaussian(2.0, rate=0.01)
    assert response(made, PREDICT) == PrivacyCost()
    assert query_cost(made, PREDICT_LOGITS, "gradient", INPUT_GRADIENT, {}) == PrivacyCost()
    assert total_cost(made.run_costs()) == (
        gaussian(1.5, 20, rate=0.1) + gaussian(2.0, 5, rate=0.08) + laplace(10.0)
    )
    networks = made.dp_sgd_parameters()
    assert {role: (dp.noise, dp.clip) for role, dp in networks.items()} == {
        "model": (1.5, 1.0),
        "critic": (2.0, 0.5),
    }


def test_pate_charges_votes_and_gradients_not_training() -> None:
    made = protection("pate")
    assert made.initial_training_costs() == {"training": PrivacyCost()}
    # sqrt(2) votes per row, 8 rows; and the critic's step
    near(response(made), gaussian(5 / math.sqrt(2 * 8)) + gaussian(2.0, rate=0.08))
    near(response(made, PREDICT), gaussian(5 / 4))
    near(
        query_cost(made, PREDICT_LOGITS, "gradient", INPUT_GRADIENT, {}),
        gaussian(3 * 20 / (2 * math.sqrt(8))),
    )
    assert set(made.dp_sgd_parameters()) == {"critic"}


def test_pate_threshold_saves_unanswered_rows() -> None:
    pate = replace(GIVEN["pate"], threshold=12.0, threshold_noise=4.0)
    made = protection("pate", PREDICT, pate=pate)
    near(response(made, PREDICT), gaussian(4 / math.sqrt(8)) + gaussian(5 / math.sqrt(16)))
    unanswered = torch.ones(ROWS, CLASSES)
    unanswered[3:] = 0
    near(
        response(made, PREDICT, noised={"logits": unanswered}),
        gaussian(4 / math.sqrt(8)) + gaussian(5 / math.sqrt(2 * 3)),
    )
    near(response(made, PREDICT, noised={"logits": 0 * unanswered}), gaussian(4 / math.sqrt(8)))


def test_noisy_outputs_charges_each_row() -> None:
    made = protection("noisy-outputs")
    near(response(made, PREDICT), laplace(6 / (2 * 2 * CLASSES), ROWS))
    near(response(made), laplace(6 / 16, ROWS) + gaussian(2.0, rate=0.08))
    near(
        query_cost(made, PREDICT_LOGITS, "gradient", INPUT_GRADIENT, {}), gaussian(3 / (2 * math.sqrt(8)))
    )  # one network
    rows = protection("noisy-outputs", outputs=replace(GIVEN["outputs"], distribution="gaussian"))
    near(response(rows, PREDICT), gaussian(6 / (2 * 2 * math.sqrt(8))))
    assert made.initial_training_costs() == {"training": PrivacyCost()}


@pytest.mark.parametrize("mechanism", ["dp-sgd", "pate", "noisy-outputs"])
def test_counts_cost_one_event_under_every_mechanism(mechanism: str) -> None:
    shapes = {"counts": (CLASSES,)}
    assert query_cost(protection(mechanism), COUNT, "response", shapes, {}) == laplace(10.0)
    assert query_cost(protection(mechanism, counts_noise=4.0), COUNT, "response", shapes, {}) == laplace(4.0)
    assert query_cost(protection(mechanism, counts_noise=0.0), COUNT, "response", shapes, {}) is None
    assert query_cost(protection(mechanism, group_size=5), COUNT, "response", shapes, {}) == laplace(2.0)
    assert query_cost(protection(mechanism), COUNT, "response", {"sizes": ()}, {}) == PrivacyCost(), (
        "sizes follow from label counts"
    )


class Maps(Classification):
    """Classification whose targets are maps."""

    name = "segmentation"
    kind: ClassVar[TargetKind] = "map"  # type: ignore[assignment]


MAPS = Maps(CLASSES)


@pytest.mark.parametrize("task", [MAPS, MultiLabel(CLASSES)])
def test_teachers_vote_for_one_class_only(task: Task) -> None:
    with pytest.raises(QueryRefused, match=f"teachers vote for one class.*{task.name}"):
        protection("pate", task=task)
    assert protection("pate", count_labels(task), task=task).protects, "label counts are not votes"


def test_summed_votes_have_no_guarantee() -> None:
    """One teacher changes the logarithm of each class's share, not two of them by one vote."""
    summed = replace(PREDICT, sums=dict.fromkeys(PREDICT.releases, "mean"))
    with raises_refused("privacy", "votes", "sums"):
        protection("pate", summed)
    protection("noisy-outputs", summed)  # this mechanism bounds and noises any numbers


def test_custom_methods_votes_have_no_guarantee() -> None:
    """It may sharpen votes, so that one teacher changes a row by more than one vote."""
    made = protection("pate", PREDICT_LOGITS, plugin="lab")
    assert response(made, PREDICT_LOGITS) is None
    near(
        query_cost(made, PREDICT_LOGITS, "gradient", INPUT_GRADIENT), gaussian(3 / (2 * math.sqrt(8)))
    )  # mean of all teachers
    untrained = replace(PREDICT_LOGITS, trains=())
    for other in ("dp-sgd", "noisy-outputs"):
        logits = {"logits": SHAPES["logits"]}
        made = protection(other, PREDICT_LOGITS, plugin="lab")
        assert query_cost(made, untrained, "response", logits) is not None


def test_image_outputs_have_no_guarantee() -> None:
    with raises_refused("privacy", "task segmentation", "images"):
        protection("noisy-outputs", PREDICT, task=MAPS)
    near(
        response(protection("noisy-outputs", PREDICT, task=MultiLabel(CLASSES)), PREDICT),
        laplace(6 / 16, ROWS),
    )
    assert (
        query_cost(protection("dp-sgd", PREDICT, task=MAPS), PREDICT, "response", {"logits": (8, 4, 2, 2)})
        == PrivacyCost()
    )


@pytest.mark.parametrize("mechanism", ["dp-sgd", "noisy-outputs"])
@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (LABEL_MAPS, 'with method.generator.conditions = "drawn" none is asked for'),
        (DIFFERENCE, 'with method.generator.conditions = "drawn" none is compared'),
    ],
)
@pytest.mark.parametrize("reads", [(), ("revealed",)])
def test_record_maps_and_images_have_no_guarantee(
    mechanism: Any, kind: str, advice: str, reads: tuple[str, ...]
) -> None:
    revealed = Query(
        PREDICT_LOGITS.function, releases={"revealed": kind}, times=1, depends_on_records=reads, name="tell"
    )
    made = protection(mechanism, revealed, task=MAPS, epsilon=3.0)
    assert query_cost(made, revealed, "response", {"revealed": (5,)}) is None
    refused = no_guarantee_reason(made, revealed)
    assert refused is not None
    assert f"gives no guarantee for {kind}; " in refused
    assert advice in refused
    assert no_guarantee_reason(protection(mechanism, revealed, task=MAPS), revealed) is None, (
        "no budget is set"
    )


@pytest.mark.parametrize(
    ("mechanism", "kind", "reads", "advice"),
    [
        ("noisy-outputs", ATTENTION, (), "method.attention = 0"),
        ("dp-sgd", FEATURES, ("revealed",), "method.lambda_adv = 0"),
    ],
)
def test_refusal_without_guarantee_gives_advice(
    mechanism: Any, kind: str, reads: tuple[str, ...], advice: str
) -> None:
    revealed = Query(
        PREDICT_LOGITS.function, releases={"revealed": kind}, times=1, depends_on_records=reads, name="tell"
    )
    refused = no_guarantee_reason(protection(mechanism, revealed, epsilon=3.0), revealed)
    assert str(refused).endswith(f"gives no guarantee for {kind}; with {advice} none are released")


def test_gradients_of_record_comparisons_depend_on_records() -> None:
    compared = replace(PREDICT_LOGITS, releases={"critic": "critic", "difference": "difference"})
    for reads in ((), ("difference",)):
        query = replace(compared, depends_on_records=reads)
        made = protection("dp-sgd", query, task=MAPS)
        assert query_cost(made, query, "gradient", INPUT_GRADIENT) is None, (
            "DP-SGD training of the critic does not cover it"
        )
        noisy = protection("noisy-outputs", query, task=MAPS)
        near(query_cost(noisy, query, "gradient", INPUT_GRADIENT), gaussian(3 / (2 * math.sqrt(8))))
    plain = replace(compared, releases={"critic": "critic"})
    assert (
        query_cost(protection("dp-sgd", plain, task=MAPS), plain, "gradient", INPUT_GRADIENT) == PrivacyCost()
    )


def test_expected_rows_follow_inputs() -> None:
    made = protection("pate")
    assert made.expected_shapes(PREDICT_LOGITS)["response"]["logits"] == (ROWS, CLASSES)
    sent = {"x": torch.zeros(20, 1, 4, 4), f"x{SCALE}": torch.zeros(999)}
    shapes = made.expected_shapes(PREDICT_LOGITS, sent)
    assert shapes["response"]["logits"] == (20, CLASSES)
    assert shapes["gradient"]["d/dx"][0] == 20
    assert made.expected_shapes(COUNT) == {"response": {"counts": (CLASSES,), "sizes": (CLASSES,)}}


def test_group_protection_costs_more() -> None:
    made = protection("dp-sgd", group_size=3)
    assert made.initial_training_costs() == {"training": gaussian(1.5, 20, rate=0.1, group=3)}
    assert protection("dp-sgd", group_size=3, examples=10).initial_training_costs() == {
        "training": gaussian(0.5, 2)
    }  # rate 1
    near(
        response(protection("pate", PREDICT, group_size=3), PREDICT), gaussian(5 / 4)
    )  # a group has one teacher


def test_values_computed_from_records_have_no_guarantee() -> None:
    rated = replace(
        PREDICT_LOGITS, releases={**PREDICT_LOGITS.releases, "real": "critic"}, depends_on_records=("real",)
    )
    for mechanism in ("dp-sgd", "pate", "noisy-outputs"):
        made = protection(mechanism, rated)
        assert query_cost(made, rated, "response", {"real": ()}, {}) is None
        assert response(made, PREDICT_LOGITS) is not None


def test_unknown_network_outputs_have_no_guarantee() -> None:
    odd = replace(PREDICT, releases={"range": LOGIT_RANGE})
    for mechanism in ("pate", "noisy-outputs"):
        assert query_cost(protection(mechanism, odd), odd, "response", {"range": ()}, {}) is None
    assert query_cost(protection("dp-sgd", odd), odd, "response", {"range": ()}, {}) == PrivacyCost(), (
        "it was trained with DP-SGD"
    )


def test_without_noise_there_is_no_guarantee() -> None:
    config: dict[str, Any] = {}  # without given noise and without an epsilon to calibrate it
    for mechanism in ("dp-sgd", "pate", "noisy-outputs"):
        assert total_cost(protection(mechanism, config=config).run_costs()) is None
    for mechanism in ("dp-sgd", "pate", "noisy-outputs"):
        only_critic = {"critic": DPTrainingConfig(noise=2.0)}
        assert total_cost(protection(mechanism, config=only_critic).run_costs()) is None
    bare = protection("noisy-outputs", PREDICT, outputs=OutputsConfig(noise=6.0, bound=0.0))
    assert response(bare, PREDICT) is None


def test_training_in_rounds_costs_the_same() -> None:
    made = protection("dp-sgd", TRAIN, initial_training=None)
    assert made.initial_training_costs() == {"training": PrivacyCost()}
    rounds = [
        query_cost(made, TRAIN, "response", {"theta": (9,)}, {"span": torch.tensor(index)})
        for index in range(4)
    ]
    assert rounds == [gaussian(1.5, 5, rate=0.1)] * 4
    assert made.run_costs() == {"training": gaussian(1.5, 20, rate=0.1), "other": PrivacyCost()}
    # Fewer steps than rounds: each round still takes one.
    small = protection("dp-sgd", TRAIN, initial_training=None, examples=5)
    assert query_cost(small, TRAIN, "response", {}, {"span": torch.tensor(3)}) == gaussian(1.5)
    assert small.run_costs()["training"] == gaussian(1.5, 4)


def test_frozen_models_cost_no_training() -> None:
    assert protection("dp-sgd", PREDICT, trains_models=False).initial_training_costs() == {
        "training": PrivacyCost()
    }


def test_more_rounds_than_steps_cost_one_step_each() -> None:
    """FedMD with transfer learning does this: its queries train for parts of a round's length."""
    alone = replace(TRAIN, name="alone", times=1, span=lambda sent: Span(0, 30, 34))
    rounds = replace(TRAIN, span=lambda sent: Span.part(int(sent["span"]), 4, offset=30))
    made = protection("dp-sgd", alone, rounds)  # 20 steps if trained in one part
    taken = [made.training_costs(alone, {})["training"]]
    taken += [made.training_costs(rounds, {"span": torch.tensor(t)})["training"] for t in range(4)]
    assert sum((cost for cost in taken if cost), PrivacyCost()) == gaussian(1.5, 34, rate=0.1)
    assert made.run_costs()["training"] == gaussian(1.5, 34, rate=0.1)


# --- calibrated noise --------------------------------------------------------------------------------

FREE: dict[str, Any] = {"outputs": OutputsConfig(bound=2.0)}
DELTA = 1e-5


@pytest.mark.sample(5)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("most", [1.0, 8.0])
@pytest.mark.parametrize("mechanism", ["dp-sgd", "pate", "noisy-outputs"])
def test_calibrated_noise_uses_whole_epsilon(mechanism: str, most: float, accountant: Any) -> None:
    made = protection(mechanism, config=FREE, epsilon=most, accountant=accountant)
    cost = total_cost(made.run_costs())
    assert cost is not None
    assert 0.97 * most < compute_epsilon(cost, DELTA, accountant) <= most
    parts = {
        "dp-sgd": ("training",),
        "pate": ("pate", "gradients"),
        "noisy-outputs": ("outputs", "gradients"),
    }
    used = {"critic", "sums", *parts[mechanism]}  # noise on sums has a default
    assert {name for name, noise in made.noise_levels.items() if noise} == used


def test_charges_match_calibrated_epsilon() -> None:
    """The costs of all releases of a run add up to the calibrated epsilon."""
    made = protection("pate", config=FREE, epsilon=4.0)
    charged = PrivacyCost()
    for cost in [
        *made.initial_training_costs().values(),
        query_cost(made, COUNT, "response", {"counts": (CLASSES,), "sizes": ()}, {}),
    ]:
        charged += cost or PrivacyCost()
    for _ in range(PREDICT_LOGITS.times):
        for part, shapes in (("response", SHAPES), ("gradient", INPUT_GRADIENT)):
            charged += query_cost(made, PREDICT_LOGITS, part, shapes, {}) or PrivacyCost()
    near(charged, total_cost(made.run_costs()))
    assert 0.97 * 4 < compute_epsilon(charged, DELTA) <= 4


def test_given_noise_is_kept_in_calibration() -> None:
    made = protection("dp-sgd", config=dict(FREE, critic=DPTrainingConfig(noise=3.0)), epsilon=4.0)
    assert made.noise_levels["critic"] == 3.0
    assert made.noise_levels["training"] > 0
    less = protection("dp-sgd", config=dict(FREE, critic=DPTrainingConfig(noise=1.5)), epsilon=4.0)
    assert less.noise_levels["training"] > made.noise_levels["training"], (
        "the epsilon of the critic is not available to the model"
    )


def test_larger_share_gives_less_noise() -> None:
    even = protection("dp-sgd", config=FREE, epsilon=4.0)
    skewed = protection("dp-sgd", config=dict(FREE, training=DPTrainingConfig(share=4.0)), epsilon=4.0)
    assert skewed.noise_levels["training"] < even.noise_levels["training"]
    assert skewed.noise_levels["critic"] > even.noise_levels["critic"]


@pytest.mark.parametrize("mechanism", ["dp-sgd", "noisy-outputs"])
@pytest.mark.parametrize("isolate", [False, True])
def test_private_training_assumes_harmless_rounding_unless_isolated(mechanism: str, isolate: bool) -> None:
    made = protection(mechanism, PREDICT_LOGITS, isolate_rounding=isolate)
    assert (ROUNDING_TEXT in made.statement().assumes) is not isolate
    assert {each.isolate_rounding for each in made.dp_sgd_parameters().values()} == {isolate}
    untrained = replace(PREDICT_LOGITS, trains=())
    if mechanism == "noisy-outputs":
        assert ROUNDING_TEXT not in protection(mechanism, untrained).statement().assumes


# --- refusals -----------------------------------------------------------------------------------------


def test_query_without_declared_dependence_is_refused() -> None:
    undeclared = replace(PREDICT, depends_on_records=None)
    for mechanism in ("dp-sgd", "pate", "noisy-outputs"):
        with raises_refused("privacy", "depends_on_records"):
            protection(mechanism, undeclared)
    assert response(protection("none", undeclared), undeclared) is None
    protection("pate", replace(undeclared, releases={}))  # it releases nothing


def test_statement_names_plug_in_whose_declarations_it_assumes() -> None:
    """The library cannot verify that one record changes the plug-in's counts by one."""
    assumed = PLUGIN_METHOD_TEXT.format(name="lab:Method")
    for mechanism in ("dp-sgd", "pate", "noisy-outputs"):
        assert assumed in protection(mechanism, COUNT, plugin="lab:Method").statement().assumes
        assert assumed not in protection(mechanism, COUNT).statement().assumes


def test_critic_without_private_training_has_no_guarantee() -> None:
    untrained = replace(PREDICT_LOGITS, trains=())
    for mechanism, rule in (("pate", Exact()), ("noisy-outputs", Exact())):
        assert protection(mechanism, untrained).rule(untrained, "critic") == rule
        assert protection(mechanism, PREDICT_LOGITS).rule(PREDICT_LOGITS, "critic") != rule


def test_budget_refusal_names_kinds_without_guarantee() -> None:
    rated = replace(PREDICT_LOGITS, releases={**PREDICT_LOGITS.releases, "range": LOGIT_RANGE})
    made = protection("pate", rated, COUNT, epsilon=5.0)
    assert no_guarantee_reason(made, COUNT) is None
    assert no_guarantee_reason(made, rated) == (
        "privacy: a budget is set, and mechanism pate gives no guarantee for logit range; "
        "with a bound fixed in advance (method.z_max) none is released"
    )
    assert no_guarantee_reason(protection("pate", rated), rated) is None, "allowed without a budget"
    assert no_guarantee_reason(protection("pate", rated, total_epsilon=5.0), rated) is not None
    bare = protection("none", PREDICT_LOGITS, epsilon=5.0)
    reason = no_guarantee_reason(bare, PREDICT_LOGITS)
    assert reason is not None
    assert "privacy.mechanism: dp-sgd, pate or noisy-outputs" in reason
    assert reason == no_guarantee_reason(bare, rated), "the kinds do not matter, so refusals are one line"


# --- keyed noise ------------------------------------------------------------------------------------------


def test_noise_needs_setup_hash() -> None:
    made = PrivacyMechanism("clinic", DPSGD(), side(), LOCAL, EXAMPLES, TASK)
    for sampler in (made.noise_sampler, made.dp_sgd_parameters()["model"].sampler):
        with raises_invalid("setup_hash", ""):
            sampler("gate", 1)


def test_query_costs_include_training() -> None:
    made = protection("dp-sgd", PREDICT_LOGITS, TRAIN, initial_training=None)
    inputs = {"span": torch.tensor(1)}
    assert made.training_costs(TRAIN, inputs) == {"training": gaussian(1.5, 5, rate=0.1)}
    assert made.training_costs(PREDICT_LOGITS, {}) == {"critic": gaussian(2.0, rate=0.08)}
    assert (
        made.training_costs(PREDICT, {})
        == protection("none", PREDICT_LOGITS).training_costs(PREDICT_LOGITS, {})
        == {}
    )
    assert (
        total_cost(made.release_costs(PREDICT_LOGITS, SHAPES))
        == total_cost(made.release_costs(TRAIN, {"theta": (9,)}))
        == PrivacyCost()
    )


# --- statements ---------------------------------------------------------------------------------------


def test_statement_holds_mechanism_unit_noise_and_rules() -> None:
    statement = protection("pate", epsilon=1e3, group_size=2).statement()
    assert (statement.mechanism, statement.delta, statement.budget, statement.accountant) == (
        "pate",
        1e-5,
        1e3,
        "pld",
    )
    assert statement.unit == "all records of one group, 2 at most, added or removed"
    # Given levels are stated unchanged.
    assert {**statement.noise}.items() >= {"pate": 5.0, "gradients": 3.0, "critic": 2.0}.items()
    assert "logits of predict_logits: all votes of 20 teachers, Gaussian noise 5" in statement.rules
    assert "counts of count_labels: Laplace noise of scale 10 on each count" in statement.rules
    assert any(
        line.startswith("d/dx of predict_logits: mean of 20 teachers' gradients") for line in statement.rules
    )
    assert any("teacher" in line for line in statement.assumes)
    assert protection("dp-sgd").statement().budget is None
    assert protection("dp-sgd").statement().unit == "one training record of this node, added or removed"


def test_statement_without_mechanism() -> None:
    statement = protection("none").statement()
    assert statement.mechanism == "none"
    assert statement.rules
    assert all(line.endswith("exact: no guarantee") for line in statement.rules)


@pytest.mark.parametrize("mechanism", ["dp-sgd", "pate", "noisy-outputs"])
def test_unknown_network_is_not_trained_under_mechanism(mechanism: Any) -> None:
    changed = replace(PREDICT_LOGITS, trains=("critic", "dreamer"))
    with raises_refused("privacy", "dreamer", "noise"):
        protection(mechanism, changed)
    assert protection("none", changed) is not None


def test_seal_depends_on_secret() -> None:
    """Other inputs of the seal are in the run's files, and would allow values to be guessed and checked."""

    def noisy(secret: int, salt: str = "") -> PrivacyMechanism:
        like = protection("dp-sgd")
        own = ("clinic", like.config, like.side, LOCAL, EXAMPLES, TASK)
        made = PrivacyMechanism(*own, secret=secret, salt=salt)
        made.setup_hash = "data"
        return made

    one, other = noisy(1), noisy(2)
    assert one.keyed_hash("counts 3 4") == one.keyed_hash("counts 3 4") != one.keyed_hash("counts 4 3")
    assert one.keyed_hash("counts 3 4") != other.keyed_hash("counts 3 4")
    other_run = noisy(1, "of another run")
    assert one.keyed_hash("counts 3 4") != other_run.keyed_hash("counts 3 4")
