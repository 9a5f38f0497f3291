"""Correctness and speed on a GPU: equality with the CPU, and seconds per step by engine and precision.

    python benchmarks/gpu.py --stages estimate                     # computed bounds; needs no GPU
    python benchmarks/gpu.py --stages check                        # every method equals the CPU
    python benchmarks/gpu.py --stages step local                   # seconds by engine and precision
    python benchmarks/gpu.py --stages run --data.root DIR          # CIFAR-10, full run; call again to resume

Each stage ends within ``--seconds`` and reports its results so far, so that a GPU that is available for ten
minutes at a time is enough. Rows named ``library`` are the library's engines. The others are plain loops over
the nodes' part of a step, which show whether another engine would be faster.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from step_time import (
    CLASSES,
    COLOR,
    Options,
    distillation,
    local_training,
    machine,
    make_nodes,
    peak,
)
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fedstill
from fedstill import models
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.models import Generator, PatchCritic
from fedstill.node.audit_log import AuditLog
from fedstill.protocol.method import METHODS

Stage = Literal["estimate", "check", "step", "local", "run"]
PEAKS = {  # of one card, dense: FLOP/s in bfloat16 and TF32, byte/s
    "H100 SXM": (989e12, 494e12, 3.35e12),
    "H200": (989e12, 494e12, 4.8e12),
}
LAUNCH = 4e-6  # approximate seconds to launch a kernel from Python


@dataclass(frozen=True)
class Data:
    """Folder and name of CIFAR-10."""

    root: str = ""
    name: str = "cifar10"
    """packs.cifar:CIFAR10, with experiments/presets on PYTHONPATH, reads a file of JPEGs."""


@dataclass(frozen=True)
class Chosen:
    """Options: stages and device."""

    stages: tuple[Stage, ...] = ("estimate", "check", "step", "local")
    device: str = "cuda"
    """cpu tests the program itself, at small sizes."""
    seconds: float = 540.0
    """Time limit of each stage, after which it reports its results so far."""
    nodes: int = 20
    batch: int = 64
    width: int = 128
    """Width of ResNet-8, generator and critics; the default is the paper's."""
    network: str = ""
    """Network of nodes and student; empty is ResNet-8 of the width."""
    data: Data = field(default_factory=Data)
    out: Path = Path(__file__).parent / "results"
    """Folder of the results, saved as gpu-STAGE-DATE.json."""

    @property
    def model(self) -> str:
        return self.network or f"resnet8:{self.width}"

    def options(self) -> Options:
        """Sizes of a step as published, with one student step."""
        return Options(
            nodes=self.nodes, batch=self.batch, device=self.device, local_steps=1, student_steps=1,
            student_batch=self.batch, generator_width=self.width, critic_width=self.width,
        )  # fmt: skip


# --- estimate ---------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts operations, each about one kernel, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations += 1
            each = [*args, *(output if isinstance(output, tuple | list) else [output])]
            self.bytes += sum(part.nbytes for part in each if isinstance(part, torch.Tensor))
        return output


@dataclass
class Cost:
    """Cost of a computation: floating-point operations (a multiply-add is two), kernels, bytes."""

    flop: float = 0.0
    kernels: int = 0
    bytes: int = 0

    def times(self, count: int) -> Cost:
        return Cost(self.flop * count, self.kernels * count, self.bytes * count)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flop + other.flop, self.kernels + other.kernels, self.bytes + other.bytes)


def cost(network: nn.Module, x: torch.Tensor, learns: bool) -> Cost:
    """Return the cost of a network's forward and backward pass, computed on the device ``meta``.

    Args:
        learns: compute gradients of the weights (True) or of the input (False).

    >>> cost(nn.Linear(4, 3), torch.ones(2, 4), learns=True).flop  # 2 * 2 * 4 * 3 forward, the same backward
    96.0
    """
    twin = copy.deepcopy(network).to("meta").requires_grad_(learns)
    x = x.to("meta").requires_grad_(not learns)
    with FlopCounterMode(display=False) as flops, Counted() as counted:
        twin(x).sum().backward()
    return Cost(float(flops.get_total_flops()), counted.operations, counted.bytes)


