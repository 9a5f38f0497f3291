"""Our steps compared with those of published code, which is reimplemented here pass by pass.

*FedIOD's authors* (github.com/lsl001006/FedIOD at ef74ac8, mosaic_core/pipeline/FL.py): one optimizer step
trains all critics. The generator's loss is backpropagated through teachers and critics, and also computes
gradients of their weights, which are unused. Each of five student steps queries all teachers for new inputs.
*PFLlib* (github.com/TsingZ0/PFLlib, FedAvg): a DataLoader over single examples, one client after another,
copies of whole models. Both run in float32, as published, without their data loading and logging. Both use
our networks.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import step_time
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import fedstill
from fedstill import models
from fedstill.core.compute import Compute, EngineConfig, Workers
from fedstill.core.dataset import TensorData
from fedstill.core.errors import FedstillError
from fedstill.core.seeds import seeded, torch_generator
from fedstill.federation.inprocess import InProcess
from fedstill.methods._server import Server
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fediod import FedIOD
from fedstill.models import Generator, PatchCritic
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.local_training import attach_optimizers
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import Method
from fedstill.protocol.node_side import NodeSetting
from fedstill.runs.simulation import group_nodes, should_stack
from fedstill.tasks.classification import Classification

CLASSES = 10
Step = Callable[[], object]
Precision = Literal["float32", "auto"]


@dataclass(frozen=True)
class Options:
    """Our steps compared with those of published code."""

    rounds: int = 5
    """Timed rounds; each times every variant once."""
    threads: int = 0
    """CPU threads; 0 uses torch's default."""
    seed: int = 0
    """Seed of data, initial weights and sampling."""
    work: tuple[str, ...] = ("fediod lenet5 K=20", "fediod resnet8:128 K=4", "fedavg K=20")
    """Steps to time."""
    save: bool = False
    """Write the results to benchmarks/results."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a FedIOD step, as in the authors' settings given in an issue of their repository."""

    model: str
    nodes: int
    batch: int = 64
    generator_width: int = 64
    critic_width: int = 128
    shape: tuple[int, int, int] = (3, 32, 32)
    examples: int = 512


class TwoConvolutions(nn.Sequential):
    """The network of PFLlib's FedAvg on images of 1 x 28 x 28."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
        )


def node_data(seed: int, k: int, count: int, shape: tuple[int, int, int]) -> TensorData:
    """Return random images and labels of node k."""
    draw = torch_generator(seed, "data", k)
    inputs = torch.randn(count, *shape, generator=draw)
    return TensorData(inputs, torch.randint(CLASSES, (count,), generator=draw))


# --- published code, pass by pass -------------------------------------------------------------------


class AuthorsFedIOD:
    """The authors' step: critics, generator, and five steps of the student on new inputs each."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        with seeded(seed, "authors"):
            build = lambda name: models.build(sizes.model, sizes.shape, CLASSES, seed, name)  # noqa: E731
            self.T = [build(f"node {k}").eval() for k in range(sizes.nodes)]
            self.D = [PatchCritic(sizes.shape[0], sizes.critic_width) for _ in range(sizes.nodes)]
            half = (0.5,) * sizes.shape[0]
            self.G = Generator(sizes.shape, 100, sizes.generator_width, half, half)
            self.S = build("student")
        self.data = [node_data(seed, k, sizes.examples, sizes.shape) for k in range(sizes.nodes)]
        counts = torch.stack([torch.bincount(data.targets, minlength=CLASSES) for data in self.data]).float()
        self.pi = counts.sum(1) / counts.sum()  # (K,)
        self.by_class = (counts / counts.sum(0)).unsqueeze(1)  # (K, 1, classes)
        self.batch = sizes.batch
        self.adam_G = torch.optim.Adam(self.G.parameters(), 1e-3, betas=(0.5, 0.999))
        self.adam_D = torch.optim.Adam([p for D in self.D for p in D.parameters()], 1e-3, betas=(0.5, 0.999))
        self.adam_S = torch.optim.Adam(self.S.parameters(), 1e-3)

    def __call__(self) -> None:
        x = self.G(torch.randn(self.batch, 100))
        self.learn_critics(x.detach())
        self.learn_generator(x)
        for _ in range(5):
            self.learn_student()

    def learn_critics(self, x: torch.Tensor) -> None:
        loss = torch.zeros(())
        for D, data in zip(self.D, self.data, strict=True):
            fake = D(x)
            real = D(data.inputs[torch.randint(len(data), (self.batch,))])
            loss = loss + (F.softplus(fake).sum() + F.softplus(-real).sum()) / (2 * self.batch)
        self.adam_D.zero_grad()
        (loss / len(self.D)).backward()  # type: ignore[no-untyped-call]
        self.adam_D.step()

    def learn_generator(self, x: torch.Tensor) -> None:
        gan = self.pi @ torch.stack([F.softplus(-D(x)).sum() / self.batch for D in self.D])
        z = torch.stack([T(x) for T in self.T])  # (K, B, classes)
        p = z.softmax(2)
        align = self.pi @ -(p * z.log_softmax(2)).sum(2).mean(1)
        mean = p.mean(1)
        balance = self.pi @ (mean * mean.log2()).sum(1)
        mimic = -F.l1_loss(self.S(x), (z * self.by_class).sum(0))
        self.adam_G.zero_grad()
        (gan + mimic + align + 10 * balance).backward()
        self.adam_G.step()

    def learn_student(self) -> None:
        with torch.no_grad():
            x = self.G(torch.randn(self.batch, 100))
            z = (torch.stack([T(x) for T in self.T]) * self.by_class).sum(0)
        loss = F.l1_loss(self.S(x), z)
        self.adam_S.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam_S.step()


