"""Test of a custom method, to copy: it passes the library's checks, and its student learns."""

from __future__ import annotations

import torch
from my_lab.entropy import EntropyFedMD
from sklearn.datasets import load_digits

import fedstill
from fedstill.models import SmallCNN


def test_passes_all_checks() -> None:
    fedstill.check_method(EntropyFedMD(rounds=3))


def test_student_learns() -> None:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 8 - 1).float().view(-1, 1, 8, 8), torch.tensor(labels)
    torch.manual_seed(0)
    networks = [SmallCNN((1, 8, 8), 10) for _ in range(3)]
    outcome = fedstill.distil(
        [(x[:500], y[:500]), (x[500:1000], y[500:1000])],
        networks[:2],
        networks[2],
        (x[1400:], y[1400:]),
        10,
        method=EntropyFedMD(rounds=3),
        public=x[1000:1400],
        local=fedstill.LocalConfig(epochs=6),
    )
    assert outcome.result["accuracy"] > 60
