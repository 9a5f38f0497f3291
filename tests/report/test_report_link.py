"""Communication with nodes in the report and the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from fedstill.report import run_tables, write_report
from fedstill.report.records import Result
from fedstill.report.terminal import print_table
from tests.support import audit_logs

RESULT: dict[str, Any] = {
    "name": "clinics",
    "title": "FedIOD",
    "evaluated_model": "student",
    "accuracy": 90.0,
    "link": {
        "messages": 10,
        "seconds_each": 0.5,
        "bytes_each": 2000.0,
        "share": 0.125,
        "starting": 4.0,
        "training": 1.0,
        "nodes": 2.0,
        "waiting": 0.5,
        "link": 2.5,
        "server": 10.0,
    },
    "events": [
        {"node": "north", "number": 7, "event": "excluded", "reason": "logits hold <NaN>"},
        {"node": "east", "number": 9, "event": "rejoined", "reason": ""},
    ],
}


def test_run_in_one_process_has_no_communication_time() -> None:
    assert run_tables.time_parts(Result()) == []
    assert run_tables.message_cost_text(Result()) is None
    assert run_tables.time_parts_text(Result()) is None


def test_time_bar_has_parts_and_accessible_text() -> None:
    bar = str(run_tables.time_bar(Result.from_record(RESULT)))
    assert 'class="part link" x="37.50%" width="12.50%"' in bar
    assert 'class="part server" x="50.00%" width="50.00%"' in bar
    assert 'aria-label="start and end 20.0%; local training 5.0%; nodes 10.0%; waiting 2.5%' in bar


def test_terminal_prints_time_by_activity_and_excluded_nodes() -> None:
    console = Console(record=True, width=200)
    print_table(RESULT, console)
    output = console.export_text()
    assert (
        "time by activity:  start and end 4.0 s, local training 1.0 s, nodes 2.0 s, waiting 0.5 s" in output
    )
    assert "10 message rounds, 500 ms and 2.0 kB each; the link took 12.5% of the run's time" in output
    assert "north:             excluded at query 7: logits hold <NaN>" in output
    assert "east:              rejoined at query 9" in output


def test_page_shows_communication_and_escapes_events(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    page = write_report(tmp_path).read_text()
    assert "Communication with nodes" in page
    assert "logits hold &lt;NaN&gt;" in page
    assert "<NaN>" not in page
    quiet = {key: value for key, value in RESULT.items() if key not in ("link", "events")}
    (tmp_path / "result.json").write_text(json.dumps(quiet))
    assert "Communication with nodes" not in write_report(tmp_path).read_text()


def test_refused_query_is_not_traffic(tmp_path: Path) -> None:
    released = {
        "node": "north",
        "number": 0,
        "query": "predict_logits",
        "part": "response",
        "up": {"logits": 8},
    }
    refused = {"node": "north", "number": 1, "part": "refused", "rule": "max_rows: 10, and x has 11"}
    audit_logs.write(tmp_path, [released, refused])
    from fedstill.report.records import AuditTotals

    totals = AuditTotals.read(tmp_path / "audit.sqlite")
    assert totals is not None
    assert totals.nodes["north"].queries == {0}
    assert totals.bytes_by_kind("up") == {"logits": 8}


def test_waiting_for_absent_nodes_is_not_link_time() -> None:
    waited = {**RESULT, "link": {**RESULT["link"], "absent": 5.0}}
    parts = {part.key: part for part in run_tables.time_parts(Result.from_record(waited))}
    assert (parts["absent"].seconds, parts["absent"].share) == (5.0, 0.2)
    assert parts["link"].share == 0.1
    assert "absent nodes 5.0 s, link 2.5 s" in str(run_tables.time_parts_text(Result.from_record(waited)))
    assert 'class="part absent" x="30.00%" width="20.00%"' in str(
        run_tables.time_bar(Result.from_record(waited))
    )
