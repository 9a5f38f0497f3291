"""Gradient inversion of observed releases: all parameters, a part of them, later rounds, and Adam."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.attacks.gradient_inversion import (
    GradientInversion,
    Victim,
    invert_victim,
    make_victims,
    run_inversion,
)
from fedstill.attacks.gradient_matching import PixelRange
from fedstill.attacks.transcript import ReplayedRun
from fedstill.core.errors import ArgumentError
from tests.support.errors import raises_invalid
from tests.support.runs import FEDAVG, FEDKD, SGD, replay

ONE = GradientInversion(victims=2, attacks=("idlg",))
LG, PER = {"name": "lg-fedavg", "rounds": 2}, {"name": "fedper", "rounds": 2}


def held(again: ReplayedRun, count: int) -> list[Victim]:
    return make_victims(again, 0, count=count, images=1, round=0)


def adam(**changes: Any) -> dict[str, Any]:
    local = {**SGD, "optimizer": "adam", "lr": 1e-3}
    return {"nodes": {"models": ["mlp:32"], "local": local, "policy": {"outputs_only": False}}}


def test_recovers_image_from_all_parameters() -> None:
    got = run_inversion(replay(FEDAVG), ONE, seed=0)
    record = got.part
    assert (record["shared"], record["steps"], record["optimizer"], record["best"]) == (
        "all parameters",
        1,
        "sgd",
        "idlg",
    )
    assert record["attacks"][0]["psnr"]["mean"] > 30
    assert record["attacks"][0]["labels"] == {"right": 2, "of": 2}
    assert record["guess"] < 20
    assert got.pictures["original"].shape == got.pictures["idlg"].shape == (2, 1, 8, 8)
    soon = run_inversion(replay(FEDAVG), replace(ONE, steps=1), seed=0).part["attacks"][0]
    assert soon["psnr"]["mean"] < record["attacks"][0]["psnr"]["mean"] - 5
    difference = got.pictures["original"].int() - got.pictures["idlg"].int()
    assert difference.abs().float().mean() < 8


def test_attacked_update_equals_release() -> None:
    again = replay(FEDAVG)
    first, second = held(again, 2)
    assert first.release.is_gradient
    own = first.release.compute_target(first.data.inputs, first.data.targets)
    for name, value in own.items():
        assert torch.allclose(value, first.release.target[name], atol=1e-4), name
    other = first.release.compute_target(second.data.inputs, second.data.targets)
    assert not all(
        torch.allclose(value, first.release.target[name], atol=1e-4) for name, value in other.items()
    )
    # Each victim has an image from the data of its node.
    for victim, part in zip((first, second), again.parts, strict=False):
        assert (part.inputs == victim.data.inputs).flatten(1).all(1).any()


def test_several_steps_give_update_target() -> None:
    local = {**SGD, "batch": 1, "epochs": 4.0, "momentum": 0.0}
    nodes = {"models": ["mlp:32"], "local": local, "policy": {"outputs_only": False}}
    (victim,) = held(replay(FEDAVG, nodes=nodes), 1)
    assert not victim.release.is_gradient
    assert len(victim.release.schedule.rates) == 2  # 4 epochs of one image, batch size 1, in 2 rounds
    own = victim.release.compute_target(victim.data.inputs, victim.data.targets)
    for name, moved in own.items():
        assert torch.allclose(moved, victim.release.target[name], atol=1e-5), name


@pytest.mark.slow
def test_head_leaks_less_with_unknown_extractor() -> None:
    wide = {"nodes": {"models": ["mlp:512"], "local": SGD, "policy": {"outputs_only": False}}}
    again = replay(LG, split={"nodes": 2, "alpha": 5.0}, student={"model": "mlp:512"}, **wide)
    one = replace(ONE, victims=1)
    first, later = (run_inversion(again, replace(one, round=round), seed=0).part for round in (0, 1))
    assert first["shared"] == later["shared"] == "the head"
    assert "in the first round also the extractor" in first["known"]
    assert "only the first weights" in later["known"]
    assert first["attacks"][0]["psnr"]["mean"] > later["attacks"][0]["psnr"]["mean"] + 3


def test_extractor_release_has_no_labels() -> None:
    again = replay(PER)
    (victim,) = held(again, 1)
    assert victim.part == "extractor"
    got = run_inversion(again, GradientInversion(victims=1, attacks=("idlg", "dlg"), steps=2), seed=0)
    assert [each["name"] for each in got.part["attacks"]] == ["dlg"]
    assert [name for name, _ in got.skipped] == ["inversion: iDLG"]


def test_first_adam_step_allows_cosine_attack_only() -> None:
    again = replay(FEDAVG, **adam())
    (victim,) = held(again, 1)
    signs = torch.cat([value.flatten() for value in victim.release.target.values()])
    assert torch.isclose(signs.abs(), torch.ones(()), atol=0.02).float().mean() > 0.5
    for attack in ("dlg", "layers"):
        with raises_invalid("nodes.local.optimizer", "adam", "signs"):
            invert_victim(victim, attack, PixelRange(), 0)
    assert invert_victim(victim, "inverting", PixelRange(), 0).labels.tolist() == victim.data.targets.tolist()


def test_rejects_inapplicable_runs_in_one_line() -> None:
    side = replay(FEDKD, outputs_only=True, public={"name": "held-out"}).experiment().side
    assert ONE.refusal(side) == "gradient inversion needs parameters, and none are released"
    for uploaded in ({"name": "dense", "models": "uploaded"}, {"name": "fens", "rounds": 2}):
        side = replay(uploaded).experiment().side
        assert ONE.refusal(side) == "gradient inversion needs the nodes' initial weights, and none are sent"
    assert ONE.refusal(replay(PER).experiment().side) is None
    with pytest.raises(ArgumentError, match=r"invalid inversion\.round = 2 \(expected 0 \.\. 1"):
        run_inversion(replay(FEDAVG), GradientInversion(round=2), 0)
    with raises_invalid("inversion.victims", 300, "at most", "of 1 images"):
        run_inversion(replay(FEDAVG), GradientInversion(victims=300), 0)
    for bad in ({"victims": 0}, {"images": 0}, {"round": -1}, {"attacks": ("guess",)}, {"attacks": ()}):
        ((name, value),) = bad.items()
        with raises_invalid(f"inversion.{name}", list(value) if isinstance(value, tuple) else value):
            GradientInversion(**bad)  # type: ignore[arg-type]


def test_mentions_extra_loss_of_method() -> None:
    again = replay({"name": "fedmd-cg", "rounds": 2})
    first, later = (
        run_inversion(again, GradientInversion(victims=1, round=round, attacks=("idlg",), steps=1), 0).part[
            "known"
        ]
        for round in (0, 1)
    )
    assert "also descend" not in first
    assert "leaves out that nodes also descend distances from what the global generator gives" in later
    plain = run_inversion(replay(LG), GradientInversion(victims=1, round=1, attacks=("idlg",), steps=1), 0)
    assert "also descend" not in plain.part["known"]
