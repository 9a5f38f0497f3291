"""The Python API: ``distil``, a federation of your own modules and data, one each a node, in ten lines."""

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

# A DataFrame has no type here: pandas and polars are nobody's need.
Examples = TensorData | tuple[torch.Tensor, torch.Tensor] | torch.utils.data.Dataset[Any] | Any


@dataclass(frozen=True)
class Outcome:
    """Result of a federation; printed, it is a summary of a few lines.

    Args:
        student: the central model, the module that was given; None where the method has none, as those whose
            nodes keep a part of their model.
        result: accuracies in percent, bytes, queries, seconds: what ``result.json`` holds.
        folder: the run's files; None: none were kept.
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
    """Train one student from data and models that stay at their nodes.

    Args:
        data: each node's private examples: ``(inputs (N, C, H, W), labels (N,))``, labels as numbers from 0
            or, where ``classes`` names them, texts; a map-style
            torch data set of ``(input, label)`` or of ``{"image": input, "label": label}``, a ``DataLoader``
            of such a one, a Hugging Face ``datasets.Dataset`` of images and labels, or
            :class:`~fedstill.core.dataset.TensorData`. Inputs may be images of PIL; their pixels, and those
            of Hugging Face data sets, are normalized here. Other tasks
            have other targets: a class for each pixel ``(N, H, W)``, findings ``(N, classes)`` of 1, 0 and
            -1 (unknown), images ``(N, 1, H, W)``; of texts, inputs are token ids ``(N, L)``, 0 for padding;
            of tables (tasks "tabular", "regression" and "survival"), features ``(N, F)``, or DataFrames with
            a schema, with a class, a number or, for survival, ``(N, 2)`` each: the time of follow-up in
            intervals, and 1 where the event ended it.
        models: each node's own module, of any architecture; trained in place. Or a model that is there
            already and only answers: an estimator, an ONNX session, a function, or a name as in nodes.models
            (a .skops or .onnx file, an endpoint's address); with what must be known to read it in an
            :class:`~fedstill.models.model_config.CustomModel` (docs/own-model.md).
        student: the server's module; trained in place.
        test: examples that no node has.
        classes: number of classes, or their names, by which reports call them; every module gives
            ``(B, classes)``, or ``(B, classes, H, W)`` where each pixel has one, or ``(B, 1, H, W)`` where
            outputs are images.
        task: what is learned: a name, as in ``fedstill list``, or ``module:Name``, or a task with options, as
            ``SegmentationConfig(dice=0.5)``.
        method: which method, with its options, as ``FedAvg(rounds=10)``, or its name, as ``"fedkd"``, for
            its defaults; None is FedIOD with its own.
        local: how nodes train their models; None is the default.
        engine: device, precision, stacked or one by one; None is the default.
        names: of the nodes; none is ``node-0``, ``node-1``...
        policies: of the nodes' gates; none is ``PolicyConfig()`` for each, which lets only outputs pass:
            methods that share parameters need ``PolicyConfig(outputs_only=False)``.
        privacies: one a node: how it protects its records, and its budget, as
            ``DPSGD(epsilon=3.0)``; none is no mechanism, and no guarantee.
        mean, std: how inputs were normalized, per channel, ``(pixel - mean) / std`` of pixels from 0 to 1.
            None is 0.5 and 0.5: inputs from -1 to 1.
        seed: of every random draw.
        public: public inputs ``(N, C, H, W)``, or examples with labels of the same classes, for methods
            that need some.
        vocabulary: how many token ids there are, where inputs are texts.
        schema: what columns tables have, or a file that says so (docs/data.md): by it DataFrames become
            features, and methods that make rows know what rows may be. None: features are any numbers.
        perceptual: a .safetensors file of VGG-16 or VGG-19 weights, named as torchvision names them, for
            methods that compare images by features; "" is none: they do without.
        every: the server's steps or rounds between two evaluations; 0 is only at the end, None ten times.
        link: in which form tensors would travel, and what is done about a node that answers nonsense; None
            is the default: full precision, and the run stops.
        out: a new folder for the run's files and report, or None to keep none. If a run with the same
            arguments was stopped in this folder, it goes on. (Networks must then start from the same
            weights: a state that was saved replaces them, but one that was not cannot.)
        track: who else hears the run's metrics: names, as ``"tensorboard"``, or a
            :class:`~fedstill.track.Tracker` of your own; they write into ``out``.
        progress: show how far it is on standard error: bars on a terminal, else (in notebooks, too) lines.

    Raises:
        FedstillError: data, models, policies and method do not fit together; one line says why.

    Three clinics with digits of their own, and three kinds of model:

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
