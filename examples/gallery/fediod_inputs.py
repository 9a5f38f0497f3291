"""
Inputs that FedIOD generates
============================

FedIOD needs no public data: the server generates the inputs of its queries, at first from noise. Losses on
the nodes' responses are backpropagated through the nodes to the server's generator. It learns inputs that
the nodes' critics classify as real, that the nodes predict with confidence, and on which the student still
differs from them.
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
# Three clinics with four of the ten digits each.

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
known = [(0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9)]
held = [torch.isin(y[:1200], torch.tensor(some)) for some in known]
clinics = [(x[:1200][mine], y[:1200][mine]) for mine in held]

# %%
# Each clinic trains its own network; then the server sends 150 queries with 64 inputs each. With ``out`` the
# run writes files, among them samples of the generated inputs at each evaluation.

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
print(f"a clinic alone: {alone:.1f} %, student: {outcome.accuracy:.1f} %")

# %%
# No private image has left a clinic; these images were generated at the server.

samples = load_file(folder / "samples.safetensors")  # by step, bytes (N, 1, 8, 8)
figure, axes = plt.subplots(len(samples), 12, figsize=(9, 0.8 * len(samples)))
for row, step in zip(axes, sorted(samples), strict=True):
    for axis, image in zip(row, samples[step], strict=True):
        axis.imshow(image[0], cmap="gray", vmin=0, vmax=255)
        axis.set_axis_off()
    row[0].set_title(f"step {int(step)}", loc="left", fontsize=9)
figure.tight_layout()
plt.show()
