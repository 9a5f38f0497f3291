"""Files of one run: metrics, checkpoint, results.

Runs of :func:`fedstill.distil` are made of Python objects. Their folders hold no configuration from which
data and networks could be rebuilt.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from fedstill.core.checkpoint import load_state, save_state
from fedstill.core.errors import ArgumentError, RunFolderError
from fedstill.core.private_files import lock_file
from fedstill.core.text_format import json_text, more_suffix, replace_nonfinite

STATE_FILE = "state.safetensors"
PICTURES_FILE = "pictures.safetensors"
RESAMPLES_FILE = "draws.safetensors"
SECONDS_BETWEEN = 5.0  # between two checkpoints; more if saving takes long


def make_folder(out: Path) -> None:
    """Create a folder and its parents, and check that it is writable.

    Raises:
        RunFolderError: it cannot be created or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFolderError(f"out: the folder {str(out)!r} cannot be made or written: {reason}") from error


def parse_folder(out: object) -> Path:
    """Return a folder from the caller's argument.

    Raises:
        ArgumentError: the text is empty or not a path.
    """
    if not isinstance(out, (str, os.PathLike)) or not str(out) or "\0" in str(out):
        raise ArgumentError("out", out, "a folder's path")
    try:
        folder = Path(out).expanduser()
        folder.exists()
    except (OSError, RuntimeError) as error:  # the name is too long, or there is no home folder
        raise ArgumentError("out", str(out), f"a folder's path: {error}") from error
    return folder


