"""Backbones: the real loading code on tiny networks made by the tests. No downloads."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError, PluginError
from fedstill.core.seeds import seeded
from fedstill.models import backbones
from fedstill.models.backbones import (
    BackboneWithHead,
    Features,
    FeatureScale,
    PixelConversion,
    RawInputs,
    ScaledHead,
    batch_norm_moments,
    load_backbone,
)
from fedstill.models.image_classifiers import RandomConv
from tests.support.errors import raises_invalid
from tests.support.models import onnx_backbone, save_tiny_encoder, save_tiny_vision_transformer

GRAY = RawInputs((1, 8, 8), (0.5,), (0.5,))
TINY = "tests.support.models:tiny_backbone"


def images(count: int, raw: RawInputs = GRAY) -> torch.Tensor:
    return torch.rand(count, *raw.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_random_conv_has_features_of_built_in_network() -> None:
    with seeded(0, "backbone"):
        network = RandomConv((1, 8, 8), 2, width=4)
    expected = nn.Sequential(*list(network)[:4])(images(3))  # layers up to the normalization
    torch.testing.assert_close(load_backbone(Features("random-conv:4"), GRAY)(images(3)), expected)


def test_pixels_are_resized_repeated_and_normalized_for_the_backbone() -> None:
    convert = PixelConversion(GRAY, 3, 16, (0.1, 0.2, 0.3), (0.5, 0.25, 0.125))
    x = torch.full((2, 1, 8, 8), 0.2)  # pixel value 0.6
    expected = (0.6 - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor([0.5, 0.25, 0.125])
    torch.testing.assert_close(convert(x), expected.view(1, 3, 1, 1).expand(2, 3, 16, 16))


def test_images_with_other_channels_are_refused() -> None:
    with raises_invalid("features.backbone", "3 channels", "2"):
        PixelConversion(RawInputs((2, 8, 8)), 3, 0, (), ())


def test_weights_are_loaded_from_a_local_file_without_its_head(tmp_path: Path) -> None:
    own = load_backbone(Features(TINY), GRAY)
    state = {name: torch.full_like(tensor, 0.25) for name, tensor in own.network.state_dict().items()}
    path = tmp_path / "w.safetensors"
    save_file({**state, "head.weight": torch.ones(2, 3)}, path)
    loaded = load_backbone(Features(TINY, weights=str(path)), GRAY)
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.network.state_dict().items())
    assert loaded.digest != own.digest


def test_weights_with_other_names_are_refused(tmp_path: Path) -> None:
    state = load_backbone(Features(TINY), GRAY).network.state_dict()
    path = str(tmp_path / "w.safetensors")
    save_file({f"other.{name}": tensor + 1 for name, tensor in state.items()}, path)
    with pytest.raises(ModelError, match=r"lacks 'conv\.weight'"):
        load_backbone(Features(TINY, weights=path), GRAY)


def test_weights_of_other_shapes_are_refused(tmp_path: Path) -> None:
    state = load_backbone(Features(TINY), GRAY).network.state_dict()
    path = str(tmp_path / "w.safetensors")
    save_file({**state, "norm.weight": torch.zeros(4)}, path)
    with pytest.raises(ModelError, match=r"lacks 'norm\.weight' of .* other shapes"):
        load_backbone(Features(TINY, weights=path), GRAY)


def test_rejects_pickled_weights(tmp_path: Path) -> None:
    torch.save(load_backbone(Features(TINY), GRAY).network.state_dict(), tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"features\.weights 'w\.pt' .*safetensors"):
        load_backbone(Features(TINY, weights=str(tmp_path / "w.pt")), GRAY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Features("timm"), "features.backbone = 'timm'"),
        (Features(TINY, weights="absent.safetensors"), "features.weights = 'absent.safetensors'"),
        (Features("random-conv", weights="some.pt"), "none with random-conv"),
        (Features(TINY, layer="absent"), "features.layer = 'absent'"),
        (Features("random-conv", size=16), "features.size = 16"),
        (Features("random-conv", mean=(0.5,)), "features.mean"),
        (Features("random-conv", precision="bfloat16"), "features.precision"),
        (Features("absent.onnx"), "an existing .onnx file"),
        (Features("hf:absent"), "a local folder with config.json"),
    ],
)
def test_invalid_options_are_refused_in_one_line(options: Features, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        load_backbone(options, GRAY)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backbone", "weights", "option"),
    [
        ("timm:hf-hub:evil/x", "w.pt", "features.backbone"),
        ("timm:local-dir:/tmp/x", "w.pt", "features.backbone"),
        ("torchvision:../x", "w.pt", "features.backbone"),
        ("timm:resnet18", "", "features.weights"),
        ("torchvision:resnet18", "", "features.weights"),
    ],
)
def test_rejects_hubs_and_library_weights_before_import(
    monkeypatch: pytest.MonkeyPatch, backbone: str, weights: str, option: str
) -> None:
    monkeypatch.setattr(backbones.importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    with pytest.raises(ArgumentError, match=option):
        load_backbone(Features(backbone, weights=weights), GRAY)


class Library:
    """Stub of timm and torchvision that fails if pretrained weights are requested."""

    def __init__(self) -> None:
        self.models = self

    def create_model(self, name: str, pretrained: bool, num_classes: int) -> nn.Module:
        assert not pretrained
        assert num_classes == 0
        network: Any = nn.Sequential(nn.Conv2d(3, 4, 1))
        network.pretrained_cfg = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3}
        return network

    def list_models(self, module: object) -> list[str]:
        assert module is self
        return ["resnet18"]

    def get_model(self, name: str, weights: object) -> nn.Module:
        assert weights is None
        return nn.Sequential(nn.Conv2d(3, 4, 1))


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_networks_of_libraries_get_the_weights_of_a_local_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, Library())  # type: ignore[arg-type]
    path, state = tmp_path / "w.safetensors", {"0.weight": torch.ones(4, 3, 1, 1), "0.bias": torch.ones(4)}
    save_file(state, path)
    loaded = load_backbone(Features(f"{library}:resnet18", weights=str(path)), GRAY).network.state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_networks_that_download_their_own_backbone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", Library())  # type: ignore[arg-type]
    with raises_invalid("features.backbone", ANY, "torchvision"):
        load_backbone(Features("torchvision:fasterrcnn_resnet50_fpn", weights="w.pt"), GRAY)


def test_inputs_that_the_backbone_cannot_take_are_refused() -> None:
    with pytest.raises(ModelError, match="inputs of 1 x 2 x 2"):
        load_backbone(Features("tests.support.models:needs_large_images"), RawInputs((1, 2, 2)))


def test_layer_selects_a_submodule_and_its_map_is_averaged() -> None:
    backbone = load_backbone(Features(TINY, layer="conv", precision="float32"), GRAY)
    expected = backbone.network.network.conv(images(2)).mean((2, 3))
    torch.testing.assert_close(backbone(images(2)), expected)


def test_digest_depends_on_preprocessing_and_not_on_precision() -> None:
    digests = [
        load_backbone(Features(TINY, **options), GRAY).digest
        for options in ({}, {"precision": "bfloat16"}, {"size": 12}, {"mean": (0.1,)}, {"layer": "conv"})
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_onnx_graph_is_a_backbone(tmp_path: Path) -> None:
    path = tmp_path / "backbone.onnx"
    path.write_bytes(onnx_backbone().SerializeToString())
    backbone = load_backbone(Features(str(path)), GRAY)
    x = images(3)
    torch.testing.assert_close(backbone(x), x.mean((1, 2, 3)).unsqueeze(1) * torch.arange(8.0))
    with raises_invalid("features.layer", "features", "none"):
        load_backbone(Features(str(path), layer="features"), GRAY)


@pytest.mark.parametrize("kind", ["random", "empty", "torchscript"])
def test_files_that_are_no_onnx_graph_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "b.onnx"
    if kind == "torchscript":  # a ZIP archive
        torch.save(torch.zeros(2), path)
    else:
        path.write_bytes(random.Random(0).randbytes(2000) if kind == "random" else b"")
    with pytest.raises(ModelError, match=r"^backbone .*b\.onnx cannot be loaded: .*") as caught:
        load_backbone(Features(str(path)), GRAY)
    assert "\n" not in str(caught.value)


def test_texts_are_refused_by_backbones_of_images_and_images_by_those_of_texts(tmp_path: Path) -> None:
    texts = RawInputs((6,), vocabulary=save_tiny_encoder(tmp_path))
    (tmp_path / "b.onnx").write_bytes(onnx_backbone().SerializeToString())
    save_tiny_vision_transformer(tmp_path / "vit")
    for backbone in (str(tmp_path / "b.onnx"), f"hf:{tmp_path / 'vit'}", "random-conv"):
        with raises_invalid("features.backbone", backbone):
            load_backbone(Features(backbone), texts)
    with pytest.raises(ModelError, match=r"^backbone: .*expected a backbone for texts"):
        load_backbone(Features(TINY), texts)
    with pytest.raises(ModelError, match=r"data\.length"):
        load_backbone(Features(f"hf:{tmp_path}"), RawInputs((64,), vocabulary=texts.vocabulary))
    with raises_invalid("features.backbone", f"hf:{tmp_path}", "images"):
        load_backbone(Features(f"hf:{tmp_path}"), GRAY)
    assert load_backbone(Features(f"hf:{tmp_path / 'vit'}"), GRAY).width == 16


def test_rows_of_numbers_are_refused() -> None:
    with raises_invalid("features.backbone", TINY, "(12,)"):
        load_backbone(Features(TINY), RawInputs((12,)))


@pytest.mark.parametrize("error", ["Exception('no', 1)", "SafetensorError('no')", "SystemExit(3)"])
def test_module_whose_import_fails_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code = f"from safetensors import SafetensorError\nraise {error}\n"
    (tmp_path / "fails_on_import.py").write_text(code)
    with pytest.raises(PluginError, match="fails_on_import") as caught:
        load_backbone(Features("fails_on_import:net"), GRAY)
    assert "\n" not in str(caught.value)


def test_factory_that_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = (
        "from safetensors import SafetensorError\ndef net(shape): raise SafetensorError('header too large')\n"
    )
    (tmp_path / "failing_factory.py").write_text(code)
    with pytest.raises(ModelError, match="'failing_factory:net' cannot be built: header too large"):
        load_backbone(Features("failing_factory:net"), GRAY)


def test_onnx_graph_with_weights_in_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest would not depend on these weights."""
    onnx = pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)  # the folder in which onnxruntime looks for the other file
    onnx.save_model(onnx_backbone(), "b.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    with pytest.raises(ModelError, match="other files"):
        load_backbone(Features("b.onnx"), GRAY)


def test_digest_of_an_encoder_depends_on_its_configuration_but_not_on_versions(tmp_path: Path) -> None:
    words, file = save_tiny_encoder(tmp_path), tmp_path / "config.json"
    config, digests = json.loads(file.read_text()), []
    changes: list[dict[str, Any]] = [{}, {"transformers_version": "0"}]
    changes += [{"num_attention_heads": 4}, {"hidden_act": "relu"}, {"pad_token_id": 1}]
    for change in changes:
        file.write_text(json.dumps({**config, **change}))
        digests.append(load_backbone(Features(f"hf:{tmp_path}"), RawInputs((6,), vocabulary=words)).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_encoder_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    """The library would sample them, so that two nodes had different features."""
    texts, file = RawInputs((6,), vocabulary=save_tiny_encoder(tmp_path)), tmp_path / "model.safetensors"
    state, name = load_file(file), "embeddings.word_embeddings.weight"
    content = file.read_bytes()
    without = {key: tensor for key, tensor in state.items() if key != name}
    for tensors in (without, {**state, name: torch.zeros(5, 16)}):
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ModelError, match=rf"lacks '{re.escape(name)}' of hf:[^\n]*$"):
            load_backbone(Features(f"hf:{tmp_path}"), texts)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"^backbone hf:.* cannot be loaded: [^\n]*$"):
        load_backbone(Features(f"hf:{tmp_path}"), texts)


