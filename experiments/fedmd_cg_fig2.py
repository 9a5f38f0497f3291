"""FedMD-CG's Fig. 2: a teacher's features, and what generators give that learned from it by Eq. 9.

    python experiments/fedmd_cg_fig2.py --out fig2.svg --root FOLDER

LeNet-5 on MNIST, or on digits where MNIST is not to be found; all features on the teacher's two principal
axes. Prints, for each diversity loss, how well the teacher's head knows the generated features, and how
they are spread within a class beside the real ones. About a minute on one core.
"""

from __future__ import annotations

from pathlib import Path

import torch
import tyro

from fedstill.compute import Compute, EngineConfig
from fedstill.data.loaders import DataConfig, load
from fedstill.errors import DataError
from fedstill.methods.fedmd_cg import FedMDCGConfig, generator_work
from fedstill.methods.generators import give_generators, train_generators
from fedstill.models import build
from fedstill.models.features import condition
from fedstill.models.split import split
from fedstill.node import training
from fedstill.node.gate import Gate, PolicyConfig
from fedstill.node.group import Group
from fedstill.node.ledger import Ledger
from fedstill.node.node import Node
from fedstill.node.questions import NodeSetting
from fedstill.node.training import WHOLE, LocalConfig
from fedstill.report.features import Panel, pca, scatter
from fedstill.seeds import torch_generator
from fedstill.tasks import TaskConfig, make_task

SHOWN = 600  # dots a panel


def main(
    out: Path = Path("fig2.svg"),
    root: str = "",
    examples: int = 10_000,
    epochs: float = 10.0,
    seed: int = 0,
) -> None:
    """Train the teacher, then a generator for each diversity loss, and draw all their features.

    Args:
        out: the picture.
        root: the folder that holds MNIST.
        examples: training images.
        epochs: of the teacher, and of each generator.
        seed: of every draw.
    """
    try:
        data = load(DataConfig(name="mnist", root=root, train_limit=examples))
    except DataError:
        data = load(DataConfig(name="digits"))
    compute = Compute(EngineConfig(threads=1))
    task = make_task(TaskConfig(), len(data.classes))
    channels, height, width = data.test.inputs.shape[1:]
    setting = NodeSetting(task, LocalConfig(epochs=epochs, batch=64, smoothing=0.0), compute)
    model = split(build("lenet5", (channels, height, width), task.classes, seed), "teacher")
    node = Node("teacher", data.train, model, Gate("teacher", PolicyConfig(), Ledger()), seed)
    training.prepare([node], setting.local)
    training.train([node], task, setting.local, compute)

    test = data.test
    accuracy = task.metrics(training.predict(model, test.inputs, compute), test.targets)["accuracy"]
    order = torch.randperm(len(test), generator=torch_generator(seed, "shown"))[:SHOWN]
    labels = test.targets[order]
    real = training.predict(model.extractor, test.inputs[order], compute)  # (N, p)
    mean, axes = pca(real, 2)
    panels = [Panel("teacher", (real - mean) @ axes, labels)]
    print(f"{data.name}: teacher {accuracy:.1f} %, spread within a class {within(real, labels):.3f}")
    for form in ("none", "div0", "div1", "div2"):
        config = FedMDCGConfig(diversity=form)
        give_generators([node], config, setting, beta=0.9)
        train_generators(Group([node]), config, setting, WHOLE, generator_work(config, setting, 0))
        z = torch.randn(len(labels), config.noise, generator=torch_generator(seed, "z"))
        made = training.predict(node.modules["generator"], condition(z, labels, task.classes), compute)
        known = task.metrics(training.predict(model.head, made, compute), labels)["accuracy"]
        panels.append(Panel(form, (made - mean) @ axes, labels))
        print(f"{form}: known by the head {known:.1f} %, spread within a class {within(made, labels):.3f}")
    out.write_text(scatter(panels, data.classes), encoding="utf-8")


def within(features: torch.Tensor, labels: torch.Tensor) -> float:
    """Root mean square distance of features ``(N, p)`` from their class's mean, per value."""
    classes = [features[labels == label] for label in sorted(set(labels.tolist()))]
    apart = [mine - mine.mean(0) for mine in classes]
    return float(torch.cat(apart).square().mean().sqrt())


if __name__ == "__main__":
    tyro.cli(main)
