"""Accuracy of a PATE student across nodes: one vote per node for each public digit, with noise added once.

    python experiments/votes_across_nodes.py

288 public images, five repetitions. Each node independently predicts an image's class correctly with
probability 0.7 or 0.9, and a random class otherwise. The student is a ridge regression with the best of seven
penalties on its test images. So the results are upper bounds: skewed nodes make correlated errors, and this
choice of penalty is impossible in practice. Epsilon covers all records of a node.
"""

from __future__ import annotations

import math

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fedstill.privacy.accounting import calibrate_noise
from fedstill.privacy.events import Event, PrivacyCost

PUBLIC, TEST, CLASSES, DRAWS = 288, 359, 10, 5
PENALTIES = (3, 10, 30, 100, 300, 1000, 3000)


def learned(nodes: int, right: float, noise: float, seed: int) -> np.ndarray:
    """Return the student's test accuracy in percent by penalty, ``(penalties,)``."""
    rng = np.random.default_rng(seed)
    x, y = load_digits(return_X_y=True)
    x = x / 8 - 1
    train, test = train_test_split(np.arange(len(x)), test_size=TEST, random_state=seed, stratify=y)
    public = rng.permutation(train)[:PUBLIC]
    predictions = rng.integers(0, CLASSES, (PUBLIC, nodes))
    predictions = np.where(rng.random((PUBLIC, nodes)) < right, y[public][:, None], predictions)
    votes = (predictions[..., None] == np.arange(CLASSES)).sum(1) + noise * rng.standard_normal(
        (PUBLIC, CLASSES)
    )
    a, b = x[public], votes / nodes - 1 / CLASSES
    each = [np.linalg.solve(a.T @ a + penalty * np.eye(a.shape[1]), a.T @ b) for penalty in PENALTIES]
    return np.array([100 * ((x[test] @ w).argmax(1) == y[test]).mean() for w in each])


def main() -> None:
    """Print a Markdown table."""
    print("| nodes | epsilon | noise on the votes | right with 0.7 | with 0.9 |\n|---:|---:|---:|---:|---:|")
    for epsilon in (3.0, 8.0):
        # A changed vote moves from one class to another: norm sqrt(2) per image, sqrt(2 * 288) in total.
        multiple = calibrate_noise(lambda s: PrivacyCost({Event("gaussian", s): 1}), epsilon, 1e-5)
        noise = multiple * math.sqrt(2 * PUBLIC)
        for nodes in (5, 20, 50, 100):
            best = [
                np.mean([learned(nodes, right, noise, seed) for seed in range(DRAWS)], axis=0).max()
                for right in (0.7, 0.9)
            ]
            print(f"| {nodes} | {epsilon:g} | {noise:.1f} | {best[0]:.0f} | {best[1]:.0f} |")


if __name__ == "__main__":
    main()
