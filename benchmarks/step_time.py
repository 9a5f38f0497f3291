"""Time of one step with every engine, compared with a plain loop that computes the same.

Times one FedIOD distillation step and local training for K nodes with equally many examples, on random data.
The plain loop is Algorithm 1 in torch modules alone: no federation, no gate, no stacking. See the README in
this folder.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import overhead
import torch
import torch.nn.functional as F
import tyro
from torch.utils.flop_counter import FlopCounterMode

import fedstill
from fedstill import models
from fedstill.core.compute import Compute, EngineConfig, Workers
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.seeds import seeded, torch_generator
from fedstill.federation.inprocess import InProcess
from fedstill.methods._server import Server
from fedstill.methods.fediod import FedIOD
from fedstill.models import Generator
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.local_training import attach_optimizers, train
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.protocol.local_config import LocalConfig, cosine_lr, set_lr
from fedstill.protocol.node_side import NodeSetting
from fedstill.runs.simulation import group_nodes
from fedstill.tasks import logit_formulas
from fedstill.tasks.classification import Classification

Precision = Literal["float32", "bfloat16"]
Shape = tuple[int, int, int]
Losses = list[list[float]]
ENGINES = ("stacked", "one-by-one", "at-once")
VARIANTS = ("plain", *ENGINES)
CLASSES = 10
GRAY: Shape = (1, 28, 28)  # input of small-cnn, lenet5 and mlp
COLOR: Shape = (3, 32, 32)  # input of all other models


@dataclass(frozen=True)
class Options:
    """Time of a step on every engine, compared with a plain loop."""

    nodes: int = 20
    """K, all of one architecture."""
    batch: int = 64
    """Inputs in a query, and examples in a step of local training."""
    models: tuple[str, ...] = ("small-cnn", "resnet8:16")
    """Architectures, as in a run's config; nodes and student have the same."""
    precision: tuple[Precision, ...] = ("float32",)
    """float32, bfloat16 (autocast) or both."""
    device: str = "cpu"
    """A torch device."""
    threads: int = 0
    """CPU threads; 0 uses torch's default."""
    channels_last: bool = False
    """Use channels-last memory format for the networks of every engine."""
    cuda_graphs: bool = True
    """On a GPU, capture steps as CUDA graphs."""
    rounds: int = 7
    """Timed rounds; each times every engine once."""
    steps: int = 1
    """Distillation steps per round."""
    local_steps: int = 10
    """Local steps per round."""
    examples: int = 256
    """Examples of each node."""
    generator_width: int = FedIOD().generator.width
    """Width of G."""
    critic_width: int = FedIOD().critic.width
    """Width of each D_k."""
    student_steps: int = 5
    """Student steps in a distillation step."""
    student_batch: int = 128
    """Inputs from memory in a student step."""
    seed: int = 0
    """Seed of data, initial weights and sampling."""
    clock: Literal["wall", "processor"] = "wall"
    """processor counts processor seconds: less noisy on a shared CPU, with one thread."""
    save: bool = False
    """Write the results to benchmarks/results."""
    name: str = "step_time"
    """First part of the result file's name."""
    assert_not_slower: float | None = None
    """Exit with 1 if the default engine takes more than this many times as long as the fastest."""

    def fediod(self) -> FedIOD:
        """Return the method's options in this benchmark: its defaults except for the sizes."""
        return FedIOD(
            steps=1000,
            batch=self.batch,
            generator=fedstill.InputGenerator(width=self.generator_width),
            critic=fedstill.Discriminators(width=self.critic_width, batch=0),
            student=fedstill.ReplayTraining(steps=self.student_steps, batch=self.student_batch),
        )

    def local(self) -> LocalConfig:
        """Return options of local training with more steps than are timed, so that no node ends early."""
        return LocalConfig(epochs=0, min_steps=10_000, batch=self.batch)

    def engine(self, name: str, precision: Precision) -> EngineConfig:
        """Return the configuration of one engine."""
        return EngineConfig(
            batching="stacked" if name == "stacked" else "one-by-one",
            device=self.device,
            precision=precision,
            channels_last=self.channels_last,
            threads=self.threads,
            cuda_graphs=self.cuda_graphs,
        )

    def compute(self, variant: str, precision: Precision) -> Compute:
        """Return the compute of an engine: all threads for each node one by one, one thread each at once."""
        compute = Compute(self.engine(variant, precision))
        if variant != "at-once":
            compute.workers = Workers(1)
        return compute


