"""A small run through the command line, in this process: three nodes whose inputs are no images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstill.cli import main as cli


def small_run(
    out: Path, *words: str, task: str, method: str, model: str, local: dict[str, Any], **tables: Any
) -> int:
    """The exit code of a run in ``out / "run"``; ``tables`` are its data, and what differs from here."""
    config = {
        "task": {"name": task},
        "method": {"name": method},
        "student": {"model": model},
        "split": {"nodes": 3, "alpha": 5.0},
        "public": {"name": "held-out", "share": 0.4},
        "nodes": {"models": [model], "local": local, "policy": {"outputs_only": False}},
        "evaluation": {"centralized": False, "every": 0},
        **tables,
    }
    (out / "run.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    with pytest.raises(SystemExit) as exit:
        cli.main(["run", str(out / "run.toml"), *words, "--engine.threads", "1", "--out", str(out / "run")])
    assert isinstance(exit.value.code, int)
    return exit.value.code


def result_of(out: Path) -> dict[str, Any]:
    """What the run's ``result.json`` says."""
    result: dict[str, Any] = json.loads((out / "run" / "result.json").read_text(encoding="utf-8"))
    return result