class PFLlibFedAvg:
    """A round of PFLlib's FedAvg: one local epoch of every client, one after another, and the average."""

    def __init__(self, data: list[TensorData], batch: int, lr: float) -> None:
        self.model = TwoConvolutions()
        self.batch = batch
        self.examples = [list(zip(each.inputs, each.targets, strict=True)) for each in data]
        self.clients = [copy.deepcopy(self.model) for _ in data]
        self.sgd = [torch.optim.SGD(client.parameters(), lr) for client in self.clients]

    def __call__(self) -> None:
        for client in self.clients:
            for new, old in zip(self.model.parameters(), client.parameters(), strict=True):
                old.data = new.data.clone()
        for client, examples, sgd in zip(self.clients, self.examples, self.sgd, strict=True):
            for x, y in DataLoader(examples, self.batch, drop_last=True, shuffle=True):  # type: ignore[arg-type]
                loss = F.cross_entropy(client(x), y)
                sgd.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                sgd.step()
        self.model = copy.deepcopy(self.clients[0])
        for parameter in self.model.parameters():
            parameter.data.zero_()
        for client in self.clients:
            for mean, own in zip(self.model.parameters(), client.parameters(), strict=True):
                mean.data += own.data.clone() / len(self.clients)


# --- ours -------------------------------------------------------------------------------------------


def ours(
    method: Method,
    networks: list[nn.Module],
    student: nn.Module,
    data: list[TensorData],
    local: LocalConfig,
    precision: Precision,
    options: Options,
) -> Server:
    """Return the server of an in-process federation, as a run builds it, with the audit log in memory."""
    shape = tuple(data[0].inputs.shape[1:])
    engine = EngineConfig(precision=precision, threads=options.threads)
    compute = Compute(engine).for_network(shape, networks[0])
    audit, task = AuditLog(durable=False), Classification(CLASSES)
    nodes = []
    for k, (network, examples) in enumerate(zip(networks, data, strict=True)):
        name = f"node-{k}"
        gate = Gate(name, PolicyConfig(outputs_only=False), audit)
        nodes.append(Node(name, examples, compute.to_device(network), gate, options.seed))
    side = method.node_side(NodeSetting(task, local, compute))
    for node in nodes:
        side.prepare(node)
    attach_optimizers(nodes, local)
    if method.initial_training is not None:  # local training leaves models in this state
        for node in nodes:
            node.model.eval().requires_grad_(False)
    federation = InProcess(nodes, group_nodes(nodes, should_stack(compute, nodes)), side, compute)
    half = (0.5,) * shape[0]
    return Server(
        method, federation, compute.to_device(student), task, shape, half, half, compute, options.seed, local
    )


