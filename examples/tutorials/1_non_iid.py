"""
Non-IID data in ten minutes
===========================

In a federation, data owners (*nodes*: hospitals, banks, phones) train one model together, and their records
stay with them. Their data differ: one hospital sees mostly fractures, another mostly tumors. Such data are
*non-IID*. This tutorial divides handwritten digits over five nodes, evenly at first and then more and more
unevenly, and compares what five methods make of it: how accurate they are, and how many bytes each node
sends.
"""

import matplotlib.pyplot as plt
import torch

import fedstill
from fedstill.models import SmallCNN

# %%
# Label skew
# ----------
#
# Each class is divided over the nodes by random proportions from a Dirichlet distribution. Its parameter
# alpha sets the skew of the labels: at 10 all nodes have nearly the same classes, at 0.1 most classes are at
# one or two nodes. A fifth of the images is held out as public data, without their labels. Each column of a
# picture is a digit, each row a node; a dark field means many examples.

alphas = [10.0, 0.5, 0.1]
federations = {alpha: fedstill.datasets.digits(nodes=5, alpha=alpha, public="held-out") for alpha in alphas}

figure, axes = plt.subplots(1, 3, figsize=(8, 2.2))
for axis, (alpha, data) in zip(axes, federations.items(), strict=True):
    counts = torch.stack([torch.bincount(node.targets, minlength=10) for node in data.nodes])
    axis.imshow(counts, cmap="Blues", vmin=0, aspect="auto")
    axis.set(title=f"alpha {alpha:g}", xlabel="digit", xticks=range(10), yticks=range(5))
axes[0].set_ylabel("node")
figure.tight_layout()
plt.show()

# %%
# Three methods and two references
# --------------------------------
#
# - **FedAvg** averages the parameters of the nodes' networks, round by round. All nodes need the same
#   network, and their owners must allow that parameters leave, which the default policy forbids.
# - **FedKD** asks each node once for its predictions on the public images, and trains a *student* on them.
# - **FedIOD** needs no public data: the server generates inputs, and learns from the nodes' predictions and
#   from gradients with respect to these inputs.
#
# Two references come with a run. *Standalone* is the mean of the nodes' own models, without any federation.
# The *ensemble* combines the predictions of all nodes for each input: a student that learned everything from
# its teachers would reach it. Local training is the same for all methods.

methods = {
    "FedAvg": fedstill.FedAvg(rounds=10),
    "FedKD": fedstill.FedKD(student=fedstill.StudentTraining(epochs=60)),
    "FedIOD": fedstill.FedIOD(steps=250),
}


def run(data: fedstill.datasets.FederatedData, method: object) -> dict:
    """Return the metrics of one method on one federation."""
    torch.manual_seed(0)
    shares_parameters = isinstance(method, fedstill.FedAvg)
    return fedstill.distil(
        models=[SmallCNN(data.shape, 10, width=8) for _ in data.nodes],
        student=SmallCNN(data.shape, 10, width=8),
        method=method,
        local=fedstill.LocalConfig(epochs=15, lr=2e-3),
        policies=[fedstill.PolicyConfig(outputs_only=not shares_parameters)] * 5,
        every=0,
        **data.arguments(),
    ).result


results = {alpha: {name: run(data, m) for name, m in methods.items()} for alpha, data in federations.items()}

# %%
# Accuracy
# --------
#
# Read the table downwards. At alpha 10 a node alone is already good, and a federation adds little. At alpha
# 0.1 a node has never seen most digits: alone it fails on them, whatever its network. The predictions of all
# nodes together still contain what each of them knows, and the student learns it. The ensemble of the table
# is FedKD's.

print("alpha  standalone  ensemble" + "".join(f"{name:>8}" for name in methods))
reached = {}
for alpha, runs in results.items():
    references = [runs["FedKD"]["standalone"]["accuracy"]["mean"], runs["FedKD"]["ensemble"]["accuracy"]]
    reached[alpha] = references + [metrics["accuracy"] for metrics in runs.values()]
    print(
        f"{alpha:5g}" + "".join(f"{x:{w}.1f}" for x, w in zip(reached[alpha], (12, 10, 8, 8, 8), strict=True))
    )

# %%
# What crosses the wire
# ---------------------
#
# No method sends a record. FedAvg sends all parameters in each round, so its bytes grow with the network;
# FedKD sends ten numbers for each public image, once, so a larger network costs nothing more. FedIOD queries
# many generated inputs and also receives gradients, which is its price for needing no public data.

for name, metrics in results[0.1].items():
    kilobytes = metrics["bytes"]["up"] / 1e3
    print(f"{name:7} {kilobytes:9.0f} kB from all nodes, {metrics['bytes']['down'] / 1e3:9.0f} kB to them")

figure, axis = plt.subplots(figsize=(6, 3))
for name, line in zip(["standalone", "ensemble", *methods], zip(*reached.values(), strict=True), strict=True):
    axis.semilogx(alphas, line, "o--" if name in ("standalone", "ensemble") else "o-", label=name)
axis.set(xlabel="alpha (smaller: stronger label skew)", ylabel="accuracy, percent", ylim=(0, 100))
axis.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
axis.legend(loc="lower right")
figure.tight_layout()
plt.show()

# %%
# One seed says little about small differences: `comparing over seeds <../../docs/many-runs.md>`_ does more.
# Then read `which method for whom <../../docs/choosing.md>`_ and `what each releases
# <../../docs/methods/index.md>`_, or use `your own data <../../docs/python.md>`_.
