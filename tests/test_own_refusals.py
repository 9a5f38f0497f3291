"""What is unknown, broken or does not fit, of anything that somebody else may offer: one line, and no run."""

from __future__ import annotations

import pytest

from tests.own_lab import SMALL, Lab

NOT_IMPORTED = "is 'broken': allowed is one that can be imported: broken:thing cannot"


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    """With a run that would do."""
    nodes = {**SMALL["nodes"], "policy": {"outputs_only": False}}
    split = {"how": "quantity-skew", "nodes": 3, "power": 1.0}
    lab.write("small.toml", split=split, nodes=nodes, method={"name": "fedavg", "rounds": 3})
    lab.beside_broken()
    return lab


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data plate", "data.name is 'plate': allowed is one of digits, mnist"),
        ("--data plates --data.white 0", "data.white is 0.0: allowed is above 0"),
        ("--method.name fedistill", "unknown method 'fedistill': did you mean 'feddistill'?"),
        ("--method.name my_lab.feddistill:Missing", "has no 'Missing'"),
        ("--method.name my_lab.gone:FedDistill", "allowed is one in"),
        ("--method.name json:JSONDecoder", "a subclass of Method"),
        ("--task.name ordinary", "unknown task 'ordinary': did you mean 'ordinal'?"),
        ("--task.name my_lab.ordinal:Ordinal", "a subclass of TaskConfig"),
        ("--task.name ordinal --task.dice 1.0", "allowed is none, as task 'ordinal' has no such option"),
        ("--split.how broken", f"split {NOT_IMPORTED}"),
        ("--split.how json:JSONDecoder", "split is 'json:JSONDecoder': allowed is a subclass of SplitConfig"),
        ("--split.alpha 1", "split.alpha is '1': allowed is none"),
        ("--split.power -1", "split.power is -1.0: allowed is 0 or more and up to 10\n"),
        ("--student.model broken:8", "model is 'broken': allowed is one that can be imported: broken:thing"),
        ("--student.model json:no", "model is 'json:no': allowed is one of"),
        ("--student.model convmixer:wide", "model is 'convmixer:wide': allowed is"),
        (
            "--method.name fedkd --public.name held-out --method.ensemble broken",
            f"method.ensemble {NOT_IMPORTED}",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(lab: Lab, words: str, said: str) -> None:
    assert said in lab.refused(*words.split())
