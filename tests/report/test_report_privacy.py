"""Privacy section of a report, from handmade results and values computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import RunFolderError
from fedstill.report.privacy_section import describe_privacy, image_notes, max_guess_accuracy
from fedstill.report.records import AuditTotals, Result
from tests.support import audit_logs
from tests.support.result_files import Page, a_folder, a_result, an_audit, only_result, page_of, printed, read

UNIT = "one training record of this node, added or removed"
COUNTS = "counts of count_labels: Laplace noise of scale 10 on each count"


def a_node(name: str, epsilon: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "mechanism": "pate",
        "unit": UNIT,
        "delta": 1e-5,
        "budget": 8.0,
        "accountant": "pld",
        "randomness": "a cryptographic generator",
        "noise": {"pate": 6.968824790927517},
        "rules": [COUNTS, "logits of predict: all votes of 10 teachers, Gaussian noise 6.97"],
        "assumes": ["each record belongs to one teacher"],
        "guarantee": epsilon is not None,
        "epsilon": epsilon,
        "left": None if epsilon is None else 8.0 - epsilon,
        "events": {"gaussian(0.2903676996219799)": 4, "laplace(10.0)": 1},
        "releases_without_guarantee": 0,
        **changes,
    }


def unprotected_node(name: str, **changes: Any) -> dict[str, Any]:
    """Return a node without a mechanism."""
    privacy = {"mechanism": "none", "unit": "", "noise": {}, "rules": [], "assumes": [], "events": {}}
    return a_node(name, None, **{**privacy, "budget": None, "releases_without_guarantee": 9, **changes})


def result_with(*nodes: dict[str, Any]) -> dict[str, Any]:
    every = all(node["guarantee"] for node in nodes)
    return {
        **a_result(),
        "privacy": {"guarantee": every or None, "text": "as reported", "nodes": list(nodes)},
    }


def folder_of(folder: Path, result: dict[str, Any]) -> Page:
    """Return a run's page, with an audit log that has the charges of the result."""
    a_folder(folder, result)
    charges = {node["name"]: node["events"] for node in result["privacy"]["nodes"] if node["guarantee"]}
    lines, first = [], set()
    for line in an_audit():
        node_charges = charges.get(line["node"])
        if node_charges is not None:
            entry = {
                "mechanism": "pate",
                "cost": {} if line["node"] in first else node_charges,
                "no_guarantee": 0,
            }
            line = {**line, **entry}
        first.add(line["node"])
        lines.append(line)
    audit_logs.write(folder, lines)
    return read(folder)


# --- figures ---


def test_max_guess_accuracy_is_that_of_optimal_test() -> None:
    # Randomized response that tells the truth with probability e / (1 + e) attains them at epsilon 1.
    assert max_guess_accuracy(1.0, 0.0) == pytest.approx(math.e / (1 + math.e))
    assert max_guess_accuracy(0.0, 0.0) == 0.5
    # Epsilon 0: a guess is right half the time, and always in a share delta of the cases.
    assert max_guess_accuracy(0.0, 0.5) == pytest.approx(0.75)
    assert max_guess_accuracy(1e6, 0.0) == 1.0


def test_guarantee_of_run_is_that_of_weakest_node() -> None:
    result = result_with(a_node("north", 3.0), a_node("south", 5.0, delta=1e-6))
    assert Result.from_record(result).guarantee == (5.0, 1e-5)
    assert Result.from_record(result_with(a_node("north", 3.0), unprotected_node("south"))).guarantee is None
    assert Result.from_record({"privacy": {"guarantee": None, "text": "no guarantee"}}).guarantee is None


# --- the page ---


def test_page_lists_cost_budget_and_releases_of_each_node(tmp_path: Path) -> None:
    page = folder_of(tmp_path, result_with(a_node("north", 3.0), a_node("south", 5.0)))
    assert "The releases of each node have a formal privacy guarantee" in page.text
    # 1 - (1 - 1e-5) / (e^3 + 1) = 0.952575, up; e^5: 0.993307, up
    kinds = "label counts 80 B , logits 10.0 kB , gradients 30.0 kB"
    assert f"north {kinds} pate 3 1e-05 95.3% 8 5" in page.text
    assert f"south {kinds} pate 5 1e-05 99.4% 8 3" in page.text
    assert "No guarantee:" not in page.text
    assert "disagree" not in page.text
    # What is said alike is said once.
    for line in (
        COUNTS,
        "logits of predict: all votes of 10 teachers",
        "each record belongs to one teacher",
        UNIT,
    ):
        assert page.text.count(line) == 1
    assert "Noise votes 6.969 Accountant pld Randomness a cryptographic generator" in page.text
    assert "north: 4 \u00d7 gaussian(0.2904), 1 \u00d7 laplace(10) south: 4 \u00d7" in page.text