def require_same_options(folder: Path | None, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to resume a run with other options than it began with.

    Args:
        folder: folder of the run, for the error.
        before: the options of the run by name.
        now: the options that are asked for.

    Raises:
        RunFolderError: naming the first option that differs.
    """
    different = sorted(name for name in {**now, **before} if now.get(name) != before.get(name))
    if different:
        name, more = different[0], more_suffix(len(different))
        message = (
            f"the run in {folder} began with {name} = {before.get(name)}, but now it is {now.get(name)}{more}"
        )
        raise RunFolderError(f"{message} (expected the same options, or another folder)")


class RunWriter:
    """Writes the files of a run, or keeps everything in memory if there is no folder.

    Args:
        folder: folder of the run; None: keep everything in memory.
        on_metrics: called with the lines of ``metrics.jsonl`` when they are on the disk. A resumed run calls
            it first with all earlier lines.
        options: options of the run by name. The run can be resumed only with the same options.

    Attributes:
        metrics: all lines so far.
        samples: generated samples by step. ``"<step>.maps"`` are the label maps that they were generated
            from.
    """

    def __init__(
        self,
        folder: Path | None,
        on_metrics: Callable[[Sequence[Mapping[str, Any]]], object] = lambda lines: None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder, self._on_metrics, self._options = folder, on_metrics, dict(options)
        self.metrics: list[dict[str, Any]] = []
        self.samples: dict[str, torch.Tensor] = {}
        self._save_interval = SECONDS_BETWEEN
        self._saved_at = time.monotonic()
        self._written = 0  # metrics lines on disk

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Add a line to ``metrics.jsonl``. It is written with the next checkpoint."""
        self.metrics.append(replace_nonfinite(line))  # as a resumed run reads it from the file

    def is_save_due(self) -> bool:
        """Return whether it is time for a checkpoint."""
        return self.folder is not None and time.monotonic() - self._saved_at > self._save_interval

    def save(self, state: Mapping[str, Any], since: float | None = None) -> None:
        """Write a checkpoint with all metrics and samples so far, atomically.

        Args:
            state: the state of the run.
            since: when collecting the state began, by ``time.monotonic``; None: now. Slow checkpoints are
                written less often.
        """
        if self.folder is None:
            return
        start = time.monotonic() if since is None else since
        new_lines = self._write_metrics()
        content = {**state, "metrics": self._written, "samples": self.samples, "options": self._options}
        save_state(self.folder / STATE_FILE, content)
        self._saved_at = time.monotonic()
        self._save_interval = max(SECONDS_BETWEEN, 20 * (self._saved_at - start))  # at most 5 % of the time
        self._on_metrics(new_lines)  # after saving, as listeners may be slow

    def load(self) -> dict[str, Any]:
        """Return the state of the checkpoint, or an empty dict if there is none.

        Raises:
            RunFolderError: metrics are missing, or the run had other options.
        """
        if self.folder is None:
            return {}
        if not (
            self.folder / STATE_FILE
        ).exists():  # stopped before the first checkpoint: its metrics are void
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            return {}
        state: dict[str, Any] = load_state(self.folder / STATE_FILE)
        require_same_options(self.folder, state.get("options", {}), self._options)
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if len(lines) < state["metrics"]:
            counts = f"{len(lines)} lines (expected {state['metrics']})"
            raise RunFolderError(f"{self.folder / 'metrics.jsonl'} has {counts}: the run cannot be resumed")
        self.metrics = [json.loads(line) for line in lines[: state["metrics"]]]
        self.samples = state["samples"]
        write_text(self.folder / "metrics.jsonl", "".join(line + "\n" for line in lines[: state["metrics"]]))
        self._written = state["metrics"]
        self._on_metrics(self.metrics)
        return state

    def finish(
        self,
        result: Mapping[str, Any],
        student: nn.Module | None,
        header: Mapping[str, str] | None = None,
        *,
        keep_state: bool = False,
    ) -> None:
        """Write the results and the student, and delete the checkpoint.

        Args:
            result: content of ``result.json``.
            student: the student, if there is one.
            header: metadata of the student's file.
            keep_state: keep the checkpoint.
        """
        if self.folder is None:
            return
        self._on_metrics(self._write_metrics())
        if self.samples:
            save_file(self.samples, self.folder / "samples.safetensors")
        if student is not None:
            # Copies, as safetensors does not accept tensors that share memory (tied weights).
            state = student.state_dict()
            weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
            save_file(weights, self.folder / "student.safetensors", dict(header or {}))
        write_text(self.folder / "result.json", json_text(result) + "\n")
        if not keep_state:
            (self.folder / STATE_FILE).unlink(missing_ok=True)

    def write_file(self, name: str, text: str) -> None:
        """Write a text file of the method into the folder."""
        if self.folder is not None:
            write_text(self.folder / name, text)

    def save_predictions(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Save predictions and targets for the report."""
        if self.folder is not None:
            save_file(dict(tensors), self.folder / PICTURES_FILE)

    def save_bootstrap_metrics(self, draws: torch.Tensor) -> None:
        """Save the main metric in each bootstrap sample, ``(R,)``, for paired comparisons."""
        if self.folder is not None:
            save_file({"judged": draws.contiguous()}, self.folder / RESAMPLES_FILE)

    def _write_metrics(self) -> list[dict[str, Any]]:
        """Append the lines that are not on the disk yet, and return them."""
        if self.folder is None:
            return []
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            for line in self.metrics[self._written :]:
                file.write(json_text(line, indent=None) + "\n")
            file.flush()
            os.fsync(file.fileno())  # before the state that counts these lines
        new_lines, self._written = self.metrics[self._written :], len(self.metrics)
        return new_lines


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: an interruption leaves the old file."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextlib.contextmanager
def lock_folder(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder, so that no two processes write to it. The system releases the lock if the process ends.

    Args:
        folder: an existing folder.
        what: content of the folder, for the error: a run or a comparison.

    Raises:
        RunFolderError: another process holds the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            lock_file(descriptor)
        except BlockingIOError as error:
            raise RunFolderError(f"{folder} is in use: another process runs this {what}") from error
        yield
    finally:
        os.close(descriptor)


def read_result(path: Path) -> Mapping[str, Any]:
    """Read the result of a finished run.

    Raises:
        RunFolderError: there is no result, or it is damaged.
    """
    try:
        return read_object(path)
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: a report needs the folder of a finished run") from None


def read_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON object from a file.

    Raises:
        RunFolderError: the file is not JSON, or holds another value.
        FileNotFoundError: there is no file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise RunFolderError(f"{path} holds a {type(content).__name__} (expected a JSON object)")
    return content


OBJECTS_FILE = "setting.json"  # written instead of config.toml for a run that was made of Python objects
ATTACK_NEEDS_CONFIG = "attacks need the config.toml that fedstill run and fedstill.run_preset write"


def reject_run_of_python_objects(folder: Path, advice: str) -> None:
    """Refuse the folder of a run that was made of Python objects.

    Args:
        folder: folder of a run.
        advice: what to do instead, for the error.

    Raises:
        RunFolderError: it is such a folder.
    """
    if (folder / OBJECTS_FILE).exists() and not (folder / "config.toml").exists():
        raise RunFolderError(
            f"{folder} holds a run of fedstill.distil without its data and networks: {advice}"
        )
