"""
A table of hospitals
====================

The rows of a table are divided over three hospitals. All agree beforehand on a schema: the columns and the
ranges of their numbers. So no statistics have to be computed on private rows. FedIOD's generator generates
rows that are valid in the schema, and queries the hospitals with them.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_wine

import fedstill
from fedstill.models import MLP

# %%
# Thirteen measurements, three kinds of wine. The ranges are round numbers that are valid for any wine, not
# the ranges of these rows.

wine = load_wine()
RANGES = [(10, 16), (0, 7), (1, 4), (8, 32), (60, 180), (0, 5), (0, 6), (0, 1), (0, 5), (0, 15), (0, 2)]
RANGES += [(1, 5), (200, 1800)]
columns = [
    fedstill.SchemaColumn(name=name, range=(float(low), float(high)))
    for name, (low, high) in zip(wine.feature_names, RANGES, strict=True)
]
kind = fedstill.SchemaColumn(name="kind", type="category", categories=tuple(wine.target_names))
schema = fedstill.TableSchema("kind", (*columns, kind))

low, high = torch.tensor(RANGES, dtype=torch.float32).T
x = 2 * (torch.tensor(wine.data).float() - low) / (high - low) - 1  # (N, 13), from -1 to 1
y = torch.tensor(wine.target)

# %%
# Each hospital has two kinds only, and fewer rows of the second.

draw = torch.Generator().manual_seed(0)
rows = [torch.nonzero(y == each).flatten() for each in range(3)]
rows = [of[torch.randperm(len(of), generator=draw)] for of in rows]
names = ["Aarau", "Basel", "Chur"]
parts = [torch.cat([rows[each][:30], rows[(each + 1) % 3][30:40]]) for each in range(3)]
test = torch.cat([of[40:] for of in rows])

# %%
# A run in which all networks are small perceptrons.

torch.manual_seed(0)
metrics = fedstill.distil(
    data=[(x[part], y[part]) for part in parts],
    models=[MLP((13,), 3, width=32) for _ in names],
    student=MLP((13,), 3, width=32),
    test=(x[test], y[test]),
    classes=schema.classes,
    task="tabular",
    schema=schema,
    names=names,
    method=fedstill.FedIOD(steps=200),
    local=fedstill.LocalConfig(epochs=60, min_steps=400, lr=3e-3),
    every=0,
).result

# %%
# Accuracy on rows that no hospital has.

alone = metrics["standalone"]["accuracy"]["per_node"]
figure, axis = plt.subplots(figsize=(6, 2.6))
bars = axis.barh([*names, "student"], [*alone, metrics["accuracy"]], color=["C7"] * 3 + ["C0"])
axis.bar_label(bars, fmt="%.0f", padding=3)
axis.set(xlabel="accuracy, percent", xlim=(0, 110))
axis.invert_yaxis()
figure.tight_layout()
plt.show()
