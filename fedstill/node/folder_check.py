"""Checks of a node's folder: everything that `fedstill node check` finds, one line for each fault."""

from __future__ import annotations

import importlib.util
import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.config_tables import read_table
from fedstill.core.dataset import TensorData
from fedstill.core.errors import (
    ArgumentError,
    DeployError,
    FedstillError,
    UnknownInputFormatError,
    UnknownName,
)
from fedstill.core.registry import Registry, searching_in
from fedstill.core.startup_kit import KIT_FOLDER, StartupKit
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.data import node_data
from fedstill.data.augmentation import require_augmentable
from fedstill.data.data_spec import DataSpec
from fedstill.data.node_data import NodeDataConfig
from fedstill.data.stratified_sampling import largest_group_size
from fedstill.models import module_check
from fedstill.node.admission import RunFacts, allowed_servers
from fedstill.node.features import own_features
from fedstill.node.folder_log import audit_path, read_total_spent, unwritable_reason
from fedstill.node.model_setup import check_name_and_weights, load_perceptual, make_model
from fedstill.node.node_file import NodeFile
from fedstill.node.noise_calibration import uncalibrated_noise
from fedstill.node.owner_folder import FILE, make_compute, read_node_table, read_secret
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import PrivacyConfig
from fedstill.protocol.feature_plan import FeaturePlan
from fedstill.protocol.method import METHODS
from fedstill.protocol.recalibration import QUERY
from fedstill.tasks import TASKS, Task, TaskConfig

T = TypeVar("T")


def require_valid(file: NodeFile, data: TensorData, model: nn.Module, task: Task) -> None:
    """Refuse to serve with an augmentation, a policy or protection that `fedstill node check` calls a fault,
    naming all faults of the policy and protection.

    A budget without a mechanism is not refused here: the gate then refuses each query that releases
    anything.
    """
    require_augmentable(task, tuple(data.inputs.shape[1:]), file.local.augment, "local.augment")
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
        features: features of the owner's backbone; None: the model takes the data themselves.
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
    schema: TableSchema = NO_SCHEMA
    features: FeaturePlan | None = None

    @property
    def model_spec(self) -> DataSpec | None:
        """Spec of what the model takes: the data, or features of them."""
        if self.spec is None or self.features is None:
            return self.spec
        return self.spec.on_features(self.features.model_width)


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
    model, features = None, None
    if require_spec is None:
        attempt("model", lambda: check_name_and_weights(file, folder))
    else:
        model_spec: DataSpec | None = require_spec
        if file.features:
            features = attempt("features", lambda: own_features(file, folder, require_spec))
            model_spec = None if features is None else require_spec.on_features(features.model_width)
        if model_spec is not None:
            model = attempt("model", lambda: make_model(file, folder, model_spec))
            run_task, shape, mode = model_spec.make_task(), model_spec.shape, file.local.augment
            attempt("local", lambda: require_augmentable(run_task, shape, mode, "local.augment"))
        attempt("model", lambda: load_perceptual(file, folder, require_spec))
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
        file, require_spec, data, model, compute, tuple(found), "; ".join(unreported), own_schema, features
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


# --- policy and privacy options ---------------------------------------------------------------------


def policy_faults(policy: PolicyConfig) -> list[str]:
    """Return plug-ins that are not installed, and queries that no method declares, as misspelled ones."""
    faults = []
    for name in policy.plugins:
        errors = [error for error in (_import_error(METHODS, name), _import_error(TASKS, name)) if error]
        if len(errors) == 2:  # neither a method nor a task
            faults.append(f"policy.plugins: {errors[name in TASKS and name not in METHODS]}")
    if faults:
        return faults
    names = [name for name in policy.queries if name != "*"]
    if not names:  # finding all queries of all methods takes time
        return faults
    methods = allowed_methods(policy)
    if any(name not in METHODS.builtin for name in methods):
        return faults  # a custom method may declare others
    known_names = known_queries(methods)
    unknown = [name for name in names if name not in known_names]
    return [str(UnknownName("query of policy.queries", name, sorted(known_names))) for name in unknown]


def allowed_methods(policy: PolicyConfig) -> list[str]:
    """Return the plug-ins of a policy that are methods; all others are tasks."""
    return [name for name in policy.plugins if _import_error(METHODS, name) is None]


def _import_error(registry: Registry[Any], name: str) -> FedstillError | None:
    try:
        registry[name]
    except FedstillError as error:
        return error
    return None