@dataclass
class Timing:
    """Seconds per step of one engine, one value per round."""

    seconds: list[float] = field(default_factory=list)


# --- shared initial state ---------------------------------------------------------------------------


def shape_of(model: str) -> Shape:
    """Return the input shape with which an architecture is timed."""
    return GRAY if model.partition(":")[0] in ("small-cnn", "lenet5", "mlp") else COLOR


def make_nodes(options: Options, model: str, compute: Compute, audit: AuditLog) -> list[Node]:
    """Return K nodes with random data, the same for each engine."""
    shape, count = shape_of(model), options.examples
    nodes = []
    for k in range(options.nodes):
        draw = torch_generator(options.seed, "data", k)
        inputs = torch.randn(count, *shape, generator=draw)
        targets = torch.randint(CLASSES, (count,), generator=draw)
        network = compute.to_device(models.build(model, shape, CLASSES, options.seed, "node", k))
        name = f"node-{k}"
        gate = Gate(name, PolicyConfig(), audit)
        data = TensorData(inputs, targets).to(compute.device)
        nodes.append(Node(name, data, network, gate, options.seed))
    return nodes


def make_student(options: Options, model: str) -> torch.nn.Module:
    """Return the student, with the same initial weights for each engine."""
    return models.build(model, shape_of(model), CLASSES, options.seed, "student")


# --- the plain loops --------------------------------------------------------------------------------


