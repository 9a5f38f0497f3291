"""
Benefit of federation by label skew
===================================

A node with all classes gains little from a federation. If each node has few classes only, no node can
classify all digits alone, and the student gains most.
"""

import matplotlib.pyplot as plt
import numpy
import torch
from sklearn.datasets import load_digits

import fedstill
from fedstill.data import Dirichlet, split
from fedstill.models import SmallCNN

# %%
# Four nodes. A small Dirichlet alpha gives strong label skew. 300 images are public, without labels.

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
alphas, alone, student = [0.1, 0.3, 1.0, 10.0], [], []
for alpha in alphas:
    how = Dirichlet(nodes=4, alpha=alpha)
    parts = split(y[:1000], 10, how, numpy.random.default_rng(0))
    torch.manual_seed(0)
    metrics = fedstill.distil(
        data=[(x[part], y[part]) for part in map(torch.as_tensor, parts)],
        models=[SmallCNN((1, 8, 8), 10, width=8) for _ in parts],
        student=SmallCNN((1, 8, 8), 10, width=8),
        test=(x[1300:], y[1300:]),
        classes=10,
        public=x[1000:1300],
        method=fedstill.FedKD(student=fedstill.StudentTraining(epochs=40)),
        local=fedstill.LocalConfig(epochs=10),
        every=0,
    ).result
    alone.append(metrics["standalone"]["accuracy"]["per_node"])
    student.append(metrics["accuracy"])

# %%
# A dot is the accuracy of one node alone, on all digits.

figure, axis = plt.subplots(figsize=(6, 3))
axis.semilogx(alphas, student, "o-", label="student (FedKD)")
axis.semilogx(alphas, [sum(each) / len(each) for each in alone], "--", color="C7", label="a node alone, mean")
for alpha, each in zip(alphas, alone, strict=True):
    axis.plot([alpha] * len(each), each, ".", color="C7")
axis.set(xlabel="alpha (smaller: stronger label skew)", ylabel="accuracy, percent", ylim=(0, 100))
axis.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
axis.legend(loc="lower right")
figure.tight_layout()
plt.show()
