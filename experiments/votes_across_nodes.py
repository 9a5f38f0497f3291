"""Accuracy of a student of PATE across nodes: one vote per node about each public digit, noised once.

    python experiments/votes_across_nodes.py

288 public images, five draws. Each node is right about an image with the same chance, 0.7 or 0.9, by itself,
and else says any class; the student is a ridge regression whose penalty is the best of seven on its test
images. So figures are upper ones: skewed nodes err together, and nobody could choose so. Epsilon is of all
that a node holds.
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
    """Percent of test images that the student has right, ``(penalties,)``."""
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
        # A vote moves from one class to another: sqrt(2) an image, sqrt(2 * 288) in all.
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
