"""
One budget for any number of rounds
===================================

A comparison is unfair where one method may train longer than another. In fedstill a node's local training
is one budget, ``LocalConfig(epochs=...)``, and a method of R rounds takes it in R equal parts, along one
curve of the learning rate. So 1 round or 20 cost a node the same steps, and what differs is how often
parameters are averaged, and what that sends.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import fedstill
from fedstill.models import MLP

# %%
# Four nodes; each knows few digits well (they are sorted by label, and dealt out in runs).

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
order = y[:1400].argsort(stable=True).view(20, 70)  # runs of like digits
parts = [order[node::4].flatten() for node in range(4)]

# %%
# FedAvg with more and more rounds, and all else equal. Its parameters may leave only where the nodes'
# owners allow it.

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
# The same training, differently divided.

figure, axis = plt.subplots(figsize=(6, 3))
axis.semilogx(rounds, reached, "o-")
for count, accuracy, megabytes in zip(rounds, reached, sent, strict=True):
    axis.annotate(f"{megabytes:.1f} MB", (count, accuracy), (0, -15), textcoords="offset points", ha="center")
axis.set_xticks(rounds, [str(count) for count in rounds])
axis.set(xlabel="rounds, of one budget", ylabel="accuracy, percent", ylim=(min(reached) - 12, 100))
figure.tight_layout()
plt.show()
