"""Files are replaced atomically and synced to disk."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fedstill.core import private_files
from fedstill.core.checkpoint import save_state


@pytest.mark.parametrize("how", ["replace", "save_state"])
def test_syncs_content_before_rename(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sync of the folder, a file may have its old name or none after a power failure."""
    done: list[str] = []
    sync, move = os.fsync, os.replace

    def synced(opened: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(opened).st_mode) else "file")
        sync(opened)

    def moved(part: Path, path: Path) -> None:
        done.append("move")
        move(part, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    if how == "replace":
        private_files.replace_file(tmp_path / "file", b"content", sync=True)
    else:
        save_state(tmp_path / "file", {"x": torch.ones(2)})
    assert done == ["file", "move", "folder"]


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_ignores_unsyncable_folder_but_not_disk_errors(
    number: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def refused(opened: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(number, os.strerror(number))
        sync(opened)

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) if fails else nullcontext():
        private_files.replace_file(tmp_path / "file", b"content", sync=True)
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_folder_is_changed_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Each adds 1 to a number in a file 50 times; a lost addition would show."""
    program = (
        "import sys; from pathlib import Path; from fedstill.core.private_files import alone_in\n"
        "file = Path(sys.argv[1])\n"
        "for _ in range(50):\n"
        "    with alone_in(file.parent): file.write_text(str(int(file.read_text()) + 1))\n"
    )
    (tmp_path / "number").write_text("0")
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "number")]) for _ in range(3)
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "number").read_text() == "150"
