"""
Your own data and model
=======================

``fedstill.distil`` takes what you have: arrays for each node, any PyTorch module for each node, and a student
of any other architecture. In this tutorial three factories look at images of wafers. Each has its own camera,
has seen two of four kinds of defects, and has its own network. Nothing comes from a data set of fedstill.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import fedstill

# %%
# Data: numpy arrays
# ------------------
#
# Inputs are images ``(N, C, H, W)`` from -1 to 1, and targets are class numbers ``(N,)``. Replace this
# function by the one that reads your files; torch and Hugging Face data sets and DataFrames work, too.

defects = ["scratch", "crack", "ring", "spot"]
down, across = np.mgrid[-8:8, -8:8]


def photograph(seed: int, kinds: list[int], count: int, contrast: float) -> tuple[np.ndarray, np.ndarray]:
    """Return images (count, 1, 16, 16) of random defects of some kinds, and their classes (count,)."""
    draw = np.random.default_rng(seed)
    images, classes = [], draw.choice(kinds, count)
    for kind in classes:
        y, x = down + draw.integers(-2, 3), across + draw.integers(-2, 3)
        radius = np.hypot(x, y)
        shape = [abs(x - y) < 2, abs(y) < 1, abs(radius - 4) < 1, radius < 3][kind]
        images.append(contrast * shape - 0.5 + draw.normal(0, 0.35, shape.shape))
    return np.clip(np.stack(images)[:, None], -1, 1).astype(np.float32), classes


factories = [
    photograph(1, kinds=[0, 1], count=150, contrast=1.0),
    photograph(2, kinds=[1, 2], count=150, contrast=0.8),
    photograph(3, kinds=[2, 3], count=150, contrast=1.2),
]
test = photograph(4, kinds=[0, 1, 2, 3], count=400, contrast=1.0)
public, _ = photograph(5, kinds=[0, 1, 2, 3], count=500, contrast=1.0)  # not secret, and without labels

# %%
# Models: one module per node
# ---------------------------
#
# A module maps a batch ``(B, 1, 16, 16)`` to logits ``(B, 4)``, one per class of the *federation*, also for
# classes that the node has never seen. The three networks have nothing in common but that.


class Strided(nn.Module):
    """Two convolutions, and the mean over the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 1, 16, 16) to (B, 4)
        return self.head(self.body(x).mean((2, 3)))


torch.manual_seed(0)  # before the modules are made: the same initial weights each time
models = [
    Strided(width=16),
    nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 4)),
    nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(128, 4)),
]

# %%
# A run
# -----
#
# First each node trains its module, in place, on its own images. Then the server asks each of them once for
# its logits on the public images, and trains the student on their combination (FedKD; FedIOD would need no
# public images). With ``out="runs/wafers"`` the run also writes a report, an audit log and the student.

outcome = fedstill.distil(
    data=factories,
    models=models,
    student=Strided(width=24),
    test=test,
    classes=defects,
    names=["north", "east", "west"],
    public=public,
    method=fedstill.FedKD(student=fedstill.StudentTraining(epochs=60)),
    local=fedstill.LocalConfig(epochs=30, lr=3e-3),
)
print(outcome)

# %%
# The outcome
# -----------
#
# ``metrics`` has all metrics of the student on the test images, ``result`` all that a run measures.

alone = dict(
    zip(["north", "east", "west"], outcome.result["standalone"]["accuracy"]["per_node"], strict=True)
)
print({name: f"{value:.1f} %" for name, value in alone.items()})
print({name: round(value, 3) for name, value in outcome.metrics.items() if value is not None})

# %%
# ``history`` has a row for each step, with the losses and, where it was evaluated, the accuracy.
# ``predictions`` are the student's logits on the test images. A factory alone cannot exceed about half of
# them, since it knows two of the four defects; the diagonal shows that the student recognizes all four.

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
measured = [row for row in outcome.history if "accuracy" in row]
left.plot([row["step"] for row in measured], [row["accuracy"] for row in measured], "o-", label="student")
for name, value in alone.items():
    left.axhline(value, color="C7", ls="--", label="a factory alone" if name == "north" else None)
left.set(xlabel="step", ylabel="accuracy, percent", ylim=(0, 100))
left.legend(loc="lower right")

predicted = outcome.predictions.argmax(1).numpy()
confusion = np.zeros((4, 4), int)
np.add.at(confusion, (test[1], predicted), 1)
right.imshow(confusion, cmap="Blues")
for (row, column), count in np.ndenumerate(confusion):
    right.text(column, row, count, ha="center", va="center", color="C1")
right.set(xlabel="predicted", ylabel="true")
right.set_xticks(range(4), defects)
right.set_yticks(range(4), defects)
figure.tight_layout()
plt.show()

# %%
# The nodes' models are in ``outcome.models``, their combined predictions come from ``outcome.ensemble(x)``,
# and ``outcome.student`` is your module, trained. More: `all arguments and kinds of inputs
# <../../docs/python.md>`_, `data from files for the command line <../../docs/data.md>`_, `a forest or a file
# as a node's model <../../docs/custom-model.md>`_, `other tasks than classification <../../docs/tasks.md>`_.
