"""Security events in the audit log: logged once, in one chain with releases, hidden from other readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from fedstill.node import folder_log, owner_folder
from fedstill.node.audit_database import AuditError
from fedstill.node.audit_entries import NODE_DATA, SECURITY_EVENTS, Entry, parse_entry_fields
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.folder_log import SecurityEvents, read_security_events
from tests.support.audit_logs import edit, entries
from tests.support.audit_logs import security_events as events_in
from tests.support.errors import raises_invalid

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    owner_folder.init_folder(tmp_path / "clinic")
    return tmp_path / "clinic"


def write(folder: Path, count: int) -> None:
    with closing(SecurityEvents(folder)) as events:
        for number in range(count):
            events.write("joined", "aa", f"reason {number}", run=f"run-{number}")


def test_events_hold_actor_time_and_reason(folder: Path) -> None:
    write(folder, 5)
    events = events_in(folder)
    assert [event["entry"] for event in events] == [1, 2, 3, 4, 5]
    expected = {"event": "joined", "actor": "aa", "reason": "reason 2", "run": "run-2"}
    assert events[2].items() >= expected.items()
    assert events[0]["at"] <= events[4]["at"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("audit*"))


@pytest.mark.parametrize(
    ("statement", "entry"),
    [
        ("UPDATE entries SET line = replace(line, 'reason 2', 'reason 9')", 3),
        ("UPDATE entries SET line = replace(line, 'reason 4', 'reason 5')", 5),
        ("UPDATE entries SET line = replace(line, '\"aa\"', '\"bb\"') WHERE entry = 5", 5),
        ("UPDATE entries SET line = replace(line, '\"number\":', '\"number\": ') WHERE entry = 3", 3),
        ("UPDATE entries SET entry = CASE entry WHEN 3 THEN -4 ELSE -3 END WHERE entry IN (3, 4)", 1),
        ("DELETE FROM entries WHERE entry = 3", 3),
        ("DELETE FROM entries WHERE entry = 1", 1),
        ("DELETE FROM entries WHERE entry < 5", 1),
        ("DELETE FROM entries WHERE entry > 3", 3),
        ("DELETE FROM entries", 0),
    ],
)
def test_tampering_stops_events_and_releases(folder: Path, statement: str, entry: int) -> None:
    write(folder, 5)
    edit(folder / FILE, statement)
    fault = f"entry {entry}[ ,].*nothing is released"
    with closing(SecurityEvents(folder)) as events:
        with pytest.raises(AuditError, match=fault):
            events.write("joined", "aa", "more")
        with pytest.raises(AuditError, match=fault):
            events.audit.charge(Entry("one", NODE_DATA, "clinic", 0, "predict", "response"))


@pytest.mark.parametrize("content", [None, "{"])
def test_lost_or_damaged_head_stops_events(folder: Path, content: str | None) -> None:
    write(folder, 2)
    head = folder / f"{FILE}.head"
    if content is None:
        head.unlink()
    else:
        head.write_text(content)
    with closing(SecurityEvents(folder)) as events, pytest.raises(AuditError, match="its head"):
        events.write("joined", "aa", "more")


def test_two_processes_write_one_chain(folder: Path) -> None:
    """A node's site and its job do this, with releases in between."""
    with closing(SecurityEvents(folder)) as site, closing(SecurityEvents(folder)) as job:
        for number in range(4):
            site.write("refused", "aa", f"reason {number}")
            job.write("joined", "bb", "why")
            job.audit.charge(Entry("one", NODE_DATA, "clinic", number, "predict", "response"))
        site.audit.verify()
        assert [entry["part"] for entry in site.audit.entries()] == ["refused", "joined", "response"] * 4
    assert len(entries(folder)) == 4


@pytest.mark.parametrize("event", SECURITY_EVENTS)
@pytest.mark.parametrize(
    "counted", [{"cost": {"gaussian(1.0)": 1}}, {"up": {"logits": 1}}, {"no_guarantee": 1}, {"queries": 1}]
)
def test_charged_entries_cannot_be_written_as_events(event: str, counted: dict[str, object]) -> None:
    """Totals ignore events, so a charge in an event would be free."""
    given = Entry("one", NODE_DATA, "clinic", 0, "predict", event, **counted)  # type: ignore[arg-type]
    with closing(AuditLog()) as audit, raises_invalid("entry of an audit log"):
        audit.append(given)
    assert parse_entry_fields(given.to_line("now")) is None


