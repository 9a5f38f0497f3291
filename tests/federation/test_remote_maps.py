"""Methods that generate images from label maps: equal results over messages and in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedstill.core import compute as compute_module
from fedstill.models.module_utils import to_vector
from fedstill.node.node_service import NodeService
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import RunSpec, from_dict
from tests.support.links import Away, here
from tests.support.map_world import blobs
from tests.support.models import VGG16, save_tiny_weights
from tests.support.models import weights as vgg_weights

METHODS: dict[str, dict[str, Any]] = {
    "fediod-maps": {"steps": 2, "pretrain": 1, "student": {"memory": 16, "steps": 1, "batch": 8}},
    "asyndgan": {"steps": 2, "student": {"steps": 1, "batch": 8}},
}


def config_of(method: str, folder: Path, **options: Any) -> RunSpec:
    data = blobs(60, 0)
    images = ((data.inputs + 1) * 127.5).round().byte().numpy()
    np.savez(folder / "shapes.npz", images=images[:, 0], masks=data.targets.numpy().astype(np.uint8))
    table = {"batch": 4, "generator": {"width": 2}, "critic": {"width": 4}, **METHODS[method], **options}
    return from_dict(
        {
            "data": {"name": str(folder / "shapes.npz")},
            "task": {"name": "segmentation"},
            "split": {"name": "iid", "nodes": 3},
            "nodes": {
                "models": ["unet:2"],
                "local": {"epochs": 1, "batch": 8, "lr": 5e-3},
                "policy": {"label_maps": True},
            },
            "student": {"model": "unet:2"},
            "evaluation": {"centralized": False, "samples": 2},
            "engine": {"batching": "one-by-one"},
            "method": {"name": method, **table},
        }
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "options"),
    [("fediod-maps", {"generator": {"width": 2, "conditions": "drawn"}}), ("asyndgan", {})],
)
def test_remote_run_equals_simulation(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(method, tmp_path, **options)
    experiment, metrics = here(config)
    away = Away(config, tmp_path)
    live = away.live()
    result = live.run()
    assert (result["bytes"], result["queries"]) == (metrics["bytes"], metrics["queries"])
    assert result["releases"] == metrics["releases"]
    assert ("perceptual loss is off" in str(metrics.get("notes"))) == (not options)
    assert result.get("notes") == metrics.get("notes"), "nodes report their notes when they join"
    assert ("label maps" in result["releases"]) == (not options)
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    assert result["dice"] == metrics["dice"]
    away.same_nodes(experiment)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("method", "taken"), [("fediod-maps", "float32"), ("asyndgan", "bfloat16")])
def test_float32_methods_ignore_bfloat16(
    method: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_module, "is_bfloat16_faster", lambda device: True)
    config = config_of(method, tmp_path)
    computed: set[str] = set()

    def watched(serve: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        def reply(message: bytes) -> bytes:
            response = serve(message)
            computed.update(h.session.compute.precision for h in away.hosts.values() if h.session is not None)
            return response

        return reply

    away = Away(config, tmp_path, {"node-0": watched})
    for host in away.hosts.values():  # the owner has not set the precision
        host.file = replace(host.file, compute=replace(host.file.compute, precision="auto"))
    live = away.live()
    live.run()
    assert [build_simulation(config)[0].compute.precision, live.compute.precision, *computed] == [taken] * 3


@pytest.mark.slow
def test_remote_nodes_use_equal_perceptual_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named relative to the run's folder, not a node's."""
    save_file(vgg_weights(VGG16), tmp_path / "vgg.safetensors")
    config = config_of("fediod-maps", tmp_path)
    nodes = replace(config.nodes, perceptual="vgg.safetensors")
    config = replace(config, nodes=nodes)
    monkeypatch.chdir(tmp_path)
    experiment, metrics = here(config)
    away = Away(config, tmp_path)
    monkeypatch.chdir("/")
    live = away.live()
    result = live.run()
    assert result["notes"] == metrics["notes"] == []
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    assert torch.equal(
        to_vector(live.server.state.generator.G), to_vector(experiment.server.state.generator.G)
    )


def test_notes_name_their_nodes(tmp_path: Path) -> None:
    save_file(vgg_weights(VGG16), tmp_path / "vgg.safetensors")
    away = Away(config_of("asyndgan", tmp_path), tmp_path)
    file = tmp_path / "nodes/node-1/node.toml"
    path = str(tmp_path / "vgg.safetensors")
    file.write_text(file.read_text().replace('perceptual = ""', f'perceptual = "{path}"'))
    away.serve["node-1"] = NodeService(file.parent).serve
    (note,) = away.live().run()["notes"]
    assert note.startswith("node-0, node-2: perceptual loss is off")


def test_remote_nodes_use_equal_features_of_a_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_weights(tmp_path / "w.safetensors")
    config = config_of("fediod-maps", tmp_path)
    backbone = "tests.support.models:tiny_encoder"
    nodes = replace(config.nodes, perceptual=backbone, perceptual_weights="w.safetensors")
    monkeypatch.chdir(tmp_path)
    plain, _ = here(config)
    experiment, metrics = here(replace(config, nodes=nodes))
    live = Away(replace(config, nodes=nodes), tmp_path).live()
    assert live.run()["notes"] == metrics["notes"] == []
    (own, other, without) = (to_vector(run.server.state.generator.G) for run in (live, experiment, plain))
    assert torch.equal(own, other)
    assert not torch.equal(other, without)
