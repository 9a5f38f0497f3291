"""Cost of privacy: milliseconds of gate, noise and audit log per query, and time of DP-SGD over plain SGD.

    python benchmarks/privacy.py                  # both, one thread
    python benchmarks/privacy.py --save

The query is FedIOD's: logits and critic values up, then the inputs' gradient. Its tensors are computed
beforehand, so that only the gate is timed: one admission and two releases, charged to a log on this disk. A
step of DP-SGD and a plain one alternate, on the same model and data.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from fedstill import models
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.dataset import TensorData
from fedstill.methods.fediod import FedIOD
from fedstill.node import local_training
from fedstill.node.audit_entries import ReceivedQuery
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.gate import Gate, hand_over
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.node.protection import protect
from fedstill.privacy.config import DPTrainingConfig, GradientsConfig, NoPrivacy, PrivacyConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.noisy_outputs import NoisyOutputs, OutputsConfig
from fedstill.privacy.pate import PATE, PateConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.tasks.classification import Classification

ROWS, CLASSES, RECORDS = 64, 10, 400
CRITIC, GRADIENTS = DPTrainingConfig(noise=20.0), GradientsConfig(noise=1000.0)
LEARNED = DPSGD(epsilon=1e6, training=DPTrainingConfig(noise=2.0), critic=CRITIC)
NOISY = NoisyOutputs(
    epsilon=1e6,
    outputs=OutputsConfig(distribution="gaussian", noise=1000.0, bound=10.0),
    critic=CRITIC,
    gradients=GRADIENTS,
)
VOTES = PATE(epsilon=1e6, pate=PateConfig(teachers=2, noise=1000.0), critic=CRITIC, gradients=GRADIENTS)
MECHANISMS: dict[str, PrivacyConfig | None] = {
    "no privacy": None,
    "none": NoPrivacy(),
    "dp-sgd": LEARNED,
    "pate": VOTES,
    "noisy-outputs": NOISY,
    "noisy-outputs, seeded": replace(NOISY, randomness="seeded"),
}
SHAPES = ((1, 8, 8), (3, 32, 32))
MODELS = (("small-cnn", (1, 8, 8)), ("small-cnn", (1, 28, 28)), ("lenet5", (1, 28, 28)))


def make_node(shape: tuple[int, ...], model: str = "mlp:8") -> Node:
    """Return a node with noise as data; accuracy does not matter here."""
    generator = torch.Generator().manual_seed(0)
    data = TensorData(torch.rand(RECORDS, *shape, generator=generator), torch.arange(RECORDS) % CLASSES)
    channels, height, width = shape
    network = models.build(model, (channels, height, width), CLASSES, 0)
    return Node("node-0", data, network, Gate("node-0", PolicyConfig(), AuditLog()), 0)


def query_seconds(
    shape: tuple[int, ...], privacy: PrivacyConfig | None, times: int, folder: Path
) -> list[float]:
    """Return the time that the gate takes for each query."""
    compute, node = Compute(EngineConfig(batching="one-by-one", threads=1)), make_node(shape)
    config = FedIOD(steps=times, batch=ROWS)
    setting = NodeSetting(Classification(CLASSES), LocalConfig(), compute)
    side = config.node_side(setting)
    path = Path(tempfile.mkdtemp(dir=folder))
    node.gate.ledger.audit.open(path / FILE)
    if privacy is not None:
        protect(node, privacy, side, config, setting, secret=1)
    gate, predict_logits = node.gate, side.queries["predict_logits"]
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(ROWS, *shape, generator=generator)
    response = {"logits": torch.rand(ROWS, CLASSES), "critic": torch.rand(ROWS, shape[1] // 4, shape[2] // 4)}
    # checks the budget of the whole run; computed once, before the first query
    gate.refusal_reason(predict_logits)
    seconds = []
    for number in range(times):
        query = ReceivedQuery(
            number, "predict_logits", f"{number:032x}", f"{number + 1:032x}", {"inputs": x.nbytes}
        )
        start = time.perf_counter()
        release = gate.admit(query, predict_logits, {"x": x})
        gate.ledger.complete(release)
        hand_over([gate.prepare(release, response, {"x": x})])
        gradients = gate.ledger.admit_gradients(release, f"{number:032x}", {"gradients": x.nbytes})
        hand_over([gate.prepare(gradients, {"d/dx": x}, {})])
        seconds.append(time.perf_counter() - start)
    return seconds[5:]


def step_seconds(model: str, shape: tuple[int, ...], batch: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a plain training step and of a DP-SGD step, which alternate."""
    compute, task = Compute(EngineConfig(batching="one-by-one", threads=1)), Classification(CLASSES)
    local = LocalConfig(batch=batch, epochs=1e4)
    plain, private = make_node(shape, model), make_node(shape, model)
    setting, method = NodeSetting(task, local, compute), FedIOD(gan=0.0)
    side = method.node_side(setting)
    privacy = replace(LEARNED, epsilon=float("inf"))
    protect(private, privacy, side, method, setting, secret=1)
    took: dict[str, list[float]] = {"plain": [], "private": []}
    local_training.attach_optimizers([plain, private], local)
    for round_ in range(rounds):
        for name, node in (("plain", plain), ("private", private)):
            start = time.perf_counter()
            local_training.train([node], task, local, compute, start=round_ * 5, steps=5)
            took[name].append((time.perf_counter() - start) / 5)
    return statistics.median(took["plain"][1:]), statistics.median(took["private"][1:])


def main() -> None:
    """Measure, print and optionally save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results/")
    given = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "queries": [],
        "steps": [],
    }
    print(f"{'inputs':14} {'mechanism':22} {'ms per query':>13} {'p99':>6}")
    for shape in SHAPES:
        for name, privacy in MECHANISMS.items():
            each = sorted(query_seconds(shape, privacy, given.queries, given.folder))
            middle, late = 1e3 * statistics.median(each), 1e3 * each[int(0.99 * (len(each) - 1))]
            form = f"{ROWS}x{'x'.join(map(str, shape))}"
            print(f"{form:14} {name:22} {middle:13.2f} {late:6.2f}", flush=True)
            content["queries"].append({"inputs": form, "mechanism": name, "ms": middle, "p99_ms": late})
    print(f"\n{'model':11} {'inputs':8} {'batch':>5} {'plain ms':>9} {'DP-SGD ms':>10} {'ratio':>6}")
    for model, shape in MODELS:
        for batch in (32, 128):
            plain, private = step_seconds(model, shape, batch, given.rounds)
            form = "x".join(map(str, shape))
            ratio = private / plain
            print(
                f"{model:11} {form:8} {batch:5} {1e3 * plain:9.2f} {1e3 * private:10.2f} {ratio:6.2f}",
                flush=True,
            )
            row = {"model": model, "inputs": form, "batch": batch, "plain_ms": 1e3 * plain}
            content["steps"].append({**row, "private_ms": 1e3 * private, "ratio": ratio})
    if given.save:
        path = Path(__file__).parent / "results" / f"privacy-cpu-{content['date']}.json"
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        print(f"Saved as {path}")


if __name__ == "__main__":
    main()