class PlainDistillation:
    """Algorithm 1's second loop for a list of torch modules, with a memory of responses.

    It samples as the library does (same names, same seeds), so that losses can be compared.
    """

    def __init__(self, options: Options, model: str, compute: Compute, nodes: Sequence[Node]) -> None:
        self.config, self.compute, self.seed = options.fediod(), compute, options.seed
        self.names = [node.name for node in nodes]
        self.data = [node.data.inputs for node in nodes]
        self.teachers = [node.model.eval().requires_grad_(False) for node in nodes]
        self.critics = [node.modules["critic"].requires_grad_(False) for node in nodes]
        self.critic_adams = [node.optimizers["critic"] for node in nodes]
        counts = torch.stack([torch.bincount(node.data.targets, minlength=CLASSES) for node in nodes]).float()
        self.pi = counts.sum(1) / counts.sum()  # (K,)
        self.task = Classification(CLASSES)
        self.weights = logit_formulas.importance_weights(counts)  # (K, 1, classes)
        shape, config = shape_of(model), self.config
        half = (0.5,) * shape[0]
        with seeded(self.seed, "generator"):
            self.G = Generator(shape, config.generator.noise, config.generator.width, half, half)
        self.S = make_student(options, model)
        compute.to_device(self.G)
        compute.to_device(self.S)
        self.g_adam = torch.optim.Adam(
            self.G.parameters(), config.generator.lr, betas=(0.5, 0.999), fused=True
        )
        self.s_adam = torch.optim.Adam(self.S.parameters(), config.student.lr, fused=True)
        capacity = config.batch * options.steps * (options.rounds + 1)
        self.remembered_x = torch.empty(capacity, *shape, device=compute.device)
        self.remembered_z = torch.empty(capacity, CLASSES, device=compute.device)
        self.done = 0

    def step(self) -> list[float]:
        """Run one step; return the losses in the order in which Server names them."""
        config, t, device = self.config, self.done, self.compute.device
        set_lr(self.g_adam, cosine_lr(t, config.steps, config.generator.lr, config.generator.lr_end))
        set_lr(self.s_adam, cosine_lr(t, config.steps, config.student.lr, config.student.lr_end))
        w = torch.randn(config.batch, config.generator.noise, generator=torch_generator(self.seed, "w", t))
        with self.compute.autocast():
            x = self.G(w.to(device)).float()
            z_each, d_each = [], []
            for k, (T, D, adam) in enumerate(
                zip(self.teachers, self.critics, self.critic_adams, strict=True)
            ):
                # Query 0 counts the labels, so step t is query t + 1.
                draw = torch_generator(self.seed, self.names[k], "critic", t + 1)
                chosen = torch.randint(len(self.data[k]), (config.batch,), generator=draw).to(device)
                D.requires_grad_(True)
                real, fake = D(self.data[k][chosen]).float(), D(x.detach()).float()
                loss = F.softplus(real).mean() + F.softplus(-fake).mean()
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
                D.requires_grad_(False)
                z_each.append(T(x).float())
                d_each.append(D(x).float())
            z, d = torch.stack(z_each), torch.stack(d_each)  # (K, B, classes), (K, B, h, w)
            z_bar = self.task.ensemble(z, self.weights, config.ensemble)  # (B, classes)
            L_gan = self.pi @ F.softplus(d).flatten(2).sum(2).mean(1)
            L_conf = logit_formulas.mean_entropy(z, self.pi)
            L_unique = -logit_formulas.js_divergence(z, self.pi)
            L_balance = -logit_formulas.entropy_from_probs(z_bar.softmax(1).mean(0), 0)
            self.S.eval().requires_grad_(False)
            L_mimic = logit_formulas.distillation_loss(self.S(x).float(), z_bar, config.tau).mean()
            self.S.train().requires_grad_(True)
            L_G = (
                config.gan * L_gan
                + config.conf * L_conf
                + config.unique * L_unique
                - config.mimic * L_mimic
                + config.balance * L_balance
            )
        self.g_adam.zero_grad()
        L_G.backward()  # type: ignore[no-untyped-call]
        self.g_adam.step()

        size = (t + 1) * config.batch
        self.remembered_x[size - config.batch : size] = x.detach()
        self.remembered_z[size - config.batch : size] = z_bar.detach()
        L_S = torch.zeros(())
        for index in range(config.student.steps):
            draw = torch_generator(self.seed, "memory", t, index)
            if size > config.student.batch:
                chosen = torch.randint(size, (config.student.batch,), generator=draw).to(device)
            else:
                chosen = torch.arange(size, device=device)
            with self.compute.autocast():
                z_hat = self.S(self.remembered_x[chosen]).float()
                L_S = logit_formulas.distillation_loss(z_hat, self.remembered_z[chosen], config.tau).mean()
            self.s_adam.zero_grad()
            L_S.backward()  # type: ignore[no-untyped-call]
            self.s_adam.step()
        self.done += 1
        return torch.stack([L_gan, L_conf, L_unique, L_balance, L_mimic, L_S]).tolist()


