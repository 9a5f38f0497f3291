"""Presets of the experiments: complete, with the values of the papers, and with files found by folder."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedstill.compare.comparison import is_file_listing_methods, read_comparison
from fedstill.core.config_tables import parse_toml
from fedstill.data.config import check_supports_task
from fedstill.models import build
from fedstill.runs import presets, spec
from tests.support.my_lab import Lab
from tests.support.packs import PRESETS


def preset(name: str) -> str:
    return str(PRESETS / f"{name}.toml")


@pytest.mark.parametrize("name", sorted(file.stem for file in PRESETS.glob("*.toml")))
def test_every_preset_is_a_valid_run(name: str) -> None:
    run = spec.load(preset(name))
    check_supports_task(run.data, run.task)
    assert run.name == name
    assert (PRESETS / f"{name}.toml").read_text().startswith("# ")
    assert spec.read_toml(spec.to_toml(run)) == run
    assert run.plugins == (() if name.startswith("paper") else (str(PRESETS),))


COMPARISONS = [file for file in sorted(PRESETS.parent.glob("*.toml")) if is_file_listing_methods(str(file))]


@pytest.mark.sample(4)
@pytest.mark.parametrize("file", COMPARISONS, ids=lambda file: file.stem)
def test_every_comparison_is_valid_at_each_scale(tmp_path: Path, file: Path) -> None:
    """A copy in another folder gives the same comparison, like ``compare.toml`` in the folder of a run."""
    for scale in ("small", *parse_toml(file.read_text()).get("scale", {})):
        comparison = read_comparison(file, scale=scale)
        assert len(comparison.methods) > 1 or len(comparison.settings) > 1
        # required to find the readers
        assert "packs." not in comparison.to_toml() or comparison.base["plugins"]
        (tmp_path / "compare.toml").write_text(comparison.to_toml())
        assert read_comparison(tmp_path / "compare.toml") == comparison


@pytest.mark.parametrize(
    ("name", "method", "like", "but"),
    [
        ("fediod_table1", "fediod", "cifar10-fediod-printed", {}),
        ("fediod_fig8", "fediod", "cifar10-fediod-printed", {}),
        ("fediod_table5", "fediod", "cifar10-fediod-printed", {"importance": "size"}),
        ("fediod_table6", "all", "cifar10-fediod-printed", {}),
        ("fediod_table2", "fediod", preset("paper-mri-segmentation"), {}),
        ("fediod_table3", "fediod", preset("paper-nuclei"), {}),
        ("fediod_table9", "fediod", preset("paper-mri-reconstruction"), {}),
        ("fedkd_table5", "fedkd", preset("text-sst2-fedkd-distilbert"), {}),
    ],
)
def test_paper_scale_has_method_of_the_paper(name: str, method: str, like: str, but: dict[str, Any]) -> None:
    """No option of the smaller scale is kept."""
    comparison = read_comparison(PRESETS.parent / f"{name}.toml", scale="paper")
    planned_run = next(
        planned_run for planned_run in comparison.planned_runs() if planned_run.label == method
    )
    assert comparison.run_config(planned_run).method == replace(spec.load(like).method, **but)


def test_paper_scale_of_fedmd_cg_equals_published_code() -> None:
    method = spec.load("fashion-fedmd-cg-published").method
    comparison = read_comparison(PRESETS.parent / "fedmd_cg_table1.toml", scale="paper")
    planned = next(run for run in comparison.planned_runs() if run.label == "fedmd-cg")
    assert comparison.run_config(planned).method == method


@pytest.mark.parametrize("name", ["fediod_table2", "fediod_table3", "fediod_table4"])
def test_paper_scale_of_asyndgan_has_networks_and_steps_of_fediod(name: str) -> None:
    comparison = read_comparison(PRESETS.parent / f"{name}.toml", scale="paper")
    one, other = (
        comparison.run_config(
            next(planned_run for planned_run in comparison.planned_runs() if planned_run.label == method)
        ).method
        for method in ("fediod", "asyndgan")
    )
    for group, alike in (
        ("generator", ("width", "perceptual", "pixel", "lr", "lr_end")),
        ("critic", ("width", "form", "lr")),
        ("student", ("batch", "augment", "lr")),
    ):
        mine, others = getattr(one, group), getattr(other, group)
        assert {key: getattr(mine, key) for key in alike} == {key: getattr(others, key) for key in alike}
    assert one.batch == other.batch
    assert other.steps == one.total_steps
    assert other.student.steps == one.steps


@pytest.mark.parametrize(
    ("name", "local", "steps", "rate", "batch"),
    [
        ("mri-segmentation", (0.002, 16, 50), 221_200, 2e-4, 2),
        ("nuclei", (2.5e-4, 4, 100), 2_400, 1e-4, 8),
        ("mri-reconstruction", (1e-4, 16, 20), 817_500, 1e-4, 8),
    ],
)
def test_paper_presets_of_maps_match_the_appendix(
    name: str, local: tuple[float, int, int], steps: int, rate: float, batch: int
) -> None:
    """The values are from the appendix of FedIOD, which gives no batch size for reconstruction."""
    run = spec.load(preset(f"paper-{name}"))
    check_supports_task(run.data, run.task)
    given, method = run.nodes.local, run.method
    assert (given.lr, given.batch, given.epochs, given.optimizer) == (*local, "adam")
    generator, critic, student = method.generator, method.critic, method.student
    assert (method.steps, method.batch, student.batch) == (steps, batch, batch)
    assert {generator.lr, generator.lr_end, critic.lr, student.lr, student.lr_end} == {rate}
    assert (generator.width, critic.width, critic.form) == (64, 64, "patchgan")
    assert run.nodes.perceptual
    assert generator.perceptual == 1.0


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in presets.names() if name.endswith(("-printed", "-published"))),
        *(str(file) for file in [*PRESETS.glob("paper-*.toml"), *PRESETS.glob("*-distilbert.toml")]),
    ],
)
def test_paper_presets_have_no_smoothing_and_fediod_reports_best_round(name: str) -> None:
    """No paper mentions label smoothing. Only the code of FedIOD reports its best round on test data."""
    run = spec.load(name)
    assert run.nodes.local.smoothing == 0.0
    assert run.evaluation.best == (type(run.method).__name__.startswith("FedIOD") and "digits" not in name)


def test_paper_preset_of_findings_matches_fedkd() -> None:
    run = spec.load(preset("paper-xray"))
    check_supports_task(run.data, run.task)
    local, method = run.nodes.local, run.method
    assert (local.optimizer, local.lr, local.lr_end, local.batch, local.epochs) == ("sgd", 1e-4, 1e-6, 32, 50)
    student = method.student
    assert (method.levels, method.gamma, student.epochs) == (200, 1.0, 50)
    assert (student.optimizer, student.lr, student.lr_end) == ("sgd", 1e-3, 1e-3)
    assert (run.split.registered_name, run.split.nodes, run.split.alpha) == ("dirichlet", 5, 1.0)


@pytest.mark.parametrize(
    "name",
    [
        "mri-segmentation-fediod",
        "mri-segmentation-fediod-drawn",
        "nuclei-fediod",
        "nuclei-sites-fediod",
        "mri-reconstruction-fediod",
    ],
)
def test_presets_of_maps_have_all_loss_terms_except_perceptual(name: str) -> None:
    run = spec.load(preset(name))
    method = run.method
    assert not run.nodes.perceptual
    assert min(method.gan, method.conf, method.unique, method.mimic, method.generator.pixel) > 0
    if name.startswith("mri-segmentation"):
        assert (method.ensemble, method.tau) == ("logits", math.inf)
    elif name.startswith("nuclei"):  # equal weights, chosen on validation images
        assert (method.ensemble, method.tau) == ("sum", 5.0)


ENCODERS = [file.stem for file in PRESETS.glob("*-encoder-*.toml")]


@pytest.mark.parametrize("name", ENCODERS)
def test_presets_with_an_encoder_have_it_in_all_networks_and_in_the_perceptual_loss(name: str) -> None:
    """Apart from that, local training is that of the other methods on the same data."""
    run = spec.load(preset(name))
    assert run.nodes.models == (run.student.model,) == ("unet:packs.lite0:encoder",)
    assert run.nodes.encoder_weights == run.student.encoder_weights == run.nodes.perceptual_weights
    assert f"unet:{run.nodes.perceptual}" == run.student.model
    others = [spec.load(preset(other)) for other in ENCODERS if other.split("-")[0] == name.split("-")[0]]
    assert {(other.data, other.nodes.local, other.split) for other in others} == {
        (run.data, run.nodes.local, run.split)
    }
    assert len({other.method.title for other in others}) == len(others) == 3


def test_lite0_is_an_encoder_for_gray_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of the network is replaced by two layers; images become ``(pixel - 127) / 128``."""

    class EfficientNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Conv2d(3, 3, 2, 2, groups=3, bias=False) for _ in range(2))
            self._fc = self._dropout = torch.nn.Linear(1, 1)

        @classmethod
        def from_name(cls, name: str) -> EfficientNet:
            assert name == "efficientnet-lite0"
            return cls()

        def extract_features(self, x: torch.Tensor) -> torch.Tensor:
            self.inputs = x.detach()
            maps: torch.Tensor = self.second(self.first(x))
            return maps

    library = SimpleNamespace(EfficientNet=EfficientNet)
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", library)  # type: ignore[arg-type]
    monkeypatch.syspath_prepend(str(PRESETS))
    unet: Any = build("unet:packs.lite0:encoder", (1, 8, 8), 2, 0)
    pixels = torch.tensor([0.0, 127.0, 255.0])
    unet((pixels / 127.5 - 1).view(3, 1, 1, 1).expand(3, 1, 8, 8))
    found = unet.encoder.network.network.inputs
    assert found.shape == (3, 3, 8, 8)
    torch.testing.assert_close(found[:, 0, 0, 0], (pixels - 127) / 128)
    assert not any("_fc" in key for key in unet.state_dict())