def known_queries(methods: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of all queries of the package's own methods, of the given ones, and of
    recalibration."""
    return frozenset({QUERY}).union(*(METHODS[name].query_names for name in (*METHODS.builtin, *methods)))


def privacy_faults(
    config: PrivacyConfig,
    data: TensorData | None,
    model: nn.Module | None,
    data_config: NodeDataConfig | None = None,
) -> list[str]:
    """Return reasons why a mechanism protects nothing, or does not work with these data or this model, if
    known.

    Slices of NIfTI volumes are scaled by their whole volume, so one slice by itself is not a record:
    without it all others of its volume would differ.
    """
    if not config.protects:
        if math.isinf(config.tightest_epsilon_budget):
            return []
        expected = "a mechanism if a budget is set: without a guarantee nothing can be released"
        return [str(ArgumentError("privacy.mechanism", config.registered_name, expected))]
    errors = []
    part, main = next(iter(config.noise_option_tables.items()), ("", None))
    is_noisy = main is None or main.noise is not None or uncalibrated_noise(main) > 0
    if not is_noisy and math.isinf(config.tightest_epsilon_budget):
        expected = f"a finite value, from which privacy.{part}.noise is calibrated"
        errors.append(ArgumentError("privacy.epsilon", config.epsilon, expected))
    errors += config.faults()
    if data is not None:
        if config.group_size > 1 and data.groups is None:
            expected = "1 without data.group"
            errors.append(ArgumentError("privacy.group_size", config.group_size, expected))
        volumes = data_config if data_config is not None and data_config.source == "nifti" else None
        if volumes and (volumes.group != "patient" or config.group_size == 1 < largest_group_size(data)):
            expected = "2 or more, with data.group = 'patient': slices of a volume are scaled together"
            errors.append(ArgumentError("privacy.group_size", config.group_size, expected))
        for name, delta in (("delta", config.delta), ("total_delta", config.total_delta)):
            if delta is not None and delta * len(data) >= 1:
                expected = f"well below 1 / {len(data)}, one over the number of records"
                errors.append(ArgumentError(f"privacy.{name}", delta, expected))
    faults = [str(fault) for fault in errors]
    if "model" in config.dp_trained and model is not None:
        try:
            module_check.reject_dp_incompatible(model, "the model")
        except FedstillError as error:
            faults.append(f"privacy.mechanism {config.registered_name}: {error}")
    return faults


# --- startup kit ------------------------------------------------------------------------------------


def server_faults(policy: PolicyConfig, authority: str) -> list[str]:
    """Return the fault of a policy that admits no run of the kit's own server; empty if it does."""
    if allowed_servers(RunFacts(policy, authority)) is None:
        return []
    expected = f"a list with {authority}, the authority of the startup kit, or an empty one"
    return [str(ArgumentError("policy.allowed_servers", list(policy.allowed_servers), expected))]


def kit_faults(folder: Path, name: str | None) -> list[str]:
    """Return the faults of the kit in a node's folder; the node's name, if known, must be the kit's."""
    if importlib.util.find_spec("nvflare") is None:
        return ["NVIDIA FLARE is not installed: pip install 'fedstill[flare]'"]
    kit = StartupKit(folder / KIT_FOLDER)
    if not kit.path("fed_client.json").is_file():
        advice = "copy yours there, or set online = false"
        return [f"{kit.folder} holds no startup kit: {advice}"]
    files = [kit.path(file) for file in ("client.crt", "client.key", "rootCA.pem")]
    faults = [f"{path} is missing: copy the startup kit there again" for path in files if not path.is_file()]
    try:
        if not faults:
            kit.require_valid()
        kit.server_address("client")
        if name not in (None, kit.node_name):
            faults.append(str(ArgumentError("name", name, f"{kit.node_name!r}, as the startup kit has it")))
    except DeployError as error:
        faults.append(str(error))
    return faults


def rounding_warning(privacy: PrivacyConfig) -> str | None:
    """Return the risk of DP-SGD without ``privacy.isolate_rounding``, in one line; None: it is not used."""
    if not privacy.protects or not privacy.dp_trained or privacy.isolate_rounding:
        return None
    return (
        "privacy.isolate_rounding = false: the last digits of a DP-SGD step may depend on several records, "
        "which a hostile server could amplify; set it to true unless you trust the server"
    )


OTHERS_RIGHTS = 0o077  # rights of group and others
PRIVATE_FILES = (
    "features",
    "node.key",
    "node.log",
    "node.pid",
    "node.pub",
    "public",
    "requests",
    "runs",
    "salt",
    "summed.json",
)
AUDIT_SUFFIXES = ("", "-wal", "-shm", ".head", ".head.part")  # suffixes of an audit log's files


# --- rights of files --------------------------------------------------------------------------------


def readable_files_warning(folder: Path, audit: Path) -> str | None:
    """Return files that others of this machine can read, and the command that closes them, in one line;
    None: none.

    fedstill creates files for their owner only. Older or copied files are not closed silently: others may
    have read them already, and the owner should know. The node does not stop for them, as it does for a
    secret or a key that others can read, since refusing would not undo that. The owner decides about
    ``node.toml``, data and model.
    """
    files = [folder / name for name in PRIVATE_FILES]
    files += [audit.with_name(audit.name + end) for end in AUDIT_SUFFIXES]
    open_paths = [path for path in files if any(map(_is_open, _walk(path)))]
    names, commands = [path.name for path in open_paths], []
    if _is_open(folder):
        names.insert(0, f"{folder}/")
        commands.append(shlex.join(["chmod", "go=", str(folder)]))
    if open_paths:
        commands.append(shlex.join(["chmod", "-R", "go=", *map(str, open_paths)]))
    return f"open to others of this machine: {', '.join(names)}; {' && '.join(commands)}" if names else None


def _walk(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        yield from path.rglob("*")


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & OTHERS_RIGHTS)
    except FileNotFoundError:  # it does not exist, or not any more while a node works
        return False
