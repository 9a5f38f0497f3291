"""A server whose inputs are copies is caught, one whose inputs are fresh is not; whence the numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.attacks import memorization as module
from fedstill.attacks.attack import AttackResult
from fedstill.attacks.attack_runner import attack_record
from fedstill.attacks.generative_metrics import (
    frechet_distance,
    inception_scores,
    kernel_distance,
    penultimate_extractor,
    pixel_extractor,
)
from fedstill.attacks.memorization import Memorization, examine_images, memorization_test
from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data import Digits, load
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.standalone import Standalone
from fedstill.models import build
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.setting import Setting
from fedstill.runs.simulation import Simulation
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel

SHAPE, SIZES = (1, 8, 8), (200, 300, 100)
FEW = Memorization(images=150, permutations=199, pairs=5)
PIXELS = pixel_extractor((0.5,), (0.5,))


def digits() -> tuple[list[TensorData], TensorData, torch.Tensor]:
    """Three nodes' digits, held-out ones, and fresh ones that neither of them has."""
    data = load(Digits())
    images = torch.cat([data.train.inputs, data.test.inputs])
    labels = torch.cat([data.train.targets, data.test.targets])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    *parts, test, fresh, _ = torch.split(order, [*SIZES, 300, 150, len(order) - 1050])
    nodes = [TensorData(images[part], labels[part]) for part in parts]
    return nodes, TensorData(images[test], labels[test]), images[fresh]


PARTS, TEST, FRESH = digits()


def setting(method: Any = None, **changes: Any) -> Setting:
    given: dict[str, Any] = {
        "task": Classification(10),
        "parts": PARTS,
        "models": [build("mlp:16", SHAPE, 10, 0, index) for index in range(3)],
        "student": build("mlp:16", SHAPE, 10, 0, "student"),
        "test": TEST,
        "method": method or FedAvg(rounds=1),
        "policies": [PolicyConfig(outputs_only=False)] * 3,
        "local": LocalConfig(epochs=1, batch=20),
        **changes,
    }
    return Setting(**given)


@pytest.fixture(scope="module")
def run() -> Simulation:
    experiment = Simulation(setting())
    experiment.run()
    return experiment


def spaces(found: AttackResult) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = found.part["spaces"]
    return told


def noisy(images: torch.Tensor, noise: float = 0.02) -> torch.Tensor:
    return images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))


# --- what is a copy, and what is not ----------------------------------------------------------------


def test_a_server_that_memorizes_is_caught_and_whose_images_it_has(run: Simulation) -> None:
    found = examine_images(noisy(PARTS[1].inputs[:150]), run, FEW, 0)
    for space in spaces(found):
        assert space["p_value"] < 0.01
        assert space["pairs"][-1]["ratio"] < min(0.1, space["held_out_ratio"] / 2)
        # Image i is a copy of node-1's image i.
        assert [(pair["node"], pair["private"]) for pair in space["pairs"]] == [
            ("node-1", pair["generated"]) for pair in space["pairs"]
        ]
    for name in ("generated", "private"):
        assert found.pictures[name].shape == (5, *SHAPE)
    apart = found.pictures["generated"].int() - found.pictures["private"].int()
    assert apart.abs().max() < 20
    near = {name: of["fid"] for name, of in found.part["distances"][0]["nodes"].items()}
    assert min(near, key=near.__getitem__) == "node-1"


# --- where numbers come from ------------------------------------------------------------------------


