"""Folder of a node's owner: ``node.toml``, and the data, model and secret that it names.

No server can change these files.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fedstill.core import private_files, toml
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.config_tables import commented_toml, read_table
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError, UnknownInputFormatError, UnknownName
from fedstill.core.registry import searching_in
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.data import node_data
from fedstill.data.data_spec import DataSpec
from fedstill.models import PREDICTION_ONLY
from fedstill.node.audit_log_inspection import audit_path, read_total_spent, unwritable_reason
from fedstill.node.gate import policy_refusal
from fedstill.node.node_file import NodeFile
from fedstill.node.owner_model import check_name_and_weights, load_perceptual, make_model
from fedstill.node.policy_faults import policy_faults, privacy_faults
from fedstill.node.startup_kit_faults import kit_faults, server_faults
from fedstill.privacy.config import NoPrivacy
from fedstill.protocol.payload_kinds import PRIVATE_DATA
from fedstill.protocol.queries import Query
from fedstill.tasks import TaskConfig

T = TypeVar("T")

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
        return read_table(NodeFile, _read_table(folder))


def _read_table(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    try:
        str(folder.resolve()).encode()
    except UnicodeEncodeError as error:
        expected = "a UTF-8 name: rename it"
        raise ArgumentError("node folder", os.fsencode(folder), expected) from error
    if not path.is_file():
        raise FedstillError(f"{folder} has no {FILE}: `fedstill node init {folder}` writes one")
    return toml.read(path)


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


# --- checking -----------------------------------------------------------------------------------------


def require_valid(file: NodeFile, data: TensorData, model: nn.Module) -> None:
    """Refuse to serve with a policy or protection that `fedstill node check` calls a fault, naming all
    faults.

    A budget without a mechanism is not refused here: the gate then refuses each query that releases
    anything.
    """
    faults = policy_faults(file.policy)
    if file.privacy.protects:
        faults += privacy_faults(file.privacy, data, model, file.data)
    if faults:
        raise FedstillError(f"{FILE}: {'; '.join(faults)}")


@dataclass(frozen=True)
class FolderCheck:
    """Contents and faults of a folder. Parts with a fault are None.

    Args:
        file: the folder's ``node.toml``; invalid values have their defaults.
        spec: the server's data spec, or that of the node's own data.
        data: the node's data.
        model: the node's model.
        compute: device and precision.
        faults: one line each.
        unreported: reason why the data were not examined, though they have no fault; empty: they were.
        schema: the only schema that a run may have; without columns: any.
    """

    file: NodeFile | None
    spec: DataSpec | None = None
    data: TensorData | None = None
    model: nn.Module | None = None
    compute: Compute | None = None
    faults: tuple[str, ...] = ()
    unreported: str = ""
    schema: Schema = NO_SCHEMA


def check_folder(
    folder: Path, spec: DataSpec | None = None, *, task: TaskConfig | None = None, quick: bool = False
) -> FolderCheck:
    """Load everything that a folder names, without training.

    Args:
        folder: the node's folder.
        spec: a server's data spec; None: shape and classes are taken from the data.
        task: task of a run whose spec is not known; None: classification.
        quick: only check that data and model exist, without loading them.
    """
    with searching_in(folder):
        return _check_folder(folder, spec, task, quick)


def _check_folder(folder: Path, spec: DataSpec | None, task: TaskConfig | None, quick: bool) -> FolderCheck:
    try:
        table = _read_table(folder)
    except FedstillError as error:
        return FolderCheck(None, faults=(str(error),))
    file, found, invalid = _read_valid_sections(table)
    unreported: list[str] = []

    def attempt(section: str, make: Callable[[], T]) -> T | None:
        if section in invalid:
            return None
        try:
            return make()
        except UnknownInputFormatError as error:
            unreported.append(str(error))
        except FedstillError as error:
            found.append(str(error))
        except OSError as error:
            found.append(f"{section}: {error.filename or folder}: {error.strerror or error}")
        return None

    attempt("secret", lambda: read_secret(folder))
    data, require_spec = None, None if quick else spec
    schema = attempt("data", lambda: node_data.read_node_schema(file.data, folder))
    if schema is None:
        invalid.add("data")
    if quick:
        attempt("data", lambda: node_data.find_path(file.data, folder))
    elif (
        loaded := attempt("data", lambda: node_data.load_node_data(file.data, folder, spec, task))
    ) is not None:
        data, require_spec = loaded
        attempt("data", lambda: node_data.check_pixel_range(file.data, *loaded))
    if require_spec is not None:
        model = attempt("model", lambda: make_model(file, folder, require_spec))
        attempt("model", lambda: load_perceptual(file, folder, require_spec))
    else:
        model = attempt("model", lambda: check_name_and_weights(file, folder))
    compute = attempt("compute", lambda: make_compute(file))
    if "policy" not in invalid:
        found += policy_faults(file.policy)
    if "privacy" not in invalid:
        found += privacy_faults(file.privacy, data, model, file.data)
        spent = attempt("audit log", lambda: read_total_spent(file, folder))
        if spent is not None and spent.fault is not None:
            settle = f"nothing is released until `fedstill audit accept {folder}`"
            found.append(f"privacy.audit_log {file.privacy.audit_log!r}: {spent.fault}; {settle}")
        reason = (
            None
            if spent is None
            else attempt("audit log", lambda: unwritable_reason(audit_path(file, folder)))
        )
        if reason:
            found.append(f"privacy.audit_log {file.privacy.audit_log!r}: {reason}")
    if data is not None and "policy" not in invalid and len(data) < file.policy.min_records:
        found.append(f"policy.min_records is {file.policy.min_records}, and here are {len(data)} examples")
    if file.online:
        found += (faults := kit_faults(folder, None if "name" in invalid else file.name))
        if not faults and "policy" not in invalid:
            found += server_faults(file.policy, StartupKit(folder / KIT_FOLDER).authority_fingerprint)
    own_schema = schema or NO_SCHEMA
    return FolderCheck(
        file, require_spec, data, model, compute, tuple(found), "; ".join(unreported), own_schema
    )


def _read_valid_sections(table: dict[str, Any]) -> tuple[NodeFile, list[str], set[str]]:
    """Return a table's configuration, its faults, and the invalid sections, which get defaults."""
    faults: list[str] = []
    invalid: set[str] = set()
    while True:
        try:
            return read_table(NodeFile, table), faults, invalid
        except ArgumentError as error:
            faults.append(str(error))
            if isinstance(error, UnknownName):
                path = str(error.value)
            else:
                path = error.name.partition("[")[0]
                invalid.add(path.partition(".")[0])
            if not _remove_key(table, path.split(".")) and path != "name":
                table = {}  # avoid an endless loop
            table.setdefault("name", "unnamed")


def _remove_key(table: Any, path: list[str]) -> bool:
    """Remove one value from a table; return whether it existed."""
    for section in path[:-1]:
        table = table.get(section) if isinstance(table, dict) else None
    return isinstance(table, dict) and table.pop(path[-1], None) is not None


def rules_by_refused_query(
    file: NodeFile, passes_gradients: bool, queries: Mapping[str, Query]
) -> dict[str, str]:
    """Return the rule that refuses each query that this node never accepts, by name.

    Args:
        file: the node's configuration.
        passes_gradients: whether gradients pass through its model.
        queries: declared queries.
    """
    rules = {}
    for name, query in queries.items():
        rule = policy_refusal(file.policy, query)
        if PRIVATE_DATA in query.released_kinds().values():
            rule = "private data: they never leave a real node, whatever its policy"
        if rule is None:
            rule = query.sum_fault(file.local.optimizer)
        if rule is None and 0 < file.policy.max_rows < query.rows:
            rule = f"max_rows: {file.policy.max_rows}, and it has {query.rows}"
        if rule is None and query.differentiable and not passes_gradients:
            rule = PREDICTION_ONLY
        if rule is not None:
            rules[name] = rule
    return rules