class PlainLocal:
    """Algorithm 1's first loop: one node after the other, each on its own shuffled passes."""

    def __init__(self, options: Options, compute: Compute, nodes: Sequence[Node]) -> None:
        self.config, self.compute, self.seed = options.local(), compute, options.seed
        self.names = [node.name for node in nodes]
        self.data = [node.data for node in nodes]
        self.networks = [node.model.train().requires_grad_(True) for node in nodes]
        self.adams = [torch.optim.Adam(net.parameters(), self.config.lr, fused=True) for net in self.networks]
        self.order = [torch.empty(0, dtype=torch.int64) for _ in nodes]  # remaining examples of the pass
        self.passes = [0] * len(nodes)
        self.done = 0

    def train(self, steps: int) -> Losses:
        """Run this many steps of every node; return the losses by node and step."""
        losses = [self._node(k, steps) for k in range(len(self.networks))]
        self.done += steps
        return losses

    def _node(self, k: int, steps: int) -> list[float]:
        config, data, T, adam = self.config, self.data[k], self.networks[k], self.adams[k]
        total = config.steps(len(data))
        losses = []
        for step in range(self.done, self.done + steps):
            while len(self.order[k]) < config.batch:
                draw = torch_generator(self.seed, self.names[k], "pass", self.passes[k])
                self.order[k] = torch.cat([self.order[k], torch.randperm(len(data), generator=draw)])
                self.passes[k] += 1
            chosen, self.order[k] = self.order[k][: config.batch], self.order[k][config.batch :]
            chosen = chosen.to(self.compute.device)
            set_lr(adam, cosine_lr(step, total, config.lr, config.lr_end))
            with self.compute.autocast():
                z = T(data.inputs[chosen]).float()
                loss = F.cross_entropy(z, data.targets[chosen], label_smoothing=config.smoothing)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()


# --- one round of each engine -----------------------------------------------------------------------


def distillation(
    options: Options, model: str, precision: Precision, variant: str, folder: Path
) -> tuple[Callable[[], Losses], Timing]:
    """Return a function that runs ``options.steps`` distillation steps and returns their losses."""
    compute = options.compute(variant, precision)
    config, task, shape = options.fediod(), Classification(CLASSES), shape_of(model)
    audit = AuditLog(folder / f"{variant}.sqlite", durable=False)
    nodes = make_nodes(options, model, compute, audit)
    side = config.node_side(NodeSetting(task, LocalConfig(), compute))
    for node in nodes:
        side.prepare(node)
    timing = Timing()
    if variant == "plain":
        plain = PlainDistillation(options, model, compute, nodes)
        return lambda: [plain.step() for _ in range(options.steps)], timing
    for node in nodes:
        node.model.eval().requires_grad_(False)  # local training leaves models in this state
    groups = group_nodes(nodes, variant == "stacked")
    half = (0.5,) * shape[0]
    federation = InProcess(nodes, groups, side, compute)
    student = compute.to_device(make_student(options, model))
    server = Server(
        config,
        federation,
        student,
        task,
        shape,
        half,
        half,
        compute,
        options.seed,
        LocalConfig(),
    )
    return lambda: [list(server.step().values()) for _ in range(options.steps)], timing


def local_training(
    options: Options, model: str, precision: Precision, variant: str, folder: Path
) -> tuple[Callable[[], Losses], Timing]:
    """Return a function that runs ``options.local_steps`` steps of every node and returns their losses."""
    compute = options.compute(variant, precision)
    config, task = options.local(), Classification(CLASSES)
    nodes = make_nodes(options, model, compute, AuditLog())
    timing = Timing()
    if variant == "plain":
        plain = PlainLocal(options, compute, nodes)
        return lambda: plain.train(options.local_steps), timing
    attach_optimizers(nodes, config)
    groups, done = group_nodes(nodes, variant == "stacked"), 0

    def run_step() -> Losses:
        nonlocal done
        by_node: dict[str, list[torch.Tensor]] = {node.name: [] for node in nodes}

        def report(active: Sequence[Node], step: int, losses: torch.Tensor) -> None:
            for node, loss in zip(active, losses, strict=True):
                by_node[node.name].append(loss)

        def learn(group: Sequence[Node]) -> None:
            train(group, task, config, compute, start=done, steps=options.local_steps, report=report)

        compute.workers.map(learn, groups, [model] * len(groups))
        done += options.local_steps
        return [torch.stack(losses).tolist() for losses in by_node.values()]

    return run_step, timing


Make = Callable[[Options, str, Precision, str, Path], tuple[Callable[[], Losses], Timing]]
PHASES: Mapping[str, Make] = {"distillation": distillation, "local training": local_training}