def test_numbers_are_those_of_the_functions(run: Simulation) -> None:
    found = examine_images(FRESH, run, replace(FEW, images=60), 3)
    last = FRESH[-60:]
    features = penultimate_extractor(run.student, last, "the student")
    everyone = torch.cat([part.inputs for part in PARTS])
    assert (found.part["images"], found.part["of"]) == (60, "inputs that the server sent to nodes")
    for extractor, copies, apart in zip(
        (PIXELS, features), spaces(found), found.part["distances"], strict=True
    ):
        same = memorization_test(
            last, everyone, TEST.inputs, extractor, seed=3, permutations=199, pair_count=5
        )
        assert copies["extractor"] == apart["extractor"] == extractor.name
        for name in ("generated", "private", "held_out", "statistic", "expected", "p_value", "permutations"):
            assert copies[name] == same[name]
        for name in ("share", "low", "high", "z", "z_p_value", "held_out_ratio"):
            assert copies[name] == same[name]
        for told, pair in zip(copies["pairs"], same["pairs"], strict=True):
            assert (told["generated"], told["held_out"]) == (pair["generated"], pair["held_out"])
            assert (told["distance"], told["other"]) == (pair["distance"], pair["other"])
            assert told["ratio"] == pair["ratio"]
            own = run.nodes[int(told["node"][-1])].data.inputs
            assert torch.equal(own[told["private"]], everyone[pair["private"]])
        nodes = {node.name: node.data.inputs for node in run.nodes}
        real = {name: extractor(own) for name, own in nodes.items()}
        far = {name: frechet_distance(extractor(last), each) for name, each in real.items()}
        spread = TEST.inputs[torch.linspace(0, 299, 60).long()]
        beside = {name: frechet_distance(extractor(spread), each) for name, each in real.items()}
        for key, found_ in (("average", far), ("average_held_out", beside)):
            assert apart[key] == pytest.approx(sum(found_.values()) / 3)
        assert (apart["generated"], apart["full_rank"]) == (60, apart["dimensions"] == 16)
        kid = kernel_distance(extractor(last), real["node-2"])
        assert apart["nodes"]["node-2"] == {"fid": far["node-2"], "kid": kid, "real": 100}
        assert apart["held_out"]["node-0"]["fid"] == beside["node-0"]
    assert [space["dimensions"] for space in found.part["distances"]] == [64, 16]
    scores = inception_scores(last, {node.name: node.model for node in run.nodes})
    student = inception_scores(last, {"student": run.student})["student"]
    adapted = pytest.approx(sum(scores.values()) / 3)
    assert found.part["scores"] == {"images": 60, "adapted": adapted, "nodes": scores, "student": student}
    assert found.skipped == []


