"""A model that is no torch module (a function, scikit-learn, ONNX, an endpoint) as one that gives outputs.

It answers what asks for predictions. It has nothing to train, and no gradient goes through it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedstill.core.errors import FedstillError, ModelError, PredictorError
from fedstill.core.user_functions import OWN, first_line
from fedstill.models.class_map import LEAST, ClassMap
from fedstill.models.interface import Interface
from fedstill.models.model_config import ModelConfig
from fedstill.models.onnx_graph import OnnxGraph

logger = logging.getLogger("fedstill.node")

Numbers = npt.NDArray[Any]


def file_of(model: nn.Module) -> str:
    """The fingerprint of the file from which a model that only predicts is; empty: it is from none. Weights
    of a network are not meant: a run remembers these itself."""
    return "".join(part.file for part in model.modules() if isinstance(part, Predictor))


def tell_no_failures(model: nn.Module) -> None:
    """Have a model that only predicts give NaN from now on where it fails, and say so in this log alone."""
    for part in model.modules():
        if isinstance(part, Predictor):
            part.tells = False


@dataclass(frozen=True)
class _Source:
    """What a model's own kind makes of inputs, and what it says of its outputs."""

    predict: Callable[[Any], Any]
    classes: Sequence[Any] = ()
    probabilities: bool = False


class Predictor(nn.Module):
    """Inputs to logits ``(B, classes)``, or numbers ``(B, 1)``, float32, through what is no torch module.

    Args:
        source: one of these, tried in this order. An ONNX session: ``run`` and ``get_inputs``, as
            onnxruntime's. An estimator as scikit-learn's: ``predict_proba``, else ``decision_function``; for
            numbers ``predict``. It gets images flattened, ``(B, C * H * W)``, unless it takes none such. A
            function of a numpy array of inputs that gives ``(B, classes)``, or ``(B,)`` for two classes or
            numbers; it may say what it gives by attributes ``classes`` and ``probabilities``.
        to: what inputs it is given, and what it must give.
        how: what it takes (:class:`~fedstill.models.model_config.ModelConfig`), what it gives, its classes.

    Attributes:
        file: the fingerprint of the file that it is from; empty: from none.

    Raises:
        ModelError: none of these, or one that cannot take inputs of this shape.

    >>> from fedstill.tasks.classification import Classification
    >>> to = Interface(Classification(2), ("cat", "dog"), (1, 4, 4))
    >>> predictor = Predictor(lambda images: images[:, 0, 0, :2], to, ModelConfig(classes=("dog", "cat")))
    >>> predictor(torch.tensor([3.0, 1.0, 0.0, 0.0]).expand(1, 1, 4, 4))
    tensor([[1., 3.]])
    """

    differentiable = False
    file = ""

    def __init__(self, source: Any, to: Interface, how: ModelConfig | None = None) -> None:
        super().__init__()
        how = how or ModelConfig()
        if to.task.kind not in ("class", "number"):
            raise ModelError(
                f"the model is a {type(source).__name__}, which gives a class or a number for each input: "
                f"allowed for {to.task.name} is a torch.nn.Module"
            )
        self._called = getattr(source, "called", type(source).__name__)
        self._to, self._takes = to, how.takes
        probe = self._taken(np.zeros((2, *to.shape), dtype=np.float32))
        opened = _opened(source, probe, to.task.kind == "number", self._called)
        self._predict = opened.predict
        self._probabilities = how.gives == "probabilities" or (how.gives == "auto" and opened.probabilities)
        own = [] if to.task.kind == "number" else how.classes or list(opened.classes)
        mapped = ClassMap(own, to.classes) if own else None
        self._given = mapped.given if mapped else len(to.classes)
        self._map = mapped if mapped and mapped.changes else None
        self.tells = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs, without gradient.

        Where it is not to tell that the model fails (:func:`tell_no_failures`), which would tell of what it
        has learned, NaN stand for what should have come out.

        Raises:
            PredictorError: a gradient was wanted; or it tells, and the model fails, or what comes out is no
                ``(B, classes)``.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise PredictorError(f"a {self._called} predicts only: no gradient goes through it")
        try:
            return self._outputs(x)
        except ModelError as error:  # a PredictorError, but for ONNX
            if self.tells:
                raise
            logger.error("NaN stand for what the model gives: %s", error)
            return torch.full((len(x), *self._to.outputs), float("nan"), device=x.device)

    def _outputs(self, x: torch.Tensor) -> torch.Tensor:
        inputs = x.detach().cpu()
        taken = self._taken((inputs.float() if inputs.is_floating_point() else inputs).numpy())
        given = _asked(self._predict, taken, self._called)
        outputs = self._numbers(given) if self._to.task.kind == "number" else self._logits(given)
        found, allowed = tuple(outputs.shape), (len(x), self._given)
        if found != allowed:
            raise PredictorError(f"a {self._called} gives {found} for {len(x)} inputs: allowed is {allowed}")
        if not outputs.isfinite().all():
            raise PredictorError(f"a {self._called} gives outputs that are not finite")
        return (outputs if self._map is None else self._map(outputs)).to(x.device)

    def _taken(self, x: Numbers) -> Any:
        """Inputs as the model takes them."""
        return {"inputs": lambda x: x, "raw": self._to.raw, "frame": self._to.frame}[self._takes](x)

    def _numbers(self, given: torch.Tensor) -> torch.Tensor:
        """Numbers as the federation's targets are: from -1 to 1 within their declared range."""
        numbers = given.reshape(-1, 1) if given.ndim == 1 else given
        if self._takes == "inputs":
            return numbers
        low, high = self._to.schema.answer.range
        return 2 * (numbers - low) / (high - low) - 1

    def _logits(self, given: torch.Tensor) -> torch.Tensor:
        """Scores of whatever kind as logits."""
        one = given.ndim == 1 or (given.ndim == 2 and given.shape[1] == 1)
        if one and self._given == 2:  # of the second class alone, as decision_function gives it
            second = given.reshape(-1)
            first = 1 - second if self._probabilities else torch.zeros_like(second)
            given = torch.stack([first, second], 1)
        if not self._probabilities:
            return given
        if given.numel() and not -1e-3 <= given.min() <= given.max() <= 1 + 1e-3:
            least, most = given.min().item(), given.max().item()
            raise PredictorError(
                f"a {self._called} gives from {least:.3g} to {most:.3g}: allowed are probabilities, or "
                'gives = "logits"'
            )
        return given.clamp_min(LEAST).log()

    def extra_repr(self) -> str:
        """What it wraps."""
        gives = "numbers" if self._to.task.kind == "number" else "logits"
        return f"{self._called}, {'probabilities' if self._probabilities else gives}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Predictor:
        """Itself: it has no state, and not every session can be copied."""
        return self


