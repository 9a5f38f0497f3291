"""Predictors of models that are not torch modules: logits, class order and refused gradients."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

import fedstill
from fedstill import models
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.core.errors import MethodRefused, ModelError
from fedstill.models.inference import predict
from fedstill.models.interface import MIN_PROBABILITY, Interface
from fedstill.models.model_config import ModelConfig
from fedstill.models.predictors import Predictor
from fedstill.node.architectures import group_by_architecture
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.local_training import attach_optimizers
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.tasks.classification import ClassificationConfig

SHAPE, TEN_CLASSES = (1, 8, 8), tuple(map(str, range(10)))
TASK, PROBABILITIES = ClassificationConfig(), ModelConfig(output_format="probabilities")


def interface_of(*classes: str, shape: tuple[int, ...] = SHAPE) -> Interface:
    return Interface(TASK.make(classes), classes, shape)


DIGITS = interface_of(*TEN_CLASSES)
FLAT, LABELS = load_digits(return_X_y=True)
FLAT = (FLAT / 8 - 1).astype(np.float32)
IMAGES = torch.from_numpy(FLAT).view(-1, *SHAPE)


@pytest.fixture(scope="module")
def regression() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=50)).fit(FLAT[:300], LABELS[:300])


def test_logits_are_log_probabilities_of_the_estimator(regression: Any) -> None:
    predictor = Predictor(regression, DIGITS)
    probabilities = regression.predict_proba(FLAT[300:350])
    logits = predictor(IMAGES[300:350])
    assert logits.dtype == torch.float32
    expected = torch.from_numpy(np.log(np.maximum(probabilities, MIN_PROBABILITY))).float()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    high = probabilities.min(1) > MIN_PROBABILITY  # without clamping, the softmax restores the probabilities
    assert high.any()
    back = torch.from_numpy(probabilities[high]).float()
    torch.testing.assert_close(logits.softmax(1)[high], back, rtol=1e-4, atol=1e-4)


def test_unknown_classes_have_minimum_probability() -> None:
    few = LABELS[:300] % 4 == 2  # 2 and 6
    estimator = LogisticRegression().fit(FLAT[:300][few], LABELS[:300][few])
    logits = Predictor(estimator, DIGITS)(IMAGES[300:320])
    probabilities = torch.from_numpy(estimator.predict_proba(FLAT[300:320])).float()
    torch.testing.assert_close(
        logits[:, [2, 6]], probabilities.clamp_min(MIN_PROBABILITY).log(), rtol=1e-4, atol=1e-4
    )
    others = [number for number in range(10) if number not in (2, 6)]
    assert (logits[:, others] == math.log(MIN_PROBABILITY)).all()


def test_classes_are_matched_by_name() -> None:
    names = np.array(["one", "zero"])[(LABELS[:100] == 0).astype(int)]
    estimator = LogisticRegression().fit(FLAT[:100], names)  # sorted: one, zero
    logits = Predictor(estimator, interface_of("zero", "one"))(IMAGES[:50])
    assert logits.argmax(1).eq(0).tolist() == (LABELS[:50] == 0).tolist()
    with pytest.raises(ModelError, match=r"class 'one' .*zero, two"):
        Predictor(estimator, interface_of("zero", "two"))


def test_decision_function_scores_are_logits() -> None:
    machine = LinearSVC(random_state=0).fit(FLAT[:300], LABELS[:300])
    logits = Predictor(machine, DIGITS)(IMAGES[:20])
    torch.testing.assert_close(logits, torch.from_numpy(machine.decision_function(FLAT[:20])).float())
    two = LogisticRegression().fit(FLAT[:300], LABELS[:300] % 2)
    scorer = SimpleNamespace(decision_function=two.decision_function, classes_=two.classes_)
    logits = Predictor(scorer, interface_of("even", "odd"))(IMAGES[:20])
    expected = torch.from_numpy(two.predict_proba(FLAT[:20])).float()
    torch.testing.assert_close(logits.softmax(1), expected, rtol=1e-4, atol=1e-4)


def test_function_receives_images_and_returns_logits() -> None:
    calls = []

    def scores(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        calls.append((images.shape, images.dtype))
        return images.reshape(len(images), -1)[:, :10]

    logits = Predictor(scores, DIGITS)(IMAGES[:3])
    assert calls == [((3, 1, 8, 8), np.float32)]
    assert torch.equal(logits, IMAGES[:3].flatten(1)[:, :10])
    probabilities = Predictor(lambda images: np.full((len(images), 10), 0.1), DIGITS, PROBABILITIES)
    torch.testing.assert_close(probabilities(IMAGES[:3]), torch.full((3, 10), math.log(0.1)))


class Session:
    """Stub of an onnxruntime session with a batch size."""

    def __init__(self, sizes: list[Any], kind: str = "tensor(float)", outputs: str = "logits") -> None:
        self.inputs, self.outputs, self.calls = (
            [SimpleNamespace(name="x", shape=sizes, type=kind)],
            outputs,
            [],
        )

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in (("label", "scores")[: 1 + (self.outputs != "none")])]

    def get_inputs(self) -> list[Any]:
        return self.inputs

    def run(self, names: None, feed: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        x = feed["x"]
        self.calls.append((x.shape, x.dtype))
        rows = x.reshape(len(x), -1)[:, :10]
        if self.outputs == "map":
            return [rows.argmax(1), [dict(enumerate(row)) for row in rows.tolist()]]
        return [rows.argmax(1), rows] if self.outputs == "logits" else [rows.argmax(1)]


def test_onnx_session_receives_its_input_shape_and_batch_size() -> None:
    expected = IMAGES[:5].flatten(1)[:, :10]
    free = Session(["N", 1, 8, 8])
    assert torch.equal(Predictor(free, DIGITS)(IMAGES[:5]), expected)
    assert free.calls[-1] == ((5, 1, 8, 8), np.float32)
    rows_of_two = Session([2, 64], "tensor(double)")
    assert torch.equal(Predictor(rows_of_two, DIGITS)(IMAGES[:5]), expected)
    assert rows_of_two.calls == [((2, 64), np.float64)] * (1 + 3)  # one more call to detect the output format

    mapped = Predictor(Session([None, 64], outputs="map"), DIGITS, ModelConfig(output_format="logits"))
    assert torch.equal(mapped(IMAGES[:5]), expected)


@pytest.mark.parametrize("sizes", [["N", 3, 8, 8], ["N", 63], ["N", 1, 8], [1, 8, 8, 64, 1]])
def test_rejects_onnx_session_with_other_input_shape(sizes: list[Any]) -> None:
    with pytest.raises(ModelError, match=r"ONNX .*inputs"):
        Predictor(Session(sizes), DIGITS)


def test_onnxruntime_outputs_equal_exported_model(tmp_path: Any) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model = models.build("mlp:8", SHAPE, 10, 0).eval()
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(model, (IMAGES[:2],), path, input_names=["x"], dynamo=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = model(IMAGES[:5])
    torch.testing.assert_close(Predictor(session, DIGITS)(IMAGES[:5]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (3, r"the model is a int \(expected a torch.nn.Module, an estimator"),
        (lambda images: images, r"returns shape \(2, 1, 8, 8\) for 2 inputs \(expected \(2, 10\)"),
        (lambda images: images[:, 0, 0, 0], r"returns shape \(2,\) for 2 inputs \(expected \(2, 10\)"),
        (lambda images: images["x"], "cannot take these inputs"),
        (lambda images: [["a"] * 10] * 2, "cannot take these inputs: could not convert string"),
        (lambda images: images[:, 0, 0, :1].repeat(10, 1) + 1j, "returns complex numbers"),
        (Session(["N", 64], outputs="none"), r"returns no floats \(B, classes\)"),
    ],
)
def test_rejects_invalid_predictors_in_one_line(source: Any, line: str) -> None:
    with pytest.raises(ModelError, match=line):
        models.check_module(Predictor(source, DIGITS), SHAPE, (10,), "model")


def test_predictor_refuses_inputs_with_gradient(regression: Any) -> None:
    predictor = Predictor(regression, DIGITS)
    assert predictor.differentiable is False
    x = IMAGES[:2].clone().requires_grad_()
    with pytest.raises(ModelError, match=r"Pipeline .*gradient"):
        predictor(x)
    with torch.no_grad():
        assert not predictor(x).requires_grad
    assert not predictor(IMAGES[:2]).requires_grad


def test_predictor_is_accepted_as_model_of_a_node(regression: Any) -> None:
    predictor = Predictor(regression, DIGITS)
    models.check_module(predictor, SHAPE, (10,), "model")
    assert list(predictor.parameters()) == []
    assert dict(predictor.state_dict()) == {}
    assert copy.deepcopy(predictor)(IMAGES[:2]).equal(predictor(IMAGES[:2]))
    compute = Compute(EngineConfig())
    assert compute.to_device(predictor) is predictor
    data = TensorData(IMAGES[:50], torch.from_numpy(LABELS[:50]))
    node = Node("clinic", data, predictor, Gate("clinic", PolicyConfig(), AuditLog()), 0)
    attach_optimizers([node], LocalConfig())
    assert node.optimizers == {}  # nothing is trained
    model = NodeGroup([node]).module("model")
    model.train(False)
    assert model(IMAGES[None, :5])[0].equal(predictor(IMAGES[:5]))
    assert predict(predictor, IMAGES[:5], compute).equal(predictor(IMAGES[:5]))


def test_predictors_are_never_stacked(regression: Any) -> None:
    data = TensorData(IMAGES[:50], torch.from_numpy(LABELS[:50]))
    nodes = [
        Node(name, data, Predictor(regression, DIGITS), Gate(name, PolicyConfig(), AuditLog()), 0)
        for name in ("a", "b")
    ]
    assert [[node.name for node in group] for group in group_by_architecture(nodes)] == [["a"], ["b"]]


def test_forests_teach_a_student_by_predictions() -> None:
    forests = [
        RandomForestClassifier(30, random_state=seed).fit(FLAT[rows], LABELS[rows])
        for seed, rows in enumerate((slice(0, 400), slice(400, 800)))
    ]
    targets = torch.from_numpy(LABELS)
    method = fedstill.FedKD(student=fedstill.StudentTraining(epochs=20), gamma=100.0)
    outcome = fedstill.distil(
        [(IMAGES[:400], targets[:400]), (IMAGES[400:800], targets[400:800])],
        [Predictor(forest, DIGITS) for forest in forests],
        models.build("small-cnn:8", SHAPE, 10, 0),
        (IMAGES[1300:], targets[1300:]),
        10,
        method=method,
        public=IMAGES[800:1300],
    )
    teachers = np.mean([100 * forest.score(FLAT[1300:], LABELS[1300:]) for forest in forests])
    assert outcome.result["local"]["accuracy"]["mean"] == pytest.approx(teachers)
    assert outcome.result["accuracy"] > 60
    assert set(outcome.result["releases"]) <= {"label counts", "logit range", "logits"}
    with pytest.raises(MethodRefused, match="frozen"):
        fedstill.distil(
            [(IMAGES[:400], targets[:400])],
            [Predictor(forests[0], DIGITS)],
            models.build("small-cnn:8", SHAPE, 10, 0),
            (IMAGES[1300:], targets[1300:]),
            10,
            method=fedstill.FedAvg(),
            policies=[PolicyConfig(outputs_only=False)],
        )