def test_an_image_that_is_asked_about_again_counts_once(run: Simulation) -> None:
    moved = FRESH[:20] + 1e-3 * torch.randn(3, 20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    again = examine_images(torch.cat([*moved, FRESH[:20]]), run, FEW, 3)
    assert again.part == examine_images(FRESH[:20], run, FEW, 3).part
    assert again.part["images"] == 20
    with pytest.raises(ArgumentError, match="generated inputs is 'all one image'"):
        examine_images(FRESH[:1].repeat(5, 1, 1, 1), run, FEW, 3)


def test_held_out_and_generated_images_are_as_many_in_fid(run: Simulation) -> None:
    images = torch.cat([PARTS[0].inputs, PARTS[1].inputs, PARTS[2].inputs, FRESH[:60]])
    found = examine_images(images, run, replace(FEW, images=len(images)), 3)
    count = min(len(TEST), found.part["images"])
    assert count < found.part["images"]
    assert {apart["generated"] for apart in found.part["distances"]} == {count}


def test_of_many_images_some_are_drawn(run: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IMAGES", 90)
    monkeypatch.setattr(module, "MAX_NODE_IMAGES", 40)
    found = examine_images(noisy(FRESH), run, FEW, 0)
    drawn = "90 of 600 private and 90 of 300 held-out images were drawn to compare with"
    for space in spaces(found):
        assert (space["private"], space["held_out"]) == (90, 90)
        assert space["caveats"] == [drawn]
    (p, *_) = (row for row in FEW.rows(found.part) if row.metric == "p")
    assert (
        p.note
        == "199 permutations; 90 of 600 private and 90 of 300 held-out images were drawn to compare with"
    )
    shown = found.pictures
    for row, pair in enumerate(spaces(found)[0]["pairs"]):
        true = run.nodes[int(pair["node"][-1])].data.inputs[pair["private"]]
        assert torch.equal(shown["private"][row], ((true + 1) * 127.5).round().to(torch.uint8))
        other = TEST.inputs[pair["held_out"]]
        assert torch.equal(shown["held_out"][row], ((other + 1) * 127.5).round().to(torch.uint8))
    assert len({pair["node"] for pair in spaces(found)[0]["pairs"]}) > 1
    assert {of["real"] for of in found.part["distances"][0]["nodes"].values()} == {40}
    assert json.dumps(spaces(found)) == json.dumps(spaces(examine_images(noisy(FRESH), run, FEW, 0)))


def test_spaces_too_large_for_fid_are_told(run: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FID_DIMENSIONS", 63)
    found = examine_images(FRESH, run, FEW, 0)
    assert [space["dimensions"] for space in found.part["distances"]] == [16]
    assert len(spaces(found)) == 2
    (skipped,) = found.skipped
    assert skipped[0] == "distances"
    assert "pixels: 64 dimensions, more than 63" in skipped[1]


# --- patients ---------------------------------------------------------------------------------------


def test_patients_are_drawn_whole() -> None:
    """Numbers of patients may be alike in two places, where they are of two patients."""
    parts = [replace(part, groups=torch.arange(len(part)) // 10) for part in PARTS]
    test = replace(TEST, groups=torch.arange(len(TEST)) // 10)
    experiment = Simulation(setting(Standalone(), parts=parts, test=test))
    (space,) = spaces(examine_images(FRESH, experiment, FEW, 0))
    everyone = torch.cat([part.inputs for part in PARTS])
    whose = (torch.arange(600) // 10, 60 + torch.arange(300) // 10)
    same = memorization_test(
        FRESH, everyone, TEST.inputs, PIXELS, seed=0, permutations=199, pair_count=5, groups=whose
    )
    alone = memorization_test(FRESH, everyone, TEST.inputs, PIXELS, seed=0, permutations=199, pair_count=5)
    assert (space["expected"], space["p_value"]) == (same["expected"], same["p_value"])
    assert space["expected"] != alone["expected"]

    by_cases = replace(TEST, cases=CaseIndex(torch.arange(300) // 10, ("",) * 30, ("",) * 30))
    experiment = Simulation(setting(Standalone(), parts=parts, test=by_cases))
    assert spaces(examine_images(FRESH, experiment, FEW, 0)) == [space]

    # Of held-out images nothing is known: drawn one by one, and said so.
    experiment = Simulation(setting(Standalone(), parts=parts))
    (space,) = spaces(examine_images(FRESH, experiment, FEW, 0))
    assert space["expected"] == alone["expected"]
    assert "p is too small" in space["caveats"][0]


# --- what does not apply ----------------------------------------------------------------------------


def test_scores_are_of_one_label_an_image() -> None:
    parts = [replace(part, targets=torch.nn.functional.one_hot(part.targets, 10)) for part in PARTS]
    test = replace(TEST, targets=torch.nn.functional.one_hot(TEST.targets, 10))
    found = examine_images(FRESH, Simulation(setting(parts=parts, test=test, task=MultiLabel(10))), FEW, 0)
    assert found.part["scores"] is None
    assert [name for name, _ in found.skipped] == ["scores"]
    assert "multi-label" in found.skipped[0][1]
    assert len(spaces(found)) == 2


def test_a_student_that_diverged_leaves_pixels() -> None:
    experiment = Simulation(setting())
    for parameter in experiment.student.parameters():
        parameter.data.fill_(torch.nan)
    found = examine_images(FRESH, experiment, FEW, 0)
    assert [space["extractor"] for space in spaces(found)] == ["pixels"]
    assert found.part["scores"] is None
    assert [name for name, _ in found.skipped] == ["memorization", "distances", "scores"]
    assert all("NaN" in reason for _, reason in found.skipped)


def test_inputs_that_are_no_numbers_give_nothing(run: Simulation) -> None:
    found = examine_images(FRESH * torch.nan, run, FEW, 0)
    assert (found.part["spaces"], found.part["distances"], found.part["scores"]) == ([], [], None)
    assert found.pictures == {}
    assert Memorization().sentence(found.part) == ""
    assert {name for name, _ in found.skipped} == {"memorization", "distances", "scores"}


def test_a_node_of_one_image_has_no_distance() -> None:
    parts = [PARTS[0].subset(torch.tensor([0])), *PARTS[1:]]
    found = examine_images(FRESH, Simulation(setting(Standalone(), parts=parts)), FEW, 0)
    assert list(found.part["distances"][0]["nodes"]) == ["node-1", "node-2"]
    assert [name for name, _ in found.skipped] == ["distances"]
    assert "node-0 holds one image" in found.skipped[0][1]


def test_all_is_json_with_none_for_what_is_not_finite(run: Simulation) -> None:
    """Copies of held-out images are infinitely farther from private ones."""
    found = examine_images(TEST.inputs[:150], run, FEW, 0)
    told = attack_record(FEW, found.part)["result"]
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert [pair["ratio"] for pair in told["spaces"][0]["pairs"]] == [None] * 5
    assert all(picture.dtype == torch.uint8 for picture in found.pictures.values())


@pytest.mark.parametrize("wrong", [{"images": 1}, {"permutations": 0}, {"pairs": 0}])
def test_bad_options_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"memorization.{next(iter(wrong))}"):
        Memorization(**wrong)


def test_bad_inputs_are_refused(run: Simulation) -> None:
    for wrong in (FRESH[:1], FRESH.expand(-1, 3, -1, -1), FRESH[0]):
        with pytest.raises(ArgumentError, match="generated inputs"):
            examine_images(wrong, run, FEW, 0)
