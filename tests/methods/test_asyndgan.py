"""AsynDGAN: its queries and their recipients, and the training of its task network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedstill.core.errors import NodeFault
from fedstill.federation.link_config import LinkConfig
from fedstill.node.policy import PolicyConfig
from tests.support.map_world import (
    ASYN,
    RECONSTRUCTION,
    TASK,
    World,
    everything,
    sent_order,
    up,
    weights,
    world,
)
from tests.support.small_world import change_responses, resumed

pytestmark = pytest.mark.usefixtures("steady_adam")


def test_generator_loss_is_weighted_sum_over_nodes() -> None:
    one, plain = world(ASYN), world(ASYN)
    losses = one.server.step()
    plain_generator, source = plain.server.state.generator, plain.server.state.generator.source
    source.load_state_dict(one.server.state.generator.source.state_dict(), torch.device("cpu"))
    sizes, gan, unlike = [5.0, 8.0, 11.0], torch.zeros(()), torch.zeros(())
    for k, node in enumerate(plain.nodes):
        number = 1 + 3 + k  # the queries for sizes and for three nodes' maps come first
        batch = source.sample_batch(ASYN.batch, "w", 0, node.name, node=node.name)
        x = plain_generator.G(TASK.encode_maps(batch.maps))
        D, sampled = node.modules["critic"].train(), node.sample_batch(ASYN.batch, "critic", number)
        real = torch.cat([TASK.encode_maps(TASK.label_maps(sampled)), sampled.inputs], 1)
        fake = torch.cat([TASK.encode_maps(batch.maps), x], 1)
        optimizer = torch.optim.Adam(D.parameters(), ASYN.critic.lr, betas=(0.5, 0.999))
        (F.softplus(D(real)).mean() + F.softplus(-D(fake.detach())).mean()).backward()
        optimizer.step()
        gan = gan + sizes[k] / 24 * F.softplus(D(fake)).mean()
        own = node.data.inputs[sent_order(node)][batch.source[:, 1]]
        unlike = unlike + sizes[k] / 24 * 3.0 * (x - own).abs().mean()
    assert losses == pytest.approx({"gan": gan.item(), "difference": unlike.item()}, rel=1e-4)
    (gan + unlike).backward()
    G, other_G = one.server.state.generator.G, plain_generator.G
    pairs = zip(G.parameters(), other_G.parameters(), strict=True)
    for mine, other in pairs:
        assert (mine.grad - other.grad).norm() < 0.01 * other.grad.norm()


def test_student_is_trained_after_generator() -> None:
    one = world(ASYN)
    assert one.server.total_steps == 4
    student, G = weights(one.server.student), weights(one.server.state.generator.G)
    for _ in range(2):
        assert set(one.server.step()) == {"gan", "difference"}
    assert torch.equal(weights(one.server.student), student)
    made, bytes_up = weights(one.server.state.generator.G), up(one)
    assert not torch.equal(made, G)
    for _ in range(2):
        assert set(one.server.step()) == {"student"}
    assert not torch.equal(weights(one.server.student), student)
    assert torch.equal(weights(one.server.state.generator.G), made)
    assert up(one) == bytes_up, "the student uses images generated at the server"
    assert set(bytes_up) == {"label maps", "data sizes", "critic", "difference", "gradients"}


def test_student_is_trained_on_generated_images_and_maps() -> None:
    one, turning, plain = world(ASYN), world(ASYN, student={"augment": "turn"}), world(ASYN)
    losses = [[each.server.step() for _ in range(3)][-1] for each in (one, turning)]
    for _ in range(2):
        plain.server.step()
    batch = plain.server.state.generator.source.sample_batch(ASYN.student.batch, "student", 0)
    with torch.no_grad():
        x = plain.server.state.generator.G(TASK.encode_maps(batch.maps))
    z = plain.server.student.train()(x)
    (loss,) = TASK.loss(z.unsqueeze(0), TASK.targets_from_maps(batch.maps, x).unsqueeze(0))
    assert losses[0]["student"] == pytest.approx(loss.item(), rel=1e-4)
    assert losses[1] != losses[0]


def test_sampled_maps_give_all_nodes_the_same_images() -> None:
    one = world(ASYN, policy=PolicyConfig(), generator={"conditions": "drawn"})
    for _ in range(4):
        one.server.step()
    assert set(up(one)) == {"data sizes", "critic", "gradients"}
    assert one.audit.traffic_totals()["queries_by_name"] == {"count_samples": 1, "score_with_critic": 2}


def test_reconstructs_from_label_maps() -> None:
    """The student reconstructs generated images from their simulated measurements."""
    one, turning, plain = (
        world(ASYN, task=RECONSTRUCTION, student={"augment": how}) for how in ("none", "turn", "none")
    )
    losses = [[each.server.step() for _ in range(3)][-1] for each in (one, turning)]
    for _ in range(2):
        plain.server.step()
    batch = plain.server.state.generator.source.sample_batch(ASYN.student.batch, "student", 0)
    with torch.no_grad():
        x = plain.server.state.generator.G(RECONSTRUCTION.encode_maps(batch.maps))
        z = plain.server.student.train()(RECONSTRUCTION.observe(x))
    assert losses[0]["student"] == pytest.approx((z - x).abs().mean().item(), rel=1e-4)
    assert losses[1] != losses[0]


@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_training_equals_uninterrupted(stop: int, tmp_path: Path) -> None:
    whole, second = world(ASYN), resumed(lambda: world(ASYN), stop, tmp_path)
    expected = [whole.server.step() for _ in range(4)]
    assert [second.server.step() for _ in range(4 - stop)] == expected[stop:]
    assert torch.equal(everything(second), everything(whole))


def test_stacked_and_single_nodes_give_equal_metrics() -> None:
    for options in ({}, {"generator": {"conditions": "drawn"}}):
        stacked, alone = world(ASYN, **options), world(ASYN, **options, stacked=False)
        for _ in range(4):
            assert stacked.server.step() == pytest.approx(alone.server.step(), rel=1e-3, abs=1e-5)
        assert stacked.audit.traffic_totals() == alone.audit.traffic_totals()


def away(one: World, *names: str) -> None:
    """Make nodes fail when maps are sent, and only then."""
    one.federation.link = LinkConfig(quorum=0.3)

    def respond(query: str, nodes: Any, sent: Any, response: Any) -> Any:
        if query == "send_label_maps" and nodes[0] in names:
            one.federation.exclude(
                nodes[0], query, "no answer", may_rejoin=True, since_query=response.args[1].number
            )
            return {}
        return response()

    change_responses(one, respond)


def test_returning_node_without_maps_is_not_queried_about_its_own() -> None:
    one = world(ASYN)
    away(one, "n1")
    one.server.step()
    del one.federation.excluded["n1"]  # n1 returns
    for _ in range(3):
        one.server.step()
    assert one.federation.present == ("n0", "n1", "n2")
    assert one.audit.traffic_totals()["queries_by_name"]["score_with_critic"] == 2 * 2, (
        "two nodes in two steps"
    )


def test_run_stops_without_nodes_that_sent_maps() -> None:
    one = world(ASYN)
    away(one, "n1")
    one.server.step()
    del one.federation.excluded["n1"]
    for name in ("n0", "n2"):
        one.federation.exclude(name, "score_with_critic", "gone", may_rejoin=False)
    with pytest.raises(NodeFault, match="size and maps"):
        one.server.step()
