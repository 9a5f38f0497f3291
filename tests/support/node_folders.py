"""Folders of nodes for ``fedstill node check``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedstill.cli.main import main
from fedstill.node.audit_entries import NODE_DATA, Entry
from fedstill.node.audit_log import AuditLog

NODE = 'name = "clinic"\nonline = false\n[data]\n[local]\nepochs = 2\n'
MODEL = '[model]\nname = "mlp:8"\n'


def folder_of(path: Path, privacy: str = "", rest: str = MODEL, groups: bool = False) -> Path:
    """Create a node's folder with 60 records and return it."""
    path.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    arrays = {"images": draw.uniform(0, 1, (60, 8, 8)).astype(np.float32), "labels": np.arange(60) % 10}
    if groups:
        arrays["groups"] = np.arange(60) // 6
    np.savez(path / "data.npz", **arrays)
    (path / "node.toml").write_text(f"{NODE}{rest}[privacy]\n{privacy}")
    secret = path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("rehearsal 7\n")
    return path


def charge(folder: Path, events: dict[str, int], *, guarantee: bool = True, unit: str = "") -> None:
    audit = AuditLog(folder / "audit.sqlite")
    entry = Entry(
        "old",
        NODE_DATA,
        "clinic",
        0,
        "q",
        "response",
        cost=events,
        no_guarantee=int(not guarantee),
        unit=unit,
    )
    audit.charge(entry)
    audit.close()


def stdout_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return the command's output on one line, with errors at the end."""
    with pytest.raises(SystemExit) as exit_info:
        main(["node", "check", *words])
    assert exit_info.value.code == code
    output = capsys.readouterr()
    return " ".join((output.out + output.err).split())
