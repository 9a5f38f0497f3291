"""
From a pretrained backbone to ONNX
==================================

With a few dozen examples at each node, no network learns good features from scratch. But a network that was
*pretrained* on other data has them already. In this tutorial the nodes train only *heads*, linear layers on
the features of a frozen backbone; the student is another head, and the result is one ONNX file that takes
pixels and needs neither fedstill nor PyTorch.
"""

import math
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedstill
from fedstill.models import Linear

# %%
# A backbone
# ----------
#
# Usually you download one. For a notebook without downloads we pretrain a small one ourselves, on the digits
# 5 to 9 (the federation will have 0 to 4 only), and save it as an ONNX graph, one of the forms that fedstill
# reads.

digits = load_digits()
pixels = torch.tensor(digits.images / 16).float().unsqueeze(1)  # (N, 1, 8, 8), from 0 to 1
x, y = 2 * pixels - 1, torch.tensor(digits.target)
other = y > 4


def convolutions() -> nn.Module:
    """Return a network from images (B, 1, 8, 8) to features (B, 256), with random weights."""
    first, second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AvgPool2d(4), nn.Flatten())


torch.manual_seed(0)
backbone = convolutions()
network = nn.Sequential(backbone, nn.Linear(256, 5))
optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
for _ in range(20):
    for rows in torch.randperm(int(other.sum())).split(32):
        loss = nn.functional.cross_entropy(network(x[other][rows]), y[other][rows] - 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

home = Path(tempfile.mkdtemp())
graph, batch = home / "backbone.onnx", {0: torch.export.Dim("batch")}
torch.onnx.export(
    backbone.eval(), (x[:2],), graph, dynamo=True, dynamic_shapes=(batch,), external_data=False, verbose=False
)

# %%
# A network of timm or torchvision is named in the same place: ``Features("timm:resnet18",
# weights="resnet18.safetensors", size=128)``, or ``torchvision:resnet18``. fedstill downloads nothing, so
# write the file once, on a machine with internet access: ``save_file(timm.create_model("resnet18",
# pretrained=True, num_classes=0).state_dict(), "resnet18.safetensors")`` with ``save_file`` of
# ``safetensors.torch``. An ONNX graph does not know its normalization of pixels, so we give it. Each vector
# of features is normalized by itself, without any statistics of private data.

features = fedstill.Features(str(graph), mean=(0.5,), std=(0.5,), normalize="example")

# %%
# Heads
# -----
#
# Three nodes have 30 images of each of three digits. The server queries them once with vectors of noise *in
# feature space* (``public="gaussian"``), so no party needs public data. With ``out`` the run writes its
# student.

first = (~other).nonzero()[:, 0]
private, held_out = first[:500], first[500:]
known = [(0, 1, 2), (2, 3, 4), (4, 0, 1)]
rows = [
    torch.cat([private[y[private] == digit][30 * node : 30 * node + 30] for digit in digits_of_node])
    for node, digits_of_node in enumerate(known)
]

common = {
    "data": [(x[part], y[part]) for part in rows],
    "test": (x[held_out], y[held_out]),
    "classes": 5,
    "every": 0,
}
local = fedstill.LocalConfig(epochs=60)
fedkd = fedstill.FedKD(gamma=math.inf, ensemble="logits", student=fedstill.StudentTraining(epochs=20))
on_features = fedstill.distil(
    models=[Linear((256,), 5) for _ in rows],
    student=Linear((256,), 5),
    features=features,
    public="gaussian",
    method=fedkd,
    local=local,
    out=home / "run",
    **common,
)

from_scratch = fedstill.distil(
    models=[nn.Sequential(convolutions(), nn.Linear(256, 5)) for _ in rows],
    student=nn.Sequential(convolutions(), nn.Linear(256, 5)),
    public=x[other][:500],
    method=fedkd,
    local=local,
    **common,
)

# %%
# ONNX
# ----
#
# The exported file has the whole way from pixels (0 to 1) to logits: normalization, backbone, head.
# ``fedstill export`` itself compares the file's outputs with the student's before it succeeds, and writes a
# model card.

export = [sys.executable, "-m", "fedstill", "export", str(home / "run"), "--format", "onnx"]
exporting = subprocess.run(export, cwd=home, capture_output=True, text=True, check=False)
print(exporting.stdout + exporting.stderr)

session = onnxruntime.InferenceSession(home / "run" / "student.onnx")
[logits] = session.run(None, {session.get_inputs()[0].name: pixels[held_out].numpy()})
student = fedstill.load(home / "run")  # the same student in PyTorch, which takes pixels, too
with torch.no_grad():
    difference = (student(pixels[held_out]) - torch.tensor(logits)).abs().max()
exported = 100 * (torch.tensor(logits).argmax(1) == y[held_out]).float().mean().item()
print(f"largest difference of logits: {difference:.1e}; accuracy of the ONNX file: {exported:.1f} %")

# %%
# A node alone knows three of five digits, with the best features. The same network from scratch has too few
# examples.

results = {
    "a head alone (mean)": on_features.result["standalone"]["accuracy"]["mean"],
    "FedKD from scratch, public images": from_scratch.accuracy,
    "FedKD on features, noise": on_features.accuracy,
    "its ONNX file": exported,
}
figure, axis = plt.subplots(figsize=(6, 2.4))
bars = axis.barh(list(results), list(results.values()), color=["C7", "C1", "C0", "C0"])
axis.bar_label(bars, fmt="%.1f", padding=3)
axis.set(xlabel="accuracy on the digits 0 to 4, percent", xlim=(0, 110))
axis.invert_yaxis()
figure.tight_layout()
plt.show()

# %%
# More: `backbones, their options and results <../../docs/features.md>`_, `predict, evaluate and export
# <../../docs/student.md>`_.
