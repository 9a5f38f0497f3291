"""An ONNX graph as a function of arrays; ``onnxruntime`` comes with the extra "onnx"."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedstill.core.errors import ArgumentError, ModelError
from fedstill.core.user_functions import first_line

Floats = npt.NDArray[np.floating[Any]]


def load(path: Path) -> Any:
    """An ONNX session from a file, on the CPU, with as many threads as torch has.

    Raises:
        ArgumentError: onnxruntime is not installed.
        ModelError: no ONNX graph.
    """
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        allowed = "pip install 'fedstill[onnx]'"
        raise ArgumentError(path.name, "onnxruntime is not installed", allowed) from error
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # what it finds wrong comes as an exception
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # kinds of its own, below no common one
        raise ModelError(f"{path.name} is no ONNX graph: {first_line(error)}") from error


class OnnxGraph:
    """Inputs ``(B, *shape)`` to the graph's first output of numbers, in batches of the size that it was made
    for, if any.

    Attributes:
        classes: its own labels, where it tells them (skl2onnx); known once it has answered.
        probabilities: whether what it gives is called so.

    Raises:
        ModelError: it takes inputs of another form.
    """

    called = "ONNX graph"

    def __init__(self, session: Any, shape: tuple[int, ...]) -> None:
        inputs = session.get_inputs()
        if len(inputs) != 1:
            raise ModelError(f"the ONNX model takes {len(inputs)} inputs: allowed is one")
        self._session, self._name, sizes = session, inputs[0].name, list(inputs[0].shape)
        self._wanted = [math.prod(shape)] if len(sizes) == 2 else list(shape)
        pairs = zip(sizes[1:], self._wanted, strict=False)
        fits = [not isinstance(size, int) or size == want for size, want in pairs]
        if len(sizes) != len(self._wanted) + 1 or not all(fits):
            forms = " or ".join(dict.fromkeys((str(["B", *shape]), str(["B", math.prod(shape)]))))
            raise ModelError(f"the ONNX model takes inputs {sizes}: allowed is {forms}")
        self._kind = np.float64 if "double" in str(inputs[0].type) else np.float32
        self._batch = sizes[0] if isinstance(sizes[0], int) else None
        self.classes: Sequence[Any] = ()
        self.probabilities = False

    def __call__(self, x: Floats) -> Floats:
        """The graph's scores ``(B, classes)``."""
        x = x.reshape(len(x), *self._wanted).astype(self._kind)
        batch = self._batch or max(len(x), 1)
        padded = np.concatenate([x, np.zeros((-len(x) % batch, *self._wanted), dtype=self._kind)])
        parts = [
            self._scores(self._session.run(None, {self._name: padded[first : first + batch]}))
            for first in range(0, len(padded), batch)
        ]
        return np.concatenate(parts)[: len(x)]

    def _scores(self, outputs: Sequence[Any]) -> Floats:
        """The first output that holds a row of numbers an example; the others are labels and the like."""
        names = [str(each.name).lower() for each in self._session.get_outputs()]
        for name, output in zip(names, outputs, strict=True):
            if isinstance(output, np.ndarray) and output.ndim == 2 and output.dtype.kind == "f":
                self.probabilities = "probabilit" in name
                return output
            if isinstance(output, list) and output and isinstance(output[0], dict):  # by class: skl2onnx
                self.classes, self.probabilities = sorted(output[0]), True
                return np.array([[row[key] for key in self.classes] for row in output])
        raise ModelError("the ONNX model gives no floats (B, classes)")
