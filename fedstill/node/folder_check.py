"""Checks of a node's folder: everything that `fedstill node check` finds, one line for each fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.config_tables import read_table
from fedstill.core.dataset import TensorData
from fedstill.core.errors import ArgumentError, FedstillError, UnknownInputFormatError, UnknownName
from fedstill.core.registry import searching_in
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.data import node_data
from fedstill.data.data_spec import DataSpec
from fedstill.node.audit_log_inspection import audit_path, read_total_spent, unwritable_reason
from fedstill.node.node_file import NodeFile
from fedstill.node.owner_folder import FILE, make_compute, read_node_table, read_secret
from fedstill.node.owner_model import check_name_and_weights, load_perceptual, make_model
from fedstill.node.policy_faults import policy_faults, privacy_faults
from fedstill.node.startup_kit_faults import kit_faults, server_faults
from fedstill.tasks import TaskConfig

T = TypeVar("T")


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
        table = read_node_table(folder)
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
