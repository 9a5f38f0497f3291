"""
Heads on fixed features
=======================

With few examples at each node, heads on the features of a fixed backbone learn more than networks from
scratch. The features are computed once, and queries can be vectors of noise in feature space: no party needs
public data. Here the backbone is a layer of random filters, which needs no file of weights. A pretrained
network is used in the same way, such as ``Features("timm:resnet18", weights="resnet18.safetensors")``.
"""

import math

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedstill
from fedstill.models import SmallCNN

# %%
# Three nodes have 48 images of four digits each.

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
rows = [
    torch.isin(y[:1200], torch.tensor(known)).nonzero()[:48, 0]
    for known in ((0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9))
]
nodes, test = [(x[part], y[part]) for part in rows], (x[1300:], y[1300:])
common = {
    "data": nodes,
    "test": test,
    "classes": 10,
    "local": fedstill.LocalConfig(epochs=40),
    "every": 0,
}

# %%
# FedKD from scratch, with 100 public images, and with linear heads on the features of 64 filters, with noise.

fedkd = fedstill.FedKD(gamma=math.inf, ensemble="logits", student=fedstill.StudentTraining(epochs=40))
torch.manual_seed(0)
from_scratch = fedstill.distil(
    models=[SmallCNN((1, 8, 8), 10, width=8) for _ in nodes],
    student=SmallCNN((1, 8, 8), 10, width=8),
    public=x[1200:1300],
    method=fedkd,
    **common,
)

features = fedstill.Features("random-conv:64", normalize="example")
width = 1024
on_features = {
    "models": [nn.Linear(width, 10) for _ in nodes],
    "student": nn.Linear(width, 10),
    "features": features,
}
noise = fedstill.distil(public="gaussian", method=fedkd, **common, **on_features)

# %%
# FedCGS trains nothing: it computes a linear head from sums of the nodes' features. A node releases such sums
# only if its policy names them.

sums = fedstill.PolicyConfig(kinds=("unbounded feature sums",))
closed_form = fedstill.distil(method=fedstill.FedCGS(), policies=[sums] * 3, **common, **on_features)

# %%
# Accuracy on all ten digits.

heads = noise.result["standalone"]["accuracy"]["mean"]
results = {
    "a head alone (mean)": heads,
    "FedKD from scratch, public images": from_scratch.result["accuracy"],
    "FedKD on features, noise": noise.result["accuracy"],
    "FedCGS": closed_form.result["accuracy"],
}
figure, axis = plt.subplots(figsize=(6, 2.4))
bars = axis.barh(list(results), list(results.values()), color=["C7", "C1", "C0", "C2"])
axis.bar_label(bars, fmt="%.1f", padding=3)
axis.set(xlabel="accuracy on all digits, percent", xlim=(0, 105))
axis.invert_yaxis()
figure.tight_layout()
plt.show()
