"""Models that only predict: ONNX graphs, scikit-learn estimators, HTTP endpoints and functions of an array.

:class:`Predictor` wraps them as torch modules with logits as outputs. They answer queries for predictions,
cannot be trained, and no gradient passes through them. ``onnxruntime`` is installed with the extra "onnx",
``skops`` with the extra "skops". A skops file is not a pickle; only trusted types are loaded from it.

An endpoint such as ``"http://127.0.0.1:8080/predict"`` receives ``POST {"inputs": [[0.5, null, ...], ...]}``
with one entry per example in its shape; null is a missing value. It responds with one of
``{"probabilities": [[0.9, 0.1], ...]}``, ``{"logits": [...]}`` and, for numbers, ``{"numbers": [0.3, ...]}``,
with one entry per input, and optionally ``"classes": ["benign", "malignant"]``. The owner of the model
chooses the address. Proxies and redirects are not used, and responses contain only numbers and names.
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
from fedstill.models.feature_maps import FeatureMaps
from fedstill.models.interface import MIN_PROBABILITY, ClassMap, Interface
from fedstill.models.model_config import ModelConfig
from fedstill.models.vgg import VGGFeatures

Floats = npt.NDArray[np.floating[Any]]
Numbers = npt.NDArray[Any]
# In addition to the types that skops trusts: parts of fitted estimators, which hold numbers only.
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
TIMEOUT_SECONDS = 60.0  # for a response, from the first byte sent to the last byte read
MAX_RESPONSE_BYTES = 2**26
MAX_REQUEST_VALUES = 2**18  # more inputs are sent in several requests
OUTPUT_KEYS = ("probabilities", "logits", "numbers")
READ_BYTES = 2**16  # read at once
logger = logging.getLogger("fedstill.node")


# --- ONNX ----------------------------------------------------------------------------------------------


def load_onnx(path: Path) -> Any:
    """Return an ONNX session for a file, on the CPU, with torch's number of threads.

    Raises:
        ArgumentError: onnxruntime is not installed.
        ModelError: the file is not an ONNX graph.
    """
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        expected = "onnxruntime to be installed: pip install 'fedstill[onnx]'"
        raise ArgumentError("model", path.name, expected) from error
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors are raised as exceptions
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise ModelError(f"{path.name} is not an ONNX graph: {first_line(error)}") from error


class OnnxGraph:
    """Function from inputs ``(B, *shape)`` to an ONNX graph's first numeric output.

    Inputs are split into batches of the graph's fixed batch size, if it has one.

    Attributes:
        classes: the graph's class labels if it returns them (skl2onnx); known after the first call.
        probabilities: True if the output's name contains "probabilit"; known after the first call.

    Raises:
        ModelError: the graph takes inputs of another shape.
    """

    display_name = "ONNX graph"

    def __init__(self, session: Any, shape: tuple[int, ...]) -> None:
        inputs = session.get_inputs()
        if len(inputs) != 1:
            raise ModelError(f"the ONNX model takes {len(inputs)} inputs (expected one)")
        self._session, self._name, sizes = session, inputs[0].name, list(inputs[0].shape)
        self._input_shape = [math.prod(shape)] if len(sizes) == 2 else list(shape)
        pairs = zip(sizes[1:], self._input_shape, strict=False)
        fits = [not isinstance(size, int) or size == expected for size, expected in pairs]
        if len(sizes) != len(self._input_shape) + 1 or not all(fits):
            shapes = " or ".join(dict.fromkeys((str(["B", *shape]), str(["B", math.prod(shape)]))))
            raise ModelError(f"the ONNX model takes inputs {sizes} (expected {shapes})")
        self._dtype = np.float64 if "double" in str(inputs[0].type) else np.float32
        self._batch = sizes[0] if isinstance(sizes[0], int) else None
        self.classes: Sequence[Any] = ()
        self.probabilities = False

    def __call__(self, x: Floats) -> Floats:
        """Return the graph's scores ``(B, classes)``."""
        x = x.reshape(len(x), *self._input_shape).astype(self._dtype)
        batch = self._batch or max(len(x), 1)
        padded = np.concatenate([x, np.zeros((-len(x) % batch, *self._input_shape), dtype=self._dtype)])
        parts = [
            self._scores(self._session.run(None, {self._name: padded[first : first + batch]}))
            for first in range(0, len(padded), batch)
        ]
        return np.concatenate(parts)[: len(x)]

    def _scores(self, outputs: Sequence[Any]) -> Floats:
        """Return the first output with one row of floats per example. Other outputs are labels, for
        example.
        """
        names = [str(output.name).lower() for output in self._session.get_outputs()]
        for name, output in zip(names, outputs, strict=True):
            if isinstance(output, np.ndarray) and output.ndim == 2 and output.dtype.kind == "f":
                self.probabilities = "probabilit" in name
                return output
            if (
                isinstance(output, list) and output and isinstance(output[0], dict)
            ):  # one dictionary per example: skl2onnx
                self.classes, self.probabilities = sorted(output[0]), True
                return np.array([[row[key] for key in self.classes] for row in output])
        raise ModelError("the ONNX model returns no floats (B, classes)")


