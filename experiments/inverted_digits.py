"""scikit-learn's digits at five sites, each with another share of inverted images, as an .npz file.

    python experiments/inverted_digits.py runs/inverted.npz

Images are divided over the sites at random, so that all sites have the same classes. Half of the test images
are inverted. For experiments/property_inference.toml.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
TRAINING_IMAGES = 1200


def main(file: Path) -> None:
    """Write the file."""
    draw, digits = np.random.default_rng(0), load_digits()
    order = draw.permutation(len(digits.images))
    images, labels = (digits.images[order] / 16 * 255).round().astype(np.uint8), digits.target[order]
    is_test = np.arange(len(images)) >= TRAINING_IMAGES
    site = np.arange(len(images)) % len(SHARES)
    is_inverted = draw.random(len(images)) < np.where(is_test, 0.5, np.take(SHARES, site))
    images[is_inverted] = 255 - images[is_inverted]
    names = np.array([f"inverted {100 * SHARES[k]:.0f} %" for k in site])
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, images=images, labels=labels, split=is_test.astype(np.int64), site=names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    main(parser.parse_args().file)
