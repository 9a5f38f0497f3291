"""
One budget for any number of rounds
===================================

A comparison is unfair if one method may train longer than another. In fedstill the local training of a node
is one budget, ``LocalConfig(epochs=...)``. A method with R rounds divides it into R equal parts, with one
learning-rate schedule over all of them. So 1 round or 20 rounds cost a node the same number of steps; only
the number of averages and the bytes sent differ.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import fedstill
from fedstill.models import MLP

# %%
# Four nodes with few digits each: the images are sorted by label and divided in blocks.

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
order = y[:1400].argsort(stable=True).view(20, 70)  # blocks of equal digits
parts = [order[node::4].flatten() for node in range(4)]

# %%
# FedAvg with a growing number of rounds, everything else equal. The policies of the nodes have to allow the
# release of parameters.

rounds, reached, sent = [1, 2, 5, 10, 20], [], []
for count in rounds:
    torch.manual_seed(0)
    metrics = fedstill.distil(
        data=[(x[part], y[part]) for part in parts],
        models=[MLP((1, 8, 8), 10, width=32) for _ in parts],
        student=MLP((1, 8, 8), 10, width=32),
        test=(x[1400:], y[1400:]),
        classes=10,
        method=fedstill.FedAvg(rounds=count),
        local=fedstill.LocalConfig(epochs=20, lr=2e-3),
        policies=[fedstill.PolicyConfig(outputs_only=False)] * len(parts),
        every=0,
    ).result
    reached.append(metrics["accuracy"])
    sent.append(metrics["bytes"]["up"] / 1e6)

# %%
# Accuracy by number of rounds; labels are the bytes sent.

figure, axis = plt.subplots(figsize=(6, 3))
axis.semilogx(rounds, reached, "o-")
for count, accuracy, megabytes in zip(rounds, reached, sent, strict=True):
    axis.annotate(f"{megabytes:.1f} MB", (count, accuracy), (0, -15), textcoords="offset points", ha="center")
axis.set_xticks(rounds, [str(count) for count in rounds])
axis.set(xlabel="rounds, of one budget", ylabel="accuracy, percent", ylim=(min(reached) - 12, 100))
figure.tight_layout()
plt.show()
