"""Custom components that are unknown, broken or unsuitable are refused in one line."""

from __future__ import annotations

import pytest

from tests.support.my_lab import SMALL, Lab

NOT_IMPORTED = "= 'broken' (expected an importable object: broken:thing fails with"


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    """Return the lab with a valid configuration, whose options the tests change."""
    nodes = {**SMALL["nodes"], "policy": {"outputs_only": False}}
    split = {"name": "quantity-skew", "nodes": 3, "power": 1.0}
    lab.write("small.toml", split=split, nodes=nodes, method={"name": "fedavg", "rounds": 3})
    lab.add_broken_package()
    return lab


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data plate", "invalid data.name = 'plate' (expected one of digits, mnist"),
        ("--data plates --data.white 0", "invalid data.white = 0.0 (expected above 0"),
        ("--method.name fedistill", "unknown method 'fedistill': did you mean 'feddistill'?"),
        ("--method.name my_lab.feddistill:Missing", "has no 'Missing'"),
        ("--method.name my_lab.gone:FedDistill", "expected a module in"),
        ("--method.name json:JSONDecoder", "a subclass of Method"),
        ("--task.name ordinary", "unknown task 'ordinary': did you mean 'ordinal'?"),
        ("--task.name my_lab.ordinal:Ordinal", "a subclass of TaskConfig"),
        ("--task.name ordinal --task.dice 1.0", "expected none: task 'ordinal' has no such option"),
        ("--split.name broken", f"split {NOT_IMPORTED}"),
        (
            "--split.name json:JSONDecoder",
            "invalid split = 'json:JSONDecoder' (expected a subclass of SplitConfig",
        ),
        ("--split.alpha 1", "invalid split.alpha = '1' (expected none"),
        ("--split.power -1", "invalid split.power = -1.0 (expected 0 or more and up to 10)\n"),
        (
            "--student.model broken:8",
            "invalid student.model = 'broken:8' (expected an importable object: broken:thing",
        ),
        ("--student.model json:no", "invalid student.model = 'json:no' (expected a name in"),
        ("--student.model convmixer:wide", "invalid student.model = 'convmixer:wide'"),
        (
            "--method.name fedkd --public.name held-out --method.ensemble broken",
            f"method.ensemble {NOT_IMPORTED}",
        ),
    ],
)
def test_custom_component_errors_are_one_line(lab: Lab, words: str, message: str) -> None:
    assert message in lab.refused(*words.split())
