"""Memorization: copies of private images are detected, and new images are not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.attacks import memorization as module
from fedstill.attacks.attack import AttackResult
from fedstill.attacks.attack_runner import attack_record
from fedstill.attacks.generative_metrics import (
    Extractor,
    frechet_distance,
    inception_scores,
    kernel_distance,
    penultimate_extractor,
    pixel_extractor,
)
from fedstill.attacks.memorization import (
    Memorization,
    SortedNeighbors,
    data_copying_test,
    measure_memorization,
    memorization_test,
    nearest_neighbors,
    wilson_interval,
)
from fedstill.core.dataset import CaseIndex, TensorData
from fedstill.core.errors import ArgumentError
from fedstill.data import Digits, load
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.standalone import Standalone
from fedstill.models import build
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.runs.build import Setting
from fedstill.runs.simulation import Simulation
from fedstill.tasks.classification import Classification
from fedstill.tasks.multi_label import MultiLabel
from tests.support.errors import raises_invalid
from tests.support.runs import make_setting

PLAIN = Extractor("vectors", lambda x: x)


def gauss(count: int, seed: int, size: int = 8) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_parts(seed: int, *counts: int) -> tuple[torch.Tensor, ...]:
    """Split vectors of one distribution into parts of given sizes."""
    return torch.split(gauss(sum(counts), seed), list(counts))


def slow_distances(
    generated: torch.Tensor, private: torch.Tensor, held_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distances to the nearest private and held-out vector, computed with loops."""
    return tuple(  # type: ignore[return-value]
        torch.stack([min(((x - y) ** 2).sum().sqrt() for y in part) for x in generated])
        for part in (private, held_out)
    )


