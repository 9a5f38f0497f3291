"""Folder of a node's owner: ``node.toml`` and the secret.

No server can change these files.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from fedstill.core import private_files
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.config_tables import commented_toml, read_table, read_toml
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.registry import searching_in
from fedstill.node.node_file import NodeFile
from fedstill.privacy.config import NoPrivacy

FILE, SECRET = "node.toml", "secret"
MIN_SECRET = 2**96  # a number of 128 random bits is lower with probability 2**-32
REHEARSAL_PREFIX = "rehearsal "  # prefix of a secret derived from a run's seed, which is not secret


# --- reading ------------------------------------------------------------------------------------------


def read_node_file(folder: Path) -> NodeFile:
    """Return the ``node.toml`` of a folder.

    Raises:
        FedstillError: there is none, or it holds unknown keys or invalid values.
    """
    with searching_in(folder):
        return read_table(NodeFile, read_node_table(folder))


def read_node_table(folder: Path) -> dict[str, Any]:
    """Return the values of a folder's ``node.toml``, unchecked."""
    path = folder / FILE
    try:
        str(folder.resolve()).encode()
    except UnicodeEncodeError as error:
        expected = "a UTF-8 name: rename it"
        raise ArgumentError("node folder", os.fsencode(folder), expected) from error
    if not path.is_file():
        raise FedstillError(f"{folder} has no {FILE}: `fedstill node init {folder}` writes one")
    return read_toml(path)


def read_secret(folder: Path) -> int:
    """Return the number that seeds the noise at this node's gate.

    Raises:
        FedstillError: there is none, it is not a number or can be guessed, or others of this machine may
            read it.
    """
    path = folder / SECRET
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        advice = f"put it back, or `fedstill node init {folder}` makes a new one"
        raise FedstillError(f"{path} is missing: {advice}") from error
    except ValueError:
        text = ""
    number = text.removeprefix(REHEARSAL_PREFIX)
    if not number.isdecimal():
        raise FedstillError(f"{path} does not hold an integer from 0")
    if number == text and int(number) < MIN_SECRET:
        advice = f"delete it, and `fedstill node init {folder}` writes one of 128 random bits"
        raise FedstillError(f"{path} holds a number that can be guessed, and with it the noise: {advice}")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise FedstillError(f"{path} can be read by others, who could subtract the noise: chmod 600 {path}")
    return int(number)


def make_compute(file: NodeFile) -> Compute:
    """Return the node's device and precision; :class:`ArgumentError` if this machine has no such device."""
    config = file.compute
    engine = EngineConfig(batching="one-by-one", **vars(config))
    try:
        return Compute(engine)
    except ArgumentError as error:
        raise ArgumentError(error.name.replace("engine.", "compute."), error.value, error.expected) from error


# --- writing ------------------------------------------------------------------------------------------

HEAD = """\
# Configuration of this node. It belongs to you: no server can read or change it.
# Paths count from the folder of this file. `fedstill node check` on this folder says what the node
# is, what it would answer and refuse, and everything that is wrong.

"""


def init_folder(folder: Path, name: str | None = None) -> bool:
    """Write a ``node.toml`` with every option at its default, and a secret; or only a lost secret.

    Only ``privacy.isolate_rounding`` is not at its default, as a server may be hostile.

    Args:
        folder: created if it does not exist.
        name: name of the node; None: the folder's name.

    Returns:
        False if ``node.toml`` existed and is unchanged: only the secret was missing, and is new.

    Raises:
        FedstillError: the folder has both already, or the name is invalid.
    """
    if (folder / FILE).exists():
        if (folder / SECRET).exists():
            raise FedstillError(f"{folder / FILE} exists already: change it, or choose another folder")
        if name is not None:
            raise ArgumentError("--name", name, f"none, since {folder / FILE} exists and holds the name")
        _write_secret(folder)
        return False
    file = NodeFile(
        name=folder.resolve().name if name is None else name,
        privacy=NoPrivacy(isolate_rounding=True),
        seed=secrets.randbits(31),
    )
    private_files.make_folder(folder)
    if not (folder / SECRET).exists():
        _write_secret(folder)
    private_files.replace_file(folder / FILE, (HEAD + commented_toml(file)).encode())
    return True


def _write_secret(folder: Path) -> None:
    with open(folder / SECRET, "x", encoding="ascii", opener=private_files.private_opener) as stream:
        stream.write(f"{secrets.randbits(128)}\n")
