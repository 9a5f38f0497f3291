"""Models that are not torch modules, and weights with the structure of VGG-16."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def write_onnx(path: Path, weights: np.ndarray[Any, Any], output_name: str = "probabilities") -> None:
    """Write an ONNX graph ``softmax(x W)``, or ``x W`` for logits, with W ``(features, classes)``."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    last = "Softmax" if output_name == "probabilities" else "Identity"
    rows, columns = weights.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["z"]), helper.make_node(last, ["z"], [output_name])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", rows])],
        [helper.make_tensor_value_info(output_name, TensorProto.FLOAT, ["B", columns])],
        [numpy_helper.from_array(weights.astype(np.float32), "W")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))


def onnx_backbone() -> Any:
    """Return a graph whose features are 0 to 7 times the average pixel."""
    pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    weights = np.arange(8, dtype=np.float32).reshape(8, 1, 1, 1)
    nodes = [
        helper.make_node("Conv", ["x", "W"], ["z"]),
        helper.make_node("GlobalAveragePool", ["z"], ["features"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [info("x", TensorProto.FLOAT, ["B", 1, "H", "W"])],
        [info("features", TensorProto.FLOAT, ["B", 8, 1, 1])],
        [numpy_helper.from_array(weights, "W")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@contextmanager
def serving(response: Callable[[Any], Any], status: int = 200) -> Iterator[str]:
    """Serve a local endpoint; ``response`` computes the response, bytes or JSON, of each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            result = response(request)
            body = result if isinstance(result, bytes) else json.dumps(result).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # the client may have disconnected
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/predict"
    finally:
        server.shutdown()
        server.server_close()


VGG16 = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)


def weights(indices: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights of a tiny network structured like a published one: 2 channels, then 3, 4, ..."""
    generator, channels, tensors = torch.Generator().manual_seed(seed), 3, {}
    for position, index in enumerate(indices):
        wide = 2 + position % 4
        tensors[f"features.{index}.weight"] = torch.randn(wide, channels, 3, 3, generator=generator)
        tensors[f"features.{index}.bias"] = torch.randn(wide, generator=generator)
        channels = wide
    return {**tensors, "classifier.0.weight": torch.zeros(4, 4)}


class TinyBackbone(torch.nn.Module):
    """Convolution, batch norm and ReLU, averaged to three features; its weights are always the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv = torch.nn.Conv2d(channels, 3, 3, padding=1)
        self.norm, self.act = torch.nn.BatchNorm2d(3), torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.act(self.norm(self.conv(x)))
        return features


def tiny_backbone(shape: tuple[int, ...]) -> torch.nn.Module:
    """Return a backbone for images."""
    return TinyBackbone(shape[0])


def save_tiny_backbone(path: Path, shift: float = 0.0) -> Path:
    """Write the weights of :func:`tiny_backbone` for gray images, with ``shift`` added; return the path."""
    from safetensors.torch import save_file

    save_file({name: tensor + shift for name, tensor in TinyBackbone(1).state_dict().items()}, path)
    return path


def needs_large_images(shape: tuple[int, ...]) -> torch.nn.Module:
    """Return a backbone that fails for images below 5 x 5."""
    return torch.nn.Conv2d(shape[0], 3, 5)


def save_tiny_encoder(folder: Path) -> int:
    """Write a Hugging Face sentence encoder with its tokenizer; return its number of tokens."""
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "##s"]
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return len(words)


def save_tiny_vision_transformer(folder: Path) -> None:
    """Write a Hugging Face model of color images of 8 x 8 pixels, with 16 features."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=4,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.ViTModel(config).save_pretrained(folder)


class TinyEncoder(torch.nn.Module):
    """Three stages that each halve height and width, with batch norm, an inner branch and a head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(channels, 4, 3, stride=2, padding=1, bias=False)
        self.norm, self.act = torch.nn.BatchNorm2d(4), torch.nn.ReLU()
        self.stages = torch.nn.Sequential(self._stage(4, 6), self._stage(6, 8))
        self.pool, self.dropout = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Dropout(0.5)

    @staticmethod
    def _stage(channels: int, width: int) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(channels, width, 1),
            torch.nn.MaxPool2d(2),
            torch.nn.BatchNorm2d(width),
            torch.nn.ReLU(),
            torch.nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.pool(self.stages(self.dropout(self.act(self.norm(self.stem(x))))))
        return features.flatten(1)


def tiny_encoder(shape: tuple[int, ...]) -> torch.nn.Module:
    """Return a backbone with feature maps at a half, a quarter and an eighth of the image."""
    return TinyEncoder(shape[0])


def save_tiny_weights(path: Path, channels: int = 1, seed: int = 3) -> dict[str, torch.Tensor]:
    """Write weights of :class:`TinyEncoder` with statistics of a pretraining, and return them."""
    from safetensors.torch import save_file

    generator, state = torch.Generator().manual_seed(seed), TinyEncoder(channels).state_dict()
    weights = {
        name: 0.1 + 0.4 * torch.rand(tensor.shape, generator=generator) if tensor.ndim else tensor
        for name, tensor in state.items()
    }
    save_file(weights, path)
    return weights


def flat(shape: tuple[int, ...]) -> torch.nn.Module:
    """Return a backbone without feature maps."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(3))


def patches(shape: tuple[int, ...]) -> torch.nn.Module:
    """Return a backbone with maps at 1/4, 1/32 and 1/64 of the image."""
    sizes = ((shape[0], 3, 4), (3, 4, 8), (4, 5, 2))
    return torch.nn.Sequential(*(torch.nn.Conv2d(before, after, side, side) for before, after, side in sizes))


def means(shape: tuple[int, ...]) -> torch.nn.Module:
    """Return a backbone whose maps are twice the averages of 2 x 2 and three times those of 4 x 4 pixels."""
    layers = [torch.nn.Conv2d(1, 1, 2, 2, bias=False) for _ in range(2)]
    for layer, factor in zip(layers, (2.0, 1.5), strict=True):
        torch.nn.init.constant_(layer.weight, factor / 4)
    return torch.nn.Sequential(*layers)
