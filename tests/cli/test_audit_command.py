"""The commands of ``fedstill audit``, as used by a data officer."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from fedstill.cli.audit import SECRET, SECURITY
from fedstill.cli.main import dispatch
from fedstill.core.errors import FedstillError, UnknownName
from fedstill.node import owner_folder
from fedstill.node.audit_entries import NODE_DATA, Entry
from fedstill.node.audit_log import AuditLog
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.events import Event
from tests.support.audit_logs import edit
from tests.support.errors import raises_invalid

Capture = pytest.CaptureFixture[str]


def charge(
    log: AuditLog,
    number: int,
    run: str = "spring",
    payer: str = "clinic",
    no_guarantee: int = 0,
    unit: str = "a record",
) -> None:
    entry = Entry(
        run=run,
        payer=payer,
        node="clinic",
        number=number,
        query="predict_logits",
        part="response",
        content_hash=str(number),
        up={"logits": 2560, "critic": 256},
        rule="logits clamped to 5, Laplace noise of scale 100",
        cost={"laplace(10.0)": 2, "gaussian(4.0)": 1},
        no_guarantee=no_guarantee,
        unit=unit,
        queries=1,
    )
    assert log.charge(entry)


def stdout_of(capsys: Capture, *words: object) -> str:
    """Return the output of a command on a terminal of 80 columns."""
    dispatch(["audit", *(str(word) for word in words)])
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    """Create the folder of a node whose audit log has three releases of two runs."""
    folder = tmp_path / "clinic"
    owner_folder.init_folder(folder)
    (folder / "node.toml").write_text('name = "clinic"\n', encoding="utf-8")
    with closing(AuditLog(folder / "audit.sqlite")) as log:
        charge(log, 0)
        charge(log, 1)
        charge(log, 0, run="autumn")
    return folder


def test_costs_of_different_units_are_not_summed(clinic: Path, capsys: Capture) -> None:
    with closing(AuditLog(clinic / "audit.sqlite")) as log:
        charge(log, 0, run="winter", unit="4 records of one patient")
    words = " ".join(stdout_of(capsys, "show", clinic).split())
    assert re.search(r"clinic all runs 4 0 not known", words)
    assert "add up to nothing (4 records of one patient, a record)." in words


def test_show_prints_releases_with_time_run_and_cost(clinic: Path, capsys: Capture) -> None:
    with closing(AuditLog(clinic / "audit.sqlite")) as log:
        rows = list(log.entries())
    out = stdout_of(capsys, "show", clinic)
    assert max(map(len, out.splitlines()[1:])) <= 80
    words = " ".join(out.split())
    for row in rows:
        assert row["at"][:10] in out
        assert row["at"][11:19] in out
    for what in (
        "spring",
        "autumn",
        "predict_logits 0,",
        "predict_logits 1,",
        "response",
        "critic 256 B, logits",
    ):
        assert what in words
    assert "Total cost for clinic: 3 x gaussian(4), 6 x laplace(10)." in words
    # printed once for three rows
    assert words.count("A logits clamped to 5, Laplace noise of scale 100") == 1
    assert "NOT SOUND" not in out


def test_show_json_omits_fields_that_depend_on_records(clinic: Path, capsys: Capture) -> None:
    output = json.loads(stdout_of(capsys, "show", clinic, "--json", "--last", 2))
    assert output["sound"]
    assert [(each["run"], each["number"]) for each in output["entries"]] == [("spring", 1), ("autumn", 0)]
    assert not {"content_hash", "history_hash", "release_hash", "hash"} & set(output["entries"][0])
    assert output["trouble"] is None


def test_show_json_has_total_epsilon_at_given_delta(clinic: Path, capsys: Capture) -> None:
    (clinic / "node.toml").write_text('name = "clinic"\n[privacy]\nepsilon = 9.0\n', encoding="utf-8")
    with closing(AuditLog(clinic / "audit.sqlite")) as log:
        charge(log, 5, payer=NODE_DATA)
        charge(log, 6, payer=NODE_DATA, run="autumn", no_guarantee=1)
    for delta in (1e-5, 1e-9):
        rows = json.loads(stdout_of(capsys, "show", clinic, "--json", "--delta", delta))["totals"]
        by = {(row["whose"], row["run"]): row for row in rows}
        cost = compute_epsilon({Event("laplace", 10.0): 2, Event("gaussian", 4.0): 1}, delta)
        one = by[NODE_DATA, "spring"]
        assert (one["releases"], one["without_guarantee"], one["epsilon"]) == (1, 0, pytest.approx(cost))
        assert one["events"] == {"gaussian(4.0)": 1, "laplace(10.0)": 2}
        assert one["budget_epsilon_left"] > 0
        assert by["clinic", None]["releases"] == 3
        assert by["clinic", None]["budget_epsilon_left"] is None
        assert (by[NODE_DATA, None]["epsilon"], by[NODE_DATA, None]["budget_epsilon_left"]) == (None, 0)
    edit(clinic / "audit.sqlite", "UPDATE entries SET line = replace(line, 'spring', 'x') WHERE entry = 1")
    output = json.loads(stdout_of(capsys, "show", clinic, "--json"))
    assert (output["sound"], output["trouble"]) == (False, "entry 1 is not as it was written")


def test_show_counts_epsilon_for_each_run_and_for_all(
    clinic: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedstill.node import overview

    def stand_in(spent: dict[Event, int], delta: float, accountant: str) -> float:
        assert accountant == "pld"
        return sum(times / event.noise for event, times in spent.items()) + delta

    monkeypatch.setattr(overview, "compute_epsilon", stand_in)
    out = stdout_of(capsys, "show", clinic, "--delta", "1e-9")
    assert "delta 1e-09" in " ".join(out.split())
    lines = [line.split() for line in out.splitlines() if line.startswith("clinic")]
    assert lines == [
        ["clinic", "spring", "2", "0", "0.901"],  # 4/10 + 2/4, rounded up because of delta
        ["clinic", "autumn", "1", "0", "0.451"],
        ["clinic", "all", "runs", "3", "0", "1.351"],
    ]


def test_show_prints_remaining_budget_by_the_owners_accountant(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "clinic"
    owner_folder.init_folder(folder)
    limits = '[privacy]\nmechanism = "dp-sgd"\nepsilon = 8.0\ntotal_epsilon = 20.0\ndelta = 1e-6\n'
    cost = {Event("laplace", 10.0): 2, Event("gaussian", 4.0): 1}
    with closing(AuditLog(folder / "audit.sqlite")) as log:
        charge(log, 0, payer=NODE_DATA)
        charge(log, 0, run="autumn", payer=NODE_DATA)
    shown = {}
    for accountant in ("pld", "rdp"):
        text = f'name = "clinic"\n{limits}accountant = "{accountant}"\n'
        (folder / "node.toml").write_text(text, encoding="utf-8")
        out = stdout_of(capsys, "show", folder)
        lines = [line.split() for line in out.splitlines() if line.startswith(NODE_DATA)]
        assert [line[2] for line in lines] == ["spring", "autumn", "all"]
        one, all_runs = (
            compute_epsilon(Counter({event: n * times for event, n in cost.items()}), 1e-6, accountant)  # type: ignore[arg-type]
            for times in (1, 2)
        )
        assert float(lines[0][-2]) == pytest.approx(one, abs=1e-3)
        assert float(lines[0][-1]) == pytest.approx(8 - one, abs=1e-3)
        assert float(lines[2][-1]) == pytest.approx(20 - all_runs, abs=1e-3)
        assert f"Budgets, by {accountant.upper()}: a run has epsilon 8 at delta 1e-06" in out
        shown[accountant] = float(lines[0][-2])
    assert shown["pld"] + 0.01 < shown["rdp"]
    (folder / "node.toml").write_text('name = "clinic"\n', encoding="utf-8")
    out = stdout_of(capsys, "show", folder)
    assert "left\n" not in out.split("whose")[1]
    assert "Budgets" not in out


def test_show_shortens_run_names_only_in_rows(tmp_path: Path, capsys: Capture) -> None:
    run = "0123456789abcdef0123"
    with closing(AuditLog(tmp_path / "audit.sqlite")) as log:
        charge(log, 0, run=run)
        charge(log, 1, run=run)
    rows, totals = stdout_of(capsys, "show", tmp_path).split("whose")
    assert rows.count("01234567…") == 2
    assert run not in rows
    assert run in totals


def test_show_names_lost_entries_after_accept(clinic: Path, capsys: Capture) -> None:
    edit(clinic / "audit.sqlite", "DELETE FROM entries WHERE entry > 1")
    stdout_of(capsys, "accept", clinic, "--because", "restored from a backup")
    out = stdout_of(capsys, "show", clinic)
    assert "Entries 2 to 3 are lost, and their numbers are not used again." in out
    rows, totals = " ".join(out.split()).split("rule processing before the release")
    assert "restored from a" in rows  # the reason is not shown as a rule
    assert "restored" not in totals


def test_rejects_file_that_is_not_an_audit_log(clinic: Path, capsys: Capture) -> None:
    file = clinic / "data.npz"
    file.write_bytes(b"images and labels" * 1000)
    for command in ("show", "verify"):
        with pytest.raises(FedstillError) as output:
            dispatch(["audit", command, str(file)])
        assert str(output.value) == f"{file} is not an audit log"
    (clinic / "audit.sqlite").write_bytes(b"once an audit log, as its head says" * 1000)
    with pytest.raises(FedstillError, match="audit accept"):
        dispatch(["audit", "show", str(clinic)])


def test_shows_no_epsilon_after_a_release_without_guarantee(clinic: Path, capsys: Capture) -> None:
    with closing(AuditLog(clinic / "audit.sqlite")) as log:
        charge(log, 5, run="autumn", no_guarantee=1)
    out = stdout_of(capsys, "show", clinic)
    lines = [line for line in out.splitlines() if line.startswith("clinic")]
    assert ["no guarantee" in line for line in lines] == [False, True, True]
    expected = "Total cost for clinic: 4 x gaussian(4), 8 x laplace(10), 1 release without guarantee."
    assert expected in " ".join(out.split())


def test_charges_before_the_first_query_have_no_number(clinic: Path, capsys: Capture) -> None:
    entry = Entry("spring", "clinic", "clinic", -1, "training", "training", rule="DP-SGD")
    with closing(AuditLog(clinic / "audit.sqlite")) as log:
        log.charge(entry)
    words = stdout_of(capsys, "show", clinic, "--last", 1).split()
    assert "training" in words
    assert "-1" not in words
    assert "free" in words


def test_verify_prints_one_line_or_error(clinic: Path, capsys: Capture) -> None:
    out = stdout_of(capsys, "verify", clinic)
    assert out == f"{clinic / 'audit.sqlite'}: 3 entries: hashes, totals and head agree\n"
    edit(clinic / "audit.sqlite", "UPDATE entries SET line = '{}' WHERE entry = 2")
    with pytest.raises(FedstillError, match="entry 2 "):
        dispatch(["audit", "verify", str(clinic)])
    assert "NOT SOUND: entry 2 is not as it was written" in stdout_of(capsys, "show", clinic)


def test_detects_and_accepts_wrong_totals(clinic: Path, capsys: Capture) -> None:
    head = clinic / "audit.sqlite.head"
    text = head.read_text(encoding="utf-8").replace('"laplace(10.0)":4', '"laplace(10.0)":5')
    head.write_text(text, encoding="utf-8")
    with pytest.raises(FedstillError, match="entries up to 3 "):
        dispatch(["audit", "verify", str(clinic)])
    out = stdout_of(capsys, "accept", clinic, "--because", "so")
    assert "Charged again to clinic, run spring: laplace(10)." in out
    assert "4 entries: hashes, totals and head agree" in stdout_of(capsys, "verify", clinic)


def test_node_file_sets_path_of_audit_log(clinic: Path, capsys: Capture) -> None:
    other = clinic.parent / "data of the clinic.sqlite"
    for file in list(clinic.glob("audit.sqlite*")):
        file.rename(other.with_name(other.name + file.name.removeprefix("audit.sqlite")))
    named = 'name = "clinic"\n[privacy]\naudit_log = "../data of the clinic.sqlite"\n'
    (clinic / "node.toml").write_text(named, encoding="utf-8")
    assert "3 entries: hashes" in stdout_of(capsys, "verify", clinic)


def test_accept_writes_the_reason_and_charges_lost_costs_again(clinic: Path, capsys: Capture) -> None:
    with pytest.raises(FedstillError, match="no fault"):
        dispatch(["audit", "accept", str(clinic), "--because", "so"])
    edit(clinic / "audit.sqlite", "DELETE FROM entries WHERE entry = 3")
    out = stdout_of(capsys, "accept", clinic, "--because", "restored from a backup")
    assert "Accepted: is an older copy" in out
    assert "Charged again to clinic, run autumn: gaussian(4), 2 x laplace(10)." in out
    assert "3 entries: hashes" in stdout_of(capsys, "verify", clinic)
    out = " ".join(stdout_of(capsys, "show", clinic).split())
    assert "accepted by" in out
    assert "restored from a backup" in out
    assert "3 x gaussian(4)" in out


def test_missing_audit_log(clinic: Path, capsys: Capture) -> None:
    (clinic / "audit.sqlite").unlink()
    with pytest.raises(FedstillError, match=r"missing, .*head"):
        dispatch(["audit", "verify", str(clinic)])
    out = stdout_of(capsys, "accept", clinic, "--because", "lost")
    assert out.count("Charged again") == 2
    assert "3 x gaussian(4)" in stdout_of(capsys, "show", clinic)


def test_accept_starts_new_log_if_log_and_head_are_missing(clinic: Path, capsys: Capture) -> None:
    for file in clinic.glob("audit.sqlite*"):
        file.unlink()
    with pytest.raises(FedstillError, match="no audit"):
        dispatch(["audit", "verify", str(clinic)])
    (clinic / "runs" / "spring").mkdir(parents=True)
    (clinic / "runs" / "spring" / "plan.json").touch()
    with pytest.raises(FedstillError, match=r"missing, .*runs"):
        dispatch(["audit", "verify", str(clinic)])
    assert "Accepted: is missing" in stdout_of(capsys, "accept", clinic, "--because", "lost")
    assert "1 entry: hashes" in stdout_of(capsys, "verify", clinic)


def test_show_prints_refusals_with_their_rule(clinic: Path, capsys: Capture) -> None:
    with closing(AuditLog(clinic / "audit.sqlite")) as log:
        log.append(
            Entry(
                "spring",
                NODE_DATA,
                "clinic",
                7,
                "train",
                "refused",
                rule="outputs_only: parameters may not leave",
            )
        )
    words = " ".join(stdout_of(capsys, "show", clinic).split())
    assert "train 7, refused:" in words
    assert "critic: how unlike the node's own data" in words


def test_node_audit_log_is_readable_without_node_names(clinic: Path, capsys: Capture) -> None:
    for file in clinic.glob("audit.sqlite*"):
        file.unlink()
    with closing(AuditLog(clinic / "audit.sqlite")) as log:
        charge(log, 0, payer=NODE_DATA)
        charge(log, 0, run="autumn", payer=NODE_DATA)
    out = stdout_of(capsys, "show", clinic)
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert "run, node" not in out
    words = " ".join(out.split())
    assert "Total cost for these data: 2 x gaussian(4), 4 x laplace(10)." in words
    lines = [line.split() for line in out.splitlines() if line.startswith("these data")]
    assert [line[2:-1] for line in lines] == [
        ["spring", "1", "0"],
        ["autumn", "1", "0"],
        ["all", "runs", "2", "0"],
    ]


def test_export(clinic: Path, capsys: Capture) -> None:
    with closing(AuditLog(clinic / "audit.sqlite")) as log:
        output = list(log.entries())
    lines = clinic.parent / "out.jsonl"
    stdout_of(capsys, "export", clinic, "--out", lines)
    secretive = [{name: row[name] for name in row if name not in (*SECRET, *SECURITY)} for row in output]
    assert [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] == secretive
    for out, expected in ((lines, "does not exist"), (clinic.parent / "out.txt", ".jsonl"), ("", ".jsonl")):
        with raises_invalid("--out", str(out) or ".", expected):
            dispatch(["audit", "export", str(clinic), "--out", str(out)])
    edit(clinic / "audit.sqlite", "DELETE FROM entries WHERE entry = 1")
    with pytest.raises(FedstillError, match=r"not sound.*entry 1 "):
        dispatch(["audit", "export", str(clinic), "--out", str(clinic.parent / "again.jsonl")])


def test_export_omits_hashes_that_would_confirm_guessed_records(clinic: Path, capsys: Capture) -> None:
    """Fingerprints are derived from the records, and hashes of entries are computed from fingerprints."""
    secret = {"content_hash": "c0de", "release_hash": "1eft", "history_hash": "af7e"}
    with closing(AuditLog(clinic / "audit.sqlite")) as log:
        log.append(Entry("spring", NODE_DATA, "clinic", 8, "predict", "response", **secret))  # type: ignore[arg-type]
        output = list(log.entries())
    short, whole = (clinic.parent / f"{name}.jsonl" for name in ("short", "whole"))
    assert "keep it to yourself" not in stdout_of(capsys, "export", clinic, "--out", short)
    assert "keep it to yourself" in stdout_of(capsys, "export", clinic, "--whole", "--out", whole)
    for value in ("c0de", "1eft", "af7e", output[-1]["hash"]):
        assert value not in short.read_text(encoding="utf-8")
        assert value in whole.read_text(encoding="utf-8")
    assert [json.loads(line) for line in whole.read_text(encoding="utf-8").splitlines()] == output
    assert "guesses" in stdout_of(capsys, "export", "--help")


def test_only_accept_changes_files(clinic: Path, capsys: Capture) -> None:
    edit(clinic / "audit.sqlite", "UPDATE entries SET line = line || ' ' WHERE entry = 1")
    before = {file.name: file.read_bytes() for file in clinic.iterdir()}
    stdout_of(capsys, "show", clinic)
    for words in (["verify", clinic], ["export", clinic, "--out", clinic.parent / "x.jsonl"]):
        with pytest.raises(FedstillError):
            dispatch(["audit", *(str(word) for word in words)])
    after = {
        file.name: file.read_bytes() for file in clinic.iterdir() if not file.name.endswith(("-wal", "-shm"))
    }
    assert after == before


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["shw", "."], "did you mean 'audit show'"),
        (["show", "a", "b"], "takes no 'b'"),
        (["show", "nowhere.sqlite"], "file not found: nowhere.sqlite"),
        (["show", "."], "is no node's folder"),
        (["show", ".", "--lst", "3"], "did you mean '--last'"),
        (["accept", "here.sqlite"], "--because"),
        (["show", "here.sqlite", "--delta", "0"], "invalid --delta = 0.0"),
        (["show", "here.sqlite", "--last", "-1"], "invalid --last = -1"),
    ],
)
def test_invalid_audit_calls_are_one_line(
    words: list[str], output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    AuditLog(Path("here.sqlite")).close()
    with pytest.raises(FedstillError, match=output) as raised:
        dispatch(["audit", *words])
    assert isinstance(raised.value, UnknownName) == ("mean" in output)


def test_empty_log_says_that_nothing_left(tmp_path: Path, capsys: Capture) -> None:
    AuditLog(tmp_path / "audit.sqlite").close()
    assert stdout_of(capsys, "show", tmp_path).endswith("Nothing has left.\n")
