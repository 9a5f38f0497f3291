"""The data of one owner, from where they are kept to tensors as a server declares.

Labels given as names count by name, so that a node may lack classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedstill.core.dataset import TensorData, check_pixels
from fedstill.core.errors import ArgumentError, DataError, RunNeeded
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.core.user_functions import OWN, find, first_line, is_path
from fedstill.data import node_readers
from fedstill.data.array_data import ArrayData
from fedstill.data.config import DATA, MEAN, STD, DataConfig
from fedstill.data.csv_tables import Columns
from fedstill.data.image_files import UnequalSizes, UnreadableImage
from fedstill.data.input_spec import InputSpec, check_examples
from fedstill.data.loader import CLASSIFICATION
from fedstill.data.node_data_config import SOURCES, PrivateConfig
from fedstill.data.pil_images import arrays_of
from fedstill.data.preparation import with_channels
from fedstill.data.python_examples import inputs_and_targets
from fedstill.data.raw import Raw, from_arrays
from fedstill.data.tables import read_schema
from fedstill.data.user_data import SERVING, read
from fedstill.tasks import TASKS, TaskConfig

OF_SCHEMA = {"category": "tabular", "number": "regression", "time until an event": "survival"}  # tasks


def load(
    config: PrivateConfig,
    folder: Path,
    spec: InputSpec | None = None,
    task: TaskConfig | None = None,
    *,
    most: int = 0,
) -> tuple[TensorData, InputSpec]:
    """An owner's examples, as a server declares, without those for testing, and their spec.

    Args:
        folder: from which paths count.
        spec: what the server declares; None takes shape and classes from the owner's schema where one is
            named, else from the data themselves, and the usual normalisation.
        task: what the data are for, where no spec says so; None is what the owner's schema teaches, without
            one images of classes.
        most: bytes that they may take where the spec makes them larger; 0 is no limit.

    Raises:
        ArgumentError: an option that cannot be followed.
        RunNeeded: neither spec nor task, and data that are no images of classes; or no spec, and data that
            only a run can tell the spec of.
        DataError: data that cannot be read or are of another spec.
        TooLarge: they would take more than that.
    """
    rows = task is None or task.makes.form == "rows"
    if spec is None and rows and (own := own_schema(config, folder)):
        spec = InputSpec.of_schema(task or TASKS[OF_SCHEMA[own.teaches]](), own)
    if spec is not None or task is not None:
        return _loaded(config, folder, spec, task or CLASSIFICATION, most)
    locate(config, folder)
    try:
        return _loaded(config, folder, None, CLASSIFICATION, most)
    except (RunNeeded, UnreadableImage):
        raise
    except (ArgumentError, DataError) as error:
        told = "if they are no images of classes, name the run, which says what the task is"
        here = "its own data must be here, or of tables its schema; or name that in data.schema"
        raise RunNeeded(f"{error}; {told} ({here})") from error


def _loaded(
    config: PrivateConfig, folder: Path, spec: InputSpec | None, task: TaskConfig, most: int
) -> tuple[TensorData, InputSpec]:
    what = f"data {config.path!r}" if config.source in SOURCES else f"data {config.source!r}"
    asked = task if spec is None else spec.task
    if spec is None:
        _check_told(config, asked, what)
    if config.source != "tensors":
        _check_options(config, asked)
    path = locate(config, folder)
    if spec is None:
        raw, spec = _with_own_spec(config, path, folder, asked, what)
        data = node_readers.of_images(raw, config, spec, what)
    elif config.source == "tensors":
        data = node_readers.of_tensors(config, path, spec, what)
    elif asked.targets == "texts":
        data = node_readers.of_texts(config, path, spec, what, most)
    elif asked.makes.form == "rows":
        data = node_readers.of_rows(config, path, spec, what, most)
    elif asked.targets == "instances":
        data = node_readers.of_pictures(config, path, spec, what, most)
    else:
        raw = _read(config, path, folder, asked, spec, most)
        data = node_readers.of_images(raw, config, spec, what, most)
    spec.make_task().check(data, what)
    return data, spec


def check_values(config: PrivateConfig, data: TensorData, spec: InputSpec) -> None:
    """Refuse (DataError) tensors of images that are no pixels under the spec's normalisation.

    For the owner, and not as a run begins: a server that declared one normalisation after another would learn
    the least and the largest value, by which of them were refused.
    """
    if config.source == "tensors" and spec.task.makes.form == "images":
        check_pixels(spec.make_task().pictured(data), spec.mean, spec.std, f"data {config.path!r}")


def own_schema(config: PrivateConfig, folder: Path) -> Schema:
    """The only schema that an owner lets a run have; without columns: any.

    Raises:
        ArgumentError, DataError: there is no such file, or it describes none.
    """
    return read_schema(folder / Path(config.schema).expanduser()) if config.schema else NO_SCHEMA


def locate(config: PrivateConfig, folder: Path) -> Path:
    """The file or folder that a configuration means.

    Raises:
        ArgumentError: the owner's own function cannot be imported.
        DataError: there is no such file or folder.
    """
    path = folder / Path(config.path).expanduser()
    if config.source not in SOURCES:  # what the path means is the function's own business
        _function(config, folder)
    elif config.source in ("folder", "nifti"):
        if not path.is_dir():
            raise DataError(f"data.path {config.path!r}: there is no folder {path}")
    elif not path.is_file():
        raise DataError(f"data.path {config.path!r}: there is no file {path}")
    return path


# --- what can be followed -----------------------------------------------------------------------------


def _check_options(config: PrivateConfig, task: TaskConfig) -> None:
    targets = task.targets
    serving = SERVING[targets]
    of_files = targets == "instances" or task.makes.form in ("texts", "rows")
    if config.source not in serving and (config.source in SOURCES or of_files):
        told = {"texts": ": columns text and label", "rows": ": the columns of the run's schema"}
        columns = told.get(task.makes.form, "")
        allowed = f"{', '.join(serving[:-1])} or {serving[-1]}" if len(serving) > 1 else serving[0]
        raise ArgumentError("data.source", config.source, f"{allowed} for task {task.called}{columns}")
    rows = task.makes.form == "rows"
    idle = {
        "channels": targets in ("class", "instances") or rows,
        "fit": targets == "instances" or rows,
        "vocabulary": targets != "texts",
    }
    for name, unused in idle.items():
        if unused and (value := getattr(config, name)):
            shown = list(value) if isinstance(value, tuple) else value
            none = "false" if value is True else "empty"
            raise ArgumentError(f"data.{name}", shown, f"{none} for task {task.called}: leave it out")


def _check_told(config: PrivateConfig, task: TaskConfig, what: str) -> None:
    """Refuse (RunNeeded) to go without a run where only a run can say what the data should be."""
    told = task.targets in ("class", "map", "image") or (task.targets == "labels" and config.source == "npz")
    if not told or config.source == "tensors" or (config.fit and task.targets != "class"):
        told_of = f"its input spec for task {task.called} is the run's to say"
        raise RunNeeded(f"{what}: {told_of}, and the run's own data are not here")


def _with_own_spec(
    config: PrivateConfig, path: Path, folder: Path, task: TaskConfig, what: str
) -> tuple[Raw, InputSpec]:
    try:
        raw = _read(config, path, folder, task)
    except UnequalSizes as error:
        if not config.fit:
            raise
        told = "its images have several sizes, which fit brings to a run's: name the run"
        raise RunNeeded(f"{what}: {told}") from error
    classes = raw.classes
    if task.targets == "class":
        raw.require_every_class(what)
        if len(classes) < 2:
            told = "one class does not tell which others there are: name the run, which does"
            raise RunNeeded(f"{what}: {told}")
    channels, height, width = with_channels(raw.images[:1], config.channels).shape[1:]
    return raw, InputSpec(task, classes, (channels, height, width), (MEAN,) * channels, (STD,) * channels)


# --- images -------------------------------------------------------------------------------------------


def _read(
    config: PrivateConfig,
    path: Path,
    folder: Path,
    task: TaskConfig,
    spec: InputSpec | None = None,
    most: int = 0,
) -> Raw:
    if config.source not in SOURCES:
        arrays = _called(config, path, folder)
        return from_arrays(Path(config.source), arrays, task.targets, gaps=True)
    fitted = spec is not None and config.fit and spec.shape[1] == spec.shape[2]
    # Image by image: by what all have together one picture more would change every other one's last digits.
    own = spec is not None and config.fit and not config.channels and spec.shape[0] in (1, 3)
    return read(
        path,
        config.source,
        task.targets,
        size=spec.shape[1] if spec is not None and fitted else 0,
        slices=config.slices,
        gaps=True,
        columns=Columns(config.label, config.image, config.group),
        classes=spec.classes if spec is not None else (),
        shape=spec.shape if spec is not None else (),
        channels=spec.shape[0] if spec is not None and own else 0,
        **({} if spec is None else {"counted": partial(check_examples, spec=spec, most=most)}),
    )


def _called(config: PrivateConfig, path: Path, folder: Path) -> dict[str, Any]:
    """What the owner's own function gives: a pair, a mapping of arrays as in an npz, or a torch data set."""
    function = _function(config, folder)
    try:
        given = function(path)
        if not isinstance(given, Mapping):
            images, labels = given if isinstance(given, tuple) else _pairs(given)
            given = {"images": images, "labels": labels}
        return arrays_of(given, "its data")
    except DataError as error:
        raise DataError(f"data.source {config.source!r}: {error}") from error
    except OWN as error:
        told = f"the function fails, or gives no (images, labels): {first_line(error)}"
        raise DataError(f"data.source {config.source!r}: {told}") from error


def _pairs(data: Any) -> tuple[Any, Any]:
    if isinstance(data, TensorData):
        return data.inputs.numpy(), data.targets.numpy()
    images, labels = inputs_and_targets(data, "its data")
    return images, [label if isinstance(label, str) else int(label) for label in labels]


def _function(config: PrivateConfig, folder: Path) -> Any:
    """What gives an owner's own data from a path: a function, or a class of :class:`ArrayData`."""
    named = not is_path(config.source)
    found: Any = DATA[config.source] if named else find(config.source, folder, "data.source")
    if not isinstance(found, type) or not issubclass(found, DataConfig):
        return found
    if not issubclass(found, ArrayData):
        raise ArgumentError("data.source", config.source, "a data set that is arrays, below ArrayData")
    kind = found
    return lambda path: kind(root=str(path)).arrays()
