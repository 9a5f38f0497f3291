"""An ONNX graph as a function of arrays; ``onnxruntime`` comes with the extra "onnx".

An estimator of scikit-learn, XGBoost or LightGBM from a file; ``skops`` comes with the extra "skops".

Such a file is no pickle: what it holds is made of types that are allowed one by one.

A model behind an HTTP address, which is asked in JSON: ``"http://127.0.0.1:8080/predict"``.

It is asked ``POST {"inputs": [[0.5, null, ...], ...]}``, one entry an example, as it is shaped; null is a
value that is missing. It answers one of ``{"probabilities": [[0.9, 0.1], ...]}``, ``{"logits": [...]}`` and,
for numbers, ``{"numbers": [0.3, ...]}``, with one entry for each input, and may name its outputs beside that:
``"classes": ["benign", "malignant"]``.

The address is the model's owner's choice. No proxy is used, no redirection followed, and nothing of what
comes back is anything but numbers and names.

A model that is no torch module (a function, scikit-learn, ONNX, an endpoint) as one that gives outputs.

It answers what asks for predictions. It has nothing to train, and no gradient goes through it.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import ipaddress
import json
import logging
import math
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedstill.core.errors import ArgumentError, FedstillError, ModelError, PredictorError
from fedstill.core.registry import USER_CODE_ERRORS, first_line
from fedstill.models.class_map import MIN_PROBABILITY, ClassMap
from fedstill.models.interface import Interface
from fedstill.models.model_config import ModelConfig

Floats = npt.NDArray[np.floating[Any]]
Numbers = npt.NDArray[Any]
# Beside those that skops itself trusts: what estimators that have learned consist of, and hold only numbers.
TRUSTED_TYPES = (
    "collections.OrderedDict",
    "lightgbm.basic.Booster",
    "lightgbm.sklearn.LGBMClassifier",
    "lightgbm.sklearn.LGBMRegressor",
    "sklearn._loss.loss.HalfTweedieLossIdentity",
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.calibration._SigmoidCalibration",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.gaussian_process._gpc._BinaryGaussianProcessClassifierLaplace",
    "sklearn.gaussian_process.kernels.ConstantKernel",
    "sklearn.gaussian_process.kernels.Product",
    "sklearn.gaussian_process.kernels.RBF",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.tree._tree.Tree",
    "xgboost.core.Booster",
    "xgboost.sklearn.XGBClassifier",
    "xgboost.sklearn.XGBRegressor",
)
URL_SCHEMES = ("http://", "https://")
TIMEOUT_SECONDS = 60.0  # that an answer may take, from the first byte asked to the last one read
MAX_RESPONSE_BYTES = 2**26  # of an answer
MAX_REQUEST_VALUES = 2**18  # in a query: more inputs are several queries
OUTPUT_KEYS = ("probabilities", "logits", "numbers")
READ_BYTES = 2**16  # bytes read at once
logger = logging.getLogger("fedstill.node")


# --- ONNX ----------------------------------------------------------------------------------------------


def load_onnx(path: Path) -> Any:
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
            raise ModelError(f"the ONNX model takes {len(inputs)} inputs (expected one)")
        self._session, self._name, sizes = session, inputs[0].name, list(inputs[0].shape)
        self._wanted = [math.prod(shape)] if len(sizes) == 2 else list(shape)
        pairs = zip(sizes[1:], self._wanted, strict=False)
        fits = [not isinstance(size, int) or size == want for size, want in pairs]
        if len(sizes) != len(self._wanted) + 1 or not all(fits):
            forms = " or ".join(dict.fromkeys((str(["B", *shape]), str(["B", math.prod(shape)]))))
            raise ModelError(f"the ONNX model takes inputs {sizes} (expected {forms})")
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


# --- scikit-learn, XGBoost and LightGBM -----------------------------------------------------------------


def load_skops(path: Path) -> Any:
    """The estimator in a file.

    Raises:
        ArgumentError: skops is not installed.
        ModelError: no skops file, or one with types that are not trusted, or of a library that is not here.
    """
    try:
        skops = importlib.import_module("skops.io")
    except ImportError as error:
        allowed = "pip install 'fedstill[skops]'"
        raise ArgumentError(path.name, "skops is not installed", allowed) from error
    try:
        others = [kind for kind in skops.get_untrusted_types(file=path) if kind not in TRUSTED_TYPES]
        if others:
            allowed = "those of scikit-learn, XGBoost and LightGBM, or a function of your own that loads it"
            raise ModelError(f"{path.name} holds types {', '.join(others)} (expected {allowed})")
        return skops.load(path, trusted=list(TRUSTED_TYPES))
    except (*USER_CODE_ERRORS, BadZipFile) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path.name} is no skops file that can be read: {first_line(error)}") from error


# --- HTTP endpoints -------------------------------------------------------------------------------------


class Endpoint:
    """A function of arrays ``(B, ...)`` that is computed elsewhere.

    Args:
        url: ``http://`` or ``https://``, where it answers.
        seconds: that an answer may take.

    Attributes:
        classes: names of its outputs, where it tells them; known once it has answered.
        probabilities: whether it gives those.

    Raises:
        ArgumentError: no such address, or one with a name and a password in it.
    """

    def __init__(self, url: str, seconds: float = TIMEOUT_SECONDS) -> None:
        allowed = "http://host:port/path, without name and password"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ArgumentError("address of the model", url, allowed) from error
        sound = parts.scheme in ("http", "https") and parts.hostname and url.isprintable() and " " not in url
        if not sound or parts.username is not None or parts.fragment:
            raise ArgumentError("address of the model", url, allowed)
        self._host, self._port, self._seconds = str(parts.hostname), port, seconds
        self._secure = parts.scheme == "https"
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self.called = f"endpoint {parts.scheme}://{parts.netloc}{parts.path}"
        self.classes: tuple[str, ...] = ()
        self.probabilities = False
        self._told: tuple[tuple[str, ...], str] | None = None

    @property
    def loopback(self) -> bool:
        """Whether it is on this machine."""
        try:
            return ipaddress.ip_address(self._host).is_loopback
        except ValueError:
            return self._host == "localhost"

    def __call__(self, x: Floats) -> Floats:
        """What it gives for inputs ``(B, ...)``.

        Raises:
            PredictorError: it cannot be reached, takes too long, or answers anything else.
        """
        rows = max(MAX_REQUEST_VALUES // max(math.prod(x.shape[1:]), 1), 1)
        parts = [self._ask(x[first : first + rows]) for first in range(0, len(x), rows)]
        return np.concatenate(parts) if parts else np.zeros((0, max(len(self.classes), 1)))

    def _ask(self, x: Floats) -> Floats:
        inputs = x.astype(object)
        if np.isnan(x).any():
            inputs[np.isnan(x)] = None  # JSON has no NaN
        body = json.dumps({"inputs": inputs.tolist()}).encode()
        try:
            read = self._sent(body)
        except (OSError, http.client.HTTPException) as error:
            raise self._wrong(f"cannot be asked: {first_line(error)}") from error
        try:
            response = json.loads(read)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"answers what is no JSON ({first_line(error)})") from error
        return self._read(response, len(x))

    def _sent(self, body: bytes) -> bytes:
        """The bytes of an answer, all of which must be here in time."""
        late = TimeoutError(f"no whole answer after {self._seconds:g} seconds")
        link: http.client.HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            link = http.client.HTTPSConnection(self._host, self._port, timeout=self._seconds, context=context)
        else:
            link = http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        # http.client bounds each line of what comes before the answer, and not how long all of them take.
        over = threading.Event()
        watch = threading.Timer(self._seconds, lambda: _shut_down(link, over))
        watch.daemon = True
        try:
            told = {"Content-Type": "application/json", "Accept": "application/json"}
            link.connect()
            watch.start()
            link.request("POST", self._path, body, told)
            response, read = link.getresponse(), bytearray()
            if response.status != http.client.OK:
                raise self._wrong(f"answers with status {response.status} (expected 200)")
            while piece := response.read1(READ_BYTES):
                read += piece
                if len(read) > MAX_RESPONSE_BYTES:
                    raise self._wrong(f"answers more than {MAX_RESPONSE_BYTES} bytes")
            if over.is_set():
                raise late
            return bytes(read)
        except (OSError, http.client.HTTPException) as error:
            if over.is_set():
                raise late from error
            raise
        finally:
            watch.cancel()
            link.close()

    def _read(self, response: Any, rows: int) -> Floats:
        """The numbers in an answer, once it is what it should be."""
        given = [name for name in OUTPUT_KEYS if isinstance(response, dict) and name in response]
        if len(given) != 1:
            raise self._wrong(f"answers none, or more than one, of {', '.join(OUTPUT_KEYS)}")
        names = response.get("classes", ())
        if not isinstance(names, list | tuple) or not all(isinstance(name, str | int) for name in names):
            raise self._wrong("answers classes that are no list of names")
        try:
            numbers = np.array(response[given[0]])
        except ValueError as error:  # rows of different lengths
            raise self._wrong(f"answers {given[0]} that are no rows of numbers") from error
        if numbers.dtype.kind not in "iuf" or numbers.ndim not in (1, 2) or len(numbers) != rows:
            raise self._wrong(f"answers {given[0]} that are no {rows} rows of numbers")
        told = tuple(map(str, names)), given[0]
        if self._told not in (None, told):
            raise self._wrong("answers in another form than before")
        self._told, (self.classes, self.probabilities) = told, (told[0], told[1] == "probabilities")
        return numbers.astype(np.float64)

    def _wrong(self, what: str) -> PredictorError:
        return PredictorError(f"the {self.called} {what}")


def _shut_down(link: http.client.HTTPConnection, over: threading.Event) -> None:
    """Whoever reads from a link reads its end, and finds why."""
    over.set()
    with contextlib.suppress(OSError):
        socket.socket.shutdown(link.sock, socket.SHUT_RDWR)


# --- as a torch module ----------------------------------------------------------------------------------


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
        self._to, self._input_format = to, how.input_format
        probe = self._taken(np.zeros((2, *to.shape), dtype=np.float32))
        opened = _open_source(source, probe, to.task.kind == "number", self._called)
        self._predict = opened.predict
        self._probabilities = how.output_format == "probabilities" or (
            how.output_format == "auto" and opened.probabilities
        )
        own = [] if to.task.kind == "number" else how.classes or list(opened.classes)
        mapped = ClassMap(own, to.classes) if own else None
        self._given = mapped.given if mapped else len(to.classes)
        self._map = mapped if mapped and mapped.changes else None
        self.tells = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs, without gradient.

        Where it is not to tell that the model fails (:func:`hide_failures`), which would tell of what it
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
        given = _call_predict(self._predict, taken, self._called)
        outputs = self._numbers(given) if self._to.task.kind == "number" else self._logits(given)
        found, allowed = tuple(outputs.shape), (len(x), self._given)
        if found != allowed:
            raise PredictorError(f"a {self._called} gives {found} for {len(x)} inputs (expected {allowed})")
        if not outputs.isfinite().all():
            raise PredictorError(f"a {self._called} gives outputs that are not finite")
        return (outputs if self._map is None else self._map(outputs)).to(x.device)

    def _taken(self, x: Numbers) -> Any:
        """Inputs as the model takes them."""
        return {"inputs": lambda x: x, "raw": self._to.raw, "frame": self._to.frame}[self._input_format](x)

    def _numbers(self, given: torch.Tensor) -> torch.Tensor:
        """Numbers as the federation's targets are: from -1 to 1 within their declared range."""
        numbers = given.reshape(-1, 1) if given.ndim == 1 else given
        if self._input_format == "inputs":
            return numbers
        low, high = self._to.schema.target_column.range
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
                'output_format = "logits"'
            )
        return given.clamp_min(MIN_PROBABILITY).log()

    def extra_repr(self) -> str:
        """What it wraps."""
        gives = "numbers" if self._to.task.kind == "number" else "logits"
        return f"{self._called}, {'probabilities' if self._probabilities else gives}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Predictor:
        """Itself: it has no state, and not every session can be copied."""
        return self


