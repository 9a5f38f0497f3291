"""
Nodes whose models are no networks
==================================

A hospital may have a model already, a forest or a boosted one, that answers and cannot be trained by
others. It is a node as it is: here three of scikit-learn's, each of rows of its own, are asked once
about rows without labels, and a small network learns from what they say together (FedKD).
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedstill
from fedstill.models import MLP

# %%
# 569 rows of thirty measurements. Two nodes have few of one kind, the third few rows at all; 150 rows
# are public, without labels, and 219 are test data.

cells = load_breast_cancer()
x, y = torch.tensor(cells.data).float(), torch.tensor(cells.target)
low, high = x.amin(0), x.amax(0)
x = 2 * (x - low) / (high - low) - 1  # (N, 30), from -1 to 1
draw = torch.Generator().manual_seed(0)
order = torch.randperm(len(x), generator=draw)
public, test, private = order[:150], order[150:369], order[369:]
bad, good = private[y[private] == 0], private[y[private] == 1]
parts = [
    torch.cat([bad[:50], good[:10]]),
    torch.cat([bad[50:55], good[10:80]]),
    torch.cat([bad[55:60], good[80:85]]),
]

models = {
    "forest": RandomForestClassifier(random_state=0),
    "boosting": HistGradientBoostingClassifier(random_state=0),
    "logistic": make_pipeline(StandardScaler(), LogisticRegression()),
}
for model, part in zip(models.values(), parts, strict=True):  # each where its rows are
    model.fit(x[part].numpy(), y[part].numpy())

# %%
# The federation: models as they are, and a network that learns from them.

torch.manual_seed(0)
metrics = fedstill.distil(
    data=[(x[part], y[part]) for part in parts],
    models=list(models.values()),
    student=MLP((30,), 2, width=32),
    test=(x[test], y[test]),
    classes=["malignant", "benign"],
    task="tabular",
    public=x[public],
    names=list(models),
    method=fedstill.FedKD(epochs=60),
    every=0,
).result

# %%
# Balanced accuracy counts both kinds alike, however many there are of each.

key = "balanced_accuracy"
reached = dict(zip(models, metrics["standalone"][key]["per_node"], strict=True))
reached |= {"ensemble": metrics["ensemble"][key], "student": metrics[key]}
figure, axis = plt.subplots(figsize=(6, 2.8))
bars = axis.barh(list(reached), list(reached.values()), color=["C7"] * 3 + ["C1", "C0"])
axis.bar_label(bars, fmt="%.0f", padding=3)
axis.set(xlabel="balanced accuracy, percent", xlim=(0, 110))
axis.invert_yaxis()
figure.tight_layout()
plt.show()
