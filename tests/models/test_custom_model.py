"""Existing models: input formats, class maps, files, endpoints, and rejected models."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from torch import nn

from fedstill import models
from fedstill.core.errors import FedstillError, ModelError, PredictorError
from fedstill.core.table_schema import NO_SCHEMA, SchemaColumn, TableSchema
from fedstill.models import custom_model, predictors
from fedstill.models.interface import ClassMap, Interface
from fedstill.models.model_config import CustomModel, ModelConfig, read_model_config
from fedstill.models.predictors import Endpoint
from fedstill.node.refusals import public_text
from fedstill.tasks import TASKS
from tests.support.errors import raises_invalid
from tests.support.models import serving, write_onnx

AGE = SchemaColumn(name="age", range=(0.0, 100.0), missing=True)
WARD = SchemaColumn(name="ward", type="category", categories=("a", "b", "c"))
ILL = SchemaColumn(name="ill", type="category", categories=("no", "yes"))
DAYS = SchemaColumn(name="days", range=(10.0, 30.0))
# age 75, ward b; age missing, ward c
ROWS = torch.tensor([[0.5, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 1.0]])
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 5)).astype(np.float32), RNG.integers(0, 2, 60)


def table(target: SchemaColumn = ILL, schema: bool = True) -> Interface:
    task = TASKS["tabular" if target.categories else "regression"]()
    columns = TableSchema(target.name, (AGE, WARD, target))
    classes = columns.classes
    return Interface(task.make(classes), classes, (5,), schema=columns if schema else NO_SCHEMA)


def build_source(source: Any, to: Interface, **options: Any) -> nn.Module:
    return custom_model.build_model(CustomModel(source=source, **options), to, Path(), 0)


def build_named(name: str, folder: Path, to: Interface | None = None, **options: Any) -> nn.Module:
    return custom_model.build_model(
        ModelConfig(name=name, **options), to or table(), folder, 0, option="model.name"
    )


# --- input formats ----------------------------------------------------------------------------------------


class Frame(dict[str, Any]):
    """Stub of a pandas DataFrame."""

    def __len__(self) -> int:
        return len(self["age"])


def received_inputs(to: Interface, input_format: str) -> Any:
    received: list[Any] = []

    def model(x: Any) -> Any:
        received.append(x)
        return np.zeros((len(x), len(to.classes)))

    build_source(model, to, input_format=input_format)(ROWS)
    return received[-1]


def test_raw_rows_have_columns_in_their_own_units() -> None:
    np.testing.assert_allclose(received_inputs(table(), "raw"), [[75.0, 1.0], [math.nan, 2.0]])
    assert received_inputs(table(), "inputs").tolist() == ROWS.tolist()
    with pytest.raises(ModelError, match="a schema"):
        received_inputs(table(schema=False), "raw")


def test_dataframe_has_named_columns_and_categories_as_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame))
    frame = received_inputs(table(), "frame")
    assert list(frame) == ["age", "ward"]
    assert frame["ward"] == ["b", "c"]
    np.testing.assert_allclose(frame["age"], [75.0, math.nan])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModelError, match="pandas"):
        received_inputs(table(), "frame")


def test_raw_images_have_pixels_from_0_to_1() -> None:
    to = Interface(TASKS["classification"]().make(2), ("a", "b"), (2, 1, 1), mean=(0.5, 0.2), std=(0.5, 0.1))
    raw = to.to_raw(np.array([[[[1.0]], [[3.0]]]], dtype=np.float32))
    np.testing.assert_allclose(raw.ravel(), [1.0, 0.5], rtol=1e-6)


def test_numbers_of_a_raw_model_are_in_the_unit_of_the_target() -> None:
    class Days:
        def predict(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return np.where(np.isnan(x[:, 0]), 10.0, x[:, 0] / 3)  # age 75 yields 25 days

    assert build_source(Days(), table(DAYS), input_format="raw")(ROWS).tolist() == [[0.5], [-1.0]]
    # outputs for normalized inputs are normalized
    scaled = build_source(lambda x: x[:, :1], table(DAYS))(ROWS)
    assert scaled.tolist() == [[0.5], [0.0]]


# --- classes ----------------------------------------------------------------------------------------------


def test_class_map_reorders_drops_and_adds_classes() -> None:
    z = torch.tensor([[1.0, 2.0, 3.0]])
    order = ClassMap(("c", "a", "b"), ("a", "b", "c"))
    assert order(z).tolist() == [[2.0, 3.0, 1.0]]
    more = ClassMap(("a", "", "b"), ("a", "b"))
    assert more(z).tolist() == [[1.0, 3.0]]
    assert not ClassMap(("a", "b", "c"), ("a", "b", "c")).is_nontrivial
    merged = ClassMap(("ill", "ill", "well"), ("well", "ill"))
    shares = torch.tensor([1.0, 2.0, 3.0]).softmax(0)
    torch.testing.assert_close(merged(z).softmax(1)[0], torch.stack([shares[2], shares[0] + shares[1]]))


def test_class_map_prefers_names_to_numbers() -> None:
    z = torch.tensor([[1.0, 2.0]])
    assert ClassMap((2, 1), ("1", "2"))(z).tolist() == [[2.0, 1.0]]
    assert ClassMap((1, 0), ("x", "y"))(z).tolist() == [[2.0, 1.0]]
    with pytest.raises(ModelError, match=r"class 'w' .*x, y"):
        ClassMap(("x", "w"), ("x", "y"))
    with pytest.raises(ModelError, match="classes x, y"):
        ClassMap(("", ""), ("x", "y"))


def test_gradients_pass_through_the_class_map() -> None:
    net = nn.Linear(5, 3)
    model = build_source(net, table(), classes=("yes", "", "no"))
    assert torch.equal(model(ROWS), net(ROWS)[:, [2, 0]])
    assert models.carries_gradient(model, (5,))
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    named_net = build_named("mlp:4", Path(), classes=("yes", "", "no"))
    assert named_net(ROWS).shape == (2, 2)


def test_single_score_belongs_to_the_second_class() -> None:
    share = build_source(lambda x: x[:, 3], table(), output_format="probabilities")(ROWS)  # scores 1, 0
    assert share.argmax(1).tolist() == [1, 0]
    score = build_source(lambda x: x[:, 3:4] * 4, table())(ROWS)
    assert score.tolist() == [[0.0, 4.0], [0.0, 0.0]]


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RandomForestClassifier, HistGradientBoostingClassifier])
def test_skops_file_predicts_like_the_estimator(tmp_path: Path, kind: Callable[..., Any]) -> None:
    skops = pytest.importorskip("skops.io")
    estimator = kind(random_state=0).fit(X, np.array(["yes", "no"])[Y])  # in another order than in the table
    skops.dump(estimator, tmp_path / "model.skops")
    model = build_named("model.skops", tmp_path)
    expected = torch.from_numpy(estimator.predict_proba(X)).float()  # sorted: no, yes
    torch.testing.assert_close(model(torch.from_numpy(X)).softmax(1), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["xgboost.XGBClassifier", "lightgbm.LGBMClassifier"])
def test_boosted_trees_in_skops_files_predict_like_the_library(tmp_path: Path, kind: str) -> None:
    """Tried with XGBoost 3.2.0 and LightGBM 4.7.0."""
    skops = pytest.importorskip("skops.io")
    package, _, name = kind.partition(".")
    estimator = getattr(pytest.importorskip(package), name)(n_estimators=5, n_jobs=1).fit(X, Y)
    skops.dump(estimator, tmp_path / "model.skops")
    model = build_named("model.skops", tmp_path, classes=("no", "yes"))
    expected = torch.from_numpy(estimator.predict_proba(X)).float()
    torch.testing.assert_close(model(torch.from_numpy(X)).softmax(1), expected, atol=1e-4, rtol=1e-3)


class UntrustedType:
    """A type that a pickle could load."""


def test_rejects_untrusted_types_in_skops_files(tmp_path: Path) -> None:
    skops = pytest.importorskip("skops.io")
    skops.dump(UntrustedType(), tmp_path / "model.skops")
    with pytest.raises(ModelError, match=r"model.skops .*UntrustedType .*scikit-"):
        build_named("model.skops", tmp_path)
    (tmp_path / "model.skops").write_bytes(b"no zip")
    with pytest.raises(ModelError, match=r"model.skops is"):
        build_named("model.skops", tmp_path)


def test_onnx_output_named_probabilities_is_read_as_such(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    weights = RNG.normal(size=(5, 2))
    scores = torch.from_numpy(ROWS.numpy() @ weights).float()
    write_onnx(tmp_path / "shares.onnx", weights)
    shares = build_named("shares.onnx", tmp_path, classes=("yes", "no"))(ROWS)
    torch.testing.assert_close(shares, scores.log_softmax(1)[:, [1, 0]])
    write_onnx(tmp_path / "scores.onnx", weights, "scores")
    torch.testing.assert_close(build_named("scores.onnx", tmp_path)(ROWS), scores)
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(ModelError, match=r"bad\.onnx .*ONNX"):
        build_named("bad.onnx", tmp_path)


@pytest.mark.parametrize(
    ("library", "load", "extra"),
    [("skops.io", predictors.load_skops, "skops"), ("onnxruntime", predictors.load_onnx, "onnx")],
)
def test_missing_library_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, library: str, load: Callable[[Path], Any], extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with raises_invalid("model", "model.file", f"pip install 'fedstill[{extra}]'"):
        load(Path("model.file"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "forest.pkl",
            r"invalid model.name = 'forest.pkl' \(expected a .skops or .onnx file, .* pickles are not read",
        ),
        ("forest.skops", r"file not found: .*forest\.skops"),
        ("~nosuchuser/f.onnx", "expected a path without NUL characters"),
        ("http://user:word@127.0.0.1/", "expected http://host:port/path, without user name and password"),
        ("http://127.0.0.1:99999/", "expected http://host:port/path"),
    ],
)
def test_invalid_model_name_is_refused_in_check_and_build(tmp_path: Path, name: str, line: str) -> None:
    with pytest.raises(FedstillError, match=line):
        custom_model.check_name(name, tmp_path, "model.name")
    with pytest.raises(FedstillError, match=line):
        build_named(name, tmp_path)


def test_rejects_options_that_do_not_fit_the_kind_of_model(tmp_path: Path) -> None:
    with raises_invalid("model.input_format", "raw", "torch.nn.Module"):
        build_named("mlp:4", tmp_path, input_format="raw")
    with raises_invalid("model.weights", "w.safetensors", "none"):
        build_source(lambda x: x[:, :2], table(), weights="w.safetensors")
    labels = Interface(TASKS["multi-label"]().make(("no", "yes")), ("no", "yes"), (1, 8, 8))
    with pytest.raises(ModelError, match=r"a function, .* multi-label"):
        build_source(lambda x: x, labels)


def test_model_file_has_the_options_of_a_node_file(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "model.toml").write_text('name = "f.onnx"\nclasses = ["yes", "no"]', encoding="utf-8")
    config = read_model_config("own/model.toml", tmp_path, "nodes.models")
    assert config == ModelConfig(name=str(tmp_path.resolve() / "own" / "f.onnx"), classes=("yes", "no"))
    (tmp_path / "own" / "model.toml").write_text('clases = ["yes"]', encoding="utf-8")
    with raises_invalid("key", "model.toml: clases"):
        read_model_config("own/model.toml", tmp_path, "nodes.models")
    with raises_invalid("nodes.models", "none.toml", "a .toml file"):
        read_model_config("none.toml", tmp_path, "nodes.models")


# --- an endpoint ------------------------------------------------------------------------------------------


def test_endpoint_requests_are_split_and_classes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def response(query: Any) -> Any:
        requests.append(query["inputs"])
        return {"probabilities": [[0.25, 0.75]] * len(query["inputs"]), "classes": ["yes", "no"]}

    monkeypatch.setattr(predictors, "MAX_REQUEST_VALUES", 3 * 2)
    with serving(response) as url:
        model = build_named(url, Path(), input_format="raw")
        requests.clear()
        logits = model(ROWS.repeat(2, 1))
    assert requests == [[[75.0, 1.0], [None, 2.0], [75.0, 1.0]], [[None, 2.0]]]
    torch.testing.assert_close(logits.exp(), torch.tensor([[0.75, 0.25]]).expand(4, 2))


def test_endpoint_returns_logits_or_numbers() -> None:
    with serving(lambda query: {"logits": [row[:2] for row in query["inputs"]]}) as url:
        assert torch.equal(build_named(url, Path())(ROWS), ROWS[:, :2])
    with serving(lambda query: {"numbers": [20.0] * len(query["inputs"])}) as url:
        assert build_named(url, Path(), table(DAYS), input_format="raw")(ROWS).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize(
    ("response", "line"),
    [
        (b"<html>", "returns invalid JSON"),
        (b"[" * 100_000, "returns invalid JSON"),
        ([1, 2], "returns none, or more than one, of probabilities, logits, numbers"),
        ({"logits": [[1, 2]] * 3}, "returns logits that are not 2 rows of numbers"),
        ({"logits": [[1, 2], [1]]}, "returns logits that are not rows of numbers"),
        ({"logits": [[None, 2], [1, 2]]}, "returns logits that are not 2 rows of numbers"),
        ({"logits": [["1", "2"], ["3", "4"]]}, "returns logits that are not 2 rows of numbers"),
        ({"logits": [[1, math.inf]] * 2}, "returns outputs that are not finite"),
        ({"logits": [[1, 2, 3]] * 2}, r"returns shape \(2, 3\) for 2 inputs \(expected \(2, 2\)"),
        ({"probabilities": [[3, -2]] * 2}, r"returns values from -2 to 3 \(expected probabilities"),
        ({"logits": [[1, 2]] * 2, "classes": "ab"}, "returns classes that are not a list of names"),
        ({"logits": [[1, 2]] * 2, "classes": ["yes", "perhaps"]}, "unknown class 'perhaps'"),
    ],
)
def test_rejects_invalid_endpoint_responses_in_one_line(response: Any, line: str) -> None:
    with serving(lambda _: response) as url, pytest.raises(ModelError, match=line) as error:
        build_named(url, Path())(ROWS)
    assert "\n" not in str(error.value)


def test_endpoint_redirects_failures_and_long_responses_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.zeros((2, 5))
    with serving(lambda _: {}, status=302) as url, pytest.raises(PredictorError, match="with status 302"):
        Endpoint(url)(rows)
    with pytest.raises(
        PredictorError, match=r"http://127\.0\.0\.1:\d+/predict cannot be reached"
    ):  # the server has stopped
        Endpoint(url)(rows)
    monkeypatch.setattr(predictors, "MAX_RESPONSE_BYTES", 10)
    response = {"logits": [[1, 2]] * 2}
    with (
        serving(lambda _: response) as url,
        pytest.raises(PredictorError, match="more than 10 bytes") as error,
    ):
        Endpoint(url)(rows)
    assert public_text(error.value) == "its data or model failed: see its log"


def test_endpoint_with_endless_headers_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each header line arrives in time, and there is always one more.

    The thread that closes the connection may still be running when the reader has seen its end.
    """
    shut = socket.socket.shutdown
    monkeypatch.setattr(
        socket.socket, "shutdown", lambda link, options: (shut(link, options), time.sleep(0.2))
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            with contextlib.suppress(OSError):
                link, _ = listening.accept()
                with link:
                    for _ in range(2000):
                        link.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                        time.sleep(0.02)

        threading.Thread(target=drip, daemon=True).start()
        since = time.monotonic()
        with pytest.raises(PredictorError, match=r"after 0\.2 seconds"):
            Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}/", seconds=0.2)(np.zeros((2, 5)))
    assert time.monotonic() - since < 20  # the headers would last longer


def test_slow_endpoint_times_out() -> None:
    with (
        serving(lambda _: time.sleep(0.5)) as url,
        pytest.raises(PredictorError, match=r"timed out|no complete response"),
    ):
        Endpoint(url, seconds=0.05)(np.zeros((2, 5)))


# --- gradients --------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Random forest in a torch module."""

    def __init__(self, forest: Any) -> None:
        super().__init__()
        self.forest, self.scale = forest, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.from_numpy(self.forest.predict_proba(x.detach().numpy())).float()


def test_module_without_input_gradient_is_detected() -> None:
    forest = RandomForestClassifier(5, random_state=0).fit(X, Y)
    assert not models.carries_gradient(Wrapped(forest), (5,))
    assert not models.carries_gradient(build_source(forest, table()), (5,))
    silent = nn.Linear(5, 2).requires_grad_(False)
    nn.init.zeros_(silent.weight)  # a gradient of zero is accepted, since networks may have it initially
    assert models.carries_gradient(silent, (5,))
