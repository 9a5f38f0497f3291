"""U-Nets with a pretrained encoder: shapes, training, frozen statistics, names and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstill.core.errors import ArgumentError, ModelError
from fedstill.models import build, build_unchecked, check_module, check_name
from fedstill.models.custom_model import build_model
from fedstill.models.extractor_head import split_model
from fedstill.models.interface import Interface
from fedstill.models.model_config import CustomModel, ModelConfig, read_model_config
from fedstill.models.module_check import needs_two_examples
from fedstill.models.module_utils import deep_copy, to_vector
from fedstill.node.architectures import architecture_key
from fedstill.tasks.segmentation import Segmentation
from tests.support.errors import raises_invalid
from tests.support.models import save_tiny_weights

TINY = "tests.support.models:tiny_encoder"
NAME = f"unet:{TINY}"
FACES = Interface(Segmentation(2), ("a", "b"), (1, 16, 16), 0, (0.5,), (0.25,))


def unet(shape: tuple[int, int, int] = (1, 16, 16), classes: int = 3, seed: int = 0) -> Any:
    return build(NAME, shape, classes, seed)


@pytest.mark.parametrize("sides", [(16, 16), (13, 30), (8, 5), (1, 17), (64, 8)])
@pytest.mark.parametrize("channels", [1, 3])
def test_unet_returns_one_logit_per_class_and_pixel(channels: int, sides: tuple[int, int]) -> None:
    model = unet((channels, *sides), 5)
    assert model(torch.randn(2, channels, *sides)).shape == (2, 5, *sides)
    check_module(model, (channels, *sides), (5, *sides), "model")


def test_decoder_doubles_its_channels_with_each_scale() -> None:
    decoder = unet().extractor.decoder
    assert [(up.in_channels, up.out_channels) for up in decoder.ups] == [(8, 64), (64, 32), (32, 16)]
    assert [block[0].in_channels for block in decoder.blocks] == [64 + 6, 32 + 4, 16 + 16]


def test_channels_are_limited_and_large_steps_are_taken_at_once() -> None:
    decoder: Any = build("unet:tests.support.models:patches", (3, 64, 64), 2, 0).get_submodule(
        "extractor.decoder"
    )
    ups = [(up.in_channels, up.out_channels, up.stride) for up in decoder.ups]
    assert ups == [(5, 256, (2, 2)), (256, 64, (8, 8)), (64, 16, (4, 4))]


def test_gradients_reach_all_parameters() -> None:
    model = unet()
    model.train()(torch.randn(4, 1, 16, 16)).square().mean().backward()
    norms = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None and grad.abs().sum() > 0 for grad in norms.values())
    assert {name.split(".")[1] for name in norms if name.startswith("extractor")} == {"encoder", "decoder"}


def test_statistics_are_frozen_while_parameters_train() -> None:
    model, x = unet(), torch.randn(4, 1, 16, 16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        model.train()(x).square().mean().backward()
        optimizer.step()
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == dict(model.named_parameters()).keys()
    assert not needs_two_examples(model, (1, 16, 16))
    one = model.train()(x[:1])
    torch.testing.assert_close(model.eval()(x)[:1], one, rtol=1e-4, atol=1e-5)  # examples are not mixed


def test_unet_splits_before_its_last_layer_and_has_latent_features() -> None:
    model, x = unet(), torch.randn(2, 1, 16, 16)
    parts = split_model(model, "model")
    assert parts.extractor(x).shape == (2, 16, 16, 16)
    torch.testing.assert_close(parts(x), model(x))
    assert parts.get_submodule("extractor.encoder")(x).shape == (2, 8, 2, 2)


def test_copy_is_independent_and_equal() -> None:
    model, x = unet(), torch.randn(2, 1, 16, 16)
    copy = deep_copy(model)
    torch.testing.assert_close(copy(x), model(x))
    with torch.no_grad():
        model.encoder.network.stem.weight.zero_()
    assert not torch.allclose(copy(x), model(x))


def test_digest_is_of_the_pretraining_and_not_of_the_architecture(tmp_path: Path) -> None:
    """Nodes and student may have different pretrained weights, also if their parameters are averaged."""
    networks = [unet(), unet()]
    for seed, network in enumerate(networks):
        save_tiny_weights(tmp_path / f"{seed}.safetensors", seed=seed)
        network.load_encoder(tmp_path / f"{seed}.safetensors")
    one, other = networks
    before = one.encoder.digest
    assert before != other.encoder.digest
    assert architecture_key(one) == architecture_key(other)
    with torch.no_grad():
        next(one.parameters()).add_(1)
    assert deep_copy(one).encoder.digest == before


def test_residual_unet_is_identity_at_initialization() -> None:
    model, x = build(f"residual-{NAME}", (1, 13, 16), 1, 0), torch.randn(2, 1, 13, 16)
    torch.testing.assert_close(model(x), x)
    with pytest.raises(ModelError, match=r"2 output .*expected 1"):
        build(f"residual-{NAME}", (1, 8, 8), 2, 0)


def test_initial_decoder_follows_from_the_seed() -> None:
    first, same, other = (to_vector(unet(seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_encoder_knows_the_normalization_of_the_images() -> None:
    own, other = (build(NAME, (1, 16, 16), 2, 0, mean=(mean,), std=(0.5,)) for mean in (0.5, 0.2))
    for model, mean in ((own, 0.5), (other, 0.2)):
        assert float(model.encoder.conversion.data_mean) == pytest.approx(mean)  # type: ignore[union-attr]


# --- names and weights ------------------------------------------------------------------------------------


def test_model_of_a_node_gets_the_weights_of_a_local_file(tmp_path: Path) -> None:
    weights = save_tiny_weights(tmp_path / "w.safetensors")
    config = ModelConfig(name=NAME, encoder_weights="w.safetensors")
    model: Any = build_model(config, FACES, tmp_path, 0)
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in model.encoder.network.state_dict().items()
    )
    assert model.name == NAME
    assert model.encoder.conversion.data_std.item() == 0.25


def test_whole_weights_replace_those_of_the_encoder(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    whole = unet(classes=2, seed=5)
    save_file(whole.state_dict(), tmp_path / "whole.safetensors")
    model = build_model(ModelConfig(name=NAME, weights="whole.safetensors"), FACES, tmp_path, 0)
    assert torch.equal(to_vector(model), to_vector(whole))
    both = ModelConfig(name=NAME, weights="whole.safetensors", encoder_weights="whole.safetensors")
    with raises_invalid("model.encoder_weights", "whole.safetensors", "none"):
        build_model(both, FACES, tmp_path, 0)


def test_weights_of_a_model_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(
        f'name = "{NAME}"\nencoder_weights = "w.safetensors"\n', encoding="utf-8"
    )
    config = read_model_config(str(tmp_path / "node.toml"), Path(), "nodes.models")
    assert config.encoder_weights == str(tmp_path / "w.safetensors")


def test_missing_or_unused_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    with raises_invalid("model.encoder_weights", str(tmp_path / "none"), "existing"):
        build_model(ModelConfig(name=NAME, encoder_weights="none"), FACES, tmp_path, 0, option="model.name")
    save_tiny_weights(tmp_path / "w.safetensors")
    given = ModelConfig(name="unet:2", encoder_weights="w.safetensors")
    with raises_invalid("nodes.encoder_weights", str(tmp_path / "w.safetensors"), "no pretrained encoder"):
        build_model(given, FACES, tmp_path, 0, option="nodes.models")
    custom = CustomModel(source=nn.Conv2d(1, 2, 1), encoder_weights="w.safetensors")
    with raises_invalid("models[0].encoder_weights", str(tmp_path / "w.safetensors"), "none"):
        build_model(custom, FACES, tmp_path, 0, option="models[0]")


def test_weights_of_another_encoder_are_refused(tmp_path: Path) -> None:
    save_tiny_weights(tmp_path / "w.safetensors", channels=3)
    with pytest.raises(ModelError, match=r"lacks 'stem\.weight' of .*tiny_encoder, or has other shapes"):
        build_model(ModelConfig(name=NAME, encoder_weights="w.safetensors"), FACES, tmp_path, 0)


@pytest.mark.parametrize("name", ["unet:lite0.onnx", "unet:hf:folder", "residual-unet:a:b:c"])
def test_backbone_that_cannot_be_trained_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with raises_invalid("model", name, "package.module:factory"):
        check_name(name)
    with raises_invalid("nodes.models", name, "package.module:factory"):
        build_model(
            read_model_config(name, tmp_path, "nodes.models"), FACES, tmp_path, 0, option="nodes.models"
        )


@pytest.mark.parametrize("name", ["unet:timm", "unet:0", "bn-unet:timm:resnet18", "unet:"])
def test_other_names_are_no_encoders(name: str) -> None:
    with raises_invalid("model", name, ":WIDTH"):
        check_name(name)


def test_encoder_needs_images() -> None:
    with pytest.raises(ArgumentError, match="model"):
        build_unchecked(NAME, (12,), 2, 0)


def test_hub_names_are_refused_before_import() -> None:
    with raises_invalid("model", "unet:timm:hf-hub:evil/x", "letters"):
        build("unet:timm:hf-hub:evil/x", (3, 16, 16), 2, 0)


def test_network_for_images_of_another_normalization_is_refused() -> None:
    """Its file has no normalization: a student that is loaded later takes that of the run."""
    network = unet((3, 16, 16))
    network.require_normalization((), (), "student")
    network.require_normalization((0.5,) * 3, (0.5,), "student")
    with raises_invalid("std of student", [0.5] * 3, "[0.2, 0.3, 0.5]"):
        network.require_normalization((0.5,) * 3, (0.2, 0.3, 0.5), "student")
