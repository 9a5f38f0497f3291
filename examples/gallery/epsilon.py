"""
Accuracy against epsilon
========================

The owner of a node can set a privacy budget for all its releases: here differential privacy by DP-SGD, with
epsilon at delta 1e-5. fedstill calibrates the noise for the budget. The gate charges every release, and
refuses releases that exceed the budget. A smaller epsilon needs more noise and costs accuracy; with more
records the loss is smaller.
"""

import math

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import fedstill
from fedstill.models import Linear

# %%
# Two nodes with 650 digits each. They predict 200 public images once (FedKD). They do not release their class
# counts, which would have a privacy cost, too.

digits = load_digits()
x = torch.tensor(digits.images / 8 - 1).float().unsqueeze(1)  # (N, 1, 8, 8), from -1 to 1
y = torch.tensor(digits.target)
nodes = [(x[:650], y[:650]), (x[650:1300], y[650:1300])]
public, test = x[1300:1500], (x[1500:], y[1500:])


def reached(epsilon: float) -> float:
    """Return the student's accuracy in percent for a budget of each node."""
    torch.manual_seed(0)
    protected = epsilon < math.inf
    metrics = fedstill.distil(
        nodes,
        models=[Linear((1, 8, 8), 10) for _ in nodes],
        student=Linear((1, 8, 8), 10),
        test=test,
        classes=10,
        public=public,
        method=fedstill.FedKD(weights="equal", z_max=10.0, student=fedstill.StudentTraining(epochs=60)),
        local=fedstill.LocalConfig(epochs=10, batch=128, lr=0.02, lr_end=0.002),
        privacies=[fedstill.DPSGD(epsilon=epsilon)] * 2 if protected else [],
        every=0,
    ).result
    spent = [node["epsilon"] for node in metrics["privacy"]["nodes"]]
    print(f"epsilon {epsilon:4g}: spent {spent}, accuracy {metrics['accuracy']:.1f} %")
    return metrics["accuracy"]


# %%
# One run for each budget.

budgets = [0.3, 1.0, 3.0, 10.0]
private, without = [reached(epsilon) for epsilon in budgets], reached(math.inf)

# %%
# Accuracy by epsilon.

figure, axis = plt.subplots(figsize=(6, 3))
axis.semilogx(budgets, private, "o-", label="DP-SGD")
axis.axhline(without, color="C7", ls="--", label="no guarantee")
axis.set(xlabel="epsilon of all that leaves a node, at delta 1e-5", ylabel="accuracy, percent", ylim=(0, 100))
axis.set_xticks(budgets, [f"{epsilon:g}" for epsilon in budgets])
axis.legend()
figure.tight_layout()
plt.show()
