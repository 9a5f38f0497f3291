"""Model outputs for many inputs."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.compute import Compute
from fedstill.models import build, inference


def test_predict_in_batches_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "inference_batch_size", lambda inputs: 3)
    sizes: list[int] = []
    model = build("resnet8:4", (1, 8, 8), 3, 0).train()
    inputs = torch.randn(7, 1, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with model[0].register_forward_hook(lambda layer, given, out: sizes.append(len(out))):
        outputs = inference.predict(model, inputs, Compute())
    assert sizes == [3, 3, 1]
    assert model.training
    assert not outputs.requires_grad
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    torch.testing.assert_close(outputs, model.eval()(inputs))