def test_events_count_in_no_total_and_no_run(folder: Path) -> None:
    with closing(SecurityEvents(folder)) as events:
        events.write("joined", "aa", "why", run="one")
        events.record_refused_query("aa", "rule", "one", "predict", 3)
        assert not events.audit.totals.has_charged("one")
        assert events.audit.spending(NODE_DATA, "one").total_queries == 0
        assert not events.audit.totals.events


def test_export_holds_events_only_if_whole(folder: Path, command: Main) -> None:
    """Readers of an exported log learn no account and no server."""
    with closing(SecurityEvents(folder)) as events:
        events.write("approved", "the owner's account", "board of 3 May", description="d" * 64)
        events.audit.charge(Entry("one", NODE_DATA, "clinic", 0, "predict", "response", up={"logits": 8}))
        events.write("joined", "6668 7aad", "why")
        events.record_refused_query("6668 7aad", "max_rows: 3", "one", "predict", 1)
    for arguments in (["audit", "show", folder, "--json"], ["audit", "show", folder]):
        code, out, _ = command(*arguments)
        assert code == 0
        assert not any(private in out for private in ("account", "board", "6668", "lost"))
    assert command("audit", "export", folder, "--out", folder / "some.jsonl")[0] == 0
    some = [json.loads(line) for line in (folder / "some.jsonl").read_text().splitlines()]
    assert [line["part"] for line in some] == ["response", "refused"]
    assert not {"actor", "details", "hash"} & {name for line in some for name in line}
    assert command("audit", "export", folder, "--out", folder / "all.jsonl", "--whole")[0] == 0
    whole = [json.loads(line) for line in (folder / "all.jsonl").read_text().splitlines()]
    assert [line["part"] for line in whole] == ["approved", "response", "joined", "refused"]
    assert whole[0]["actor"] == "the owner's account"


def test_events_hold_no_hash_of_releases(folder: Path, command: Main) -> None:
    with closing(SecurityEvents(folder)) as events:
        hashes = {"content_hash": "c" * 64, "release_hash": "r" * 64, "history_hash": "h" * 64}
        events.audit.charge(Entry("one", NODE_DATA, "clinic", 0, "predict", "response", **hashes))
        events.write("joined", "aa", "why")
    shown = json.loads(command("node", "log", folder, "--json")[1])
    assert len(shown["hash"]) == 64
    assert [set(event) for event in shown["events"]] == [{"entry", "at", "event", "actor", "reason"}]


def test_event_of_a_server_is_logged_once(folder: Path) -> None:
    with closing(SecurityEvents(folder)) as events:
        for _ in range(3):
            events.write_once("waits", "aa", "new run", run="one", description="d")
        events.write_once("waits", "aa", "new run", run="one", description="e")
        for _ in range(3):
            events.record_refused_query("aa", "max_rows: 3", "one", "predict", 7)
        events.record_refusal("aa", "max_rows: 3", run="one", query="predict")  # announced at the next join
    assert [(event["event"], event.get("number")) for event in events_in(folder)] == [
        ("waits", None),
        ("waits", None),
        ("refused", 7),
    ]


def test_further_refusals_are_counted_by_rule(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_log, "MAX_REFUSALS", 4)
    monkeypatch.setattr(folder_log, "MAX_COUNTED_RULES", 2)
    with closing(SecurityEvents(folder)) as events:
        for number in range(129):
            events.record_refused_query("aa", f"max_rows: {number}", "one", "predict", number)
        for rule in ("hours: 1", "schema: 2", "queries: 3"):
            for _ in range(3):
                events.record_refusal("aa", rule, run="one")
        events.record_repeats()
        events.record_repeats()
        events.audit.verify()
    logged = [(event["reason"], event.get("refusals")) for event in events_in(folder)]
    assert logged == [
        *((f"max_rows: {number}", None) for number in range(4)),
        ("max_rows: 10 more refusals", "10"),
        ("max_rows: 90 more refusals", "90"),
        ("hours: 1", None),
        ("schema: 2", None),
        ("queries: 3", None),
        ("max_rows: 25 more refusals", "25"),
        ("hours: 2 more refusals", "2"),
        ("other rules: 4 more refusals", "4"),
    ]
    assert sum(int(count) if count else 1 for _, count in logged) == 129 + 9, "all refusals are counted"


