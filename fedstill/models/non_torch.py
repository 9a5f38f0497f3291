"""A model that is no torch module (a function, scikit-learn, ONNX) as one that gives logits and nothing else.

It answers what asks for predictions. It has nothing to train, and no gradient goes through it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedstill.core.errors import ModelError
from fedstill.core.user_functions import OWN, first_line

Floats = npt.NDArray[np.floating[Any]]
Gives = Literal["auto", "logits", "probabilities"]

LEAST = 1e-6  # smaller probabilities count as this: a forest's zero is no infinite certainty


class Predictor(nn.Module):
    """Images ``(B, C, H, W)`` to logits ``(B, classes)`` float32, through what is no torch module.

    Args:
        source: one of these, tried in this order. An ONNX session: ``run`` and ``get_inputs``, as
            onnxruntime's. An estimator as scikit-learn's: ``predict_proba``, else ``decision_function``;
            it gets images flattened, ``(B, C * H * W)``, unless it takes none such. A function of numpy's
            ``(B, C, H, W)`` float32 that gives ``(B, classes)``.
        shape: ``(C, H, W)`` of an input.
        classes: their names, in order. An estimator that has learned fewer (``classes_``) gives the others
            nothing.
        gives: what comes out. ``auto``: probabilities from ``predict_proba``, logits from all others.
            Probabilities become their logarithm, not below that of 1e-6.

    Raises:
        ModelError: none of these, or one that cannot take inputs of this shape.

    >>> predictor = Predictor(lambda images: images[:, 0, 0, :2], (1, 4, 4), ("cat", "dog"))
    >>> predictor(torch.tensor([3.0, 1.0, 0.0, 0.0]).expand(1, 1, 4, 4))
    tensor([[3., 1.]])
    """

    differentiable = False

    def __init__(
        self, source: Any, shape: tuple[int, int, int], classes: Sequence[str], gives: Gives = "auto"
    ) -> None:
        super().__init__()
        self._kind = type(source).__name__
        self._classes = len(classes)
        self._columns: list[int] | None = None  # of the estimator's classes, where they are not all
        probe = np.zeros((2, *shape), dtype=np.float32)
        self._probabilities = gives == "probabilities"
        if hasattr(source, "run") and hasattr(source, "get_inputs"):
            self._predict = _session(source, shape)
        elif hasattr(source, "predict_proba") or hasattr(source, "decision_function"):
            proba = hasattr(source, "predict_proba")
            self._probabilities = gives == "probabilities" or (gives == "auto" and proba)
            self._predict = _estimator(source.predict_proba if proba else source.decision_function, probe)
            self._columns = _columns(source, classes)
        elif callable(source):
            self._predict = source
        else:
            raise ModelError(
                f"the model is a {self._kind}: allowed is a torch.nn.Module, an estimator with predict_proba "
                "or decision_function, an ONNX session, or a function"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits ``(B, classes)``, without gradient.

        Raises:
            ModelError: a gradient was wanted, or what comes out is no ``(B, classes)``.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise ModelError(f"a {self._kind} predicts only: no gradient goes through it")
        images = x.detach().cpu().float().numpy()
        try:
            predicted = np.asarray(self._predict(images))
            scores = torch.from_numpy(predicted.astype(np.float32))
        except _refusals() as error:
            raise ModelError(f"a {self._kind} cannot take these inputs: {first_line(error)}") from error
        columns = self._columns
        given = self._classes if columns is None else len(columns)
        if scores.ndim == 1 and given == 2:  # one score for two classes, as decision_function gives it
            scores = torch.stack([torch.zeros_like(scores), scores], 1)
        if tuple(scores.shape) != (len(x), given):
            found, allowed = tuple(scores.shape), (len(x), given)
            raise ModelError(f"a {self._kind} gives {found} for {len(x)} inputs: allowed is {allowed}")
        if self._probabilities:
            scores = scores.clamp_min(LEAST).log()
        if columns is not None:
            known = scores if self._probabilities else scores.log_softmax(1)
            scores = torch.full((len(x), self._classes), math.log(LEAST))
            scores[:, columns] = known
        return scores.to(x.device)

    def extra_repr(self) -> str:
        """What it wraps."""
        return f"{self._kind}, {'probabilities' if self._probabilities else 'logits'}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Predictor:
        """Itself: it has no state, and not every session can be copied."""
        return self


def _estimator(predict: Callable[[Floats], Floats], probe: Floats) -> Callable[[Floats], Floats]:
    """An estimator's function, of flattened images if it takes them."""

    def flattened(images: Floats) -> Floats:
        return predict(images.reshape(len(images), -1))

    refused: Exception | None = None
    for each in (flattened, predict):
        try:
            each(probe)
        except OWN as error:
            refused = refused or error
        else:
            return each
    assert refused is not None
    raise ModelError(f"the model takes neither images nor rows of pixels: {first_line(refused)}") from refused


def _columns(source: Any, classes: Sequence[str]) -> list[int] | None:
    """The place of each class that an estimator has learned; None where it is all, in order."""
    learned = getattr(source, "classes_", None)
    if learned is None:
        return None
    places = []
    for name in np.asarray(learned).tolist():
        place = list(classes).index(name) if name in classes else name
        if place not in range(len(classes)):
            known = f"{', '.join(classes)}, or their numbers from 0"
            raise ModelError(f"the model has learned a class {name!r}: allowed are {known}")
        places.append(int(place))
    return None if places == list(range(len(classes))) else places


def _session(session: Any, shape: tuple[int, int, int]) -> Callable[[Floats], Floats]:
    """An ONNX session as a function of images, in batches of the size that it was made for, if any."""
    inputs = session.get_inputs()
    if len(inputs) != 1:
        raise ModelError(f"the ONNX model takes {len(inputs)} inputs: allowed is one")
    name, sizes = inputs[0].name, list(inputs[0].shape)
    wanted = [math.prod(shape)] if len(sizes) == 2 else list(shape)
    fits = [not isinstance(size, int) or size == want for size, want in zip(sizes[1:], wanted, strict=False)]
    if len(sizes) not in (2, 4) or not all(fits):
        raise ModelError(
            f"the ONNX model takes inputs {sizes}: allowed is {['B', *shape]} or ['B', {wanted}]"
        )
    kind = np.float64 if "double" in str(inputs[0].type) else np.float32
    fixed = sizes[0] if isinstance(sizes[0], int) else None

    def predict(images: Floats) -> Floats:
        x = images.reshape(len(images), *wanted).astype(kind)
        batch = fixed or max(len(x), 1)
        padded = np.concatenate([x, np.zeros((-len(x) % batch, *wanted), dtype=kind)])
        parts = [
            _scores(session.run(None, {name: padded[first : first + batch]}))
            for first in range(0, len(padded), batch)
        ]
        return np.concatenate(parts)[: len(x)]

    return predict


def _scores(outputs: Sequence[Any]) -> Floats:
    """The first output that holds a row of numbers an example; the others are labels and the like."""
    for output in outputs:
        if isinstance(output, np.ndarray) and output.ndim == 2 and output.dtype.kind == "f":
            return output
        if isinstance(output, list) and output and isinstance(output[0], dict):  # by class: skl2onnx
            return np.array([[row[key] for key in sorted(row)] for row in output])
    raise ModelError("the ONNX model gives no floats (B, classes)")


def _refusals() -> tuple[type[Exception], ...]:
    """What a model of another's making raises; onnxruntime, where it is in use, has kinds of its own."""
    module = sys.modules.get("onnxruntime.capi.onnxruntime_pybind11_state")
    found = vars(module).values() if module else ()
    return (*OWN, *(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)))
