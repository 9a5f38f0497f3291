"""
Nodes of different architectures
================================

Nodes release predictions, so they need not have the same network. Here a convolutional network, a LeNet-5
and a perceptron teach a student of another size with FedKD, in one query on public images.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import fedstill
from fedstill.models import MLP, LeNet5, SmallCNN

# %%
# The nodes know different digits: the first mostly 0 to 4, the last mostly 5 to 9. The public images have
# no labels.

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
order = torch.randperm(1200, generator=torch.Generator().manual_seed(0))
low = y[order] < 5
north = torch.cat([order[low][:350], order[~low][:50]])
west = torch.cat([order[low][350:400], order[~low][50:400]])
south = torch.cat([order[low][400:500], order[~low][400:500]])
public, test = x[1200:1500], (x[1500:], y[1500:])

# %%
# A run with three networks.

torch.manual_seed(0)
names = ["north: CNN", "south: LeNet-5", "west: MLP"]
outcome = fedstill.distil(
    data=[(x[part], y[part]) for part in (north, south, west)],
    models=[SmallCNN((1, 8, 8), 10, width=8), LeNet5((1, 8, 8), 10), MLP((1, 8, 8), 10)],
    student=SmallCNN((1, 8, 8), 10, width=16),
    test=test,
    classes=10,
    public=public,
    method=fedstill.FedKD(student=fedstill.StudentTraining(epochs=60)),
    local=fedstill.LocalConfig(epochs=15),
)
metrics = outcome.result

# %%
# Accuracy of each node's model and of the student, on all ten digits.

alone = metrics["standalone"]["accuracy"]["per_node"]
figure, axis = plt.subplots(figsize=(6, 2.6))
bars = axis.barh([*names, "student"], [*alone, metrics["accuracy"]], color=["C7"] * 3 + ["C0"])
axis.bar_label(bars, fmt="%.1f", padding=3)
axis.set(xlabel="accuracy on all digits, percent", xlim=(0, 105))
axis.invert_yaxis()
figure.tight_layout()
plt.show()
