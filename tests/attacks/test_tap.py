"""What a server sees is what the audit says that left, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from fedstill.attacks.tap import Enough, Overheard, Release
from fedstill.federation.link import LinkConfig
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fediod import FedIOD
from fedstill.models.vector import to_vector
from fedstill.node.policy import PolicyConfig
from tests.runs.test_simulation import setting

FEDAVG = FedAvg(rounds=2)
FEDIOD = FedIOD(
    steps=3, batch=4, generator_width=2, critic_width=2, student_steps=1, student_batch=4, memory=8
)
OUTPUTS = {"policies": [PolicyConfig()] * 3}


def heard(method: Any, **changes: Any) -> tuple[Overheard, list[Release]]:
    releases: list[Release] = []
    experiment = Overheard(setting(method, **changes))
    assert experiment.listen(releases.append)
    return experiment, releases


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (FEDAVG, {}),
        (FEDIOD, OUTPUTS),
        (FEDIOD, {**OUTPUTS, "link": LinkConfig(inputs="int8", gradients="float16")}),
    ],
)
def test_what_is_heard_is_what_the_audit_log_counts(method: Any, changes: dict[str, Any]) -> None:
    experiment, releases = heard(method, **changes)
    heard_: Counter[tuple[str, str]] = Counter()
    for release in releases:
        for name, tensor in release.tensors.items():
            heard_[release.node, release.kinds[name]] += tensor.nbytes
    counted = experiment.audit.sums.bytes.items()
    left = {(node, kind): n for (_, node, way, kind), n in counted if way == "up"}
    assert heard_.keys() == left.keys()
    if "link" not in changes:  # else in fewer bytes than they are heard in
        assert heard_ == left


def test_the_last_parameters_heard_are_the_nodes_own() -> None:
    experiment, releases = heard(FEDAVG)
    rounds = [release for release in releases if release.question == "train"]
    assert [(release.node, int(release.sent["round"])) for release in rounds] == [
        (node.name, t) for t in range(2) for node in experiment.nodes
    ]
    assert {kind for release in rounds for kind in release.kinds.values()} == {"parameters"}
    for release, node in zip(rounds[3:], experiment.nodes, strict=True):
        assert torch.equal(release.tensors["parameters"], to_vector(node.model))
    # What the server sends in a round is the average that it made of the round before.
    n = torch.tensor([float(len(node.data)) for node in experiment.nodes])
    told = torch.stack([release.tensors["parameters"] for release in rounds[:3]])
    torch.testing.assert_close(rounds[3].sent["parameters"], (n / n.sum()) @ told)


def test_gradients_are_heard_with_what_was_pulled_back() -> None:
    _, releases = heard(FEDIOD, **OUTPUTS)
    gradients = [release for release in releases if release.part == "gradient"]
    assert len(gradients) == FEDIOD.steps * 3
    for release in gradients:
        assert release.tensors["d/dx"].shape == (4, 1, 8, 8)
        assert release.sent["logits"].shape == (4, 3)
        assert release.kinds == {"d/dx": "gradients"}


def test_what_is_heard_does_not_change_later() -> None:
    """A copy: a server that goes on changes its tensors in place."""
    _, releases = heard(FEDAVG)
    first = next(release for release in releases if release.question == "train")
    other, again = heard(FEDAVG)
    assert torch.equal(first.tensors["parameters"], again[releases.index(first)].tensors["parameters"])
    assert not torch.equal(first.tensors["parameters"], to_vector(other.nodes[0].model))


def test_a_listener_ends_the_run_when_it_has_heard_enough() -> None:
    releases: list[Release] = []
    experiment = Overheard(setting(FEDAVG))

    def hear(release: Release) -> None:
        releases.append(release)
        if release.question == "train":
            raise Enough

    assert not experiment.listen(hear)
    assert [release.question for release in releases] == ["tell_size"] * 3 + ["train"]


def test_what_is_asked_after_the_end_is_not_heard() -> None:
    experiment, releases = heard(FEDIOD, **OUTPUTS)
    before = len(releases)
    x = experiment.nodes[0].data.inputs[:2]
    experiment.server.federation.ask("examine", x=x)
    assert len(releases) == before
