"""Short forms of a comparison's file: their expansion, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from fedstill.compare.comparison import at_scale, expand_short_forms
from fedstill.core.config_tables import parse_toml
from fedstill.core.errors import FedstillError

FILE = """
seeds = 1
[reproduces]
paper = "FedKD"
what = "Table 2"
[base]
data = { name = "digits", train_limit = 100 }
[method]
name = "fedkd"
gamma = 1.0
[options]
plain = {}
other = { name = "fedavg" }
[vary]
tau = [3.0, inf]
[[settings]]
name = "even"
[published]
metrics = ["accuracy", "local accuracy"]
[published.even]
plain = [80.0, ""]
tau-3 = [[81.0, 0.5], 70]
[scale.paper]
seeds = 3
methods = ["plain", "tau-inf"]
[scale.paper.base]
data = { train_limit = 0 }
[scale.paper.method]
gamma = 0.5
"""


def test_expands_shared_and_varied_options() -> None:
    table = expand_short_forms(parse_toml(FILE))
    assert table["methods"] == ["plain", "other", "tau-3", "tau-inf"]
    assert table["options"]["plain"] == {"name": "fedkd", "gamma": 1.0}
    assert table["options"]["other"] == {"name": "fedavg"}  # another method shares nothing
    assert table["options"]["tau-3"] == {"name": "fedkd", "gamma": 1.0, "tau": 3.0}
    assert {"method", "vary", "published", "reproduces", "scale"}.isdisjoint(table)


def test_published_table_names_source_and_skips_empty_cells() -> None:
    about = {"source": "FedKD, Table 2", "setting": "even"}
    assert expand_short_forms(parse_toml(FILE))["paper"] == [
        {"method": "plain", "metric": "accuracy", "value": 80.0, **about},
        {"method": "tau-3", "metric": "accuracy", "value": 81.0, "std": 0.5, **about},
        {"method": "tau-3", "metric": "local accuracy", "value": 70.0, **about},
    ]


def test_scale_overrides_file() -> None:
    paper = at_scale(parse_toml(FILE), "paper")
    assert (paper["seeds"], paper["method"]) == (3, {"name": "fedkd", "gamma": 0.5})
    assert paper["base"] == {"data": {"name": "digits", "train_limit": 0}}
    assert list(paper["options"]) == ["plain"]  # the scale leaves the other method out
    assert at_scale({"base": {"seed": 1}, "scale": {"paper": {"base": {"extends": "paper"}}}}, "paper") == {
        "base": {"extends": "paper"}  # another preset replaces the base
    }


def test_scale_without_methods_drops_their_settings() -> None:
    setting = {"name": "few", "split": {"nodes": 2}, "options": {"a": {"tau": 1.0}, "b": {"tau": 2.0}}}
    table = {"methods": ["a", "b"], "settings": [setting], "scale": {"paper": {"methods": ["a"]}}}
    (reduced,) = at_scale(table, "paper")["settings"]
    assert reduced == {"name": "few", "split": {"nodes": 2}, "options": {"a": {"tau": 1.0}}}
    assert list(setting["options"]) == ["a", "b"]  # the file's own stays for its other scales


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"vary": {"tau": []}}, "invalid vary.tau = .*a list of values"),
        ({"published": {"metrics": ["a", "b"], "x": [1.0]}}, "invalid published.x = .*2 cells"),
        ({"published": {"x": "much"}}, "invalid published.x = 'much'"),
        ({"method": 3}, r"invalid method = 3 \(expected a table"),
    ],
)
def test_rejects_empty_short_forms(table: dict[str, Any], message: str) -> None:
    with pytest.raises(FedstillError, match=message):
        expand_short_forms(table)


def test_rejects_unknown_scale() -> None:
    with pytest.raises(FedstillError, match="unknown scale 'papers': did you mean 'paper'"):
        expand_short_forms(parse_toml(FILE), "papers")