def _open_source(source: Any, probe: Any, numbers: bool, called: str) -> _Source:
    """A source as a function, tried on a probe where what it says of itself follows from that."""
    if hasattr(source, "run") and hasattr(source, "get_inputs"):
        source = OnnxGraph(source, probe.shape[1:])
    if numbers and hasattr(source, "predict"):
        return _Source(_accept_flattened(source.predict, probe))
    for name in () if numbers else ("predict_proba", "decision_function"):
        if hasattr(source, name):
            classes = np.asarray(getattr(source, "classes_", [])).tolist()
            return _Source(_accept_flattened(getattr(source, name), probe), classes, name == "predict_proba")
    if not callable(source):
        predicts = "predict" if numbers else "predict_proba or decision_function"
        raise ModelError(
            f"the model is a {type(source).__name__}: allowed is a torch.nn.Module, an estimator with "
            f"{predicts}, an ONNX session, or a function"
        )
    if hasattr(source, "probabilities"):  # which an endpoint or a graph knows once it has answered
        _call_predict(source, probe, called)
    return _Source(source, getattr(source, "classes", ()), getattr(source, "probabilities", False))


def _call_predict(predict: Callable[[Any], Any], taken: Any, called: str) -> torch.Tensor:
    """What a model gives, in float32; whatever its own kind raises is one line."""
    try:
        responses = np.asarray(predict(taken))
        if np.iscomplexobj(responses):  # whose imaginary part would be lost
            raise PredictorError(f"a {called} gives complex numbers (expected real ones)")
        return torch.from_numpy(responses.astype(np.float32))
    except _model_errors() as error:
        if isinstance(error, FedstillError):
            raise
        raise PredictorError(f"a {called} cannot take these inputs: {first_line(error)}") from error