def estimate(chosen: Chosen) -> list[dict[str, Any]]:
    """Return lower bounds on the time of a FedIOD step and of 500 epochs of local training, by bottleneck."""
    x, noise = torch.empty(chosen.batch, *COLOR), torch.empty(chosen.batch, 100)
    half = (0.5,) * COLOR[0]
    T, D = models.build(chosen.model, COLOR, CLASSES, 0), PatchCritic(COLOR[0], chosen.width)
    G = Generator(COLOR, 100, chosen.width, half, half)
    node = cost(D, x, True).times(2) + cost(D, x, False) + cost(T, x, False)
    server = cost(G, noise, True) + cost(T, x, False) + cost(T, x, True)
    steps = 500 * 50_000 // chosen.batch
    flops = {"a FedIOD step": node.times(chosen.nodes) + server, "500 epochs": cost(T, x, True).times(steps)}
    rows = []
    for name, all_of in flops.items():
        for card, (half_speed, full_speed, memory) in PEAKS.items():
            bounds = {
                "arithmetic, bfloat16": all_of.flop / half_speed,
                "arithmetic, TF32": all_of.flop / full_speed,
                "memory, float32": all_of.bytes / memory,
                "launches": all_of.kernels * LAUNCH,
            }
            rows.append(
                {"work": name, "card": card, "flop": all_of.flop, "kernels": all_of.kernels, **bounds}
            )
    return rows


# --- correctness ------------------------------------------------------------------------------------

SMALL: Mapping[str, Any] = {  # small values of options that methods may have, with more than one round
    "rounds": 2, "steps": 6, "batch": 8, "subset": 8, "initial_rounds": 1, "student_epochs": 1,
    "server_batch": 8, "attention": 0.0, "target_examples": 6, "generator": {"width": 8, "noise": 6},
    "critic": {"width": 4}, "student": {"steps": 2, "batch": 8, "epochs": 2, "memory": 24},
    "server": {"steps": 2, "batch": 8},
}  # fmt: skip
APART = 0.05  # tolerated distance between two machines, relative to the change in training
CHAOS = 3.0  # or this multiple of the rounding error, as Adam's first steps amplify it


def with_known(options: Any, changes: Mapping[str, Any]) -> Any:
    """Return options with the changes that apply to them, including those of nested options."""
    known: dict[str, Any] = {}
    for part in dataclasses.fields(options):
        if part.name in changes:
            value, old = changes[part.name], getattr(options, part.name)
            known[part.name] = with_known(old, value) if dataclasses.is_dataclass(old) else value
    return dataclasses.replace(options, **known)


