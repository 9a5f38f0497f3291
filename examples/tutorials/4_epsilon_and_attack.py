"""
An epsilon budget, and an attack on it
======================================

Records never leave a node, but models trained on them, and their predictions, carry information about them.
The owner of a node can bound this information by a *privacy budget*, epsilon. This tutorial measures what a
budget costs in accuracy; then it attacks a run twice, without and with a budget, by *membership inference*:
the attacker has a record and asks whether it was among the training data.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import fedstill
from fedstill.models import Linear

# %%
# Accuracy for several budgets
# ----------------------------
#
# Differential privacy compares your data with the same without one record: everything that leaves the node
# must be nearly as likely for both. Epsilon bounds the difference; 0 would reveal nothing. Here the nodes
# train with DP-SGD, which clips the gradient of each record and adds noise. fedstill computes the noise for
# the budget, and the node's *gate* charges each release and refuses what would exceed it. Two nodes have 650
# digits each, and answer once (FedKD).

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
nodes = [(x[:650], y[:650]), (x[650:1300], y[650:1300])]


def reached(epsilon: float) -> float:
    """Return the student's accuracy in percent for a budget of each node."""
    torch.manual_seed(0)
    outcome = fedstill.distil(
        nodes,
        models=[Linear((1, 8, 8), 10) for _ in nodes],
        student=Linear((1, 8, 8), 10),
        test=(x[1500:], y[1500:]),
        classes=10,
        public=x[1300:1500],
        # equal weights need no label counts of the nodes, which would be charged, too
        method=fedstill.FedKD(weights="equal", z_max=10.0, student=fedstill.StudentTraining(epochs=60)),
        local=fedstill.LocalConfig(epochs=10, batch=128, lr=0.02, lr_end=0.002),
        privacies=[fedstill.DPSGD(epsilon=epsilon)] * 2 if epsilon < math.inf else [],
        every=0,
    )
    spent = [node["epsilon"] for node in outcome.result["privacy"]["nodes"]]
    print(f"budget {epsilon:4g}: the nodes spent {spent}, accuracy {outcome.accuracy:.1f} %")
    return outcome.accuracy


budgets = [0.3, 1.0, 3.0, 10.0]
private, without = [reached(epsilon) for epsilon in budgets], reached(math.inf)

# %%
# A smaller epsilon needs more noise. The noise that hides one record is as large for 80 records as for 650,
# so a large node loses less than a small one.

figure, axis = plt.subplots(figsize=(6, 3))
axis.semilogx(budgets, private, "o-", label="DP-SGD")
axis.axhline(without, color="C7", ls="--", label="no guarantee")
axis.set(xlabel="epsilon of all that leaves a node, at delta 1e-5", ylabel="accuracy, percent", ylim=(0, 100))
axis.set_xticks(budgets, [f"{epsilon:g}" for epsilon in budgets])
axis.legend()
figure.tight_layout()
plt.show()

# %%
# Three runs to attack
# --------------------
#
# We choose an easy case for the attacker: nodes with 80 records each, large networks that can learn them by
# heart, and FedAvg, which averages their parameters. The last run has a budget of 8. Each step under DP-SGD
# adds noise, so it has fewer epochs, larger batches and a higher learning rate. These alone may reveal less,
# so the run between has them, too, without a budget.

home = Path(tempfile.mkdtemp())
small = {
    "split.name": "iid",
    "split.nodes": 2,
    "data.train_limit": 160,
    "nodes.models": ["mlp:128"],
    "student.model": "mlp:128",
    "nodes.local.augment": "none",
    "nodes.local.smoothing": 0.0,
    "method.rounds": 5,
    "evaluation.centralized": False,
}
few_steps = {"nodes.local.epochs": 10, "nodes.local.batch": 80, "nodes.local.lr": 0.01}
settings = {
    "no budget": {"nodes.local.epochs": 100},
    "few steps": few_steps,
    "epsilon 8": few_steps | {"nodes.privacy.mechanism": "dp-sgd", "nodes.privacy.epsilon": 8.0},
}
runs = {
    name: fedstill.run_preset("digits-fedavg", small | options, out=home / name.replace(" ", "-"))
    for name, options in settings.items()
}

# %%
# The attack
# ----------
#
# ``fedstill attack`` repeats a run, observes all releases, and attacks. The attacker has the student and
# trains eight *shadow models*, half of them with a record and half without it: so they learn how a model
# treats records that it was trained on. Attacked are the nodes' records (members) and test images (others).

attacks = {}
for name in runs:
    folder = home / name.replace(" ", "-")
    words = f"attack {folder} --attacks membership --membership.shadows 8 --quiet"
    subprocess.run([sys.executable, "-m", "fedstill", *words.split()], check=True, capture_output=True)
    [attack] = json.loads((folder / "leakage.json").read_text())["attacks"]
    print(f"{name}: accuracy {runs[name]['accuracy']:.1f} %. {attack['sentence']}")
    attacks[name] = [row for row in attack["rows"] if row["metric"] == "AUC"]
    for row in attacks[name]:
        print(f"    {row['attack']:14} AUC {row['text']}")

figure, axis = plt.subplots(figsize=(6, 2.8))
for shift, (name, rows) in enumerate(attacks.items()):
    place = [row + 0.25 * shift for row in range(len(rows))]
    low, high = zip(*(row["interval"] for row in rows), strict=True)
    axis.hlines(place, low, high, color=f"C{shift}")
    axis.plot([row["value"] for row in rows], place, "o", color=f"C{shift}", label=name)
axis.axvline(50, color="C7", ls="--", label="guessing")
axis.set_yticks(range(len(rows)), [row["attack"] for row in rows])
axis.set(xlabel="AUC, percent: a member is ranked above another record (with 95 % interval)")
axis.invert_yaxis()
axis.legend()
figure.tight_layout()
plt.show()

# %%
# What the numbers mean, and what they do not
# -------------------------------------------
#
# - In the first run the best attacks find members much better than by guessing (AUC 50). Fewer steps alone
#   reveal less, at nearly the same accuracy, but without any guarantee. With epsilon 8 no attack differs
#   significantly from guessing, and the student has learned little: a node with 80 records has little to hide
#   behind.
# - The attack gives a *lower* bound: this attacker, with eight shadow models, found that much. Another one
#   may find more. Epsilon gives an *upper* bound for every attacker, also for one who knows all other
#   records. At 8 that bound is weak; the guarantee is worth what its epsilon is worth.
# - A budget protects single records. It does not hide what all records have in common: the shares of the
#   classes show in a node's responses with or without it (``--attacks labels`` estimates them).
# - In a simulation the noise follows from the run's seed: the numbers are right, but these records are not
#   protected.
#
# More: `epsilon and budgets for data officers <../../docs/privacy.md>`_, `mechanisms
# <../../docs/privacy-mechanisms.md>`_, `attacks and how to read them <../../docs/leakage.md>`_.