def test_nodes_with_different_mechanisms_have_own_entries(tmp_path: Path) -> None:
    other = a_node("south", 5.0, rules=["logits of predict: something else"])
    page = folder_of(tmp_path, result_with(a_node("north", 3.0), other))
    assert "Mechanism of north" in page.text
    assert "Mechanism of south" in page.text


def test_node_without_guarantee_is_named(tmp_path: Path) -> None:
    page = folder_of(tmp_path, result_with(a_node("north", 3.0), unprotected_node("south")))
    assert "There is no formal privacy guarantee for south" in page.text
    assert "none no guarantee 9 releases without none set" in page.text
    assert "Mechanism of north" in page.text


def test_nodes_without_mechanism_have_one_sentence(tmp_path: Path) -> None:
    plain = page_of(tmp_path / "plain")
    result = result_with(unprotected_node("north"), unprotected_node("south"))
    result["privacy"]["text"] = "no guarantee"
    assert page_of(tmp_path / "bare", result).text == plain.text
    assert "There is no formal privacy guarantee (see Privacy below)" in plain.text


def test_disagreement_on_cost_with_audit_log_is_reported(tmp_path: Path) -> None:
    result = result_with(a_node("north", 3.0), a_node("south", 5.0))
    folder_of(tmp_path, result)
    result["privacy"]["nodes"][1]["events"] = {"laplace(10.0)": 1}
    (tmp_path / "result.json").write_text(json.dumps(result))
    page = read(tmp_path)
    assert "disagree on the privacy cost of south." in page.text


def test_result_without_audit_log_shows_cost(tmp_path: Path) -> None:
    page = only_result(tmp_path, result_with(a_node("north", 3.0)))
    assert "north not measured pate 3 1e-05" in page.text
    assert "disagree" not in page.text


def test_page_distinguishes_simulations(tmp_path: Path) -> None:
    noisy = result_with(a_node("north", 3.0), a_node("south", 5.0))
    losses = "not measured : losses depend on a node's records, so they stay with the node."
    text = only_result(tmp_path / "a", noisy).text
    assert "but comes from the seed in this report" in text
    assert "Randomness a cryptographic generator; in this simulation, from the seed in this report" in text
    assert "past the gates for this page only. The server received them (with noise)." in text
    assert losses not in text
    text = only_result(tmp_path / "b", {**noisy, "files": {"queries": {}}}).text
    assert "seed in this report" not in text
    assert "mechanism, noise and cost are as reported by each node" in text
    assert "Counts are as reported by each node, with noise." in text
    assert "for this page only" not in text
    assert losses in text
    assert "past the gates for this page only." in only_result(tmp_path / "c", a_result()).text


@pytest.mark.parametrize("odd", [3, "x", [], {"a": 1}])
def test_rejects_privacy_values_of_wrong_type(tmp_path: Path, odd: object) -> None:
    for name in ("guarantee", "noise", "events"):
        node = {**a_node("north", 3.0), name: odd}
        if name != "guarantee" and isinstance(odd, dict):
            continue
        with pytest.raises(RunFolderError, match=rf"result\.json: privacy\.nodes\[0\]\.{name} is "):
            only_result(tmp_path, result_with(node))


def test_noisy_counts_are_reported(tmp_path: Path) -> None:
    result = result_with(a_node("north", 3.0), a_node("south", 5.0))
    assert "released its number of examples per class (with noise)" in page_of(tmp_path, result).text
    follows = "The exact number of records of south follows from the privacy cost of training"
    assert follows not in page_of(tmp_path, result).text
    south = a_node("south", 5.0, events={"gaussian(2.0, rate=0.25)": 4, "laplace(10.0)": 1})
    assert follows in page_of(tmp_path, result_with(a_node("north", 3.0), south)).text
    exact = a_node("south", 5.0, rules=["counts of count_labels: exact: no guarantee"])
    page = page_of(tmp_path, result_with(a_node("north", 3.0), exact)).text
    assert "released its number of examples per class (north with noise)" in page
    assert "training (as reported" not in page, "counts of a simulation are exact"
    away = {**result_with(a_node("north", 3.0), exact), "files": {"queries": {}}}
    assert "training (as reported by nodes, north with noise)" in page_of(tmp_path, away).text


