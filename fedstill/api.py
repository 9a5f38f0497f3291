"""The Python API: :func:`distil` trains a student from your own modules and data, one per node."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstill.core.compute import EngineConfig, torch_defaults
from fedstill.core.config_tables import as_table
from fedstill.core.dataset import TensorData, as_tensor
from fedstill.core.errors import ArgumentError, DataError, RunFolderError, called_from
from fedstill.core.names import TEXTS, class_names
from fedstill.core.progress import Bars
from fedstill.core.run_writer import OBJECTS, folder_of, make_folder, write_text
from fedstill.core.table_schema import NO_SCHEMA, Schema
from fedstill.data import python_data
from fedstill.data.public import PublicData
from fedstill.data.python_data import extract_inputs_and_targets, to_input_tensor, to_target_tensor
from fedstill.data.tables import encode_frame, is_data_frame, read_schema
from fedstill.federation.link_config import LinkConfig
from fedstill.methods.fediod import FedIOD
from fedstill.models import custom_model
from fedstill.models.hugging_face import adapt
from fedstill.models.interface import Interface
from fedstill.models.model_config import CustomModel, ModelConfig, read_model_config
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.config import PrivacyConfig
from fedstill.protocol.digests import digest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS
from fedstill.report import write_report
from fedstill.report.run_summary import run_summary
from fedstill.runs.distil_arguments import check_arguments
from fedstill.runs.run import REHEARSED, check_folder, finish, noted
from fedstill.runs.setting import Setting
from fedstill.runs.simulation import Simulation
from fedstill.tasks import TASKS, Task, TaskConfig
from fedstill.track import Tracker
from fedstill.track.listeners import Listeners

# DataFrames have no type here, as pandas and polars are optional.
Examples = TensorData | tuple[torch.Tensor, torch.Tensor] | torch.utils.data.Dataset[Any] | Any


@dataclass(frozen=True)
class Outcome:
    """Result of :func:`distil`. Its ``repr`` is a summary of a few lines.

    Args:
        student: the trained student, which is the module passed to :func:`distil`, in evaluation mode. None if
            the method trains no whole global model, for example if nodes keep a part of their model.
        result: content of ``result.json``: metrics in their units (accuracy in percent), transmitted bytes,
            numbers of queries, seconds, and the privacy cost. The keys are listed in
            ``docs/reference/files.md``.
        folder: folder with the run's files and its report, or None if no files were written.

    Example:
        >>> outcome = fedstill.distil(data, models, student, test, 10)  # doctest: +SKIP
        >>> outcome.result["accuracy"], outcome.result["bytes"]["up"]  # doctest: +SKIP
        (96.4, 1843200)
        >>> outcome.student(images).argmax(1)  # doctest: +SKIP
        tensor([3, 8, 1])
    """

    student: nn.Module | None
    result: Mapping[str, Any]
    folder: Path | None = None

    def __repr__(self) -> str:
        return f"Outcome of {run_summary(self.result, self.folder)}"


@called_from("distil")
@torch_defaults()
def distil(
    data: Sequence[Examples],
    models: Sequence[Any],
    student: nn.Module,
    test: Examples,
    classes: int | Sequence[str],
    *,
    task: str | TaskConfig = "classification",
    method: Any = None,
    local: LocalConfig | None = None,
    engine: EngineConfig | None = None,
    names: Sequence[str] = (),
    policies: Sequence[PolicyConfig] = (),
    privacies: Sequence[PrivacyConfig] = (),
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    seed: int = 0,
    public: Examples | torch.Tensor | None = None,
    vocabulary: int = 0,
    schema: Schema | str | Path | None = None,
    perceptual: str | Path = "",
    every: int | None = None,
    link: LinkConfig | None = None,
    out: str | Path | None = None,
    track: Sequence[str | Tracker] = (),
    progress: bool = False,
) -> Outcome:
    """Train a student by federated distillation from the models and private data of several nodes.

    It simulates a federation in one process. Each node trains its own model on its own data. The server then
    queries the nodes and trains the student from their responses, as the method defines. All releases of a node
    pass its gate, which enforces its policy, applies its privacy mechanism and accounts for the cost. All
    arguments are checked before training. To run presets and TOML files from Python, see
    :func:`fedstill.run_preset`.

    Examples (of ``data``, ``test`` and ``public``) may be

    - a tuple ``(inputs, targets)`` of tensors or arrays,
    - a map-style :class:`torch.utils.data.Dataset` of ``(input, target)`` or of ``{"image": input, "label":
      target}``, or a ``DataLoader`` of one,
    - a Hugging Face ``datasets.Dataset`` of images and labels,
    - a pandas or polars DataFrame, for tables with a ``schema``,
    - a :class:`fedstill.TensorData`.

    Shapes depend on the task:

    ============== ========================= ==================================================================
    inputs         shape                     values
    ============== ========================= ==================================================================
    images         ``(N, C, H, W)``          float, normalized; PIL images and those of Hugging Face data sets
                                             are normalized by ``mean`` and ``std``
    texts          ``(N, L)``                token ids from 0 to ``vocabulary - 1``; 0 is padding
    tables         ``(N, F)``                float features, or DataFrames with a ``schema``
    ============== ========================= ==================================================================

    ============== ========================= ==================================================================
    targets        shape                     values
    ============== ========================= ==================================================================
    class          ``(N,)``                  indices from 0, or class names
    multi-label    ``(N, classes)``          1 (present), 0 (absent) or -1 (unknown)
    segmentation   ``(N, H, W)``             class index of each pixel
    reconstruction ``(N, 1, H, W)``          image
    regression     ``(N,)``                  number
    survival       ``(N, 2)``                follow-up time in intervals; 1 if the event ended it, else 0
    ============== ========================= ==================================================================

    Args:
        data: private examples, one entry per node.
        models: one model per node, of any architecture. A module is trained in place. A model that can only
            predict may be an estimator, an ONNX session, a function, or a string as in ``nodes.models`` (path
            of a .skops or .onnx file, address of an endpoint), also in a :class:`fedstill.CustomModel` with
            its input format.
        student: the server's module, trained in place.
        test: examples for evaluation that no node has.
        classes: number of classes (1 or more) or their names. Modules return ``(B, classes)`` logits,
            ``(B, classes, H, W)`` for segmentation, ``(B, 1, H, W)`` for reconstruction.
        task: a name from ``fedstill list tasks``, ``"module:Name"`` of a custom task, or a task's config such
            as ``SegmentationConfig(dice=0.5)``. Default: ``"classification"``.
        method: a method with its options such as ``FedAvg(rounds=10)``, or the name of a method, such as
            ``"fedkd"``, with its default options. Default: ``FedIOD()``.
        public: public data for methods that need them: inputs only, or examples with labels of the same
            classes. Default: None.
        local: options of the nodes' local training. Default: ``LocalConfig()``.
        names: names of the nodes. Default: ``node-0``, ``node-1``, ...
        policies: one policy per node, for its gate. The default ``PolicyConfig()`` releases only outputs of
            models. Methods that share parameters need ``PolicyConfig(outputs_only=False)``.
        privacies: one privacy mechanism per node, such as ``DPSGD(epsilon=3.0)``. Default: none, without a
            guarantee.
        mean, std: normalization of the inputs, one value per channel: ``(pixel - mean) / std`` of pixels from 0
            to 1; ``std`` above 0. Default: 0.5 and 0.5, inputs from -1 to 1.
        vocabulary: number of token ids, for texts. Default: 0.
        schema: columns of the tables, or the path of a TOML schema. It converts DataFrames to features, and
            methods that generate rows respect it. Default: None, features are any numbers.
        perceptual: path of a .safetensors file of VGG-16 or VGG-19 weights with torchvision's names, for
            perceptual losses. Default: ``""``, these losses are off.
        engine: device, precision, and whether equal models are stacked. Default: ``EngineConfig()``.
        link: wire format of the tensors, and rules for nodes that fail. Default: ``LinkConfig()``, full
            precision, the run stops.
        seed: non-negative seed of all random draws. Default: 0.
        every: steps or rounds between two evaluations; 0 evaluates only at the end. Default: None, ten
            evaluations.
        out: folder for the run's files and its report; it must be new or empty. A run that was interrupted in
            this folder with the same arguments resumes, if its networks start from the same weights. Default:
            None, no files are written.
        track: trackers of metrics: names such as ``"tensorboard"``, or custom :class:`fedstill.track.Tracker`
            objects. They write into ``out``, which is required. Default: none.
        progress: show progress on standard error, as bars on a terminal and as lines elsewhere. Default: False.

    Returns:
        The student, the run's metrics and costs, and its folder.

    Raises:
        ArgumentError: an argument has an invalid value. The message names it.
        DataError: examples do not fit the task.
        ModelError: a model does not accept the inputs or returns another shape than the task needs.
        MethodRefused: the method cannot learn the task, or lacks public data or an equal architecture.
        QueryRefused: a node's policy forbids a query of the method.
        RunFolderError: ``out`` holds another run or other files.
        FedstillError: base class of all of these.


    Example:
        Three clinics with models of three architectures:

    >>> import fedstill, torch
    >>> from sklearn.datasets import load_digits
    >>> x, y = load_digits(return_X_y=True)
    >>> x, y = torch.tensor(x / 8 - 1).float().view(-1, 1, 8, 8), torch.tensor(y)
    >>> clinics = [(x[:400], y[:400]), (x[400:800], y[400:800]), (x[800:1400], y[800:1400])]
    >>> from fedstill.models import LeNet5, MLP, SmallCNN
    >>> models = [SmallCNN((1, 8, 8), 10), LeNet5((1, 8, 8), 10), MLP((1, 8, 8), 10)]
    >>> student = SmallCNN((1, 8, 8), 10, width=16)
    >>> quick = dict(method=fedstill.FedIOD(steps=3), local=fedstill.LocalConfig(epochs=2))
    >>> outcome = fedstill.distil(clinics, models, student, (x[1400:], y[1400:]), 10, **quick)
    >>> sorted(outcome.result["bytes"]["by_kind"])
    ['critic', 'gradients', 'inputs', 'label counts', 'logits']
    """
    check_arguments(locals())
    if engine is not None and engine.name in REHEARSED:
        allowed = "auto, stacked or one-by-one: objects of this process; other engines run configurations"
        raise ArgumentError("engine.name", engine.name, allowed)
    seed, every = (
        int(seed),
        None if every is None else int(every),
    )  # numpy's as Python's: they are written down
    mean, std = tuple(map(float, mean)), tuple(map(float, std))
    config = TASKS[task]() if isinstance(task, str) else task
    if not isinstance(classes, Sequence):
        given = {f"data[{index}]": examples for index, examples in enumerate(data)}
        python_data.require_same_class_order({**given, "test": test})
    columns = read_schema(schema) if isinstance(schema, str | Path) else schema or NO_SCHEMA
    known = _class_names(classes, columns)
    learned = config.make(known if isinstance(classes, Sequence) else int(classes))
    if columns and len(columns.classes) != learned.classes:
        allowed = f"{len(columns.classes)}, as the schema has {', '.join(columns.classes)}"
        raise ArgumentError("classes", learned.classes, allowed)
    form = partial(_tensors, task=learned, mean=mean, std=std, schema=columns, classes=known)
    tested = form(test, "test")
    named = known or (columns.classes if columns else tuple(map(str, range(learned.classes))))
    shape = tuple(tested.inputs.shape[1:])
    to = Interface(learned, named, shape, vocabulary, mean, std, columns)
    setting = Setting(
        task=learned,
        parts=[form(examples, f"data[{index}]") for index, examples in enumerate(data)],
        models=[_model(model, to, index, seed) for index, model in enumerate(models)],
        student=student,
        test=tested,
        method=METHODS[method]() if isinstance(method, str) else method or FedIOD(),
        names=names,
        policies=policies,
        privacies=privacies,
        local=local or LocalConfig(),
        engine=engine or EngineConfig(),
        mean=mean,
        std=std,
        seed=seed,
        every=every,
        public=_public(public, form, learned),
        link=link or LinkConfig(),
        classes=known,
        vocabulary=vocabulary,
        schema=columns,
        perceptual=str(perceptual),
        learns=config,
    )
    if track and out is None:
        raise ArgumentError("track", "given", "none without out=, where trackers write")
    listeners = Listeners(track, {"method": setting.method, "local": setting.local, "seed": seed})
    simulation = Simulation(setting)
    simulation.listeners = listeners
    folder = None if out is None else folder_of(out)
    if folder is None:
        results = simulation.run(bars=Bars(progress))
    else:
        _open_folder(folder, _fingerprint(setting))
        about = {"data": {"classes": list(named)}}
        bars = noted(folder, progress, write_report)
        results = finish(simulation, about, simulation.run(folder, bars=bars), folder)
        write_report(folder)
    return Outcome(student if simulation.has_student else None, results, folder)


def _class_names(classes: int | Sequence[str], schema: Schema) -> tuple[str, ...]:
    """The names that were given, in the one form of names; none where their number was.

    Raises:
        ArgumentError: an empty name, or one given twice.
    """
    if not isinstance(classes, Sequence):
        return ()
    given = tuple(map(str, classes))
    if schema and given == schema.classes:
        return given
    try:
        return class_names(given, "classes")
    except DataError as error:
        raise ArgumentError("classes", list(given), f"each name once: {error}") from error


def _model(model: Any, to: Interface, index: int, seed: int) -> nn.Module:
    """A node's model: a module as it is, and whatever else is there already as one."""
    if isinstance(model, nn.Module) and adapt(model) is model:
        return model
    whose = f"models[{index}]"
    if isinstance(model, str | Path):
        model = read_model_config(str(model), Path(), whose)
    elif not isinstance(model, ModelConfig):
        model = CustomModel(source=model)
    return custom_model.make(model, to, Path(), seed, "model", index, whose=whose)


