"""Privacy and leakage sections of a run's page, from handmade results and values computed by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from fedstill.core.errors import RunFolderError
from fedstill.report.privacy_section import (
    MAX_IMAGES,
    build_leakage_section,
    describe_privacy,
    image_notes,
    max_guess_accuracy,
)
from fedstill.report.records import AuditTotals, Result
from tests.support import attack_results, audit_logs
from tests.support.attack_results import interval, rate_record
from tests.support.golden import Golden
from tests.support.result_files import (
    Page,
    a_folder,
    a_result,
    an_audit,
    corruptions,
    decoded,
    only_result,
    page_of,
    printed,
    read,
)

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


# --- values ---


def test_max_guess_accuracy_is_that_of_optimal_test() -> None:
    # Randomized response that is true with probability e / (1 + e) reaches the bound at epsilon 1.
    assert max_guess_accuracy(1.0, 0.0) == pytest.approx(math.e / (1 + math.e))
    assert max_guess_accuracy(0.0, 0.0) == 0.5
    # Epsilon 0: a guess is correct half the time, and always in a share delta of the cases.
    assert max_guess_accuracy(0.0, 0.5) == pytest.approx(0.75)
    assert max_guess_accuracy(1e6, 0.0) == 1.0


def test_guarantee_of_run_is_that_of_weakest_node() -> None:
    result = result_with(a_node("north", 3.0), a_node("south", 5.0, delta=1e-6))
    assert Result.from_record(result).guarantee == (5.0, 1e-5)
    assert Result.from_record(result_with(a_node("north", 3.0), unprotected_node("south"))).guarantee is None
    assert Result.from_record({"privacy": {"guarantee": None, "text": "no guarantee"}}).guarantee is None


# --- the page ---


def test_page_lists_cost_budget_and_releases_of_each_node(tmp_path: Path, golden: Golden) -> None:
    page = folder_of(tmp_path, result_with(a_node("north", 3.0), a_node("south", 5.0)))
    golden("privacy-section", page.part("Privacy cost", "Nodes and their models"))
    # 1 - (1 - 1e-5) / (e^3 + 1) = 0.952575, up; e^5: 0.993307, up
    kinds = "label counts 80 B , logits 10.0 kB , gradients 30.0 kB"
    assert f"north {kinds} pate 3 1e-05 95.3% 8 5" in page.text
    assert f"south {kinds} pate 5 1e-05 99.4% 8 3" in page.text
    assert "No guarantee:" not in page.text
    assert "disagree" not in page.text
    # Texts that are the same for all nodes appear once.
    for line in (
        COUNTS,
        "logits of predict: all votes of 10 teachers",
        "each record belongs to one teacher",
    ):
        assert page.text.count(line) == 1
    assert page.text.count(UNIT) == 2  # at the top and here
    assert "votes 6.969" in page.text
    assert "north: 4 \u00d7 gaussian(0.2904), 1 \u00d7 laplace(10)" in page.text


def test_nodes_with_different_mechanisms_have_own_entries(tmp_path: Path) -> None:
    other = a_node("south", 5.0, rules=["logits of predict: something else"])
    page = folder_of(tmp_path, result_with(a_node("north", 3.0), other))
    assert "Mechanism of north" in page.text
    assert "Mechanism of south" in page.text


def test_node_without_guarantee_is_named(tmp_path: Path, golden: Golden) -> None:
    page = folder_of(tmp_path, result_with(a_node("north", 3.0), unprotected_node("south")))
    golden("privacy-section-of-one-node", page.part("Privacy cost", "Nodes and their models"))
    assert "no formal privacy guarantee for south" in page.text
    assert "no guarantee 9 releases without" in page.text


def test_nodes_without_mechanism_have_one_sentence(tmp_path: Path) -> None:
    plain = page_of(tmp_path / "plain")
    result = result_with(unprotected_node("north"), unprotected_node("south"))
    result["privacy"]["text"] = "no guarantee"
    assert page_of(tmp_path / "bare", result).text == plain.text


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


def test_page_distinguishes_simulations(tmp_path: Path, golden: Golden) -> None:
    noisy = result_with(a_node("north", 3.0), a_node("south", 5.0))
    simulated = only_result(tmp_path / "a", noisy)
    golden("report-of-noisy-simulation", simulated.lines)
    deployed = only_result(tmp_path / "b", {**noisy, "files": {"queries": {}}})
    golden("report-of-noisy-deployment", deployed.lines)
    # Noise from a known seed gives no protection, and a server cannot bypass a gate.
    for words in ("seed in this report", "past the gates"):
        assert words in simulated.text
        assert words not in deployed.text


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


def test_terminal_prints_privacy_cost(golden: Golden) -> None:
    every = result_with(a_node("north", 3.0), a_node("south", 5.0))
    results = {
        "all nodes": every,
        "one of two": result_with(a_node("north", 3.0), unprotected_node("south")),
        "none": result_with(unprotected_node("north")),
        "two deltas": result_with(a_node("a", 3.0), a_node("b", 5.0, delta=0.01), a_node("c", 4.0)),
        "two units": result_with(a_node("a", 3.0), a_node("b", 2.0, unit="a group", mechanism="dp-sgd")),
    }
    texts = {name: str(describe_privacy(Result.from_record(result))) for name, result in results.items()}
    golden("privacy-summaries", "\n".join(f"{name}: {text}" for name, text in texts.items()))
    assert "epsilon 5 at delta 1e-05" in texts["all nodes"]
    assert "no guarantee at south" in texts["one of two"]
    assert all(
        part in texts["two deltas"] for part in ("epsilon 4 at delta 1e-05", "epsilon 5 at delta 0.01")
    )
    assert all(part in texts["two units"] for part in ("epsilon 3", "epsilon 2", UNIT, "a group"))
    assert describe_privacy(Result()) is None
    assert "epsilon 5 at delta 1e-05" in " ".join(printed(every).split())


# --- notes on images ---


def _crossed(method: str, *up: str, down: int = 7) -> dict[str, Any]:
    kinds = {kind: {"up": 5, "down": down if kind == "label maps" else 0} for kind in up}
    return {**a_result(), "method": method, "bytes": {"up": 9, "down": 9, "by_kind": kinds}}


def test_page_has_notes_on_released_images(tmp_path: Path, golden: Golden) -> None:
    result = _crossed("fediod", "label maps", "difference", "gradients")
    every = [
        result,
        {**result_with(a_node("north", 3.0), unprotected_node("south")), "bytes": result["bytes"]},
    ]
    for number, one in enumerate(every):  # without a mechanism, and with one at a single node
        notes = image_notes(Result.from_record(one))
        golden("notes-on-released-images", "\n".join(notes))
        text = only_result(tmp_path / str(number), one).text
        assert all(" ".join(note.split()) in text for note in notes)


def test_image_notes_depend_on_releases() -> None:
    assert image_notes(Result.from_record(_crossed("fediod", "logits", "gradients"))) == []
    (maps_note,) = image_notes(Result.from_record(_crossed("fediod", "label maps", down=0)))
    assert "other nodes" not in maps_note  # no query sends maps with it
    returned = {"returned": ["label maps"]}
    (maps_note,) = image_notes(Result.from_record({**_crossed("asyndgan", "label maps"), **returned}))
    assert "all other nodes" not in maps_note
    (difference_note,) = image_notes(Result.from_record(_crossed("fediod", "difference")))
    assert "gradients" not in difference_note.lower()


# --- leakage section of a run's page -----------------------------------------------------------------


ATTACKS = ("inversion", "membership", "memorization", "counts")
HOSTILE = '"><script>alert(1)</script>'
Stacks = dict[str, npt.NDArray[Any]]


def a_head(**parts: Any) -> dict[str, Any]:
    """Return the content of a leakage file with the given attacks."""
    attacks = {name: parts.pop(name) for name in ATTACKS if name in parts}
    return {
        "fedstill": "0.1.0",
        "date": "2026-11-22T17:40:00+00:00",
        "machine": "2-core x86_64, Linux",
        "command": "fedstill attack runs/x",
        "seconds": 72.5,
        "config": {"seed": 3, "inversion": {"attacks": ["dlg", "inverting"]}},
        "epsilon": None,
        "releases": ["data sizes", "parameters"],
        "audit": None,
        "skipped": [],
        "sentence": "What left north was enough to work out an image of it.",
        "attacks": attack_results.attack_entries(**attacks),
        **parts,
    }


def an_inversion() -> dict[str, Any]:
    return attack_results.inversion(
        attack_results.inversion_result("DLG", 31.24, 4.05, [30.06, 31.06, 32.06, 31.78]),
        attack_results.inversion_result("Inverting gradients", 22.0, 1.5, [22.0, 23.5, 20.5, 22.0], right=4),
    )


def a_target(of: str = "student", **changes: Any) -> dict[str, Any]:
    """Return a target with two attacks: LiRA succeeds, the loss threshold does not."""
    lira = attack_results.member_attack(
        "LiRA",
        interval(0.6123, 0.5831, 0.6409),
        rate_record(0.01, interval(0.0278, 0.0199, 0.0377), 3, 40),
        rate_record(0.001, interval(0.0084, 0.0043, 0.0145), 0, 12),
    )
    loss = attack_results.member_attack(
        "loss threshold",
        interval(0.5104, 0.4772, 0.5435),
        rate_record(0.01, interval(0.0097, 0.0053, 0.0163), 3, 14),
        rate_record(0.001, interval(0.0007, 0.0, 0.0039), 0, 1),
    )
    return attack_results.target(of, lira, loss, **changes)


PAIRS = [
    {"generated": k, "private": 2 * k, "held_out": 3 * k, "distance": 0.5, "other": 1.0,
     "ratio": 0.642 + 0.02 * k, "node": ("north", "south")[k % 2]}
    for k in range(10)
]  # fmt: skip


def generated(**changes: Any) -> dict[str, Any]:
    """Return attack results on generated images, as for FedIOD."""
    distances = {
        "extractor": "features of the student",
        "dimensions": 64,
        "generated": 1000,
        "average": 27.253,
        "average_held_out": 25.71,
        "full_rank": False,
        "nodes": {
            "north": {"fid": 30.006, "kid": 0.01234, "real": 703},
            "south": {"fid": 24.5, "kid": 0.0098, "real": 734},
        },
        "held_out": {
            "north": {"fid": 26.0, "kid": 0.0001, "real": 703},
            "south": {"fid": 25.42, "kid": -0.00021, "real": 734},
        },
    }
    scores = {"images": 1000, "adapted": 5.104, "nodes": {"north": 4.8, "south": 5.41}, "student": 7.7}
    features = attack_results.space("features of the student", share=0.5, fresh=None, pairs=PAIRS)
    spaces = (attack_results.space("pixels", pairs=PAIRS), features)
    noised = {
        "largest_error": 0.0412,
        "largest_class": "zero",
        "size_error": -12.37,
        "reported_absent": ["one"],
    }
    return {
        "releases": ["data sizes", "label counts", "logits", "gradients"],
        "membership": [
            a_target(),
            a_target("answers of south", view="what south answered", shadows=8, trained="alone"),
        ],
        "memorization": attack_results.memorization(*spaces, distances=[distances], scores=scores),
        "counts": [
            attack_results.counts_node("north", True, absent=["two"], reported_absent=["two"]),
            attack_results.counts_node("south", False, 0.05, **noised),
        ],
        **changes,
    }


def pictures(count: int, seed: int, channels: int = 1, side: int = 8) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, channels, side, side)).astype(np.uint8)


def of_inversion() -> Stacks:
    return {f"inversion.{name}": pictures(4, k) for k, name in enumerate(("original", "dlg", "inverting"))}


def of_copying() -> Stacks:
    return {
        f"memorization.{name}": pictures(10, k, 3)
        for k, name in enumerate(("generated", "private", "held_out"))
    }


def attacked(folder: Path, leakage: object, stacks: Stacks | None = None, **result: Any) -> Page:
    """Return the page of a run with leakage files."""
    a_folder(folder, {**a_result(), **result})
    (folder / "leakage.json").write_text(leakage if isinstance(leakage, str) else json.dumps(leakage))
    if stacks is not None:
        save_file(stacks, folder / "leakage.safetensors")
    return read(folder)


def image_urls(page: Page, *alts: str) -> list[str]:
    """Return the URLs of images with one of the alternative texts."""
    return [attrs["src"] or "" for tag, attrs in page.tags if tag == "img" and attrs.get("alt") in alts]


# --- values ---


def test_section_starts_with_summary_and_calls_nothing_safe(tmp_path: Path, golden: Golden) -> None:
    page = attacked(tmp_path, a_head(inversion=an_inversion()), of_inversion())
    part = page.part("Leakage", "Nodes and their models")
    golden("leakage-section-of-inversion", part)
    assert "What left north was enough to work out an image of it." in part
    assert "no guarantee" in part
    assert "The repetition equals the run" in part
    assert '"attacks": [ "dlg", "inverting" ]' in part


def test_section_reports_disagreement_with_audit_log(tmp_path: Path) -> None:
    why = "north: 10 bytes of logits by the audit log, 12 released"
    text = attacked(tmp_path, a_head(audit=why, epsilon=2.9951)).text
    assert f"The repetition differs from the run of this folder: {why}." in text
    assert "The repetition equals the run" not in text
    assert "Formal privacy guarantee: epsilon at most 3 at each node." in text  # rounded up


def test_inversion_table_has_baseline_without_attack(tmp_path: Path) -> None:
    page = attacked(tmp_path, a_head(inversion=an_inversion()), of_inversion())
    for expected in (
        "DLG all parameters 31.2 \u00b1 4.0 dB 3 of 4 3.1 s "
        "Inverting gradients all parameters 22.0 \u00b1 1.5 dB 4 of 4 3.1 s "
        "Baseline without attack 9.8 dB",
        "victim 1 victim 2 victim 3 victim 4 original DLG 30.1 dB 31.1 dB 32.1 dB 31.8 dB "
        "Inverting gradients 22.0 dB 23.5 dB 20.5 dB 22.0 dB",
    ):
        assert expected in page.text, expected
    assert "<b>31.2 \u00b1 4.0 dB</b>" in (tmp_path / "report.html").read_text()  # the best attack is bold


def test_original_and_recovered_images_are_in_order(tmp_path: Path) -> None:
    stacks = of_inversion()
    page = attacked(tmp_path, a_head(inversion=an_inversion()), stacks)
    alts = ("original", "DLG", "Inverting gradients")
    for alt, name in zip(alts, ("original", "dlg", "inverting"), strict=True):
        shown = [decoded(address) for address in image_urls(page, alt)]
        np.testing.assert_array_equal(np.stack(shown), stacks[f"inversion.{name}"][:, 0])
    order = [attrs["alt"] for tag, attrs in page.tags if tag == "img" and attrs.get("alt") in alts]
    assert order == [alt for alt in alts for _ in range(4)]


def test_images_beyond_maximum_are_counted(tmp_path: Path) -> None:
    part = {**an_inversion(), "images": 4}
    part["attacks"] = part["attacks"][:1]
    part["attacks"][0]["psnr"]["per_image"] = [20.0 + k for k in range(16)]
    stacks: Stacks = {"inversion.original": pictures(16, 0), "inversion.dlg": pictures(16, 1)}
    page = attacked(tmp_path, a_head(inversion=part), stacks)
    assert len(image_urls(page, "original")) == len(image_urls(page, "DLG")) == MAX_IMAGES == 10
    assert "The first 10 images; 6 more are included in the metrics above." in page.text
    assert "victim 1, image 4 victim 2, image 1" in page.text
    assert "20.0 dB 21.0 dB" in page.text
    assert "30.0 dB" not in page.text  # PSNR of the eleventh image


def test_membership_table_has_intervals_and_resolution_note(tmp_path: Path, golden: Golden) -> None:
    page = attacked(tmp_path, a_head(**generated()), of_copying())
    golden("leakage-section-of-generated-images", page.part("Leakage", "Nodes and their models"))
    for expected in (
        "LiRA student 61.2% (58.3 to 64.1) 2.8% (2.0 to 3.8) 40 of 1,437; false alarms: 3 of 360 "
        "0.8% (0.4 to 1.5) 12 of 1,437; false alarms: 0 of 360",
        "loss threshold student 51.0% (47.7 to 54.4) not significantly different from guessing 1.0%",
        "Baseline without attack 50% 1% 0.1%",
        "1,000 others",
    ):
        assert expected in page.text, expected
    assert (
        page.text.count("not significantly different from guessing") == 2
    )  # the loss attack on both targets; LiRA's intervals are above 0.5
    assert "1% false alarms need" not in page.text.replace("0.1% false alarms", "")
    lines = [attrs for tag, attrs in page.tags if tag == "line" and attrs.get("class") == "whisker"]
    assert ("58.31%", "64.09%") in [(attrs["x1"], attrs["x2"]) for attrs in lines]
    assert "61.23%" in page.attributes("cx")


def test_memorization_is_compared_with_held_out_images(tmp_path: Path) -> None:
    page = attacked(tmp_path, a_head(**generated()), of_copying())
    for expected in (
        "pixels 1,000 images 58.2% (55.1 to 61.2) 1,000 generated, 1,437 private, 360 held-out "
        "0.034 999 permutations -3.2 p 0.00066 0.64 0.71",
        "features of the student 1,000 images 50.0%",
        "ratio 0.64, north, closer than any held-out image ratio 0.66, south",
        "ratio 0.82, south",
    ):
        assert expected in page.text, expected
    assert page.text.count("closer than any held-out image") == 4  # 0.642, 0.662, 0.682, 0.702; then 0.722
    order = [attrs["alt"] for tag, attrs in page.tags if tag == "img"]
    rows = ("generated", "nearest private", "nearest held-out")
    assert [alt for alt in order if alt in rows] == [alt for alt in rows for _ in range(10)]


def test_section_shows_inception_scores_and_label_counts(tmp_path: Path) -> None:
    text = attacked(tmp_path, a_head(**generated())).text
    for expected in (
        "5.10 of 1,000 images the student 7.70 of 1,000 images north 4.80 south 5.41",
        "2 nodes at 1 of 2 nodes 0.0% to 5.0%",
        "north exact 0.0 0 1 of 1 classes: two south noised 4.1 class zero -12.4 no class is absent "
        "reported as absent, but present: one",
    ):
        assert expected in text.replace("baseline 1 at least ", ""), expected
    nobody = generated()
    nobody["memorization"]["scores"]["student"] = None
    assert "the student 7.70" not in attacked(tmp_path, a_head(**nobody)).text


def test_nodes_have_display_names(tmp_path: Path) -> None:
    nodes = [
        {**node, "site": site} for node, site in zip(a_result()["nodes"], ("Utrecht", "Ghent"), strict=True)
    ]
    text = attacked(tmp_path, a_head(**generated()), of_copying(), nodes=nodes).text
    for expected in (
        "LiRA answers of south \u00b7 Ghent",
        "ratio 0.64, north \u00b7 Utrecht",
        "north \u00b7 Utrecht 30.01",
        "north \u00b7 Utrecht 4.80",
        "north \u00b7 Utrecht exact",
    ):
        assert expected in text, expected


# --- missing parts ---


def test_run_without_attacks_has_no_section(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    assert build_leakage_section(folder, Result.from_record(a_result())) is None
    assert "Leakage" not in read(folder).text


def test_skipped_attacks_have_reasons(tmp_path: Path) -> None:
    skipped = [
        {"attack": "memorization", "reason": "the server made no images."},
        {"attack": "counts", "reason": "no <counts> left"},
    ]
    text = attacked(tmp_path, a_head(inversion=an_inversion(), skipped=skipped), of_inversion()).text
    part = text[text.index("Skipped attacks") :]
    assert "memorization : the server made no images." in part
    assert "counts : no <counts> left." in part
    assert "membership" not in part
    heads = ("Membership inference", "Memorization", "Released label counts")
    assert not any(head in text for head in heads)


def test_missing_images_are_reported(tmp_path: Path) -> None:
    leakage = a_head(inversion=an_inversion(), **generated())
    page = attacked(tmp_path, leakage)
    assert page.text.count("No images: leakage.safetensors") == 2
    assert "31.2 \u00b1 4.0" in page.text
    page = attacked(tmp_path, leakage, of_inversion())
    assert len(image_urls(page, "original")) == 4
    assert image_urls(page, "generated") == []
    two = {name: np.repeat(stack, 2, axis=1) for name, stack in of_inversion().items()}
    assert image_urls(attacked(tmp_path, leakage, two), "original") == []  # two channels cannot be shown


# --- broken and malicious files ---


def test_broken_image_file_raises_error(tmp_path: Path) -> None:
    (tmp_path / "leakage.safetensors").write_bytes(b"no file of tensors")
    with pytest.raises(RunFolderError, match="as safetensors"):
        attacked(tmp_path, a_head(inversion=an_inversion()))


def test_values_of_wrong_type_raise_one_line_errors(tmp_path: Path) -> None:
    """Corrupt each value once, with alternating kinds of junk; all combinations would take a minute."""
    parts = generated()
    parts["membership"] = parts["membership"][:1]
    parts["memorization"]["spaces"] = [attack_results.space("pixels", pairs=PAIRS[:1])]
    leakage = json.loads(json.dumps(a_head(inversion=an_inversion(), **parts)))
    kinds = (None, "x", 7, [3, None], {"a": [1]}, float("nan"))
    by_part = zip(*(corruptions(leakage, junk) for junk in kinds), strict=True)  # (parts, kinds)
    broken = [versions[index % len(kinds)] for index, versions in enumerate(by_part)]
    assert len(broken) > 200
    refused = []
    for changed in broken:
        (tmp_path / "leakage.json").write_text(json.dumps(changed))
        try:
            assert build_leakage_section(tmp_path, Result.from_record(a_result())) is not None
        except RunFolderError as error:
            refused.append(str(error))
    assert len(refused) > 50
    line = re.compile(r"\S+leakage\.json: [^\n]+")
    assert all(map(line.fullmatch, refused))


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            keep = ("name", "stack", "column")
            return {
                (HOSTILE if key in ("north", "south") else key): part if key in keep else poisoned(part)
                for key, part in value.items()
            }
        if isinstance(value, list):
            return [poisoned(part) for part in value]
        return HOSTILE if isinstance(value, str) else value

    whole = a_head(inversion=an_inversion(), **generated(), audit="other")
    leakage = poisoned(json.loads(json.dumps(whole)))
    leakage["skipped"] = [{"attack": HOSTILE, "reason": HOSTILE}]
    page = attacked(tmp_path, leakage, {**of_inversion(), **of_copying()})
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "iframe", "object"})
    assert all(link.startswith("#") for link in page.attributes("href")[1:])  # the first is the icon
    assert page.text.count(HOSTILE) > 40
    assert any(HOSTILE in (alt or "") for alt in page.attributes("alt"))
    assert all(source.startswith("data:image/png;base64,") for source in page.attributes("src"))
