"""Architecture keys, which cover layers, options and tensors but not weights.

Also checks of an owner's model: before its inputs are known, and for compatibility with a method.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedstill import models
from fedstill.core.compute import Compute
from fedstill.core.errors import ArgumentError
from fedstill.core.table_schema import SchemaColumn, TableSchema
from fedstill.data.data_spec import DataSpec
from fedstill.models.vgg import CONV_INDICES
from fedstill.node import folder_check, model_setup, owner_folder
from fedstill.node.model_setup import architecture_hash
from fedstill.node.node_file import NodeFile, NodeModelConfig
from fedstill.protocol.method import METHODS
from fedstill.tasks.classification import TextConfig
from fedstill.tasks.regression import RegressionConfig
from tests.support.errors import raises_invalid
from tests.support.models import weights


class Own(nn.Module):
    """A layer whose repr does not show its tensors."""

    def __init__(self, width: int, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("seen", torch.zeros(1, dtype=kind))


@pytest.mark.parametrize("other", [Own(4), Own(3, torch.float64), nn.Linear(3, 3)])
def test_architecture_key_ignores_learned_values(other: nn.Module) -> None:
    assert architecture_hash(Own(3)) == architecture_hash(Own(3)) != architecture_hash(other)


TEXTS = DataSpec(TextConfig(), ("bad", "good"), (12,), (), (), vocabulary=50)


def named(name: str) -> NodeFile:
    return NodeFile(name="clinic", model=NodeModelConfig(name=name))


@pytest.mark.parametrize(
    "name",
    [*models.MODELS.builtin, "residual-unet:8", "transformer:32", "hf:bert", "hf:some/folder"],
)
def test_builtin_networks_pass_without_inputs(tmp_path: Path, name: str) -> None:
    model_setup.check_name_and_weights(named(name), tmp_path)


@pytest.mark.parametrize("name", ["transformr", "transformer:0", "hf:", "small-cnn:-1", "sql:1"])
def test_rejects_unknown_name_or_width_without_inputs(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"^invalid model\.name = .* \(expected (one of small-cnn.*transformer|\S+:WIDTH)"
    ):
        model_setup.check_name_and_weights(named(name), tmp_path)


def test_hub_model_is_not_taken_for_factory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "hf.py").write_text("def bert(shape, classes): raise SystemExit\n", encoding="utf-8")
    columns = tuple(SchemaColumn(name=name, range=(0.0, 1.0)) for name in ("a", "b"))
    rows = DataSpec(RegressionConfig(), ("b",), (1,), (), (), schema=TableSchema("b", columns))
    with raises_invalid("model.name", "hf:bert", "rows of a table"):
        model_setup.make_model(named("hf:bert"), tmp_path, rows)


@pytest.mark.parametrize("method", ["fedper", "lg-fedavg", "fedgen"])
@pytest.mark.parametrize("name", ["bag:8", "transformer:8"])
def test_text_network_is_split_with_tokens(method: str, name: str) -> None:
    model = model_setup.make_model(named(name), Path(), TEXTS)
    needs = METHODS[method]().needs()
    assert needs.split_models
    assert model_setup.unfit_reason(model, needs, TEXTS, Compute()) is None


def test_unsuitable_perceptual_weights_are_a_fault(tmp_path: Path) -> None:
    folder = tmp_path / "clinic"
    owner_folder.init_folder(folder)
    np.savez(folder / "data.npz", images=np.zeros((4, 2, 8, 8), dtype=np.uint8), labels=np.arange(4) % 2)
    save_file(weights(CONV_INDICES["VGG-16"]), folder / "vgg.safetensors")
    text = 'name = "clinic"\nonline = false\n[model]\nname = "mlp:8"\nperceptual = "vgg.safetensors"\n'
    (folder / "node.toml").write_text(text, encoding="utf-8")
    (fault,) = folder_check.check_folder(folder).faults
    assert "VGG weights for inputs of 2 channels" in fault
    np.savez(folder / "data.npz", images=np.zeros((4, 1, 8, 8), dtype=np.uint8), labels=np.arange(4) % 2)
    assert folder_check.check_folder(folder).faults == ()