def test_encoder_without_pooler_has_the_same_features_each_time(tmp_path: Path) -> None:
    """Encoders saved from a language model have none, and the library would sample its weights."""
    texts, file = RawInputs((6,), vocabulary=save_tiny_encoder(tmp_path)), tmp_path / "model.safetensors"
    options, ids = Features(f"hf:{tmp_path}", precision="float32"), torch.tensor([[2, 5, 6, 3, 0, 0]])
    expected = load_backbone(options, texts)(ids)
    state = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("pooler.")}
    save_file(state, file, {"format": "pt"})
    first, second = (load_backbone(options, texts) for _ in range(2))
    assert first.digest == second.digest
    torch.testing.assert_close(first(ids), expected)
    with raises_invalid("features.layer", "model.pooler"):
        load_backbone(Features(f"hf:{tmp_path}", layer="model.pooler"), texts)


def test_sentence_encoder_averages_over_tokens_and_ignores_padding(tmp_path: Path) -> None:
    words = save_tiny_encoder(tmp_path)
    options = Features(f"hf:{tmp_path}", precision="float32")
    backbone = load_backbone(options, RawInputs((6,), vocabulary=words))
    ids = torch.tensor([[2, 5, 3, 0, 0, 0], [2, 6, 7, 8, 5, 3]])
    states = backbone.network.model(input_ids=ids[:1, :3]).last_hidden_state
    torch.testing.assert_close(backbone(ids)[0], states[0].mean(0))
    options = Features(f"hf:{tmp_path}", precision="float32", layer="model.embeddings")
    layer = load_backbone(options, RawInputs((6,), vocabulary=words))
    embedded = backbone.network.model.embeddings(input_ids=ids[:1, :3])
    torch.testing.assert_close(layer(ids)[0], embedded[0].mean(0))
    with raises_invalid("features.backbone", f"hf:{tmp_path}", f"data.vocabulary = 'hf:{tmp_path}'"):
        load_backbone(Features(f"hf:{tmp_path}"), RawInputs((6,), vocabulary=words + 1))