# --- files in the folder of a file ----------------------------------------------------------------------

READER = """
from dataclasses import dataclass
import numpy as np
from fedstill.data import ImageArrayData

@dataclass(frozen=True, kw_only=True)
class Noise(ImageArrayData):
    targets = ("class",)
    count: int = 40

    def arrays(self):
        images = np.random.default_rng(0).random((self.count, 8, 8), dtype=np.float32)
        return {"images": images, "labels": np.arange(self.count) % 2}
"""


@pytest.fixture
def study(lab: Lab) -> Path:
    """Create a folder with run files and a reader that is not installed, outside the working directory."""
    folder = lab.here / "study"
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    (folder / "readers").mkdir(exist_ok=True)
    (folder / "readers" / "noise.py").write_text(READER)
    lab.write(
        "study/below.toml",
        data={"name": "readers.noise:Noise"},
        nodes={"models": ["mlp:8"], "local": {"epochs": 1}, "policy": {"outputs_only": False}},
        method={"name": "fedavg", "rounds": 2},
    )
    (folder / "runs" / "above.toml").write_text('extends = "../below.toml"\ndata.count = 60\n')
    return folder


def test_finds_a_reader_in_the_folder_of_the_file(lab: Lab, study: Path) -> None:
    lab.run("first", file="study/runs/above.toml")
    data = lab.result("first")["data"]
    assert (data["name"], data["train"] + data["test"]) == ("readers.noise:Noise", 60)
    (lab.here / "first" / "result.json").unlink()
    lab("run", "--resume", "first", "--quiet")
    assert lab.result("first")["data"] == data
    assert "accuracy" in lab.run("above", "--data.count", "50", file="study/below.toml")


def test_comparison_finds_files_and_readers_in_its_folder(lab: Lab, study: Path) -> None:
    text = 'methods = ["below.toml", "standalone"]\nbase = { extends = "below.toml" }\n'
    (study / "both.toml").write_text(text)
    lab("compare", "study/both.toml", "--out", "both", "--quiet")
    for name in ("below", "standalone"):
        (lab.here / "both" / f"{name}-seed0" / "result.json").unlink()
    lab("compare", "--resume", "both", "--quiet")
    assert lab.result("both/below-seed0")["data"]["name"] == "readers.noise:Noise"
    lab("compare", "fedavg", "--base", "study/below.toml", "--out", "named", "--quiet")
    assert lab.result("named/fedavg-seed0")["data"]["name"] == "readers.noise:Noise"
