"""
What FedIOD asks about
======================

FedIOD needs no public data: the server makes the inputs that it asks nodes about. They begin as noise.
Losses on the nodes' answers are pulled back through the nodes to the server's generator, which learns to
make what the nodes' critics take for real, what nodes are sure of, and what the student still has to learn.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

import fedstill
from fedstill.models import SmallCNN

# %%
# Three clinics, each of which knows four of the ten digits.

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
known = [(0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9)]
held = [torch.isin(y[:1200], torch.tensor(some)) for some in known]
clinics = [(x[:1200][mine], y[:1200][mine]) for mine in held]

# %%
# Each trains a network of its own; then the server asks 150 times about 64 inputs. With ``out`` the run
# leaves files, and among them samples of what the generator made at each evaluation.

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp()) / "run"
outcome = fedstill.distil(
    clinics,
    models=[SmallCNN((1, 8, 8), 10, width=8) for _ in clinics],
    student=SmallCNN((1, 8, 8), 10, width=16),
    test=(x[1200:], y[1200:]),
    classes=10,
    method=fedstill.FedIOD(steps=150),
    local=fedstill.LocalConfig(epochs=10),
    every=30,
    out=folder,
)
alone = outcome.result["standalone"]["accuracy"]["mean"]
print(f"a clinic alone: {alone:.1f} %, student: {outcome.result['accuracy']:.1f} %")

# %%
# No private image has left a clinic. What is seen here was made by the server.

samples = load_file(folder / "samples.safetensors")  # by step, bytes (N, 1, 8, 8)
figure, axes = plt.subplots(len(samples), 12, figsize=(9, 0.8 * len(samples)))
for row, step in zip(axes, sorted(samples), strict=True):
    for axis, image in zip(row, samples[step], strict=True):
        axis.imshow(image[0], cmap="gray", vmin=0, vmax=255)
        axis.set_axis_off()
    row[0].set_title(f"step {int(step)}", loc="left", fontsize=9)
figure.tight_layout()
plt.show()