def test_long_attack_adds_few_entries(folder: Path) -> None:
    with closing(SecurityEvents(folder)) as events:
        for number in range(3000):
            events.record_refused_query("aa", f"max_rows: {number}", "one", f"query {number % 60}", number)
        events.record_repeats()
    most = folder_log.MAX_REFUSALS + 5 * folder_log.MAX_COUNTED_RULES
    assert len(events_in(folder)) < most


def test_made_up_queries_do_not_hide_the_budget(folder: Path) -> None:
    """Query names are chosen by the server, so any number of undeclared ones share one count."""
    with closing(SecurityEvents(folder)) as events:
        for number in range(101):
            text = f"invalid query = 'junk {number}: '"
            more: dict[str, Any] = {"rule_name": "UnknownName", "is_declared": False}
            events.record_refused_query("aa", text, "one", f"junk {number}", number, **more)
            events.record_refusal(
                "aa", text, run=f"junk {number}", query=f"{number}", rule_name="UnknownName"
            )
        for number in range(5000):
            reason = f"privacy budget: {number}"
            events.record_refused_query("aa", reason, "one", "predict", number, rule_name="privacy budget")
        events.record_repeats()
    by_budget = [event for event in events_in(folder) if event["reason"].startswith("privacy budget")]
    assert sum(int(event.get("refusals", 1)) for event in by_budget) == 5000
    assert {event["query"] for event in by_budget} == {"predict"}
    assert len(events_in(folder)) < folder_log.MAX_REFUSALS + 20


