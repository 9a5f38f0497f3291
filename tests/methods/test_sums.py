"""Methods whose server sees sums only: the figures that they have without, up to rounding."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.federation.summed import check_summed
from fedstill.methods.co_dream import CoDream
from fedstill.methods.dsfl import DSFL
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedavgm import FedAvgM
from fedstill.methods.feddf import FedDF
from fedstill.methods.fedgen import FedGEN
from fedstill.methods.fediod import FedIOD
from fedstill.methods.fedkd import FedKD
from fedstill.methods.fedmd import FedMD
from fedstill.methods.fedper import FedPer
from fedstill.methods.fedprox import FedProx
from fedstill.methods.fedzge import FedZGE
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS, Method
from fedstill.protocol.questions import NodeSetting, stand_in
from fedstill.protocol.summing import SUM
from tests.methods import small_world
from tests.methods.small_world import CLASSES, World, disagreeing, made, make_nodes, public_data, run

pytestmark = pytest.mark.usefixtures("steady_adam")

FEDIOD = FedIOD(
    steps=3,
    batch=5,
    noise=6,
    generator_width=4,
    critic_width=4,
    student_steps=2,
    ensemble="log_probs",
)
FEDKD = FedKD(levels=0, gamma=float("inf"), epochs=3, batch=8)
SUMMED = {
    "FedIOD": FEDIOD,
    "FedIOD by size, logits, critics weighed alike": replace(
        FEDIOD, importance="size", ensemble="logits", gan_weights="average"
    ),
    "FedIOD without slopes": replace(FEDIOD, through=False),
    "FedIOD with fresh questions": replace(FEDIOD, student_inputs="fresh", student_steps=1),
    "FedKD": FEDKD,
    "FedKD, all alike": replace(FEDKD, weights="equal", ensemble="log_probs"),
    "FedKD, probabilities": replace(FEDKD, ensemble="probs"),
    "FedMD": FedMD(rounds=2, first=2, subset=8, weights="counts"),
    "DS-FL": DSFL(rounds=2, subset=8, keep=1),
    "FedZGE": FedZGE(
        steps=2, batch=4, noise=6, generator_width=4, directions=2, epsilon=0.1, student_steps=2
    ),
    "Co-Dream": CoDream(steps=2, batch=4, dream_steps=2, student_steps=2, weights="counts", adversary=0.0),
    "FedAvg": FedAvg(rounds=2),
    "FedProx": FedProx(rounds=2),
    "FedAvgM": FedAvgM(rounds=2),
    "FedPer": FedPer(rounds=2),
}


def world(method: Method, sums: bool) -> World:
    same = method.needs().same_architecture
    specs = ("mlp:8",) * 4 if same else ("small-cnn:4", "resnet8:4", "mlp:8", "mlp:8")
    split = method.needs().split
    models = [disagreeing(made(spec, index, parted=split)) for index, spec in enumerate(specs)]
    # Of the last class only one node has examples, of which few.
    nodes = make_nodes(models, classes=lambda index: 2 if index else CLASSES)
    setting: dict[str, Any] = {"public": public_data(12)} if method.needs().public else {}
    student = made("mlp:8", "student", parted=split)
    return small_world.world(
        method, nodes, student, local=LocalConfig(epochs=2, batch=5), sums=sums, **setting
    )


@pytest.mark.parametrize("method", SUMMED.values(), ids=SUMMED)
def test_a_server_that_sees_sums_only_comes_to_the_same(method: Method) -> None:
    plain, summed = run(world(method, False)), run(world(method, True))

    for alone, together in zip(plain.states(), summed.states(), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-3, atol=2e-5)


def test_what_it_hears_is_one_answer_and_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(FEDIOD, True)

    told = here.server.ask("count_labels")
    answers = here.server.ask("examine", x=torch.zeros(5, *small_world.SHAPE))

    assert told.nodes == answers.nodes == (SUM,)
    counts = sum(node.data.targets.bincount(minlength=CLASSES) for node in here.nodes)
    assert told["counts"].tolist() == [counts.tolist()]  # type: ignore[union-attr]
    assert {name: tuple(tensor.shape) for name, tensor in answers.tensors.items()} == {
        "logits": (1, 5, CLASSES),
        "predicted": (1, 5, CLASSES),
        "number": (1, 5),
        "doubts": (1, 5),
    }


def test_what_no_node_holds_is_what_all_say_alike() -> None:
    method = FEDKD
    plain, summed = world(method, False), world(method, True)
    for here in (plain, summed):
        for node in here.nodes:  # nobody has the last class
            node.data = replace(node.data, targets=node.data.targets.clamp(max=CLASSES - 2))

    run(plain), run(summed)

    torch.testing.assert_close(
        summed.server.state.targets["z_hat"], plain.server.state.targets["z_hat"], rtol=0, atol=2e-4
    )


@pytest.mark.parametrize(
    ("method", "named"),
    [
        (replace(FEDIOD, ensemble="consensus"), "ensemble"),
        (replace(FEDIOD, importance="fakeness"), "method.importance"),
        (replace(FEDIOD, gan_weights="expertise"), "method.gan_weights"),
        (replace(FEDKD, levels=20, z_max=9.0), "method.levels"),
        (FedAvg(rounds=2, participation=0.5), "method.participation"),
        (FedGEN(rounds=2), "link.sums"),
        (FedDF(rounds=2), "link.sums"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_sum_is_refused_before_anything_is_asked(method: Method, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        world(method, True)


def test_two_nodes_are_too_few() -> None:
    models = [made("mlp:8", index) for index in range(2)]

    with pytest.raises(ArgumentError, match=r"link\.sums"):
        small_world.world(
            FedAvg(rounds=2), make_nodes(models), made("mlp:8", "student"), local=LocalConfig(), sums=True
        )


def asked(name: str) -> str:
    """What a method asks in sums; or why it cannot."""
    method = METHODS[name]()
    own = {part.name for part in fields(method)}
    wanted = {"ensemble": "log_probs", "levels": 0, "adversary": 0.0}
    method = replace(method, **{key: value for key, value in wanted.items() if key in own})
    at = NodeSetting(small_world.TASK, LocalConfig(), Compute(), stand_in(small_world.TASK), sums=True)
    try:
        questions = method.node_side(at).questions
        check_summed(small_world.make_nodes([made("mlp:8", at) for at in range(3)]), questions)
    except ArgumentError:
        return ""
    return "sums" if any(question.sums for question in questions.values()) else "nothing leaves"


def test_each_method_runs_on_sums_or_is_refused_as_the_page_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "sums.md"
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {line.split("`")[1]: line.split("|")[2].strip() for line in lines}

    says = {"": "no", "sums": "yes"}
    assert named == {name: says.get(asked(name), asked(name)) for name in METHODS.own}


def test_how_far_each_node_and_a_student_are_apart_is_not_added() -> None:
    """Of many students for one input it would be as many equations for each node's answer."""
    method = CoDream(steps=2, batch=4, dream_steps=2, student_steps=2)
    with pytest.raises(ArgumentError, match=r"method\.adversary is 1\.0: allowed is 0 where link\.sums"):
        world(method, True)
