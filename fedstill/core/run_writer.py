"""The files of one run: what was measured, what is remembered, what came out.

Folders of runs that :func:`fedstill.distil` made of objects: no file holds their data and networks.
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
SECONDS_BETWEEN = 5.0  # between two saved states, and more where saving takes long


def make_folder(out: Path) -> None:
    """Make a folder, and those that it is in.

    Raises:
        RunFolderError: it cannot be made or written; the line says why.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFolderError(f"out: the folder {str(out)!r} cannot be made or written: {reason}") from error


def parse_folder(out: object) -> Path:
    """A folder as the caller names it.

    Raises:
        ArgumentError: the text is empty, or it is no path.
    """
    if not isinstance(out, (str, os.PathLike)) or not str(out) or "\0" in str(out):
        raise ArgumentError("out", out, "a folder's path")
    try:
        folder = Path(out).expanduser()
        folder.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, or a home that does not exist
        raise ArgumentError("out", str(out), f"a folder's path, which this is not: {error}") from error
    return folder


def require_same_options(folder: Path | None, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse a run whose options are others than those that it began with.

    Raises:
        RunFolderError: naming the first.
    """
    other = sorted(name for name in {**now, **before} if now.get(name) != before.get(name))
    if other:
        name, more = other[0], more_suffix(len(other))
        told = f"with {name} = {before.get(name)}, and now it is {now.get(name)}{more}"
        expected = "expected as it was: with other options a run has a folder for itself"
        raise RunFolderError(f"the run in {folder} began {told}: {expected}")


class RunWriter:
    """Writes into a run's folder; keeps to memory without one.

    Args:
        on_metrics: is told the lines of ``metrics.jsonl`` as they reach the disk; of a run that goes on, all of
            those that it goes on from come first.
        options: of the run, by name, with which alone it goes on.
    """

    def __init__(
        self,
        folder: Path | None,
        on_metrics: Callable[[Sequence[Mapping[str, Any]]], object] = lambda lines: None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder, self._on_metrics, self._options = folder, on_metrics, dict(options)
        self.metrics: list[dict[str, Any]] = []
        self.samples: dict[str, torch.Tensor] = {}  # by turn; what they were made from as "<turn>.maps"
        self._save_interval = SECONDS_BETWEEN
        self._saved_at = time.monotonic()
        self._written = 0  # metrics lines on disk

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``; it reaches the disk with the next saved state."""
        self.metrics.append(replace_nonfinite(line))  # as who goes on from the file reads it

    def is_save_due(self) -> bool:
        """Whether it is time to save a state."""
        return self.folder is not None and time.monotonic() - self._saved_at > self._save_interval

    def save(self, state: Mapping[str, Any], since: float | None = None) -> None:
        """Remember a state, with all metrics and samples so far, in one move.

        Args:
            state: what a run must know to go on.
            since: when the work for it began, by ``time.monotonic``; None is now.
        """
        if self.folder is None:
            return
        start = time.monotonic() if since is None else since
        fresh = self._write_metrics()
        kept = {**state, "metrics": self._written, "samples": self.samples, "options": self._options}
        save_state(self.folder / STATE_FILE, kept)
        self._saved_at = time.monotonic()
        self._save_interval = max(SECONDS_BETWEEN, 20 * (self._saved_at - start))  # at most 5 % of the time
        self._on_metrics(fresh)  # who hears may be slow, and the state does not wait for it

    def load(self) -> dict[str, Any]:
        """The state to go on from; empty where there is none.

        Raises:
            RunFolderError: its metrics are not all there, or it was saved with other options.
        """
        if self.folder is None:
            return {}
        if not (self.folder / STATE_FILE).exists():  # stopped before there was one: what it measured is void
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            return {}
        state: dict[str, Any] = load_state(self.folder / STATE_FILE)
        require_same_options(self.folder, state.get("options", {}), self._options)
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if len(lines) < state["metrics"]:
            told = f"{len(lines)} lines, and the state counts {state['metrics']}"
            raise RunFolderError(f"{self.folder / 'metrics.jsonl'} has {told}: the run cannot go on from it")
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
        """Write the result, and the student, if there is one, with what its file says beside the weights; the
        state is not needed any more, or kept."""
        if self.folder is None:
            return
        self._on_metrics(self._write_metrics())
        if self.samples:
            save_file(self.samples, self.folder / "samples.safetensors")
        if student is not None:
            # Copies, since a file of safetensors takes no two names for one memory (tied weights).
            state = student.state_dict()
            weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
            save_file(weights, self.folder / "student.safetensors", dict(header or {}))
        write_text(self.folder / "result.json", json_text(result) + "\n")
        if not keep_state:
            (self.folder / STATE_FILE).unlink(missing_ok=True)

    def write_file(self, name: str, text: str) -> None:
        """Write what a method leaves beside its figures."""
        if self.folder is not None:
            write_text(self.folder / name, text)

    def save_pictures(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep predictions beside the truth, for the report."""
        if self.folder is not None:
            save_file(dict(tensors), self.folder / PICTURES_FILE)

    def save_resamples(self, draws: torch.Tensor) -> None:
        """Keep what a run is judged by in each draw of test cases, ``(R,)``, to be compared with others."""
        if self.folder is not None:
            save_file({"judged": draws.contiguous()}, self.folder / RESAMPLES_FILE)

    def _write_metrics(self) -> list[dict[str, Any]]:
        """Put the lines that are not on disk yet there: these."""
        if self.folder is None:
            return []
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            for line in self.metrics[self._written :]:
                file.write(json_text(line, indent=None) + "\n")
            file.flush()
            os.fsync(file.fileno())  # before the state that counts these lines
        fresh, self._written = self.metrics[self._written :], len(self.metrics)
        return fresh


def write_text(path: Path, text: str) -> None:
    """Write a text file in one move: whoever is stopped in between leaves the old one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def lock_folder(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder, so that no two processes work in it; the system lets it go however this one ends.

    Args:
        folder: which must exist.
        what: is in it, for the error: a run or a comparison.

    Raises:
        RunFolderError: another process holds it.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            lock_file(held)
        except BlockingIOError as error:
            raise RunFolderError(f"{folder} is in use: another process is at work on this {what}") from error
        yield
    finally:
        os.close(held)


def read_result(path: Path) -> Mapping[str, Any]:
    """The result of a finished run; RunFolderError as :func:`read_object`, or where there is none."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing: a report needs the folder of a finished run") from None


def read_object(path: Path) -> Mapping[str, Any]:
    """A file's JSON object.

    Raises:
        RunFolderError: it is no JSON, or another value.
        FileNotFoundError: there is no file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise RunFolderError(f"{path} holds a {type(found).__name__} (expected a JSON object)")
    return found


OBJECTS_FILE = "setting.json"  # what such a run keeps in place of a config.toml
ATTACK_NEEDS_CONFIG = (
    "an attack repeats a run by its config.toml, as fedstill run and fedstill.run_preset write it"
)


def require_no_objects(folder: Path, advice: str) -> None:
    """Refuse the folder of such a run.

    Raises:
        RunFolderError: it is one; ``advice`` says what there is to do.
    """
    if (folder / OBJECTS_FILE).exists() and not (folder / "config.toml").exists():
        told = f"{folder} holds a run of fedstill.distil, without its data and networks"
        raise RunFolderError(f"{told}: {advice}")