def now(options: Options) -> float:
    """Return the seconds on the chosen clock, after the device has finished its pending work."""
    if torch.device(options.device).type == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if options.clock == "processor" else time.perf_counter()


def measure(
    options: Options, make: Make, model: str, precision: Precision, variants: Sequence[str] = VARIANTS
) -> dict[str, Timing]:
    """Time rounds of all engines in alternation, after one warm-up round."""
    with tempfile.TemporaryDirectory() as folder:
        made = {variant: make(options, model, precision, variant, Path(folder)) for variant in variants}
        per_turn = options.steps if make is distillation else options.local_steps
        for turn_number in range(options.rounds + 1):
            for run_step, timing in made.values():
                start = now(options)
                run_step()
                if turn_number:
                    timing.seconds.append((now(options) - start) / per_turn)
    return {variant: timing for variant, (_, timing) in made.items()}


def check_same_losses(options: Options) -> None:
    """Refuse to time different computations: at small sizes all engines must give the same losses per step.

    Raises:
        RuntimeError: names the engine and its largest deviation.
    """
    small = replace(
        options,
        nodes=3,
        batch=8,
        examples=20,
        steps=3,
        local_steps=6,
        student_batch=8,
        student_steps=2,
        device="cpu",
    )
    with tempfile.TemporaryDirectory() as name:
        for model in ("small-cnn:8", "resnet8:8"):
            for phase, make in PHASES.items():
                folder = Path(name) / model.replace(":", "-") / phase
                folder.mkdir(parents=True)
                made = {variant: make(small, model, "float32", variant, folder)[0]() for variant in VARIANTS}
                plain = torch.tensor(made["plain"])
                for variant in ENGINES:
                    off = (torch.tensor(made[variant]) - plain).abs() / plain.abs().clamp_min(0.1)
                    if not off.max() < 2e-3:  # also if it is NaN
                        raise RuntimeError(
                            f"{phase} of {model}: {variant} is {off.max():.2g} off the plain loop"
                        )


# --- overhead of the federation, and peak of the machine ---------------------------------------------


def peak(options: Options, precision: Precision, size: int = 2048) -> float:
    """Return the best GFLOP/s of a large matrix product: the machine's practical peak."""
    dtype = getattr(torch, precision)
    a, b = (torch.ones(size, size, dtype=dtype, device=options.device) for _ in range(2))
    seconds = []
    for _ in range(6):
        start = now(options)
        a @ b
        seconds.append(now(options) - start)
    return 2 * size**3 / min(seconds) / 1e9