def fediod(model: str, nodes: int, options: Options) -> Mapping[str, Step]:
    """Return the variants of a FedIOD step, by name."""
    sizes = Sizes(model, nodes)
    config = FedIOD(
        steps=1000,
        batch=sizes.batch,
        generator=fedstill.InputGenerator(width=sizes.generator_width),
        critic=fedstill.Discriminators(width=sizes.critic_width),
        student=fedstill.ReplayTraining(steps=5, batch=sizes.batch),
    )
    data = [node_data(options.seed, k, sizes.examples, sizes.shape) for k in range(nodes)]
    build = lambda *name: models.build(model, sizes.shape, CLASSES, options.seed, *name)  # noqa: E731

    def server(method: FedIOD, precision: Precision) -> Step:
        networks = [build("node", k) for k in range(nodes)]
        return ours(method, networks, build("student"), data, LocalConfig(), precision, options).step

    published = replace(config, student_inputs="fresh", critic=replace(config.critic, batch=0))
    return {
        "published code": AuthorsFedIOD(sizes, options.seed),
        "ours, published form, float32": server(published, "float32"),
        "ours, published form": server(published, "auto"),
        "ours, float32": server(config, "float32"),
        "ours": server(config, "auto"),
    }


def fedavg(nodes: int, options: Options) -> Mapping[str, Step]:
    """Return the variants of a FedAvg round of one epoch, by name."""
    data = [node_data(options.seed, k, 608, (1, 28, 28)) for k in range(nodes)]
    rate: dict[str, Any] = {"lr": 0.005, "lr_end": 0.005, "momentum": 0.0, "smoothing": 0.0}
    local = LocalConfig(epochs=1000, batch=32, optimizer="sgd", **rate)

    def server(precision: Precision) -> Step:
        networks: list[nn.Module] = [TwoConvolutions() for _ in range(nodes)]
        method = FedAvg(rounds=1000)
        return ours(method, networks, TwoConvolutions(), data, local, precision, options).step

    return {
        "published code": PFLlibFedAvg(data, 32, 0.005),
        "ours, float32": server("float32"),
        "ours": server("auto"),
    }


def variants(work: str, options: Options) -> Mapping[str, Step]:
    """Return the variants of one kind of step, such as ``fediod lenet5 K=20``."""
    what, *about = work.split()
    nodes = int(about[-1].removeprefix("K="))
    return fediod(about[0], nodes, options) if what == "fediod" else fedavg(nodes, options)


def measure(made: Mapping[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Return seconds and speedup of each variant: medians over rounds that time every variant once."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for run_step in made.values():
        run_step()
    for _ in range(rounds):
        for name, run_step in made.items():
            start = time.perf_counter()
            run_step()
            seconds[name].append(time.perf_counter() - start)
    theirs = seconds["published code"]
    return {
        name: {
            "seconds": statistics.median(each),
            "times as fast": statistics.median(a / b for a, b in zip(theirs, each, strict=True)),
        }
        for name, each in seconds.items()
    }


def gflop(run_step: Step) -> float:
    """Count the GFLOP of convolutions and matrix products in one step, in this thread."""
    server = getattr(run_step, "__self__", None)
    if isinstance(server, Server):
        server.compute.workers = Workers(1)
    with FlopCounterMode(display=False) as counter:
        run_step()
    return float(counter.get_total_flops()) / 1e9


HEAD = """| workload | variant | seconds | times as fast | GFLOP | share of the float32 peak |
|---|---|---:|---:|---:|---:|"""


def main(options: Options) -> None:
    """Measure, print and save."""
    Compute(EngineConfig(threads=options.threads))
    where = step_time.machine(step_time.Options())
    peak = step_time.peak(step_time.Options(), "float32")
    print(
        f"{where['cpu']}, {where['threads']} threads, torch {where['torch']}; one large product of matrices"
    )
    print(f"in float32 reaches {peak:.0f} GFLOP/s\n\n{HEAD}")
    results: dict[str, Any] = {}
    for work in options.work:
        made = variants(work, options)
        results[work] = measure(made, options.rounds)
        counted: dict[str, float] = {}  # the same in each precision
        for name, metrics in results[work].items():
            same = name.removesuffix(", float32")
            if same not in counted:
                counted[same] = gflop(made[same])
            metrics["gflop"] = counted[same]
            metrics["share of peak"] = metrics["gflop"] / metrics["seconds"] / peak
            print(
                f"| {work} | {name} | {metrics['seconds']:.3f} | {metrics['times as fast']:.2f} "
                f"| {metrics['gflop']:.0f} | {100 * metrics['share of peak']:.0f} % |",
                flush=True,
            )
    if options.save:
        path = step_time.result_file("peers", where)
        path.write_text(json.dumps({"machine": where, "peak": peak, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except FedstillError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