def trained(name: str, engine: EngineConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Train a small run of a method; return its student's or nodes' weights before and after, as vectors."""
    kind = METHODS[name]
    method: Any = with_known(kind(), SMALL)
    maps, draw = method.needs().label_maps, torch.Generator().manual_seed(0)
    shape, spec = (1, 16, 16), "unet:4" if maps else "small-cnn:4"

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (count, *shape[1:]) if maps else (count,)
        return torch.rand(count, *shape, generator=draw) * 2 - 1, torch.randint(3, size, generator=draw)

    networks = [models.build(spec, shape, 3, 0, index) for index in range(4)]
    *own, student = networks
    before = vector(networks)
    needs = method.needs()
    public = some(12) if needs.public or needs.public_labels else None
    fedstill.distil(
        [some(size) for size in (16, 12, 20)], own, student, some(12), 3,
        task="segmentation" if maps else "classification", method=method, engine=engine, public=public,
        local=fedstill.LocalConfig(epochs=0, min_steps=60, batch=8, optimizer="sgd"), every=0,
        policies=[fedstill.PolicyConfig(outputs_only=False)] * 3,
    )  # fmt: skip
    return before, vector(networks)


def vector(networks: list[nn.Module]) -> torch.Tensor:
    """Return all weights as one vector on the CPU, in double precision."""
    each = [parameter.detach().cpu().double().flatten() for net in networks for parameter in net.parameters()]
    return torch.cat(each)


def check(chosen: Chosen) -> list[dict[str, Any]]:
    """Compare each method's networks on the device with those on the CPU, relative to the training's change.

    For reference, also measure the effect of rounding: stacked compared with one by one, both on the CPU.
    """
    rows = []
    names = [
        name
        for name in METHODS.builtin
        if not (METHODS[name]().needs().table_rows or METHODS[name]().needs().vectors)
    ]  # inputs here are images
    for name in within(chosen, names):
        before, expected = trained(name, EngineConfig(batching="one-by-one", precision="float32"))
        change = (expected - before).norm().clamp_min(1e-9)
        twin = trained(name, EngineConfig(batching="stacked", precision="float32"))[1]
        rounding = float((twin - expected).norm() / change)
        for engine in ("one-by-one", "stacked"):
            row: dict[str, Any] = {"method": name, "engine": engine, "rounding": rounding}
            try:
                with tf32(False):
                    vector = trained(
                        name, EngineConfig(batching=engine, device=chosen.device, precision="float32")
                    )[1]  # type: ignore[arg-type]
                row["apart"] = float((vector - expected).norm() / change)
                row["equal"] = row["apart"] <= max(APART, CHAOS * rounding)
            except (FedstillError, RuntimeError) as error:  # failures are what this stage looks for
                row |= {"equal": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
            rows.append(row)
    return rows


# --- speed ------------------------------------------------------------------------------------------


class NodesPart:
    """The nodes' part of a FedIOD step as a plain loop: critic steps, responses, gradients of x."""

    def __init__(self, chosen: Chosen, precision: str, variant: str) -> None:
        device, self.variant, self.precision = chosen.device, variant, precision
        options = Options(nodes=chosen.nodes, batch=chosen.batch, device=device)
        nodes = make_nodes(options, chosen.model, Compute(EngineConfig(device=device)), AuditLog())
        layout = torch.channels_last
        self.teachers = [node.model.eval().requires_grad_(False).to(memory_format=layout) for node in nodes]
        critics = [PatchCritic(COLOR[0], chosen.width).to(device, memory_format=layout) for _ in nodes]
        self.critics: list[Any] = critics
        graphs = "graph" in variant
        self.adams = [torch.optim.Adam(D.parameters(), 1e-3, fused=True, capturable=graphs) for D in critics]
        self.real = [node.data.inputs[: chosen.batch].to(memory_format=layout) for node in nodes]
        self.x = torch.randn(chosen.batch, *COLOR, device=device).to(memory_format=layout)
        self.gradients = [torch.zeros_like(self.x) for _ in nodes]
        if variant == "compile":
            self.teachers = [torch.compile(T) for T in self.teachers]
            self.critics = [torch.compile(D) for D in critics]
        self.streams = [torch.cuda.Stream() for _ in nodes] if "streams" in variant else []
        self.graph = self._captured() if graphs else None

    def node(self, k: int) -> None:
        """Compute one node's part."""
        T, D, adam = self.teachers[k], self.critics[k], self.adams[k]
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            loss = F.softplus(D(self.real[k])).mean() + F.softplus(-D(self.x)).mean()
        adam.zero_grad(set_to_none=False)
        loss.backward()
        adam.step()
        x = self.x.detach().requires_grad_()
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            response = T(x).float().square().mean() + F.softplus(D(x)).mean()
        self.gradients[k].copy_(torch.autograd.grad(response, x)[0])

    def all(self) -> None:
        """Compute all nodes' parts."""
        if not self.streams:
            for k in range(len(self.teachers)):
                self.node(k)
            return
        here = torch.cuda.current_stream()
        for k, stream in enumerate(self.streams):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                self.node(k)
        for stream in self.streams:
            here.wait_stream(stream)

    def __call__(self) -> None:
        if self.graph is None:
            self.all()
        else:
            self.graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the first calls allocate; this must happen before the capture
            for _ in range(3):
                self.all()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.all()
        return graph


def seconds(call: Callable[[], object], device: str, rounds: int = 8) -> float:
    """Return the minimum over some rounds, after one warm-up round."""
    took = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        took.append(time.perf_counter() - start)
    return min(took[1:])


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Enable or disable TF32 for float32 matrix products."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def timed(
    chosen: Chosen, make: Callable[[Options, str, str, Path], Callable[[], object]]
) -> list[dict[str, Any]]:
    """Time the library's engines in each precision; return seconds and peak memory."""
    rows: list[dict[str, Any]] = []
    base = chosen.options()
    variants = [
        (variant, precision)
        for variant in ("stacked", "stacked, no graphs", "one-by-one", "one-by-one, no graphs")
        for precision in ("float32", "TF32", "bfloat16")
    ]
    for variant, precision in within(chosen, variants):
        dtype = "bfloat16" if precision == "bfloat16" else "float32"
        name, _, without = variant.partition(", ")
        options = dataclasses.replace(base, channels_last=name == "one-by-one", cuda_graphs=not without)
        with tf32(precision == "TF32"), tempfile.TemporaryDirectory() as folder:
            call = make(options, dtype, name, Path(folder))
            row = {
                "way": f"library, {variant}",
                "precision": precision,
                "seconds": seconds(call, chosen.device),
            }
        rows.append(row | {"memory": memory(chosen.device)})
    return rows


