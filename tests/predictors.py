"""Models that are no torch modules, for tests: a graph in a file, and an address that answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def write_onnx(path: Path, weights: np.ndarray[Any, Any], gives: str = "probabilities") -> None:
    """A graph of rows: ``softmax(x W)``, with W ``(features, classes)``, or ``x W`` where it gives logits."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    last = "Softmax" if gives == "probabilities" else "Identity"
    rows, columns = weights.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["z"]), helper.make_node(last, ["z"], [gives])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", rows])],
        [helper.make_tensor_value_info(gives, TensorProto.FLOAT, ["B", columns])],
        [numpy_helper.from_array(weights.astype(np.float32), "W")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))


@contextmanager
def serving(response: Callable[[Any], Any], status: int = 200) -> Iterator[str]:
    """An address of this machine that answers what a function makes of a query: bytes, or JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            result = response(request)
            body = result if isinstance(result, bytes) else json.dumps(result).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # whoever asked may be gone
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/predict"
    finally:
        server.shutdown()
        server.server_close()