# --- scikit-learn, XGBoost and LightGBM -----------------------------------------------------------------


def load_skops(path: Path) -> Any:
    """Return the estimator in a file.

    Raises:
        ArgumentError: skops is not installed.
        ModelError: the file is not a skops file, or has untrusted types or types of a library that is not
            installed.
    """
    try:
        skops = importlib.import_module("skops.io")
    except ImportError as error:
        expected = "skops to be installed: pip install 'fedstill[skops]'"
        raise ArgumentError("model", path.name, expected) from error
    try:
        untrusted = [kind for kind in skops.get_untrusted_types(file=path) if kind not in TRUSTED_TYPES]
        if untrusted:
            expected = "those of scikit-learn, XGBoost and LightGBM, or a custom function that loads the file"
            raise ModelError(f"{path.name} holds types {', '.join(untrusted)} (expected {expected})")
        return skops.load(path, trusted=list(TRUSTED_TYPES))
    except (*USER_CODE_ERRORS, BadZipFile) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path.name} is not a readable skops file: {first_line(error)}") from error


# --- HTTP endpoints -------------------------------------------------------------------------------------


class Endpoint:
    """Function of arrays ``(B, ...)`` that an HTTP server computes.

    Args:
        url: address, ``http://`` or ``https://``.
        seconds: timeout of a response.

    Attributes:
        classes: names of the outputs if the endpoint sends them; known after the first call.
        probabilities: True if the endpoint returns probabilities; known after the first call.

    Raises:
        ArgumentError: the address is invalid or contains a user name and password.
    """

    def __init__(self, url: str, seconds: float = TIMEOUT_SECONDS) -> None:
        expected = "http://host:port/path, without user name and password"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ArgumentError("address of the model", url, expected) from error
        valid = parts.scheme in ("http", "https") and parts.hostname and url.isprintable() and " " not in url
        if not valid or parts.username is not None or parts.fragment:
            raise ArgumentError("address of the model", url, expected)
        self._host, self._port, self._seconds = str(parts.hostname), port, seconds
        self._secure = parts.scheme == "https"
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self.display_name = f"endpoint {parts.scheme}://{parts.netloc}{parts.path}"
        self.classes: tuple[str, ...] = ()
        self.probabilities = False
        # Classes and output key of the first response.
        self._format: tuple[tuple[str, ...], str] | None = None

    @property
    def is_loopback(self) -> bool:
        """True if the address is on this machine."""
        try:
            return ipaddress.ip_address(self._host).is_loopback
        except ValueError:
            return self._host == "localhost"

    def __call__(self, x: Floats) -> Floats:
        """Return the endpoint's outputs for inputs ``(B, ...)``.

        Raises:
            PredictorError: the endpoint cannot be reached, times out, or sends an invalid response.
        """
        rows = max(MAX_REQUEST_VALUES // max(math.prod(x.shape[1:]), 1), 1)
        parts = [self._request(x[first : first + rows]) for first in range(0, len(x), rows)]
        return np.concatenate(parts) if parts else np.zeros((0, max(len(self.classes), 1)))

    def _request(self, x: Floats) -> Floats:
        inputs = x.astype(object)
        if np.isnan(x).any():
            inputs[np.isnan(x)] = None  # JSON has no NaN
        body = json.dumps({"inputs": inputs.tolist()}).encode()
        try:
            content = self._post(body)
        except (OSError, http.client.HTTPException) as error:
            raise self._error(f"cannot be reached: {first_line(error)}") from error
        try:
            response = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self._error(f"returns invalid JSON ({first_line(error)})") from error
        return self._parse(response, len(x))

    def _post(self, body: bytes) -> bytes:
        """Return the bytes of a response, which must be complete within the timeout."""
        timeout = TimeoutError(f"no complete response after {self._seconds:g} seconds")
        connection: http.client.HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._seconds, context=context
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        # http.client limits each header line, but not the time that all of them take.
        expired = threading.Event()
        watch = threading.Timer(self._seconds, lambda: _shut_down(connection, expired))
        watch.daemon = True
        try:
            headers = {"Content-Type": "application/json", "Accept": "application/json"}
            connection.connect()
            watch.start()
            connection.request("POST", self._path, body, headers)
            response, content = connection.getresponse(), bytearray()
            if response.status != http.client.OK:
                raise self._error(f"responds with status {response.status} (expected 200)")
            while chunk := response.read1(READ_BYTES):
                content += chunk
                if len(content) > MAX_RESPONSE_BYTES:
                    raise self._error(f"returns more than {MAX_RESPONSE_BYTES} bytes")
            if expired.is_set():
                raise timeout
            return bytes(content)
        except (OSError, http.client.HTTPException) as error:
            if expired.is_set():
                raise timeout from error
            raise
        finally:
            watch.cancel()
            connection.close()

    def _parse(self, response: Any, rows: int) -> Floats:
        """Return the numbers in a response after checking its format."""
        keys = [key for key in OUTPUT_KEYS if isinstance(response, dict) and key in response]
        if len(keys) != 1:
            raise self._error(f"returns none, or more than one, of {', '.join(OUTPUT_KEYS)}")
        names = response.get("classes", ())
        if not isinstance(names, list | tuple) or not all(isinstance(name, str | int) for name in names):
            raise self._error("returns classes that are not a list of names")
        try:
            numbers = np.array(response[keys[0]])
        except ValueError as error:  # rows of different lengths
            raise self._error(f"returns {keys[0]} that are not rows of numbers") from error
        if numbers.dtype.kind not in "iuf" or numbers.ndim not in (1, 2) or len(numbers) != rows:
            raise self._error(f"returns {keys[0]} that are not {rows} rows of numbers")
        current = tuple(map(str, names)), keys[0]
        if self._format not in (None, current):
            raise self._error("returns another format than before")
        self._format = current
        self.classes, self.probabilities = current[0], current[1] == "probabilities"
        return numbers.astype(np.float64)

    def _error(self, problem: str) -> PredictorError:
        return PredictorError(f"the {self.display_name} {problem}")


def _shut_down(connection: http.client.HTTPConnection, expired: threading.Event) -> None:
    """Close a connection so that its reader reaches the end, and record that the time expired."""
    expired.set()
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


# --- as a torch module ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PredictionSource:
    """Prediction function of a model that is not a torch module, with its class labels and output format."""

    predict: Callable[[Any], Any]
    classes: Sequence[Any] = ()
    probabilities: bool = False


class Predictor(nn.Module):
    """Torch module around a model that only predicts: inputs to logits ``(B, classes)`` or numbers
    ``(B, 1)``, float32.

    Args:
        source: one of the following, tried in this order. An ONNX session with ``run`` and ``get_inputs``, as
            onnxruntime's. A scikit-learn estimator with ``predict_proba``, else ``decision_function``, or
            ``predict`` for numbers; it gets images flattened, ``(B, C * H * W)``, unless it refuses them. A
            function from a numpy array of inputs to ``(B, classes)``, or to ``(B,)`` for two classes or
            numbers; it may have attributes ``classes`` and ``probabilities``.
        interface: inputs and outputs of the federation's models.
        config: input format, output format and classes of the model. None: the defaults.

    Attributes:
        file: fingerprint of the model's file, or empty.

    Raises:
        ModelError: ``source`` is none of these, or cannot take inputs of this shape.

    Example:
        >>> from fedstill.tasks.classification import Classification
        >>> interface = Interface(Classification(2), ("cat", "dog"), (1, 4, 4))
        >>> config = ModelConfig(classes=("dog", "cat"))
        >>> predictor = Predictor(lambda images: images[:, 0, 0, :2], interface, config)
        >>> predictor(torch.tensor([3.0, 1.0, 0.0, 0.0]).expand(1, 1, 4, 4))
        tensor([[1., 3.]])
    """

    differentiable = False
    file = ""

    def __init__(self, source: Any, interface: Interface, config: ModelConfig | None = None) -> None:
        super().__init__()
        config = config or ModelConfig()
        if interface.task.kind not in ("class", "number"):
            raise ModelError(
                f"the model is a {type(source).__name__}, which predicts a class or a number for each input "
                f"(expected a torch.nn.Module for task {interface.task.name})"
            )
        self._description = getattr(source, "display_name", type(source).__name__)
        self._interface, self._input_format = interface, config.input_format
        probe = self._convert_inputs(np.zeros((2, *interface.shape), dtype=np.float32))
        opened = _open_source(source, probe, interface.task.kind == "number", self._description)
        self._predict = opened.predict
        self._probabilities = config.output_format == "probabilities" or (
            config.output_format == "auto" and opened.probabilities
        )
        classes = [] if interface.task.kind == "number" else config.classes or list(opened.classes)
        class_map = ClassMap(classes, interface.classes) if classes else None
        self._output_count = class_map.input_count if class_map else len(interface.classes)
        self._map = class_map if class_map and class_map.is_nontrivial else None
        self.reports_failures = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs without gradient.

        If failures are hidden (:func:`return_nan_on_failure`), because they would reveal something about the
        training data, the outputs of a failure are NaN.

        Raises:
            PredictorError: the inputs require a gradient, or the model fails or returns another shape than
                ``(B, classes)``.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            raise PredictorError(f"a {self._description} predicts only: no gradient passes through it")
        try:
            return self._outputs(x)
        except ModelError as error:  # a PredictorError, or a ModelError of ONNX
            if self.reports_failures:
                raise
            logger.error("the model failed, its outputs are NaN: %s", error)
            return torch.full((len(x), *self._interface.output_shape), float("nan"), device=x.device)

    def _outputs(self, x: torch.Tensor) -> torch.Tensor:
        inputs = x.detach().cpu()
        converted = self._convert_inputs((inputs.float() if inputs.is_floating_point() else inputs).numpy())
        predictions = _call_predict(self._predict, converted, self._description)
        outputs = (
            self._scaled_numbers(predictions)
            if self._interface.task.kind == "number"
            else self._logits(predictions)
        )
        shape, expected = tuple(outputs.shape), (len(x), self._output_count)
        if shape != expected:
            raise PredictorError(
                f"a {self._description} returns shape {shape} for {len(x)} inputs (expected {expected})"
            )
        if not outputs.isfinite().all():
            raise PredictorError(f"a {self._description} returns outputs that are not finite")
        return (outputs if self._map is None else self._map(outputs)).to(x.device)

    def _convert_inputs(self, x: Numbers) -> Any:
        """Return inputs in the model's input format."""
        if self._input_format == "raw":
            return self._interface.to_raw(x)
        return self._interface.to_dataframe(x) if self._input_format == "frame" else x

    def _scaled_numbers(self, predictions: torch.Tensor) -> torch.Tensor:
        """Return numbers scaled like the federation's targets: from -1 to 1 within the declared range."""
        numbers = predictions.reshape(-1, 1) if predictions.ndim == 1 else predictions
        if self._input_format == "inputs":
            return numbers
        low, high = self._interface.schema.target_column.range
        return 2 * (numbers - low) / (high - low) - 1

    def _logits(self, scores: torch.Tensor) -> torch.Tensor:
        """Return predictions as logits."""
        single = scores.ndim == 1 or (scores.ndim == 2 and scores.shape[1] == 1)
        if single and self._output_count == 2:  # scores of the second class only, as of decision_function
            second = scores.reshape(-1)
            first = 1 - second if self._probabilities else torch.zeros_like(second)
            scores = torch.stack([first, second], 1)
        if not self._probabilities:
            return scores
        if scores.numel() and not -1e-3 <= scores.min() <= scores.max() <= 1 + 1e-3:
            low, high = scores.min().item(), scores.max().item()
            raise PredictorError(
                f"a {self._description} returns values from {low:.3g} to {high:.3g} "
                '(expected probabilities, or output_format = "logits")'
            )
        return scores.clamp_min(MIN_PROBABILITY).log()

    def extra_repr(self) -> str:
        """Return the wrapped model and its outputs."""
        outputs = "numbers" if self._interface.task.kind == "number" else "logits"
        return f"{self._description}, {'probabilities' if self._probabilities else outputs}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Predictor:
        """Return the predictor itself: it has no state, and some sessions cannot be copied."""
        return self


def _open_source(source: Any, probe: Any, numbers: bool, description: str) -> _PredictionSource:
    """Return the prediction function of a source.

    The source is called once on ``probe`` if its output format is known only then.
    """
    if hasattr(source, "run") and hasattr(source, "get_inputs"):
        source = OnnxGraph(source, probe.shape[1:])
    if numbers and hasattr(source, "predict"):
        return _PredictionSource(_accept_flattened(source.predict, probe))
    for name in () if numbers else ("predict_proba", "decision_function"):
        if hasattr(source, name):
            classes = np.asarray(getattr(source, "classes_", [])).tolist()
            return _PredictionSource(
                _accept_flattened(getattr(source, name), probe), classes, name == "predict_proba"
            )
    if not callable(source):
        method = "predict" if numbers else "predict_proba or decision_function"
        raise ModelError(
            f"the model is a {type(source).__name__} (expected a torch.nn.Module, an estimator with "
            f"{method}, an ONNX session or a function)"
        )
    if hasattr(source, "probabilities"):  # known to an endpoint or graph after the first call
        _call_predict(source, probe, description)
    return _PredictionSource(source, getattr(source, "classes", ()), getattr(source, "probabilities", False))


def _call_predict(predict: Callable[[Any], Any], inputs: Any, description: str) -> torch.Tensor:
    """Return a model's predictions in float32. Errors of the model become one line."""
    try:
        predictions = np.asarray(predict(inputs))
        if np.iscomplexobj(predictions):  # the imaginary part would be lost
            raise PredictorError(f"a {description} returns complex numbers (expected real numbers)")
        return torch.from_numpy(predictions.astype(np.float32))
    except _model_errors() as error:
        if isinstance(error, FedstillError):
            raise
        raise PredictorError(f"a {description} cannot take these inputs: {first_line(error)}") from error


def _accept_flattened(predict: Callable[[Any], Any], probe: Any) -> Callable[[Any], Any]:
    """Return an estimator's function, with images flattened if the estimator accepts that."""

    def flattened(inputs: Numbers) -> Any:
        return predict(inputs.reshape(len(inputs), -1))

    first_error: Exception | None = None
    for function in (flattened, predict) if probe.ndim > 2 else (predict,):
        try:
            function(probe)
        except USER_CODE_ERRORS as error:
            first_error = first_error or error
        else:
            return function
    assert first_error is not None
    inputs = "neither images nor rows of pixels" if probe.ndim > 2 else f"no rows of {probe.shape[1]} columns"
    raise ModelError(f"the model takes {inputs}: {first_line(first_error)}") from first_error


def _model_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a model may raise, including onnxruntime's if it is in use."""
    module = sys.modules.get("onnxruntime.capi.onnxruntime_pybind11_state")
    members = vars(module).values() if module else ()
    return (
        *USER_CODE_ERRORS,
        *(kind for kind in members if isinstance(kind, type) and issubclass(kind, Exception)),
    )


def file_fingerprint(*networks: nn.Module | None) -> str:
    """Return the fingerprints of files that networks were made from; empty if there are none.

    These are the files of predictors, of pretrained encoders and of a perceptual loss. Other weights are not
    included: runs store them.
    """
    modules = [module for network in networks if network is not None for module in network.modules()]
    digests = [module.digest for module in modules if isinstance(module, FeatureMaps | VGGFeatures)]
    return "".join([*(module.file for module in modules if isinstance(module, Predictor)), *digests])


def return_nan_on_failure(model: nn.Module) -> None:
    """Make predictors return NaN instead of raising errors. The node's log then has the error."""
    for module in model.modules():
        if isinstance(module, Predictor):
            module.reports_failures = False