def test_new_rules_are_named_for_any_number_of_refusals(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After too many runs and queries, further ones of a run are counted together under its name."""
    monkeypatch.setattr(folder_log, "MAX_REFUSALS", 4)
    monkeypatch.setattr(folder_log, "MAX_COUNTED_RULES", 2)
    with closing(SecurityEvents(folder)) as events:
        for query in "abcdef":
            events.record_refused_query("aa", "max_rows: 1", "one", query, 0)
        for number in range(30):
            events.record_refused_query("aa", f"max_bytes: {number}", "two", "a", number)
        events.record_repeats()
        found = [entry for entry in events.audit.entries() if entry["run"] == "two"]
    assert [entry["rule"] for entry in found] == [
        "max_bytes: 0",
        "other rules: 10 more refusals",
        "other rules: 19 more refusals",
    ]
    assert {entry["payer"] for entry in found} == {NODE_DATA}


def test_many_events_of_a_server_end_with_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_log, "MAX_EVENTS", 3)
    with closing(SecurityEvents(folder)) as events:
        for number in range(5):
            events.record_refusal("aa", f"hours: {number}", run="one")
            events.write_once("waits", "aa", f"run {number}")
    reasons = [event["reason"] for event in events_in(folder) if event["reason"][:5] != "hours"]
    assert reasons == ["run 0", "run 1", "further events of this process are in node.log only"]


def test_full_disk_share_stops_server_events_only(folder: Path) -> None:
    file, most = folder / "node.toml", 100_000
    file.write_text(file.read_text().replace("max_disk = 20000000000", f"max_disk = {most}"))
    with closing(SecurityEvents(folder)) as events:
        for number in range(300):
            events.record_refusal("aa", f"rule {number} {'x' * 900}", run="one")
        refused = len(events_in(folder))
        assert 5 < refused <= folder_log.MAX_REFUSALS + folder_log.MAX_COUNTED_RULES + 1
        assert folder_log.log_size_bytes(folder / FILE) < most + 20_000
        events.write("approved", "owner", "it is sound", run="one")
        assert len(events_in(folder)) == refused + 1
    with closing(SecurityEvents(folder)) as events:
        while folder_log.log_size_bytes(folder / FILE) < most:
            events.write("approved", "owner", "x" * 900)
        count = len(events_in(folder))
        events.record_refusal("aa", "of another process", run="one")
    assert len(events_in(folder)) == count


@pytest.mark.parametrize("cause", ["limit", "disk"])
def test_refusals_on_a_full_disk_are_counted(
    folder: Path, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has filled the disk cannot hide its further attempts."""

    def full(*given: Any) -> int:
        raise AuditError(FILE, "cannot be used: database or disk is full")

    with closing(SecurityEvents(folder)) as events:
        events.record_refusal("aa", "hours: 1", run="one")
        with monkeypatch.context() as patch:
            if cause == "limit":
                patch.setattr(folder_log, "log_size_bytes", lambda path: 10**18)
            else:
                patch.setattr(AuditLog, "_insert_entry", full)
            for number in range(25):
                with suppress(AuditError):
                    events.record_refused_query("aa", f"max_rows: {number}", "one", "predict", number)
        events.record_repeats()
    assert sum(int(event.get("refusals", 1)) for event in events_in(folder)) == 1 + 25


def test_event_that_could_not_be_written_is_written_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> int:
        raise AuditError(FILE, "cannot be used: database or disk is full")

    with closing(SecurityEvents(folder)) as events:
        with monkeypatch.context() as patch:
            patch.setattr(AuditLog, "_insert_entry", full)
            with pytest.raises(AuditError):
                events.write_once("waits", "aa", "new run", run="one")
        events.write_once("waits", "aa", "new run", run="one")
    assert [event["event"] for event in events_in(folder)] == ["waits"]


def test_changed_rules_are_logged_once_by_name(folder: Path) -> None:
    for most in (1, 1, 2):
        with closing(SecurityEvents(folder)) as events:
            events.record_rules({"policy.max_bytes": most, "policy.hours": ""})
    first, second = events_in(folder)
    assert (first["event"], first["reason"], second["reason"]) == (
        "policy",
        "first start",
        "policy.max_bytes = 2",
    )
    assert second["policy"] == {"policy.max_bytes": "2", "policy.hours": '""'}


def test_server_texts_are_one_short_line(folder: Path) -> None:
    with closing(SecurityEvents(folder)) as events:
        events.record_refusal("aa\n", "two\nlines\x1b[31m\ud800" + "x" * 10_000, run='r"}\n{')
        (entry,) = events.audit.entries()
        assert len(json.dumps(entry)) < 3000
        events.audit.verify()
        assert next(read_security_events(events.audit))["reason"].startswith("two lines [31m xxx")


def test_foreign_table_stops_events(folder: Path) -> None:
    with closing(SecurityEvents(folder)) as events:
        events.write("joined", "aa", "why")
        edit(folder / FILE, "CREATE TRIGGER t AFTER INSERT ON entries BEGIN SELECT 1; END")
        with pytest.raises(AuditError, match="unknown tables"):
            events.write("joined", "aa", "why")


def test_requests_detect_lost_log(folder: Path) -> None:
    """Before the first run, requests for approval are the only trace of the log."""
    write(folder, 1)
    (folder / "requests").mkdir()
    (folder / "requests" / "a.json").write_text("{}")
    for path in folder.glob("audit.sqlite*"):
        path.unlink()
    expected = pytest.raises(AuditError, match="for approval")
    with closing(SecurityEvents(folder)) as events, expected:
        events.write("joined", "aa", "why")


def test_release_without_payer_is_shown(folder: Path, command: Main) -> None:
    """The printed cost is never less than that of the releases."""
    with closing(SecurityEvents(folder)) as events:
        events.audit.charge(Entry("one", "", "clinic", 0, "predict", "response", up={"logits": 8}))
    shown = json.loads(command("audit", "show", folder, "--json")[1])
    assert [entry["up"] for entry in shown["entries"]] == [{"logits": 8}]
    assert command("audit", "export", folder, "--out", folder / "some.jsonl")[0] == 0
    assert '"logits"' in (folder / "some.jsonl").read_text()
