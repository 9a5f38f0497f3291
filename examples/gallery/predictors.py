"""
Nodes with scikit-learn models
==============================

A hospital may already have a model, such as a random forest, that predicts and that a federation cannot
train. It can be a node as it is. Here three scikit-learn models, each fitted on its own rows, are queried
once with unlabeled rows, and a small network learns from their combined predictions (FedKD).
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
# 569 rows of thirty measurements. Two nodes have few rows of one class, the third has few rows; 150 rows
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
for model, part in zip(models.values(), parts, strict=True):  # each at its own node
    model.fit(x[part].numpy(), y[part].numpy())

# %%
# The federation: the fitted models, and a network that learns from them.

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
    method=fedstill.FedKD(student=fedstill.StudentTraining(epochs=60)),
    every=0,
).result

# %%
# Balanced accuracy gives both classes equal weight.

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