def test_infinite_epsilon_is_shown(tmp_path: Path) -> None:
    node = a_node("north", math.inf, budget=None, left=None)
    assert Result.from_record(result_with(node)).guarantee == (math.inf, 1e-5)
    assert "pate inf 1e-05 over 99.9% none set" in only_result(tmp_path, result_with(node)).text


# --- the audit, the terminal ---


def test_charges_are_read_from_audit_log(tmp_path: Path) -> None:
    lines = [
        {"node": "north", "mechanism": "pate", "cost": {"laplace(10.0)": 1, "gaussian(2.0)": 3}},
        {"node": "north", "mechanism": "pate", "cost": {"gaussian(2.0)": 4}},
        {"node": "north", "mechanism": "pate", "no_guarantee": 1},
        {"node": "north", "mechanism": "pate"},
        {"node": "north", "part": "refused", "rule": "a rule"},
    ]
    audit_logs.write(tmp_path, lines)
    totals = AuditTotals.read(tmp_path / "audit.sqlite")
    assert totals is not None
    assert totals.nodes["north"].charges == {"laplace(10.0)": 1, "gaussian(2.0)": 7}
    assert totals.nodes["north"].without_guarantee == 1


def test_terminal_prints_privacy_cost() -> None:
    every = result_with(a_node("north", 3.0), a_node("south", 5.0))
    assert (
        describe_privacy(Result.from_record(every))
        == f"at most epsilon 5 at delta 1e-05 at each node (pate), for {UNIT}"
    )
    some = result_with(a_node("north", 3.0), unprotected_node("south"))
    assert (
        describe_privacy(Result.from_record(some))
        == f"epsilon 3 at delta 1e-05 at north (pate), for {UNIT}; no guarantee at south"
    )
    assert describe_privacy(Result.from_record(result_with(unprotected_node("north")))) == "as reported"
    mixed = result_with(a_node("a", 3.0), a_node("b", 5.0, delta=0.01), a_node("c", 4.0))
    own = f"at most epsilon 4 at delta 1e-05 at a and c (pate), for {UNIT}"
    assert (
        describe_privacy(Result.from_record(mixed))
        == f"{own}; epsilon 5 at delta 0.01 at b (pate), for {UNIT}"
    )
    groups = result_with(a_node("a", 3.0), a_node("b", 2.0, unit="a group", mechanism="dp-sgd"))
    summary = "epsilon 2 at delta 1e-05 at b (dp-sgd), for a group"
    assert (
        describe_privacy(Result.from_record(groups))
        == f"epsilon 3 at delta 1e-05 at a (pate), for {UNIT}; {summary}"
    )
    assert describe_privacy(Result()) is None
    assert "at most epsilon 5 at delta 1e-05 at each node (pate)" in " ".join(printed(every).split())


# --- of images ---


def _crossed(method: str, *up: str, down: int = 7) -> dict[str, Any]:
    kinds = {kind: {"up": 5, "down": down if kind == "label maps" else 0} for kind in up}
    return {**a_result(), "method": method, "bytes": {"up": 9, "down": 9, "by_kind": kinds}}


def test_page_has_notes_on_released_images(tmp_path: Path) -> None:
    result = _crossed("fediod", "label maps", "difference", "gradients")
    every = [
        result,
        {**result_with(a_node("north", 3.0), unprotected_node("south")), "bytes": result["bytes"]},
    ]
    for number, one in enumerate(every):  # without any mechanism, and with one at a node
        text = only_result(tmp_path / str(number), one).text
        assert "Label maps, which show the outlines in private images, were released: one per image." in text
        assert "They were sent to all other nodes." in text
        assert "Nodes compared the server's images with their own images" in text
        assert "from which a server can reconstruct the node's image" in text


def test_image_notes_depend_on_releases() -> None:
    assert image_notes(Result.from_record(_crossed("fediod", "logits", "gradients"))) == []
    (maps_note,) = image_notes(Result.from_record(_crossed("fediod", "label maps", down=0)))
    assert "other nodes" not in maps_note  # no query has maps with it
    returned = {"returned": ["label maps"]}
    (maps_note,) = image_notes(Result.from_record({**_crossed("asyndgan", "label maps"), **returned}))
    assert maps_note.endswith("Each was returned to its own node only.")
    (difference_note,) = image_notes(Result.from_record(_crossed("fediod", "difference")))
    assert "gradients" not in difference_note.lower()
