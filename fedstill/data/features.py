"""Features of examples, computed once by a backbone and kept in a cache on disk.

A cached feature vector is found by the backbone's digest and a hash of the example itself. So data that have
changed are computed again, and another split of the same data is not. The cache consists of chunks, each
written atomically as it is computed, so that an interrupted computation resumes. Its files are accessible to
the owner only, as features of private examples are private. Only files with the names of chunks are deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedstill.core import private_files, timing
from fedstill.core.errors import FedstillError, ModelError
from fedstill.core.registry import first_line
from fedstill.models.backbones import Backbone, Features
from fedstill.models.hugging_face import PADDING

CHUNK = 1024  # examples in a file of the cache
HASH_SIZE = 16  # bytes of an example's hash
GIB = 2**30
FOLDER_NAME = re.compile(r"[0-9a-f]{32}-(float32|bfloat16)")  # digest and precision of a backbone
CHUNK_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
PART_NAME = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{16}\.part")  # of a chunk that a process writes or has left
Progress = Callable[[int, int], object]  # examples done, and all of them


class FeatureCache:
    """Cached features of one backbone, in a folder with those of other backbones.

    Args:
        folder: the folder; created at the first write.
        key: name of the backbone, its digest and precision.
        limit: maximum bytes of the folder; 0: nothing is read or written.

    Attributes:
        notes: problems that cost time only, one line each.
    """

    def __init__(self, folder: Path, key: str, limit: int) -> None:
        self.folder, self.key, self.limit = folder, key, limit
        self.notes: list[str] = []
        self._chunk_of: dict[bytes, tuple[Path, int]] | None = None

    @classmethod
    def from_options(cls, options: Features, backbone: Backbone, folder: Path | None = None) -> FeatureCache:
        """Return the cache that the options choose; none for a custom backbone, whose code may have changed.

        Args:
            folder: its folder, unless the options name one; None: the user's cache folder.
        """
        default = folder or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedstill" / "features"
        chosen = Path(options.cache) if options.cache else default
        key = f"{backbone.digest}-{backbone.precision}"
        return cls(chosen.expanduser(), key, 0 if options.is_custom else int(options.cache_gib * GIB))

    def read(self, hashes: list[bytes], into: torch.Tensor) -> torch.Tensor:
        """Read the cached features of some examples into ``(N, F)``; return which were found ``(N,)``."""
        found = torch.zeros(len(hashes), dtype=torch.bool)
        rows_by_chunk: dict[Path, list[tuple[int, int]]] = {}
        index = self._index()
        for row, example in enumerate(hashes):
            if (entry := index.get(example)) is not None:
                rows_by_chunk.setdefault(entry[0], []).append((row, entry[1]))
        for path, pairs in rows_by_chunk.items():
            features = self._read_chunk(path)
            if features is None or features.shape[1] != into.shape[1]:
                continue
            rows, positions = torch.tensor(pairs).T
            into[rows], found[rows] = features[positions], True
            with suppress(OSError):
                os.utime(path)  # used now: deleted after others
        return found

    def write(self, hashes: list[bytes], features: torch.Tensor) -> None:
        """Write the features of some examples. A full disk only adds a note."""
        if not self.limit:
            return
        tensors = {
            "hashes": torch.from_numpy(np.frombuffer(b"".join(hashes), np.uint8).copy()),
            "features": features.contiguous(),
        }
        content = save(tensors, {"checksum": _checksum(**tensors)})
        name = hashlib.blake2b(b"".join(hashes), digest_size=HASH_SIZE).hexdigest()
        path = self.folder / self.key / f"{name}.safetensors"
        too_small = f"features are not cached: features.cache_gib = {self.limit / GIB:.3g} is too small"
        part = path.with_name(f"{name}.{secrets.token_hex(8)}.part")  # two processes may write one chunk
        try:
            if not self._make_space(len(content)):
                self._note(too_small)
                return
            private_files.make_folder(path.parent)
            with private_files.open_new(part) as file:
                file.write(content)
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            self._note_unwritten(error)
            return
        self._index().update({example: (path, at) for at, example in enumerate(hashes)})

    def _index(self) -> dict[bytes, tuple[Path, int]]:
        """Return file and position of each cached example."""
        if self._chunk_of is None:
            self._chunk_of = {}
            for path in self._chunks() if self.limit else ():
                try:
                    with safe_open(str(path), "np") as file:
                        content = file.get_tensor("hashes").tobytes()
                except (SafetensorError, OSError):
                    self._discard(path)
                    continue
                for at in range(len(content) // HASH_SIZE):
                    self._chunk_of[content[at * HASH_SIZE : (at + 1) * HASH_SIZE]] = path, at
        return self._chunk_of

    def _chunks(self) -> list[Path]:
        """Return the files of this backbone; none if the folder cannot be read."""
        try:
            paths = sorted((self.folder / self.key).glob("*.safetensors"))
        except OSError as error:  # of another user
            self._note_unwritten(error)
            return []
        return [path for path in paths if CHUNK_NAME.fullmatch(path.name)]

    def _read_chunk(self, path: Path) -> torch.Tensor | None:
        try:
            with safe_open(str(path), "pt") as file:
                features: torch.Tensor = file.get_tensor("features")
                hashes: torch.Tensor = file.get_tensor("hashes")
                checksum = (file.metadata() or {}).get("checksum")
        except (SafetensorError, OSError):
            self._discard(path)
            return None
        is_complete = hashes.dtype == torch.uint8 and features.dtype == torch.float32 and features.ndim == 2
        is_complete = is_complete and hashes.shape == (len(features) * HASH_SIZE,)
        if not is_complete or checksum != _checksum(features, hashes):
            self._discard(path)
            return None
        return features

    def _discard(self, path: Path) -> None:
        """Delete a damaged file, but not one that this user may not read."""
        is_readable = os.access(path, os.R_OK)
        self._note(
            f"{path} {'is damaged' if is_readable else 'cannot be read'}; its features are computed again"
        )
        if is_readable:
            with suppress(OSError):
                path.unlink()

    def _make_space(self, size: int) -> bool:
        """Delete the chunks used least recently until ``size`` bytes fit. Those of this backbone stay."""
        chunks = []
        for path in self._own_files():
            with suppress(FileNotFoundError):  # deleted by another process meanwhile
                status = path.stat()
                chunks.append((status.st_mtime, status.st_size, path))
        total = size + sum(each for _, each, _ in chunks)
        for _, bytes_of_chunk, path in sorted(chunks):
            if total <= self.limit:
                break
            if path.parent.name != self.key:
                with suppress(OSError):
                    path.unlink()
                    total -= bytes_of_chunk
        return total <= self.limit

    def _own_files(self) -> Iterator[Path]:
        """Return the files of all backbones, and no other files that happen to be in the folder."""
        for path in self.folder.glob("*/*"):
            is_own = CHUNK_NAME.fullmatch(path.name) or PART_NAME.fullmatch(path.name)
            if is_own and FOLDER_NAME.fullmatch(path.parent.name):
                yield path

    def _note_unwritten(self, error: OSError) -> None:
        self._note(f"features are not cached in {self.folder}: {error.strerror or first_line(error)}")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def compute_features(
    backbone: Backbone,
    inputs: torch.Tensor,
    cache: FeatureCache,
    *,
    batch: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> torch.Tensor:
    """Return the features ``(N, F)`` of inputs ``(N, ...)``; see :func:`compute_features_of_parts`."""
    parts = compute_features_of_parts(
        backbone, [inputs], cache, batch=batch, device=device, progress=progress
    )
    return parts[0]


def compute_features_of_parts(
    backbone: Backbone,
    parts: Sequence[torch.Tensor],
    cache: FeatureCache,
    *,
    batch: int = 64,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> list[torch.Tensor]:
    """Return the features ``(N, F)`` float32 of each part of some data, on the CPU.

    Features in the cache are read, each file once for all parts. Others are computed in chunks, and each
    chunk is written to the cache when it is complete.

    Args:
        backbone: the backbone.
        parts: normalized images or token ids ``(N, ...)``, such as those of each node.
        cache: cache of this backbone.
        batch: examples in a forward pass.
        device: device that computes.
        progress: called with the number of examples that are done, and of all: at first and after each chunk.

    Raises:
        ModelError: the backbone fails for a batch, or its features are not finite.
    """
    parts = [part.cpu() for part in parts]
    hashes = [example for part in parts for example in example_hashes(part)]
    features = torch.empty(len(hashes), backbone.width)
    found = cache.read(hashes, features)
    first_rows: dict[bytes, int] = {}
    missing = torch.nonzero(~found).flatten().tolist()
    for row in missing:
        first_rows.setdefault(hashes[row], row)  # equal examples are computed once
    rows, done = list(first_rows.values()), len(hashes) - len(first_rows)
    examples = [example for part in parts for example in part] if rows else []  # views
    if progress is not None:
        progress(done, len(hashes))
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        inputs = torch.stack([examples[row] for row in chunk])
        features[chunk] = _forward(backbone.to(device), inputs, batch, device)
        cache.write([hashes[row] for row in chunk], features[chunk])
        if progress is not None:
            progress(done + start + len(chunk), len(hashes))
    for row in missing:
        features[row] = features[first_rows[hashes[row]]]
    return list(torch.split(features, [len(part) for part in parts]))


def _forward(
    backbone: Backbone, inputs: torch.Tensor, batch: int, device: torch.device | str
) -> torch.Tensor:
    layout = torch.channels_last if inputs.ndim == 4 else torch.contiguous_format
    features = torch.empty(len(inputs), backbone.width)
    lengths = _text_lengths(inputs) if backbone.takes_shorter_texts else None
    order = torch.arange(len(inputs)) if lengths is None else lengths.argsort(stable=True)
    with torch.inference_mode():
        for rows in torch.split(order, batch):
            timing.check_limits()
            part = inputs[rows] if lengths is None else inputs[rows, : int(lengths[rows].max())]
            features[rows] = _batch_features(backbone, part.to(device).contiguous(memory_format=layout))
    return features


def _batch_features(backbone: Backbone, inputs: torch.Tensor) -> torch.Tensor:
    """Return the features of a batch on the CPU.

    Raises:
        ModelError: the backbone fails, or does not return one vector of finite numbers for each input.
    """
    count = len(inputs)
    try:
        features: torch.Tensor = backbone(inputs).cpu()
    except FedstillError:
        raise
    except Exception as error:  # errors of any library
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(
            f"backbone: cannot take a batch of {count}: {reason} (expected another features.batch)"
        ) from error
    if features.shape != (count, backbone.width):
        shape, expected = tuple(features.shape), (count, backbone.width)
        raise ModelError(f"backbone: returns {shape} for {count} inputs (expected {expected})")
    if not features.isfinite().all():
        cause = "" if inputs.isfinite().all() else " for inputs that hold them"
        raise ModelError(f"backbone: returns NaN or infinity{cause} (expected finite numbers)")
    return features


def _text_lengths(ids: torch.Tensor) -> torch.Tensor:
    """Return the number of token ids up to the last that is not padding ``(N,)``, at least 1.

    >>> _text_lengths(torch.tensor([[5, 0, 7, 0], [0, 0, 0, 0]]))
    tensor([3, 1])
    """
    positions = torch.arange(1, ids.shape[1] + 1)
    return (positions * (ids != PADDING)).amax(1).clamp_min(1)


def example_hashes(inputs: torch.Tensor) -> list[bytes]:
    """Return a hash of each example of ``(N, ...)``.

    >>> first, second, third = example_hashes(torch.tensor([[1.0], [2.0], [1.0]]))
    >>> first == third, first == second
    (True, False)
    """
    rows = inputs.contiguous().flatten(1).view(torch.uint8).numpy()
    return [hashlib.blake2b(row.data, digest_size=HASH_SIZE).digest() for row in rows]


def _checksum(features: torch.Tensor, hashes: torch.Tensor) -> str:
    hashed = hashlib.blake2b(hashes.numpy().data, digest_size=HASH_SIZE)
    hashed.update(features.contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