def memory(device: str) -> int:
    """Return the peak GPU memory in bytes since the last call; 0 on other devices."""
    if torch.device(device).type != "cuda":
        return 0
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def step(chosen: Chosen) -> list[dict[str, Any]]:
    """Time a FedIOD step by engine and precision, and the nodes' part alone; list waits for the GPU."""
    rows = timed(
        chosen,
        lambda options, dtype, variant, out: distillation(options, chosen.model, dtype, variant, out)[0],
    )  # type: ignore[arg-type]
    variants = (
        ("loop", "streams", "graph", "graph of streams", "compile") if chosen.device == "cuda" else ("loop",)
    )
    for variant, precision in within(
        chosen, [(variant, each) for variant in variants for each in ("TF32", "bfloat16")]
    ):
        with tf32(precision == "TF32"):
            part = NodesPart(chosen, precision, variant)
            row = {"way": f"nodes' part, {variant}", "precision": precision}
            rows.append(row | {"seconds": seconds(part, chosen.device), "memory": memory(chosen.device)})
    best = {
        name: peak(Options(device=chosen.device), name, 8192 if chosen.device == "cuda" else 512) * 1e9
        for name in ("float32", "bfloat16")
    }
    rows.append({"way": "peak, a product of matrices", "precision": "bfloat16", "flop/s": best["bfloat16"]})
    rows.append({"way": "peak, a product of matrices", "precision": "float32", "flop/s": best["float32"]})
    return rows + [
        {"way": "waits for the GPU", "where": where, "a step": count} for where, count in waits(chosen)
    ]


def waits(chosen: Chosen) -> list[tuple[str, int]]:
    """Return the source lines at which a step of the library waits for the GPU, with counts."""
    if chosen.device != "cuda":
        return []
    options = chosen.options()
    with tempfile.TemporaryDirectory() as folder:
        run_step = distillation(options, "resnet8:16", "float32", "stacked", Path(folder))[0]
        run_step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    counts = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in caught)
    return counts.most_common()


def local(chosen: Chosen) -> list[dict[str, Any]]:
    """Time a step of local training at every node, by engine and precision."""
    return timed(
        chosen,
        lambda options, dtype, variant, out: local_training(options, chosen.model, dtype, variant, out)[0],
    )  # type: ignore[arg-type]


# --- full run ---------------------------------------------------------------------------------------


def run(chosen: Chosen) -> list[dict[str, Any]]:
    """Run CIFAR-10 with 20 nodes, alpha 1, seed 0, until the time limit; the next call resumes."""
    if not chosen.data.root:
        raise ArgumentError("data.root", "", "the folder with CIFAR-10, for the stage run")
    out = chosen.out / "gpu-run"
    begin = [
        "cifar10-fediod-gpu",
        "--data.name",
        chosen.data.name,
        "--data.root",
        chosen.data.root,
        "--engine.device",
        chosen.device,
        "--out",
        str(out),
    ]
    words = ["--resume", str(out)] if out.exists() else begin
    process = subprocess.Popen([sys.executable, "-m", "fedstill", "run", *words])
    try:
        process.wait(timeout=chosen.seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
        file = out / "metrics.jsonl"  # missing until the first evaluation
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        metrics = [result for result in map(json.loads, lines) if "accuracy" in result]
        last = {key: metrics[-1][key] for key in ("step", "accuracy", "seconds")} if metrics else {}
        return [{"run": str(out), "done": False, **last}]
    if process.returncode:
        raise FedstillError(f"the run ended with {process.returncode}")
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return [{"run": str(out), "done": True, "accuracy": result["accuracy"], "seconds": result["seconds"]}]


# --- main -------------------------------------------------------------------------------------------


def within(chosen: Chosen, items: list[Any]) -> Iterator[Any]:
    """Yield items until the time limit of a stage; then print the number of skipped items."""
    end = time.monotonic() + chosen.seconds
    for index, item in enumerate(items):
        if time.monotonic() > end:
            print(f"out of time: {len(items) - index} of {len(items)} skipped")
            return
        yield item


def show(stage: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a Markdown table; its columns are the union of all keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print(f"\n## {stage}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        print(
            "| "
            + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells)
            + " |"
        )


STAGES: dict[Stage, Callable[[Chosen], list[dict[str, Any]]]] = {
    "estimate": estimate,
    "check": check,
    "step": step,
    "local": local,
    "run": run,
}


def main(chosen: Chosen) -> int:
    """Run the stages, print their tables and save them."""
    if set(chosen.stages) != {"estimate"}:
        Compute(EngineConfig(device=chosen.device))  # raises an error if the device is unavailable
    where = machine(Options(device=chosen.device if torch.cuda.is_available() else "cpu"))
    wrong = 0
    for stage in chosen.stages:
        rows = STAGES[stage](chosen)
        show(stage, rows)
        wrong += sum(row.get("equal") is False for row in rows)
        chosen.out.mkdir(parents=True, exist_ok=True)
        path = chosen.out / f"gpu-{stage}-{where['date']}.json"
        path.write_text(json.dumps({"machine": where, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Chosen)))
    except FedstillError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