def gflop_per_step(options: Options, make: Make, model: str, precision: Precision) -> float:
    """Return the GFLOP of convolutions and matrix products in one step, counted in the plain loop."""
    one_step = replace(options, steps=1, local_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        run_step, _ = make(one_step, model, precision, "plain", Path(folder))
        with FlopCounterMode(display=False) as counter:
            run_step()
    return float(counter.get_total_flops()) / 1e9


# --- output -----------------------------------------------------------------------------------------


def summary(timings: Mapping[str, Timing], gflop: float, gflops: float) -> dict[str, dict[str, Any]]:
    """Return metrics of each engine: seconds per step, ratio to the plain loop, share of the peak."""
    plain = timings["plain"].seconds
    metrics_by_variant = {}
    for variant, timing in timings.items():
        ratios = [mine / base for mine, base in zip(timing.seconds, plain, strict=True)]
        median = statistics.median(timing.seconds)
        metrics_by_variant[variant] = {
            "median": median,
            "min": min(timing.seconds),
            "max": max(timing.seconds),
            "over_plain": statistics.median(ratios),
            "share_of_peak": gflop / median / gflops,
            "rounds": timing.seconds,
        }
    return metrics_by_variant


HEAD = """| model | phase | precision | engine | seconds per step | min - max | over plain | share of peak |
|---|---|---|---|---:|---:|---:|---:|"""


def rows(model: str, phase: str, precision: str, metrics_by_variant: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the lines of the Markdown table."""
    lines = []
    for variant, metrics in metrics_by_variant.items():
        lines.append(
            f"| {model} | {phase} | {precision} | {variant} | {metrics['median']:.4f} "
            f"| {metrics['min']:.4f} - {metrics['max']:.4f} "
            f"| {metrics['over_plain']:.2f} | {100 * metrics['share_of_peak']:.0f} % |"
        )
    return "\n".join(lines)


def machine(options: Options) -> dict[str, Any]:
    """Return the machine of the measurements."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cuda = torch.device(options.device).type == "cuda"
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": len(names),
        "amx": bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16")),
        "gpu": torch.cuda.get_device_name(options.device) if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }


def result_file(name: str, where: Mapping[str, Any]) -> Path:
    """Return the file of the results of a machine and day, such as ``name-intel-xeon-2026-11-24.json``."""
    words = re.sub(r"\(.*?\)", "", where["gpu"] or where["cpu"]).lower().split()
    parts = [word for word in words if word not in ("processor", "cpu", "nvidia")][:3]
    parts += ["amx"] if where["amx"] and not where["gpu"] else []
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    return folder / f"{name}-{'-'.join(parts)}-{where['date']}.json"


def main(options: Options) -> int:
    """Measure, print, save; return 1 if the library's default engine is slower than allowed."""
    if options.clock == "processor" and torch.device(options.device).type != "cpu":
        raise ArgumentError("clock", options.clock, "wall, for any device but the CPU")
    Compute(options.engine("one-by-one", "float32"))  # sets the threads; refuses an unavailable device
    check_same_losses(options)
    print("All engines give the same losses (checked on small sizes).\n")
    where = machine(options)
    print(f"{where['gpu'] or where['cpu']}, {where['threads']} threads, torch {where['torch']}")
    print(f"K = {options.nodes}, batch {options.batch}, {options.rounds} rounds, medians\n\n{HEAD}")
    results, notes, slow = [], [], []
    for precision in options.precision:
        gflops = peak(options, precision)
        notes.append(f"Practical peak in {precision}: {gflops:.0f} GFLOP/s, measured with one large product.")
        for model in options.models:
            for phase, make in PHASES.items():
                gflop = gflop_per_step(options, make, model, precision)
                metrics_by_variant = summary(measure(options, make, model, precision), gflop, gflops)
                print(rows(model, phase, precision, metrics_by_variant), flush=True)
                notes.append(f"{model}, {phase}, {precision}: {gflop:.1f} GFLOP per step.")
                default = "stacked" if torch.device(options.device).type == "cuda" else "at-once"
                least = min(metrics["median"] for metrics in metrics_by_variant.values())
                times = metrics_by_variant[default]["median"] / least
                if times > (options.assert_not_slower or float("inf")):
                    slow.append(f"{model}, {phase}, {precision}: {default} takes {times:.2f} times the least")
                results.append(
                    {
                        "model": model,
                        "shape": shape_of(model),
                        "phase": phase,
                        "precision": precision,
                        "gflop": gflop,
                        "peak_gflops": gflops,
                        "ways": metrics_by_variant,
                    }
                )
    costs = overhead.times(overhead.Options(options.nodes, options.batch), lambda: now(options))
    notes.append(
        "A query without computation and its backward pass, per node: "
        + ", ".join(f"{name} {cost:.0f} us" for name, cost in costs.items())
        + "."
    )
    print("\n" + "\n".join(f"- {note}" for note in notes))
    if options.save:
        path = result_file(options.name, where)
        content = {
            "machine": where,
            "options": asdict(options),
            "results": results,
            "query_microseconds_a_node": costs,
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"\nSaved as benchmarks/results/{path.name}")
    for line in slow:
        print(line, file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options)))
    except FedstillError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