def _accept_flattened(predict: Callable[[Any], Any], probe: Any) -> Callable[[Any], Any]:
    """An estimator's function, of flattened images if it takes them."""

    def flattened(inputs: Numbers) -> Any:
        return predict(inputs.reshape(len(inputs), -1))

    refused: Exception | None = None
    for each in (flattened, predict) if probe.ndim > 2 else (predict,):
        try:
            each(probe)
        except USER_CODE_ERRORS as error:
            refused = refused or error
        else:
            return each
    assert refused is not None
    kind = "images nor rows of pixels" if probe.ndim > 2 else f"rows of {probe.shape[1]} columns"
    neither = "neither " if probe.ndim > 2 else "no "
    raise ModelError(f"the model takes {neither}{kind}: {first_line(refused)}") from refused


def _model_errors() -> tuple[type[Exception], ...]:
    """What a model of another's making raises; onnxruntime, where it is in use, has kinds of its own."""
    module = sys.modules.get("onnxruntime.capi.onnxruntime_pybind11_state")
    found = vars(module).values() if module else ()
    return (
        *USER_CODE_ERRORS,
        *(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)),
    )


def file_fingerprint(model: nn.Module) -> str:
    """The fingerprint of the file from which a model that only predicts is; empty: it is from none. Weights
    of a network are not meant: a run remembers these itself."""
    return "".join(part.file for part in model.modules() if isinstance(part, Predictor))


def hide_failures(model: nn.Module) -> None:
    """Have a model that only predicts give NaN from now on where it fails, and say so in this log alone."""
    for part in model.modules():
        if isinstance(part, Predictor):
            part.tells = False