def _opened(source: Any, probe: Any, numbers: bool, called: str) -> _Source:
    """A source as a function, tried on a probe where what it says of itself follows from that."""
    if hasattr(source, "run") and hasattr(source, "get_inputs"):
        source = OnnxGraph(source, probe.shape[1:])
    if numbers and hasattr(source, "predict"):
        return _Source(_flattening(source.predict, probe))
    for name in () if numbers else ("predict_proba", "decision_function"):
        if hasattr(source, name):
            classes = np.asarray(getattr(source, "classes_", [])).tolist()
            return _Source(_flattening(getattr(source, name), probe), classes, name == "predict_proba")
    if not callable(source):
        predicts = "predict" if numbers else "predict_proba or decision_function"
        raise ModelError(
            f"the model is a {type(source).__name__}: allowed is a torch.nn.Module, an estimator with "
            f"{predicts}, an ONNX session, or a function"
        )
    if hasattr(source, "probabilities"):  # which an endpoint or a graph knows once it has answered
        _asked(source, probe, called)
    return _Source(source, getattr(source, "classes", ()), getattr(source, "probabilities", False))


def _asked(predict: Callable[[Any], Any], taken: Any, called: str) -> torch.Tensor:
    """What a model gives, in float32; whatever its own kind raises is one line."""
    try:
        answers = np.asarray(predict(taken))
        if np.iscomplexobj(answers):  # whose imaginary part would be lost
            raise PredictorError(f"a {called} gives complex numbers: allowed are real ones")
        return torch.from_numpy(answers.astype(np.float32))
    except _refusals() as error:
        if isinstance(error, FedstillError):
            raise
        raise PredictorError(f"a {called} cannot take these inputs: {first_line(error)}") from error


def _flattening(predict: Callable[[Any], Any], probe: Any) -> Callable[[Any], Any]:
    """An estimator's function, of flattened images if it takes them."""

    def flattened(inputs: Numbers) -> Any:
        return predict(inputs.reshape(len(inputs), -1))

    refused: Exception | None = None
    for each in (flattened, predict) if probe.ndim > 2 else (predict,):
        try:
            each(probe)
        except OWN as error:
            refused = refused or error
        else:
            return each
    assert refused is not None
    kind = "images nor rows of pixels" if probe.ndim > 2 else f"rows of {probe.shape[1]} columns"
    neither = "neither " if probe.ndim > 2 else "no "
    raise ModelError(f"the model takes {neither}{kind}: {first_line(refused)}") from refused


def _refusals() -> tuple[type[Exception], ...]:
    """What a model of another's making raises; onnxruntime, where it is in use, has kinds of its own."""
    module = sys.modules.get("onnxruntime.capi.onnxruntime_pybind11_state")
    found = vars(module).values() if module else ()
    return (*OWN, *(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)))