# --- neighbors -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 30), st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_nearest_neighbors_match_slow_search(seed: int, n: int, m: int, d: int, whole: bool) -> None:
    x, y = gauss(n, seed, d), gauss(m, seed + 1, d)
    if whole:  # creates ties
        x, y = x.round(), y.round()
    distances, indices = nearest_neighbors(x, y)
    every = (x.unsqueeze(1) - y).square().sum(2).sqrt()
    torch.testing.assert_close(distances, every.min(1).values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(distances, (x - y[indices]).norm(dim=1), rtol=1e-12, atol=1e-12)


def test_small_distances_are_exact_far_from_zero() -> None:
    y = gauss(50, 0) + 1e5
    x = y[:10] + 1e-6 * gauss(10, 1)
    distances, indices = nearest_neighbors(x, y)
    assert indices.tolist() == list(range(10))
    torch.testing.assert_close(distances, (x - y[:10]).norm(dim=1), rtol=1e-12, atol=0)


def test_chunked_search_matches_single_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = gauss(37, 0), gauss(91, 1)
    at_once = nearest_neighbors(x, y)
    sizes: list[int] = []
    split = torch.split
    monkeypatch.setattr(module, "MAX_NUMBERS", 300)
    monkeypatch.setattr(torch, "split", lambda a, n: sizes.append(n) or split(a, n))
    in_pieces = nearest_neighbors(x, y)
    # Chunks of 3 rows for 91 distances each; of 9 rows for the 4 nearest vectors of 8 numbers.
    assert set(sizes) == {300 // 91, 300 // 32}
    assert all(torch.equal(*pair) for pair in zip(at_once, in_pieces, strict=True))


@pytest.mark.parametrize("few", [1, 3, 150])
def test_finds_nearest_of_rare_subset(few: int) -> None:
    x, y = gauss(20, 0), gauss(300, 1)
    among = torch.zeros(300, dtype=torch.bool)
    among[torch.randperm(300, generator=torch.Generator().manual_seed(2))[:few]] = True
    pool = SortedNeighbors(x, y)
    distances, indices = pool.nearest(among)
    slow, _ = slow_distances(x, y[among], y)
    torch.testing.assert_close(distances, slow)
    assert among[indices].all()
    others = (x.unsqueeze(1) - y[~among]).norm(dim=2)
    assert torch.equal(pool.count(~among, distances, include_ties=False), (others < slow.unsqueeze(1)).sum(1))


# --- by hand and against slow references ----------------------------------------------------------


def test_memorization_test_by_hand() -> None:
    """The distances are p = 1 and h = 3; of two private images, one is closer than 3, one equally close."""
    result = memorization_test(
        torch.tensor([[0.0]]), torch.tensor([[-3.0], [1.0]]), torch.tensor([[3.0]]), PLAIN, seed=0
    )
    assert result["statistic"] == pytest.approx(0.5)
    # One of two private images is drawn: closer with probability 1/2, otherwise a tie.
    assert result["share"] == pytest.approx(0.75)
    assert (result["low"], result["high"]) == wilson_interval(0.75, 1)
    assert result["held_out_ratio"] is None
    (pair,) = result["pairs"]
    assert (pair["generated"], pair["private"], pair["held_out"]) == (0, 1, 0)
    assert (pair["distance"], pair["other"], pair["ratio"]) == (1.0, 3.0, pytest.approx(1 / 3))
    # Any of the three images may be the held-out one: (h - p) / (h + p) is 1/2, 1/2 or (1 - 3) / (1 + 3).
    assert result["expected"] == pytest.approx((0.5 + 0.5 - 0.5) / 3, abs=0.05)
    assert result["p_value"] == pytest.approx(2 / 3, abs=0.06)


def test_fewer_private_than_held_out_by_hand() -> None:
    """The nearest private image is at 2; one of three held-out images is drawn, of which one is closer."""
    result = memorization_test(
        torch.tensor([[0.0]]), torch.tensor([[2.0]]), torch.tensor([[1.0], [4.0], [5.0]]), PLAIN, seed=0
    )
    assert result["share"] == pytest.approx(2 / 3)
    # Distances to private and other held-out images: 1 / 3 for 1, 2 / 1 for 4, 3 / 1 for 5.
    assert result["held_out_ratio"] == pytest.approx(min(1 / 3, 2 / 1, 3 / 1))


def test_p_value_matches_slow_permutation_loop() -> None:
    generated, private, held_out = random_parts(0, 12, 9, 5)
    result = memorization_test(generated, private, held_out, PLAIN, seed=3, permutations=60)
    everyone = torch.cat([private, held_out])

    def statistic(mine: torch.Tensor) -> float:
        p, h = slow_distances(generated, everyone[mine], everyone[~mine])
        return float(((h - p) / (h + p)).mean())

    truth = torch.arange(14) < 9
    permuted = [statistic(mine) for mine in module._permutations(truth, None, 3, 60)]
    assert result["statistic"] == pytest.approx(statistic(truth))
    assert result["expected"] == pytest.approx(sum(permuted) / 60)
    assert result["p_value"] == (1 + sum(value >= result["statistic"] for value in permuted)) / 61


def test_share_matches_subsets_of_equal_size() -> None:
    generated, private, held_out = random_parts(1, 40, 60, 15)
    slow = []
    for seed in range(1500):
        subset = torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:15]
        p, _ = nearest_neighbors(generated, private[subset])
        h, _ = nearest_neighbors(generated, held_out)
        slow.append(float((p < h).double().mean()))
    result = memorization_test(generated, private, held_out, PLAIN, seed=0, permutations=1)
    assert result["share"] == pytest.approx(sum(slow) / len(slow), abs=0.01)


def test_data_copying_matches_scipy() -> None:
    from scipy.stats import mannwhitneyu

    for seed in range(5):
        x, y = (gauss(count, seed + shift, 1).flatten().abs() for count, shift in ((30, 0), (20, 50)))
        if seed > 2:  # ties
            x, y = (4 * x).round(), (4 * y).round()
        expected = mannwhitneyu(
            x.numpy(), y.numpy(), alternative="less", method="asymptotic", use_continuity=False
        )
        assert data_copying_test(x, y)[1] == pytest.approx(expected.pvalue, rel=1e-9)
    assert data_copying_test(torch.zeros(3), torch.zeros(4)) == (0.0, 0.5)


# --- copies and new images ----------------------------------------------------------------------


def split_digits(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return private, held-out and new digits, drawn by seed."""
    data = load(Digits())
    images = torch.cat([data.train.inputs, data.test.inputs])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    private, held_out, fresh = torch.split(images[order[:1200]], [800, 200, 200])
    return private, held_out, fresh


def blur(images: torch.Tensor, noise: float, seed: int = 0) -> torch.Tensor:
    return images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))


SPACE = pixel_extractor((0.5,), (0.5,))


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_detects_memorizing_generator(noise: float) -> None:
    private, held_out, _ = split_digits(0)
    result = memorization_test(blur(private[:200], noise), private, held_out, SPACE, seed=0, permutations=199)
    assert result["p_value"] < 0.01
    if noise < 0.4:  # with more noise, the other test compares images that are worse than held-out ones
        assert result["z_p_value"] < 0.01
        assert result["held_out_ratio"] is not None
        assert result["pairs"][9]["ratio"] < result["held_out_ratio"] / 2
    # 200 of 800 private images are drawn: with the original in 1/4 of the cases, else closer in half of them.
    assert result["share"] == pytest.approx(0.625, abs=0.07)
    assert result["low"] > 0.5
    assert result["extractor"] == "pixels"


@pytest.mark.slow
def test_p_values_of_fresh_images_are_uniform() -> None:
    """The share of small p-values is as expected."""
    values = []
    for seed in range(150):
        generated, private, held_out = random_parts(seed, 60, 80, 40)
        result = memorization_test(generated, private, held_out, PLAIN, seed=seed, permutations=79)
        values.append(result["p_value"])
    small = sum(value <= 0.05 for value in values)
    assert 2 <= small <= 15, "7.5 of 150 are expected; the range is exceeded by chance in 1 % of cases"
    from scipy.stats import kstest

    assert kstest(values, "uniform").pvalue > 0.01


def test_permutes_patients_instead_of_slices() -> None:
    """Slices of a patient are similar, so permuting slices would falsely indicate copies."""

    def measure(seed: int) -> tuple[dict[str, Any], ...]:
        centers = gauss(18, seed, 3)
        of = torch.arange(18).repeat_interleave(10)
        slices = centers[of] + 0.05 * gauss(180, seed + 1000, 3)
        private, held_out, generated = torch.split(slices, [80, 40, 60])
        parts = (generated, private, held_out, PLAIN)
        groups = (of[:80], of[80:120])
        return (
            memorization_test(*parts, seed=seed, permutations=99),
            memorization_test(*parts, seed=seed, permutations=99, groups=groups),
        )

    results = [measure(seed) for seed in range(40)]
    by_slice, by_patient = (sum(each[which]["p_value"] <= 0.05 for each in results) for which in (0, 1))
    assert by_slice > 8
    assert by_patient <= 6, "2 of 40 are expected"


def test_rejects_patient_in_both_sets() -> None:
    x, of = torch.zeros(2, 1), torch.tensor([3, 4])
    with raises_invalid("groups", 3, "private images", "held-out"):
        memorization_test(x, x, x, PLAIN, seed=0, groups=(of, torch.tensor([3, 5])))


def test_equal_images_avoid_division_by_zero() -> None:
    x = torch.tensor([[0.0], [1.0]])
    result = memorization_test(x, x, x, PLAIN, seed=0, permutations=9)
    assert (result["statistic"], result["share"], result["z"]) == (0.0, 0.5, 0.0)
    assert [pair["ratio"] for pair in result["pairs"]] == [1.0, 1.0]
    assert (
        len(memorization_test(x[:1].repeat(2, 1), x, x + 9, PLAIN, seed=0, permutations=9)["pairs"]) == 1
    )  # one pair for repeated images
    of_held_out = memorization_test(x[:1], x[1:], x[:1], PLAIN, seed=0, permutations=9)
    assert of_held_out["statistic"] == -1
    assert of_held_out["pairs"][0]["ratio"] == math.inf


SHAPE, SIZES = (1, 8, 8), (200, 300, 100)
FEW = Memorization(images=150, permutations=199, pairs=5)
PIXELS = pixel_extractor((0.5,), (0.5,))


def digits() -> tuple[list[TensorData], TensorData, torch.Tensor]:
    """Return digits of three nodes, held-out digits, and new digits."""
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
    return make_setting(**given)


@pytest.fixture(scope="module")
def run() -> Simulation:
    experiment = Simulation(setting())
    experiment.run()
    return experiment


def space_records(result: AttackResult) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = result.part["spaces"]
    return records


def noisy(images: torch.Tensor, noise: float = 0.02) -> torch.Tensor:
    return images + noise * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))


# --- copies and new images ------------------------------------------------------------------------


def test_detects_copied_node_images(run: Simulation) -> None:
    result = measure_memorization(noisy(PARTS[1].inputs[:150]), run, FEW, 0)
    for space in space_records(result):
        assert space["p_value"] < 0.01
        assert space["pairs"][-1]["ratio"] < min(0.1, space["held_out_ratio"] / 2)
        # Image i is a copy of node-1's image i.
        assert [(pair["node"], pair["private"]) for pair in space["pairs"]] == [
            ("node-1", pair["generated"]) for pair in space["pairs"]
        ]
    for name in ("generated", "private"):
        assert result.pictures[name].shape == (5, *SHAPE)
    difference = result.pictures["generated"].int() - result.pictures["private"].int()
    assert difference.abs().max() < 20
    near = {name: of["fid"] for name, of in result.part["distances"][0]["nodes"].items()}
    assert min(near, key=near.__getitem__) == "node-1"


# --- references ----------------------------------------------------------------------------------


def test_record_matches_single_functions(run: Simulation) -> None:
    result = measure_memorization(FRESH, run, replace(FEW, images=60), 3)
    last = FRESH[-60:]
    features = penultimate_extractor(run.student, last, "the student")
    everyone = torch.cat([part.inputs for part in PARTS])
    assert (result.part["images"], result.part["of"]) == (60, "inputs that the server sent to nodes")
    for extractor, copies, distances in zip(
        (PIXELS, features), space_records(result), result.part["distances"], strict=True
    ):
        same = memorization_test(
            last, everyone, TEST.inputs, extractor, seed=3, permutations=199, pair_count=5
        )
        assert copies["extractor"] == distances["extractor"] == extractor.name
        for name in ("generated", "private", "held_out", "statistic", "expected", "p_value", "permutations"):
            assert copies[name] == same[name]
        for name in ("share", "low", "high", "z", "z_p_value", "held_out_ratio"):
            assert copies[name] == same[name]
        for pair_record, pair in zip(copies["pairs"], same["pairs"], strict=True):
            assert (pair_record["generated"], pair_record["held_out"]) == (
                pair["generated"],
                pair["held_out"],
            )
            assert (pair_record["distance"], pair_record["other"]) == (pair["distance"], pair["other"])
            assert pair_record["ratio"] == pair["ratio"]
            own = run.nodes[int(pair_record["node"][-1])].data.inputs
            assert torch.equal(own[pair_record["private"]], everyone[pair["private"]])
        nodes = {node.name: node.data.inputs for node in run.nodes}
        real = {name: extractor(own) for name, own in nodes.items()}
        far = {name: frechet_distance(extractor(last), each) for name, each in real.items()}
        spread = TEST.inputs[torch.linspace(0, 299, 60).long()]
        held_out_fid = {name: frechet_distance(extractor(spread), each) for name, each in real.items()}
        for key, found_ in (("average", far), ("average_held_out", held_out_fid)):
            assert distances[key] == pytest.approx(sum(found_.values()) / 3)
        assert (distances["generated"], distances["full_rank"]) == (60, distances["dimensions"] == 16)
        kid = kernel_distance(extractor(last), real["node-2"])
        assert distances["nodes"]["node-2"] == {"fid": far["node-2"], "kid": kid, "real": 100}
        assert distances["held_out"]["node-0"]["fid"] == held_out_fid["node-0"]
    assert [space["dimensions"] for space in result.part["distances"]] == [64, 16]
    scores = inception_scores(last, {node.name: node.model for node in run.nodes})
    student = inception_scores(last, {"student": run.student})["student"]
    adapted = pytest.approx(sum(scores.values()) / 3)
    assert result.part["scores"] == {"images": 60, "adapted": adapted, "nodes": scores, "student": student}
    assert result.skipped == []


def test_repeated_images_count_once(run: Simulation) -> None:
    moved = FRESH[:20] + 1e-3 * torch.randn(3, 20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    again = measure_memorization(torch.cat([*moved, FRESH[:20]]), run, FEW, 3)
    assert again.part == measure_memorization(FRESH[:20], run, FEW, 3).part
    assert again.part["images"] == 20
    with raises_invalid("generated inputs", "all one image"):
        measure_memorization(FRESH[:1].repeat(5, 1, 1, 1), run, FEW, 3)


def test_fid_uses_equal_numbers_of_images(run: Simulation) -> None:
    images = torch.cat([PARTS[0].inputs, PARTS[1].inputs, PARTS[2].inputs, FRESH[:60]])
    result = measure_memorization(images, run, replace(FEW, images=len(images)), 3)
    count = min(len(TEST), result.part["images"])
    assert count < result.part["images"]
    assert {entry["generated"] for entry in result.part["distances"]} == {count}


def test_samples_from_large_image_sets(run: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IMAGES", 90)
    monkeypatch.setattr(module, "MAX_NODE_IMAGES", 40)
    result = measure_memorization(noisy(FRESH), run, FEW, 0)
    caveat = "90 of 600 private and 90 of 300 held-out images were drawn to compare with"
    for space in space_records(result):
        assert (space["private"], space["held_out"]) == (90, 90)
        assert space["caveats"] == [caveat]
    (p, *_) = (row for row in FEW.rows(result.part) if row.metric == "p")
    assert (
        p.note
        == "199 permutations; 90 of 600 private and 90 of 300 held-out images were drawn to compare with"
    )
    shown = result.pictures
    for row, pair in enumerate(space_records(result)[0]["pairs"]):
        true = run.nodes[int(pair["node"][-1])].data.inputs[pair["private"]]
        assert torch.equal(shown["private"][row], ((true + 1) * 127.5).round().to(torch.uint8))
        other = TEST.inputs[pair["held_out"]]
        assert torch.equal(shown["held_out"][row], ((other + 1) * 127.5).round().to(torch.uint8))
    assert len({pair["node"] for pair in space_records(result)[0]["pairs"]}) > 1
    assert {of["real"] for of in result.part["distances"][0]["nodes"].values()} == {40}
    assert json.dumps(space_records(result)) == json.dumps(
        space_records(measure_memorization(noisy(FRESH), run, FEW, 0))
    )


def test_skips_fid_in_large_spaces(run: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FID_DIMENSIONS", 63)
    result = measure_memorization(FRESH, run, FEW, 0)
    assert [space["dimensions"] for space in result.part["distances"]] == [16]
    assert len(space_records(result)) == 2
    (skipped,) = result.skipped
    assert skipped[0] == "distances"
    assert "pixels: 64 dimensions, more than 63" in skipped[1]


# --- patients ---------------------------------------------------------------------------------------


def test_patients_are_permuted_as_groups() -> None:
    """Equal patient numbers at two nodes are different patients."""
    parts = [replace(part, groups=torch.arange(len(part)) // 10) for part in PARTS]
    test = replace(TEST, groups=torch.arange(len(TEST)) // 10)
    experiment = Simulation(setting(Standalone(), parts=parts, test=test))
    (space,) = space_records(measure_memorization(FRESH, experiment, FEW, 0))
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
    assert space_records(measure_memorization(FRESH, experiment, FEW, 0)) == [space]

    # Held-out images without patient numbers are permuted individually, with a caveat.
    experiment = Simulation(setting(Standalone(), parts=parts))
    (space,) = space_records(measure_memorization(FRESH, experiment, FEW, 0))
    assert space["expected"] == alone["expected"]
    assert "p is too small" in space["caveats"][0]


# --- special cases ----------------------------------------------------------------------------------


def test_skips_inception_scores_of_multi_label_tasks() -> None:
    parts = [replace(part, targets=torch.nn.functional.one_hot(part.targets, 10)) for part in PARTS]
    test = replace(TEST, targets=torch.nn.functional.one_hot(TEST.targets, 10))
    result = measure_memorization(
        FRESH, Simulation(setting(parts=parts, test=test, task=MultiLabel(10))), FEW, 0
    )
    assert result.part["scores"] is None
    assert [name for name, _ in result.skipped] == ["scores"]
    assert "multi-label" in result.skipped[0][1]
    assert len(space_records(result)) == 2


def test_diverged_student_leaves_pixel_space() -> None:
    experiment = Simulation(setting())
    for parameter in experiment.student.parameters():
        parameter.data.fill_(torch.nan)
    result = measure_memorization(FRESH, experiment, FEW, 0)
    assert [space["extractor"] for space in space_records(result)] == ["pixels"]
    assert result.part["scores"] is None
    assert [name for name, _ in result.skipped] == ["memorization", "distances", "scores"]
    assert all("NaN" in reason for _, reason in result.skipped)


def test_nan_inputs_give_empty_record(run: Simulation) -> None:
    result = measure_memorization(FRESH * torch.nan, run, FEW, 0)
    assert (result.part["spaces"], result.part["distances"], result.part["scores"]) == ([], [], None)
    assert result.pictures == {}
    assert Memorization().sentence(result.part) == ""
    assert {name for name, _ in result.skipped} == {"memorization", "distances", "scores"}


def test_skips_distance_of_single_image_node() -> None:
    parts = [PARTS[0].subset(torch.tensor([0])), *PARTS[1:]]
    result = measure_memorization(FRESH, Simulation(setting(Standalone(), parts=parts)), FEW, 0)
    assert list(result.part["distances"][0]["nodes"]) == ["node-1", "node-2"]
    assert [name for name, _ in result.skipped] == ["distances"]
    assert "node-0 holds one image" in result.skipped[0][1]


def test_record_is_json_with_none_for_non_finite(run: Simulation) -> None:
    """For copies of held-out images, the ratio of distances is infinite."""
    result = measure_memorization(TEST.inputs[:150], run, FEW, 0)
    record = attack_record(FEW, result.part)["result"]
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert [pair["ratio"] for pair in record["spaces"][0]["pairs"]] == [None] * 5
    assert all(picture.dtype == torch.uint8 for picture in result.pictures.values())


@pytest.mark.parametrize("wrong", [{"images": 1}, {"permutations": 0}, {"pairs": 0}])
def test_rejects_invalid_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"memorization.{next(iter(wrong))}"):
        Memorization(**wrong)


def test_rejects_invalid_inputs(run: Simulation) -> None:
    for wrong in (FRESH[:1], FRESH.expand(-1, 3, -1, -1), FRESH[0]):
        with pytest.raises(ArgumentError, match="generated inputs"):
            measure_memorization(wrong, run, FEW, 0)
