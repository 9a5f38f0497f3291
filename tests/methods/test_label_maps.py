"""Sources of label maps, and their releases."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.core.errors import NodeFault
from fedstill.data.public import PublicData
from fedstill.federation.link_config import LinkConfig
from fedstill.methods._label_maps import MapGenerator, MapSource, owner_id
from fedstill.methods._server import Server
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.policy import PolicyConfig
from tests.support.errors import raises_invalid, raises_refused
from tests.support.map_world import TASK, World, blobs, sent_order, up, world
from tests.support.small_world import change_responses


def at(one: World, **changes: Any) -> Server:
    """Return a copy of the server with changed attributes."""
    server = copy.copy(one.server)
    for name, value in changes.items():
        setattr(server, name, value)
    return server


def gathered(one: World, **options: Any) -> MapSource:
    maps = MapSource(MapGenerator(**options), one.server)
    maps.fetch(one.server)
    return maps


def test_each_node_sends_its_maps_in_its_own_order() -> None:
    one = world()
    maps = gathered(one)
    for node in one.nodes:
        mine = maps.owner == owner_id(node.name)
        expected = TASK.label_maps(node.data)[sent_order(node)]
        assert torch.equal(maps.pool[mine], expected)
        assert maps.row[mine].tolist() == list(range(len(node.data)))
    assert sent_order(one.nodes[2]).tolist() != list(range(11))
    maps.fetch(one.server)  # fetched only once
    assert up(one) == {"label maps": (5 + 8 + 11) * 16 * 16}


@pytest.mark.parametrize("augment", ["none", "mirror", "turn"])
def test_samples_have_owner_row_and_pose(augment: Any) -> None:
    one = world()
    maps = gathered(one, augment=augment)
    batch = maps.sample_batch(60, "w", 3)
    by_name = {owner_id(node.name): node for node in one.nodes}
    for sampled, (owner, row, pose) in zip(batch.maps, batch.source.tolist(), strict=True):
        node = by_name[owner]
        real = TASK.label_maps(node.data)[sent_order(node)][row]
        real = real.flip(-1) if pose % 2 else real
        assert torch.equal(sampled, torch.rot90(real, pose // 2, (0, 1)))
    assert set(batch.source[:, 2].tolist()) == set(range({"none": 1, "mirror": 2, "turn": 8}[augment]))
    assert torch.equal(batch.generator_input, TASK.encode_maps(batch.maps))
    again, other = maps.sample_batch(60, "w", 3), maps.sample_batch(60, "w", 4)
    assert torch.equal(again.maps, batch.maps)
    assert not torch.equal(other.maps, batch.maps)
    mine = maps.sample_batch(20, "w", node="n1")
    assert set(mine.source[:, 0].tolist()) == {owner_id("n1")}


def test_sampled_maps_need_no_query() -> None:
    one = world(generator={"conditions": "drawn"})
    maps = gathered(one, conditions="drawn")
    assert maps.sample_batch(3, "w").generator_input.shape == (3, 3, 16, 16)
    assert up(one) == {}
    assert maps.sample_batch(3, "w").source[:, 0].tolist() == [-1] * 3


def test_public_maps_equal_public_labels() -> None:
    one, data = world(generator={"conditions": "drawn"}), blobs(6, 9)
    public = PublicData("held-out", data.inputs, data.targets)
    maps = MapSource(MapGenerator(conditions="public"), at(one, public=public))
    assert torch.equal(maps.pool, TASK.label_maps(data))
    for lacking in (None, PublicData("noise", data.inputs)):
        with raises_invalid("method.generator.conditions", "public", "nodes or drawn"):
            MapSource(MapGenerator(conditions="public"), at(one, public=lacking))


def test_non_square_images_are_not_rotated() -> None:
    with raises_invalid("method.generator.augment", "turn", "none or mirror"):
        MapSource(MapGenerator(augment="turn"), at(world(), shape=(1, 16, 24)))


# --- refusals ------------------------------------------------------------------------------------


def test_label_maps_need_policy_by_name() -> None:
    with raises_refused("label_maps", "method.generator.conditions"):
        world(policy=PolicyConfig())
    for policy in (PolicyConfig(label_maps=True), PolicyConfig(outputs_only=False)):
        world(policy=policy).server.step()
    world(policy=PolicyConfig(), generator={"conditions": "drawn"}).server.step()


def test_difference_is_refused_by_default() -> None:
    """Repeated queries would reveal the image although no map is released."""
    one = world()
    predict_logits, gate = one.side.queries["predict_logits"], Gate("n0", PolicyConfig(), AuditLog())
    assert str(gate.refusal_reason(predict_logits)).startswith("label_maps: difference may not leave")
    query = world(generator={"pixel": 0.0, "perceptual": 0.0}).side.queries["predict_logits"]
    assert gate.refusal_reason(query) is None
    assert (predict_logits.depends_on_records, query.depends_on_records) == (("difference",), ()), (
        "differences are computed from records"
    )


def test_policy_label_maps_allows_nothing_else() -> None:
    one = world()
    gate, query = one.nodes[0].gate, one.side.queries["send_label_maps"]
    assert gate.refusal_reason(query) is None
    more = replace(query, releases={**query.releases, "weights": "parameters"})
    assert gate.refusal_reason(more) == "outputs_only: parameters may not leave"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(4, 8, 8, dtype=torch.uint8), r"maps are torch\.uint8"),
        (torch.full((4, 16, 16), 200, dtype=torch.uint8), r"maps hold 200 \(expected 0\.\.2"),
        (torch.full((4, 16, 16), 3, dtype=torch.uint8), r"maps hold 3 \(expected 0\.\.2"),
    ],
)
def test_node_with_invalid_maps_is_excluded(wrong: torch.Tensor, message: str) -> None:
    def broken(link: LinkConfig) -> World:
        one = world()
        one.federation.link = link

        def corrupt(query: str, nodes: Any, sent: Any, response: Any) -> Any:
            return {name: {"maps": wrong} if name == "n1" else each for name, each in response().items()}

        change_responses(one, corrupt)
        return one

    one = broken(LinkConfig(quorum=0.5))
    maps = gathered(one)
    assert one.federation.present == ("n0", "n2")
    assert set(maps.owner.tolist()) == {owner_id("n0"), owner_id("n2")}
    with pytest.raises(NodeFault, match=message):
        gathered(broken(LinkConfig(quorum=1.0)))


def test_fetched_maps_are_saved() -> None:
    one = world()
    maps = gathered(one)
    other = MapSource(MapGenerator(), one.server)
    assert not other.is_ready
    other.load_state_dict(maps.state_dict(), torch.device("cpu"))
    assert torch.equal(other.sample_batch(9, "w").maps, maps.sample_batch(9, "w").maps)
