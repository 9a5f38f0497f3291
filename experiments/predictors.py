"""Distill a random forest, an ONNX graph and an HTTP endpoint into one torch student: docs/custom-model.md.

    python experiments/predictors.py [--validation]

Each of three nodes has a part of a table (Dirichlet, alpha 0.5) and a model trained on it beforehand: a
scikit-learn forest, a logistic regression as an ONNX graph, and boosted trees behind an HTTP address of this
machine. None is a torch module or trained here, and no gradient passes through them. No node holds the test
rows. With --validation, everything is measured on a part of the training rows instead, to choose options.

Needs onnx, and fedstill's extra "onnx".
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression

import fedstill
from fedstill import models
from fedstill.core.seeds import numpy_generator
from fedstill.data import make_data_config
from fedstill.data.loading import load
from fedstill.data.partitioners import Dirichlet, split
from fedstill.data.public import PublicConfig, load_public
from fedstill.tasks import TASKS

SETS = ("breast-cancer", "wine")
SEEDS = 3
NODES = ("forest", "onnx", "endpoint")
# By name: the method, and the public rows that it queries.
METHODS: dict[str, tuple[Callable[[], Any], str]] = {
    "fedkd, held-out rows": (fedstill.FedKD, "held-out"),
    "fedkd, noise": (fedstill.FedKD, "noise"),
    "fediod": (lambda: fedstill.FedIOD(backpropagate=False), ""),
}


def write_onnx(model: LogisticRegression, path: Path) -> None:
    """Write a logistic regression as an ONNX graph: one product, one softmax, classes in their order."""
    weights, bias = model.coef_, model.intercept_
    if len(weights) == 1:  # two classes: the score of the second; the first has 0
        weights, bias = np.vstack([0 * weights, weights]), np.append(0, bias)
    tensors = {"W": weights.astype(np.float32), "b": bias.astype(np.float32)}
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "W", "b"], ["z"], transB=1),
            helper.make_node("Softmax", ["z"], ["probabilities"], axis=1),
        ],
        "regression",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", weights.shape[1]])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["B", len(weights)])],
        [numpy_helper.from_array(tensor, name) for name, tensor in tensors.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))


def serve(model: Any, classes: tuple[str, ...]) -> ThreadingHTTPServer:
    """Serve a model at a local address; responses name their classes."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = [classes[number] for number in model.classes_]
            response = {"probabilities": model.predict_proba(request["inputs"]).tolist(), "classes": known}
            body = json.dumps(response).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def run(name: str, seed: int, validation: float, folder: Path) -> dict[str, float]:
    """Return the accuracy of each node's own model, of a forest on all rows, and of the students."""
    task = TASKS["tabular"]()
    data = load(make_data_config(name, validation=validation), task)
    train, held = load_public(PublicConfig(name="held-out"), data, task)
    x, y, shape = train.inputs, train.targets, tuple(train.inputs.shape[1:])
    draw = numpy_generator(seed, "split")
    parts = split(y, len(data.classes), Dirichlet(nodes=3, alpha=0.5), draw, {}, None)
    mine = [(x[part], y[part]) for part in parts]

    forest = RandomForestClassifier(200, random_state=seed).fit(*mine[0])
    linear = LogisticRegression(max_iter=5000).fit(*mine[1])
    boosted = GradientBoostingClassifier(random_state=seed).fit(*mine[2])
    write_onnx(linear, folder / "linear.onnx")
    server = serve(boosted, data.classes)
    known = tuple(data.classes[number] for number in linear.classes_)
    graph = fedstill.CustomModel(str(folder / "linear.onnx"), classes=known)
    own = [forest, graph, f"http://127.0.0.1:{server.server_address[1]}/predict"]
    public = {"held-out": held, "noise": load_public(PublicConfig(name="noise"), data, task)[1]}
    test = (data.test.inputs, data.test.targets)
    about = {"task": "tabular", "schema": data.schema, "seed": seed, "every": 0}
    reached = {}
    for called, (method, rows) in METHODS.items():
        student = models.build("mlp:64", shape, len(data.classes), seed)
        inputs = public[rows].inputs if rows else None
        outcome = fedstill.distil(
            mine, own, student, test, data.classes, method=method(), public=inputs, **about
        )
        nodes = outcome.result["local"]["accuracy"]["per_node"]
        reached |= dict(zip(NODES, nodes, strict=True)) | {called: outcome.result["accuracy"]}
    server.shutdown()
    server.server_close()
    pooled = RandomForestClassifier(200, random_state=seed).fit(x, y)
    return reached | {"pooled forest": 100 * pooled.score(*test)}


if __name__ == "__main__":
    share = 0.25 if "--validation" in sys.argv[1:] else 0.0
    with tempfile.TemporaryDirectory() as place:
        for data_set in SETS:
            rows = [run(data_set, seed, share, Path(place)) for seed in range(SEEDS)]
            for seed, row in enumerate(rows):
                print(data_set, seed, ", ".join(f"{what} {value:.1f}" for what, value in row.items()))
            best = [max(row[kind] for kind in NODES) for row in rows]
            every = {what: [row[what] for row in rows] for what in rows[0]} | {"best node": best}
            for what, values in every.items():
                print(f"  {what:14} {np.mean(values):.1f} \u00b1 {np.std(values, ddof=1):.1f}")
