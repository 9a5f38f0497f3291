"""FL-MRCM: releases of the target site, alignment of the sources, and FedAvg without alignment."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.core.errors import NodeFault, QueryRefused
from fedstill.federation.link_config import LinkConfig
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fl_mrcm import FEATURES, FLMRCM, latent_module_name
from fedstill.models import build
from fedstill.models.extractor_head import EXTRACTOR, split_model
from fedstill.models.module_utils import to_vector
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.run_mechanism import PrivacyMechanism, no_guarantee_reason
from fedstill.privacy.dpsgd import DPSGD
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.tasks.reconstruction import Reconstruction
from tests.support import small_world
from tests.support.errors import raises_invalid, raises_refused
from tests.support.small_world import SHAPE, World, change_responses, make_nodes, run, same

pytestmark = pytest.mark.usefixtures("steady_adam")

TASK = Reconstruction()
LOCAL = LocalConfig(epochs=2, batch=4, lr=5e-3)
CONFIG = FLMRCM(rounds=2, target_examples=6)
SIZES = (6, 11, 8)
ENGINES = ["stacked", "one-by-one"]


def heads(count: int, seed: int, shade: float) -> TensorData:
    """Return images of one site; sites differ in brightness."""
    generator = torch.Generator().manual_seed(seed)
    inside = TASK.sample_maps(count, 8, 8, generator).float()
    x = (shade * inside * (0.7 + 0.3 * torch.rand(count, 8, 8, generator=generator)) * 2 - 1).unsqueeze(1)
    return TensorData(TASK.observe(x), x)


def world(
    config: Any = CONFIG, *, engine: Any = "one-by-one", local: LocalConfig = LOCAL, spec: str = "unet:4"
) -> World:
    models = [split_model(build(spec, SHAPE, 1, 0, index), "model") for index in range(len(SIZES))]
    nodes = make_nodes(models, data=lambda index: heads(SIZES[index], index, 1 - index / 4))
    student = split_model(build(spec, SHAPE, 1, 0, "student"), "student")
    stacked = engine == "stacked"
    made = small_world.world(config, nodes, student, local=local, stacked=stacked, task=TASK)
    made.federation.link = LinkConfig(quorum=0.5)
    return made


# --- releases of the target -------------------------------------------------------------------------


def test_target_releases_features_of_server_network() -> None:
    made = world(replace(CONFIG, target="n1"))
    server, w = copy.deepcopy(made.server.student), to_vector(made.server.student)
    features = made.federation.query("send_features", nodes=["n1"], parameters=w, round=torch.tensor(1))[
        "features"
    ]
    own = made.nodes[1].sample_batch(6, "target", 1).inputs
    assert features.shape == (1, 6, 16 * 2 * 2)
    torch.testing.assert_close(
        features[0], server.eval().get_submodule("extractor.encoder")(own).flatten(1).detach()
    )


def test_other_nodes_refuse_features_with_named_target() -> None:
    made = world(replace(CONFIG, target="n1"))
    w, round = to_vector(made.server.student), torch.tensor(0)
    with raises_refused("method.target: n1", query="send_features", node="n2"):
        made.federation.query("send_features", nodes=["n2"], parameters=w, round=round)


def test_queries_and_bytes_of_features() -> None:
    made = run(world())  # the first node is the target
    summary = made.audit.traffic_totals()
    assert summary["queries_by_name"] == {"count_samples": 1, "send_features": 2, "train": 2, "align": 2}
    size = 6 * 16 * 2 * 2 * 4
    # Up once per round, and down to both sources.
    assert summary["by_kind"][FEATURES] == {"up": 2 * size, "down": 2 * 2 * size}
    assert set(summary["by_kind"]) == {"data sizes", FEATURES, "parameters", "schedule"}  # no identifiers


def test_rejects_target_that_is_not_a_node() -> None:
    with raises_invalid("method.target", "x", "one of n0, n1, n2"):
        world(replace(CONFIG, target="x"))


def test_mechanisms_refuse_features_and_adversarial_training() -> None:
    side = world().side
    without = replace(side, queries={"send_features": side.queries["send_features"]})
    mechanism = PrivacyMechanism("n0", DPSGD(epsilon=5.0), without, LOCAL, 10, TASK)
    reason = no_guarantee_reason(mechanism, side.queries["send_features"])
    assert reason is not None
    assert "no guarantee for latent features" in reason
    with pytest.raises(QueryRefused, match=r"align.*does not declare depends_on_records"):
        PrivacyMechanism("n0", DPSGD(), side, LOCAL, 10, TASK)


# --- alignment at the sources ----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_without_alignment_fl_mrcm_equals_fedavg(engine: str) -> None:
    made, plain = (
        run(world(config, engine=engine)) for config in (replace(CONFIG, lambda_adv=0.0), FedAvg(rounds=2))
    )
    same(made.server.student, plain.server.student)
    assert set(made.side.queries) == {"count_samples", "train"}


def test_step_at_source_by_hand() -> None:
    """First a step of the identifier, then plain descent of the model against the updated identifier."""
    rate = 0.1
    local = replace(LOCAL, optimizer="sgd", lr=rate, lr_end=rate, momentum=0.0)
    config = replace(CONFIG, lambda_adv=0.7)
    made = world(config, local=local)
    node = made.nodes[1]
    model, C = copy.deepcopy(node.model).train(), copy.deepcopy(node.modules["identifier"])
    adam = torch.optim.Adam(C.parameters(), config.identifier_lr, betas=(0.5, 0.999))
    features = torch.randn(9, 16 * 2 * 2)
    x, y = node.data.inputs[:4], node.data.targets[:4]

    z_t = features[torch.randint(9, (4,), generator=node.random_generator("target's", 5, 0))]
    z = model.get_submodule("extractor.encoder")(x).flatten(1)
    ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
    fooled = F.binary_cross_entropy_with_logits
    L_C = 0.5 * (fooled(C(z_t), ones) + fooled(C(z.detach()), zeros))
    for weight, gradient in zip(C.parameters(), torch.autograd.grad(L_C, list(C.parameters())), strict=True):
        weight.grad = gradient
    adam.step()
    loss = (model(x) - y).abs().mean() + 0.7 * fooled(C(z), ones)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(rate * gradient)

    group = NodeGroup([node])
    group.module("model").train(True)
    node.optimizers["model"] = torch.optim.SGD(node.model.parameters(), rate)
    view = NodeView(group, NodeSetting(TASK, local, Compute()))
    loss_k = config.align_step(features, 5, view, 0, x, y)
    assert loss_k.item() == pytest.approx((loss - 0.7 * fooled(C(z), ones)).item(), rel=1e-4)
    same(node.modules["identifier"], C, rtol=1e-4, atol=1e-5)
    same(node.model, model, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("spec", "part"), [("unet:4", "extractor.encoder"), ("small-cnn:4", EXTRACTOR)])
def test_latent_features_are_from_encoder_or_extractor(spec: str, part: str) -> None:
    assert latent_module_name(split_model(build(spec, SHAPE, 1, 0), "model")) == part


# --- excluded nodes ----------------------------------------------------------------


def test_sources_use_last_features_of_excluded_target() -> None:
    made = run(world(replace(CONFIG, rounds=3)), 1)
    features = made.server.state.features
    assert features is not None
    made.federation.exclude("n0", "train", "gone", may_rejoin=False)
    run(made, 1)
    assert made.server.state.features is features
    assert made.audit.traffic_totals()["queries_by_name"]["align"] == 2


@pytest.mark.parametrize("query", ["send_features", "train"])
@pytest.mark.parametrize("quorum", [0.5, 1.0])
def test_sources_train_without_failed_target(query: str, quorum: float) -> None:
    made = world()
    made.federation.link = LinkConfig(quorum=quorum)

    def faulty(name: str, nodes: Any, sent: Any, response: Any) -> Any:
        given = response()
        if name == query and "n0" in given:
            return {**given, "n0": {part: each * torch.nan for part, each in given["n0"].items()}}
        return given

    change_responses(made, faulty)
    if quorum == 1.0:
        with pytest.raises(NodeFault, match=r"n0.*hold NaN"):
            run(made)
        return
    before = to_vector(made.server.student).clone()
    run(made)
    assert made.server.completed_steps == 2
    assert made.federation.present == ("n1", "n2")
    assert not torch.equal(to_vector(made.server.student), before)
    counts = made.audit.traffic_totals()["queries_by_name"]
    assert counts.get("align", 0) == (2 if query == "train" else 0), (
        "with the last features of the target, if any"
    )


def test_run_stops_without_any_response() -> None:
    made = world(replace(CONFIG, participation=0.34))  # one node per round
    made.federation.link = LinkConfig(quorum=0.3)

    def faulty(name: str, nodes: Any, sent: Any, response: Any) -> Any:
        if name in ("train", "align"):
            return {node: {"parameters": sent["parameters"] * torch.nan} for node, sent in response().items()}
        return response()

    change_responses(made, faulty)
    with pytest.raises(NodeFault, match="excluded"):
        made.server.step()
    assert len(made.federation.present) == 2