def _open_folder(folder: Path, fingerprint: Mapping[str, str]) -> None:
    """Make a run's folder, or find in it the same run, stopped."""
    note = folder / OBJECTS
    if not note.exists():
        check_folder(folder)
        make_folder(folder)
        write_text(note, json.dumps(fingerprint, indent=2) + "\n")
        return
    try:
        before = dict(json.loads(note.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{note} cannot be read: choose another folder") from error
    for name, value in fingerprint.items():
        if before.get(name) != value:
            raise RunFolderError(f"{folder} holds a run with another {name}: choose another folder")
    if (folder / "result.json").exists():
        raise RunFolderError(f"{folder} holds this run, finished: choose another folder to repeat it")


def _fingerprint(setting: Setting) -> dict[str, str]:
    """What must be equal for a run to be the same run, as texts."""
    kept = (
        "method local engine names policies privacies mean std seed every link classes vocabulary perceptual"
    )
    data = {f"data[{index}]": part for index, part in enumerate(setting.parts)} | {"test": setting.test}
    public = {} if setting.public is None else {"x": setting.public.inputs}
    if setting.public is not None and setting.public.labels is not None:
        public["y"] = setting.public.labels
    return {
        "task": f"{setting.task.name} {sorted(vars(setting.task).items())}",
        **{name: repr(getattr(setting, name)) for name in kept.split()},
        "schema": repr(as_table(setting.schema)),  # whose own repr is short
        **{name: digest("", {"x": part.inputs, "y": part.targets}) for name, part in data.items()},
        "public": digest("", public),
        "models": " ".join(str(model) for model in setting.models),
        "student": str(setting.student),
    }


def _public(examples: Any, form: Callable[[Any, str], TensorData], task: Task) -> PublicData | None:
    if examples is None:
        return None
    if isinstance(examples, torch.Tensor | np.ndarray):
        inputs = as_tensor(examples, "public")
        return PublicData("given", _inputs(inputs, "public", task))
    data = form(examples, "public")
    return PublicData("given", data.inputs, data.targets)


def _tensors(
    examples: Any,
    what: str,
    task: Task,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    schema: Schema = NO_SCHEMA,
    classes: Sequence[str] = (),
) -> TensorData:
    """Whatever form a user's examples have, as tensors."""
    if isinstance(examples, TensorData):
        return examples
    if is_data_frame(examples):
        if not schema or task.form != "rows":
            raise DataError(f"{what} is a DataFrame (expected one with schema=, for a task of tables)")
        return encode_frame(examples, schema, what)
    if python_data.is_hugging_face(examples):
        examples = python_data.hugging_face_tensors(examples, what, task, mean, std, classes)
    given, targets = extract_inputs_and_targets(examples, what)
    inputs, labels = to_input_tensor(given, what, mean, std), _labels(targets, what, task, classes)
    return TensorData(_inputs(inputs, what, task), _targets(labels, what, task))


def _inputs(inputs: torch.Tensor, what: str, task: Task) -> torch.Tensor:
    """Inputs in the task's own form."""
    if task.form != "texts":
        return inputs.float()
    if inputs.is_floating_point() and (inputs != inputs.round()).any():
        raise DataError(f"{what} has token ids that are no whole numbers (expected ids from 0)")
    return inputs.long()


def _labels(labels: Any, what: str, task: Task, classes: Sequence[str]) -> torch.Tensor:
    """Labels as a tensor, texts as the numbers of classes that have their names."""
    first = labels[0] if isinstance(labels, list | tuple) and labels else None
    if not isinstance(labels, np.ndarray) and not isinstance(first, str | np.str_):
        return to_target_tensor(labels, what)
    found = np.asarray(labels)
    if found.dtype.kind not in TEXTS:
        return to_target_tensor(labels, what)
    if task.kind != "class":
        raise DataError(f"{what}: labels are texts: allowed for task {task.name} are numbers")
    return torch.from_numpy(python_data.renumber_labels(found, what, classes))


def _targets(labels: torch.Tensor, what: str, task: Task) -> torch.Tensor:
    """Labels in the task's own form."""
    if task.kind == "image":
        return labels.float()
    if task.kind == "number":
        return labels.float().reshape(-1, 1)
    if task.kind == "time":
        return labels.float()
    if task.kind == "class" and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as MedMNIST's are
    if labels.is_floating_point() and (labels != labels.round()).any():
        raise DataError(f"{what} has labels that are no whole numbers (expected class indices)")
    return labels.long()
