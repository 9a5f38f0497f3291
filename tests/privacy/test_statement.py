"""Privacy summaries of results, and the assumptions of statements."""

from __future__ import annotations

from typing import Any

import pytest

from fedstill.federation.transport import MAX_TEXT
from fedstill.privacy import statement
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.config import MECHANISMS, POISSON, NoPrivacy, PrivacyConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.events import Event
from fedstill.privacy.pate import PATE
from fedstill.privacy.statement import (
    NON_ADAPTIVE,
    PER_RECORD_ONLY,
    PLUGIN_MECHANISM_TEXT,
    PLUGIN_METHOD_TEXT,
    ROUNDING_TEXT,
    STOPPING_TEXT,
    PrivacyStatement,
    format_epsilon_bound,
    make_statement,
    summarize_privacy,
)
from tests.support.privacy import make_mechanism

RECORD = "one training record of this node, added or removed"
LESS, MORE = {"gaussian(2.0)": 1}, {"gaussian(1.5)": 1}


def statement_of(config: PrivacyConfig) -> PrivacyStatement:
    return make_statement(config, {}, ())


def text(nodes: dict[str, tuple[PrivacyConfig, dict[str, int]]]) -> str:
    statements = {name: statement_of(config) for name, (config, _) in nodes.items()}
    return str(
        summarize_privacy(statements, {name: (spent, 0) for name, (_, spent) in nodes.items()})["text"]
    )


def cost(noise: float, delta: float = 1e-5) -> str:
    return format_epsilon_bound(compute_epsilon({Event("gaussian", noise): 1}, delta))


def test_equal_guarantees_share_one_line() -> None:
    pate = PATE()
    expected = f"epsilon {cost(1.5)} at delta 1e-05, for {RECORD} (mechanism pate)"
    assert text({"a": (pate, LESS), "b": (pate, MORE)}) == expected


@pytest.mark.parametrize(
    ("change", "delta", "unit", "mechanism"),
    [
        ({"delta": 1e-2}, 1e-2, RECORD, "pate"),
        ({"group_size": 5}, 1e-5, "all records of one group, 5 at most, added or removed", "pate"),
        ({"mechanism": "dp-sgd"}, 1e-5, RECORD, "dp-sgd"),
    ],
)
def test_different_guarantees_have_separate_epsilons(
    change: dict[str, Any], delta: float, unit: str, mechanism: str
) -> None:
    pate = PATE()
    other = make_mechanism(**{"mechanism": "pate", **change})
    text_ = text({"a": (pate, LESS), "b": (other, MORE), "c": (pate, MORE)})
    assert text_ == (
        f"a, c: epsilon {cost(1.5)} at delta 1e-05, for {RECORD} (mechanism pate); "
        f"b: epsilon {cost(1.5, delta)} at delta {delta:g}, for {unit} (mechanism {mechanism})"
    )


def test_assumption_of_pld_is_stated() -> None:
    for mechanism in ("dp-sgd", "pate", "noisy-outputs"):
        pld = make_mechanism(mechanism)
        assert statement_of(pld).assumes == (
            *pld.assumes,
            NON_ADAPTIVE,
            STOPPING_TEXT.format(budget="none is set"),
        )
        rdp = make_mechanism(mechanism, accountant="rdp", epsilon=3.0)
        assert statement_of(rdp).assumes == (*rdp.assumes, STOPPING_TEXT.format(budget="epsilon 3"))
    assert statement_of(NoPrivacy()).assumes == ()


def test_lines_fit_into_messages() -> None:
    text_ = [
        line for name in MECHANISMS.builtin for line in (*MECHANISMS[name].assumes, MECHANISMS[name].about)
    ]
    assert all(
        len(line) <= MAX_TEXT
        for line in (
            *(*text_, NON_ADAPTIVE, PER_RECORD_ONLY, ROUNDING_TEXT, STOPPING_TEXT + "1" * 20),
            *(text.format(name="n" * 80) for text in (PLUGIN_MECHANISM_TEXT, PLUGIN_METHOD_TEXT)),
        )
    )


@pytest.mark.parametrize(
    ("event", "sampled"),
    [("gaussian(2.0)", False), ("gaussian(2.0, rate=1.0)", False), ("gaussian(2.0, rate=0.5)", True)],
)
def test_poisson_assumption_needs_sampled_events(event: str, sampled: bool) -> None:
    private = statement_of(DPSGD())
    (node,) = summarize_privacy({"a": private}, {"a": ({event: 3, "laplace(10.0)": 1}, 0)})["nodes"]
    assert node["assumes"] == [line for line in private.assumes if sampled or line != POISSON]
    assert POISSON in private.assumes
    (unpaid,) = summarize_privacy({"a": private}, {"a": ({}, 0)})["nodes"]
    assert unpaid["assumes"] == list(private.assumes)


def test_grouped_records_are_mentioned_without_group_privacy() -> None:
    one, group = DPSGD(), DPSGD(group_size=4)
    assert PER_RECORD_ONLY in make_statement(one, {}, (), has_groups=True).assumes
    assert PER_RECORD_ONLY not in make_statement(one, {}, ()).assumes
    assert PER_RECORD_ONLY not in make_statement(group, {}, (), has_groups=True).assumes


def test_composition_time_of_reported_costs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may report costs of sampled groups, whose losses take long to integrate."""
    monkeypatch.setattr(statement, "COMPOSE_SECONDS", 1e-9)
    text_ = PrivacyStatement(mechanism="dp-sgd", unit="a record", budget=1.0, accountant="rdp")
    plain = {"gaussian(2.0)": 1}
    made_up = {"gaussian(2.5, rate=0.5, group=97)": 3}
    summary = summarize_privacy(
        {"honest": text_, "north": text_}, {"honest": (plain, 0), "north": (made_up, 0)}
    )
    honest, north = summary["nodes"]
    assert [node["guarantee"] for node in (honest, north)] == [True, False]
    assert (north["epsilon"], north["left"]) == (None, None)
    assert statement.COMPOSE_TIMEOUT_TEXT in north["rules"]
    assert statement.COMPOSE_TIMEOUT_TEXT not in honest["rules"]
    assert summary["text"] == "no guarantee for north"
