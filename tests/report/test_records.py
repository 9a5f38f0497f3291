"""Files of a run are validated with one-line errors, and one list of records has all metrics."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedstill.cli.main import main
from fedstill.compare.comparison_runner import read_not_run
from fedstill.core.errors import RunFolderError
from fedstill.core.text_format import json_text
from fedstill.report.comparison_records import record_name
from fedstill.report.records import (
    CENTRALIZED,
    LOCAL,
    MAIN,
    OWN_SHARE,
    RUN,
    STANDALONE,
    Record,
    Result,
    find_value,
    model_rows,
    node_values,
)
from tests.support.result_files import a_result, corruptions

RESULT: dict[str, Any] = {
    "method": "fedkd",
    "seed": 4,
    "accuracy": 91.0,
    "nodes": [{"name": "north"}, {"name": "south"}, {"name": "west"}],
    "standalone": {"accuracy": {"mean": 70.0, "std": 2.0, "per_node": [68.0, None, 72.0]}},
    "local": {
        "accuracy": {"mean": 80.0, "std": 1.0, "per_node": [79.0, 80.0, 81.0]},
        "share": {"mean": 82.0},
    },
    "centralized": {"accuracy": 95.0},
    "ensemble": None,
    "intervals": {"cases": 50, "global_model": [88.0, 94.0], "nodes": [66.0, 74.0]},
    "sites": {
        "names": ["a"],
        "global_model": {"a": {"accuracy": 90.0}},
        "nodes": {"south": {"a": {"accuracy": 60.0}}},
    },
    "bytes": {"up": 7, "down": 0},
    "queries": 3,
    "privacy": {"nodes": [{"name": "north", "guarantee": True, "delta": 1e-5}]},
}


def test_records_hold_each_measured_value() -> None:
    records = Result.from_record(RESULT).records
    assert {(record.method, record.seed) for record in records} == {("fedkd", 4)}
    measured = {(r.model, r.node, r.site, r.metric): (r.value, r.std, r.interval) for r in records}
    assert len(measured) == len(records)
    assert measured == {
        (MAIN, "", "", "accuracy"): (91.0, None, (88.0, 94.0)),
        (CENTRALIZED, "", "", "accuracy"): (95.0, None, None),
        (STANDALONE, "", "", "accuracy"): (70.0, 2.0, (66.0, 74.0)),
        (STANDALONE, "north", "", "accuracy"): (68.0, None, None),
        (STANDALONE, "west", "", "accuracy"): (72.0, None, None),  # of the third node; the second has none
        (LOCAL, "", "", "accuracy"): (80.0, 1.0, (66.0, 74.0)),
        (LOCAL, "north", "", "accuracy"): (79.0, None, None),
        (LOCAL, "south", "", "accuracy"): (80.0, None, None),
        (LOCAL, "west", "", "accuracy"): (81.0, None, None),
        (LOCAL, "", OWN_SHARE, "accuracy"): (82.0, None, None),
        (MAIN, "", "a", "accuracy"): (90.0, None, None),
        (LOCAL, "south", "a", "accuracy"): (60.0, None, None),
        (RUN, "", "", "bytes up"): (7, None, None),
        (RUN, "", "", "bytes down"): (0, None, None),
        (RUN, "", "", "queries"): (3, None, None),
        (RUN, "", "", "epsilon"): (math.inf, None, None),
        (RUN, "", "", "delta"): (1e-5, None, None),
    }


def test_found_values_are_of_the_named_node_and_site() -> None:
    records = Result.from_record(RESULT).records
    assert find_value(records, LOCAL, "accuracy") == 80.0
    assert find_value(records, LOCAL, "accuracy", node="south") == 80.0
    assert find_value(records, LOCAL, "accuracy", node="south", site="a") == 60.0
    assert find_value(records, STANDALONE, "accuracy", node="south") is None
    assert node_values(records, STANDALONE, "accuracy") == [68.0, 72.0]


def test_methods_without_a_global_model_are_evaluated_by_local_models() -> None:
    result = Result.from_record({**RESULT, "evaluated_model": "nodes", "accuracy": 80.5})
    row = next(row for row in model_rows(result) if row.is_main)
    assert row.main_record is not None
    # The value is the result's; deviation and interval are over the nodes.
    assert (row.value, row.main_record.std, row.interval) == (80.5, 1.0, (66.0, 74.0))
    assert row.node_values == [79.0, 80.0, 81.0]
    assert [row.model for row in model_rows(result)] == [MAIN, CENTRALIZED]


def test_single_nodes_sites_and_attacks_have_no_name_in_comparisons() -> None:
    whole = Record(model=MAIN, metric="accuracy", value=1.0)
    assert record_name(whole, "accuracy") == "accuracy"
    for part in ({"node": "a"}, {"site": "a"}, {"finding": "a"}, {"attack": "a"}):
        assert record_name(Record(model=LOCAL, metric="accuracy", value=1.0, **part), "accuracy") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intervals", {"cases": 1, "nodes": [1.0]}),
        ("confusion", [[1, 2], [3]]),
        ("labels", {"names": ["a", "b"], "global_model": [1.0]}),
        ("cases", {"names": ["a", "b"], "ensemble": [1.0]}),
        ("ensemble", {"accuracy": 90.0, "nodes": 3}),
        ("calibration", [{"confidence": 50.0, "accuracy": 50.0, "examples": 0}]),
    ],
)
def test_value_of_wrong_shape_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    (tmp_path / "result.json").write_text(json_text({**RESULT, key: value}), encoding="utf-8")
    with pytest.raises(RunFolderError, match=key):
        Result.read(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(tmp_path)])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "result.json: " in message
    assert key in message


@pytest.mark.parametrize("content", ["{", "[]", '{"fedavg-seed0": 3}'])
def test_damaged_reasons_of_a_comparison_are_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "not_run.json").write_text(content, encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"not_run\.json[^\n]*$"):
        read_not_run(tmp_path)


# --- validation of ``result.json`` with one-line errors ----------------------------------------------


ERROR_LINE = re.compile(r"result\.json: [^\n]+")


@pytest.mark.parametrize("junk", [None, "x", 7, [3, None], {"a": [1]}, float("nan")])
def test_values_of_wrong_type_raise_one_line_errors(junk: object) -> None:
    broken = [json.loads(json.dumps(each)) for each in corruptions(a_result(), junk)]
    refused = []
    for record in broken:
        try:
            Result.from_record(record)
        except RunFolderError as error:
            refused.append(str(error))
    assert len(refused) >= 10
    assert all(map(ERROR_LINE.fullmatch, refused))


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"bytes": {"up": "many"}}, "bytes.up", "'many'"),
        ({"nodes": [{"model": "mlp"}]}, "nodes[0].name", "missing"),
        ({"nodes": "two"}, "nodes", "'two'"),
        ({"evaluated_model": "crown"}, "evaluated_model", "'crown'"),
        ({"metrics": [{"key": "a", "title": "A", "better": "up"}]}, "metrics[0].better", "'up'"),
        ({"metrics": [], "metric": None}, "metrics", "[]"),
        ({"metric": []}, "metric", "[]"),
        ({"metric": 3}, "metric", "3"),
    ],
)
def test_invalid_value_is_named_with_its_key(
    tmp_path: Path, changes: dict[str, Any], key: str, value: str
) -> None:
    (tmp_path / "result.json").write_text(json.dumps({**a_result(), **changes}))
    with pytest.raises(RunFolderError) as error:
        Result.read(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/result.json: ")
    assert f"{key} " in message
    assert value in message
    assert "\n" not in message


def test_rejects_deeply_nested_json(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("[" * 100_000)
    with pytest.raises(RunFolderError, match=r"result\.json .*JSON: "):
        Result.read(tmp_path)


def test_accepts_subclasses_of_str() -> None:
    class Version(str):
        """A str subclass like torch.__version__, in a result that was not read from a file."""

    assert Result.from_record({"versions": {"torch": Version("2.9")}}).versions == {"torch": "2.9"}


def test_null_keys_differ_from_missing_keys() -> None:
    without = Result.from_record({**a_result(), "standalone": None})
    assert "standalone" in without.absent_keys
    assert "ensemble" not in without.absent_keys
    assert Result.from_record({}).absent_keys == frozenset()
    assert Result.from_record({"centralized": {"accuracy": None}, "more": {"later": 1}}).centralized == {
        "accuracy": None
    }
