"""Validation of ``result.json`` with one-line errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import RunFolderError
from fedstill.report.records import Result
from tests.support.result_files import a_result, corruptions

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
    with pytest.raises(RunFolderError, match=r"result\.json cannot be read as JSON: "):
        Result.read(tmp_path)


def test_accepts_subclasses_of_str() -> None:
    class Version(str):
        """As torch.__version__ is, in a result that was not read from a file."""

    assert Result.from_record({"versions": {"torch": Version("2.9")}}).versions == {"torch": "2.9"}


def test_null_keys_differ_from_missing_keys() -> None:
    without = Result.from_record({**a_result(), "standalone": None})
    assert "standalone" in without.absent_keys
    assert "ensemble" not in without.absent_keys
    assert Result.from_record({}).absent_keys == frozenset()
    assert Result.from_record({"centralized": {"accuracy": None}, "more": {"later": 1}}).centralized == {
        "accuracy": None
    }