def test_layer_that_returns_a_tuple_gives_its_first_tensor() -> None:
    """Layers of Hugging Face models return a tuple in some versions of the library."""

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return 2 * x, None

    network = nn.Sequential(Pair())
    output = backbones.LayerOutput(network, "0")
    x = torch.ones(2, 3)
    assert torch.equal(output(x), 2 * x)


def test_moments_of_batch_norm_are_those_of_its_activation() -> None:
    backbone = load_backbone(Features(TINY), GRAY)
    norm: Any = backbone.network.norm
    norm.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
    norm.bias.copy_(torch.tensor([-0.5, 0.0, 3.0]))
    mean, std = batch_norm_moments(backbone)
    sample = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0)) * norm.weight + norm.bias
    torch.testing.assert_close(mean, sample.relu().mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(std, sample.relu().std(0), atol=0.02, rtol=0)


def test_dead_feature_of_batch_norm_is_not_scaled_up() -> None:
    backbone = load_backbone(Features(TINY), GRAY)
    norm: Any = backbone.network.norm
    norm.weight.copy_(torch.tensor([0.1, 1.0, 2.0]))
    norm.bias.copy_(torch.tensor([-9.0, 0.0, 3.0]))  # the first output of the activation is 0
    _, std = batch_norm_moments(backbone)
    assert float(std[0]) == pytest.approx(0.1 * math.sqrt(float(std[1] ** 2 + std[2] ** 2) / 3), rel=1e-5)


def test_complete_model_keeps_the_backbone_frozen_while_its_head_trains() -> None:
    backbone = load_backbone(Features(TINY), GRAY)
    model = BackboneWithHead(backbone, ScaledHead(FeatureScale(True), nn.Linear(3, 2)))
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    model.train()(images(4)).sum().backward()
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable == ["head.head.weight", "head.head.bias"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


def test_features_are_normalized_by_example_or_by_moments() -> None:
    f = torch.tensor([[1.0, 3.0], [10.0, 14.0]])
    torch.testing.assert_close(
        FeatureScale(True)(f), torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]), atol=1e-3, rtol=0
    )
    scale = FeatureScale(False, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(scale(f), torch.tensor([[0.0, 0.5], [9.0, 6.0]]))
    scale = FeatureScale(False, torch.tensor([1.0, 2.0]), projection=torch.tensor([[0.5], [2.0]]))
    torch.testing.assert_close(scale(f), torch.tensor([[2.0], [28.5]]))


@pytest.mark.parametrize("normalize", ["none", "example", "backbone"])
def test_components_of_other_than_public_data_are_refused(normalize: Any) -> None:
    with raises_invalid("features.components", 2, "public"):
        Features("random-conv", normalize=normalize, components=2)


def test_more_components_than_features_are_refused() -> None:
    options = Features(TINY, normalize="public", components=3)
    assert options.model_width(3) == 3
    with raises_invalid("features.components", 3, "0 to 2"):
        options.model_width(2)


@pytest.mark.parametrize(
    ("library", "backbone"),
    [("timm", "timm:resnet18"), ("torchvision", "torchvision:resnet18"), ("transformers", "hf:vit")],
)
def test_library_that_does_not_fit_torch_is_one_line(
    library: str, backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchvision of another build: importing it raises an error that is no ImportError."""
    reason = "operator torchvision::nms does not exist"
    (tmp_path / f"{library}.py").write_text(f"raise RuntimeError({reason!r})")
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.chdir(tmp_path)
    weights = "" if library == "transformers" else "w.safetensors"
    with pytest.raises(ModelError, match=reason) as caught:
        load_backbone(Features(backbone, weights=weights), GRAY)
    assert library in str(caught.value)
    assert "\n" not in str(caught.value)
