"""Test of a custom method, to copy: engines agree, and a run that stops resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from my_lab.entropy import EntropyFedMD
from sklearn.datasets import load_digits

import fedstill
from fedstill.core.run_writer import RunWriter
from fedstill.methods import Server
from fedstill.models import SmallCNN


class Stopped(Exception):
    """The run stops here, as if its process ended."""


ROUNDS: list[int] = []  # rounds that were run


@dataclass(frozen=True, kw_only=True)
class Stopping(EntropyFedMD):
    """The same method, which can stop before a round."""

    stop: int = -1
    """Round before which it stops; -1: none."""

    def step(self, server: Server, state: Any, t: int) -> Mapping[str, float]:
        if t == self.stop and t not in ROUNDS:
            ROUNDS.append(t)
            raise Stopped
        ROUNDS.append(t)
        return super().step(server, state, t)


def run(method: EntropyFedMD, engine: str = "one-by-one", out: Path | None = None) -> Mapping[str, Any]:
    """Return the results of two nodes with scikit-learn's digits."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 8 - 1).float().view(-1, 1, 8, 8), torch.tensor(labels)
    torch.manual_seed(0)
    networks = [SmallCNN((1, 8, 8), 10) for _ in range(3)]
    package = type(method).__module__.partition(".")[0]
    return fedstill.distil(
        [(x[:500], y[:500]), (x[500:1000], y[500:1000])],
        networks[:2],
        networks[2],
        (x[1400:], y[1400:]),
        10,
        method=method,
        public=x[1000:1400],
        policies=[fedstill.PolicyConfig(kinds=(f"{package}: logits",))] * 2,
        local=fedstill.LocalConfig(epochs=6),
        engine=fedstill.EngineConfig(batching=engine),  # type: ignore[arg-type]
        out=out,
    ).result


def losses(folder: Path) -> list[Any]:
    """Return the losses of each round of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["losses"] for line in lines if "losses" in line]


def test_engines_agree() -> None:
    stacked, single = (
        run(EntropyFedMD(rounds=3), engine)["accuracy"] for engine in ("stacked", "one-by-one")
    )
    assert stacked == pytest.approx(single, abs=1)


def test_resumed_run_equals_an_unbroken_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunWriter, "is_save_due", lambda self: True)  # else every few seconds
    method = Stopping(rounds=3, stop=2)
    with pytest.raises(Stopped):
        run(method, out=tmp_path / "stopped")
    resumed = run(method, out=tmp_path / "stopped")
    assert ROUNDS == [0, 1, 2, 2], "the resumed run repeats no round"
    whole = run(method, out=tmp_path / "whole")
    assert resumed["accuracy"] == whole["accuracy"]
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
