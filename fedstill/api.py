"""The Python API: train a student from your own modules and data, or run presets and files.

:func:`distil` takes modules and data, one per node. :func:`run_preset` and :func:`compare_methods` take
presets and TOML files. All resume a run that was interrupted and read one that is finished, so that a
notebook's cell can be run again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedstill.compare import comparison_runner
from fedstill.compare.comparison import (
    COMPARISON_FILE,
    base_run,
    is_file_listing_methods,
    methods_by_label,
    plan_comparison,
    read_comparison,
    read_comparison_folder,
)
from fedstill.core.compute import Compute, EngineConfig, use_torch_defaults
from fedstill.core.config_tables import merge_tables, to_table, unflatten
from fedstill.core.dataset import TensorData, as_tensor
from fedstill.core.errors import ArgumentError, DataError, RunFolderError, caller_context
from fedstill.core.name_normalization import TEXT_DTYPE_KINDS, normalize_class_names
from fedstill.core.progress import ProgressBar
from fedstill.core.run_writer import OBJECTS_FILE, make_folder, parse_folder, read_object, write_text
from fedstill.core.table_schema import NO_SCHEMA, TableSchema
from fedstill.data import in_memory_data
from fedstill.data.in_memory_data import (
    InMemoryData,
    InMemorySplit,
    extract_inputs_and_targets,
    to_input_tensor,
    to_target_tensor,
)
from fedstill.data.public import GAUSSIAN, PublicConfig, PublicData
from fedstill.data.table_data import encode_frame, is_data_frame, read_schema
from fedstill.federation.link_config import LinkConfig
from fedstill.methods.fediod import FedIOD
from fedstill.models import custom_model
from fedstill.models.backbones import Features, RawInputs
from fedstill.models.hugging_face import wrap_hugging_face
from fedstill.models.interface import Interface
from fedstill.models.model_config import CustomModel, ModelConfig, read_model_config
from fedstill.models.pretrained_unet import PretrainedUNet
from fedstill.node.policy import PolicyConfig
from fedstill.outcome import Compared, Outcome
from fedstill.privacy.config import PrivacyConfig
from fedstill.protocol.digests import digest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.method import METHODS
from fedstill.report import write_report
from fedstill.report.comparison_page import write_comparison
from fedstill.runs import run
from fedstill.runs.build import Setting, make_nodes
from fedstill.runs.feature_space import to_feature_space
from fedstill.runs.run import progress_bars, require_empty_folder, write_simulation_result
from fedstill.runs.simulation import Simulation
from fedstill.runs.spec import EvaluationConfig, NodesConfig, RunSpec, StudentConfig, from_dict, load, to_dict
from fedstill.runs.student_file import network_name
from fedstill.tasks import TASKS, Task, TaskConfig
from fedstill.tasks.custom_loss import Loss, describe_loss, with_loss
from fedstill.track import Tracker
from fedstill.track.trackers import TrackerGroup

# DataFrames have no type here, as pandas and polars are optional.
Examples = TensorData | tuple[torch.Tensor, torch.Tensor] | torch.utils.data.Dataset[Any] | Any


@caller_context("distil")
@use_torch_defaults()
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
    local_loss: Loss | None = None,
    engine: EngineConfig | None = None,
    names: Sequence[str] = (),
    policies: Sequence[PolicyConfig] = (),
    privacies: Sequence[PrivacyConfig] = (),
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    seed: int = 0,
    public: Examples | torch.Tensor | Literal["gaussian"] | None = None,
    vocabulary: int = 0,
    schema: TableSchema | str | Path | None = None,
    perceptual: str | Path = "",
    perceptual_weights: str | Path = "",
    features: Features | None = None,
    every: int | None = None,
    link: LinkConfig | None = None,
    out: str | Path | None = None,
    track: Sequence[str | Tracker] = (),
    progress: bool = False,
) -> Outcome:
    """Train a student by federated distillation from the models and private data of several nodes.

    It simulates a federation in one process. Each node trains its own model on its own data. The server then
    queries the nodes and trains the student from their responses, as the method defines. All releases of a
    node pass its gate, which enforces its policy, applies its privacy mechanism and accounts for the cost.
    All arguments are checked before training. To run presets and TOML files from Python, see
    :func:`fedstill.run_preset`.

    Examples (of ``data``, ``test`` and ``public``) may be

    - a tuple ``(inputs, targets)`` of tensors or arrays,
    - a map-style :class:`torch.utils.data.Dataset` of ``(input, target)`` or of ``{"image": input, "label":
      target}``, or a ``DataLoader`` of one,
    - a Hugging Face ``datasets.Dataset`` of images and labels,
    - a pandas or polars DataFrame, for tables with a ``schema``,
    - a :class:`fedstill.TensorData`.

    Inputs, with N examples:

    - images: float ``(N, C, H, W)``, normalized; PIL images and those of Hugging Face data sets are
      normalized
      with ``mean`` and ``std``,
    - texts: token ids ``(N, L)`` from 0 to ``vocabulary - 1``; 0 is padding,
    - tables: float features ``(N, F)``, or DataFrames with a ``schema``.

    Targets, by task:

    - classification: ``(N,)`` class indices from 0, or class names,
    - multi-label: ``(N, classes)`` of 1 (present), 0 (absent) and -1 (unknown),
    - segmentation: ``(N, H, W)`` class index of each pixel,
    - reconstruction: images ``(N, 1, H, W)``,
    - regression: ``(N,)`` numbers,
    - survival: ``(N, 2)``: follow-up time in intervals; 1 if the event ended it, otherwise 0.

    Args:
        data: private examples, one entry per node.
        models: one model per node, of any architecture. A module is trained in place. A model that can only
            predict may be an estimator, an ONNX session, a function, or a string as in ``nodes.models`` (path
            of a .skops or .onnx file, address of an endpoint), also in a :class:`fedstill.CustomModel` with
            its input format.
        student: the server's module, trained in place. FENS only needs its architecture, which is that of a
            node's model.
        test: examples for evaluation that no node has.
        classes: number of classes (1 or more) or their names. Modules return ``(B, classes)`` logits,
            ``(B, classes, H, W)`` for segmentation, ``(B, 1, H, W)`` for reconstruction.
        task: a name from ``fedstill list``, ``"module:Name"`` of a custom task, or a task's config such
            as ``SegmentationConfig(dice=0.5)``. Default: ``"classification"``.
        method: a method with its options such as ``FedAvg(rounds=10)``, or the name of a method, such as
            ``"fedkd"``, with its default options. Default: ``FedIOD()``.
        public: public data for methods that need them: inputs only, or examples with labels of the same
            classes. ``"gaussian"``, with ``features``: 8,000 normally distributed feature vectors, which need
            no data. Default: None.
        local: options of the nodes' local training. Default: ``LocalConfig()``.
        local_loss: function of a model's outputs ``(B, classes, ...)`` and targets ``(B, ...)`` that returns
            the mean of one loss per example, in place of the task's loss on labels and its label smoothing;
            also where a method's server uses labels.
            Default: None, the task's loss.
        names: names of the nodes. Default: ``node-0``, ``node-1``, ...
        policies: one policy per node, for its gate. The default ``PolicyConfig()`` releases only outputs of
            models. Methods that share parameters need ``PolicyConfig(outputs_only=False)``.
        privacies: one privacy mechanism per node, such as ``DPSGD(epsilon=3.0)``. Default: none, without a
            guarantee.
        mean, std: normalization of the inputs, one value per channel: ``(pixel - mean) / std`` of pixels from
            0 to 1; ``std`` above 0. Default: 0.5 and 0.5, inputs from -1 to 1.
        vocabulary: number of token ids, for texts. Default: 0.
        schema: columns of the tables, or the path of a TOML schema. It converts DataFrames to features, and
            methods that generate rows respect it. Default: None, features are any numbers.
        perceptual: a backbone (``timm:NAME``, ``torchvision:NAME`` or ``package.module:factory``), or the
            path of a .safetensors file of VGG-16 or VGG-19 weights with torchvision's names, for perceptual
            losses. Default: ``""``, these losses are off.
        perceptual_weights: path of a .safetensors file with the weights of that backbone. Default: ``""``.
        features: pretrained backbone, such as ``Features("timm:resnet18", weights="resnet18.safetensors")``.
            The features of all examples are computed once. ``models`` and ``student`` are then heads, which
            take rows ``(N, F)``. Default: None, models take the examples.
        engine: device, precision, and whether equal models are stacked. Default: ``EngineConfig()``.
        link: wire format of the tensors, and rules for nodes that fail. Default: ``LinkConfig()``, full
            precision, the run stops.
        seed: non-negative seed of all random draws. Default: 0.
        every: steps or rounds between two evaluations; 0 evaluates only at the end. Default: None, ten
            evaluations.
        out: folder for the run's files and its report; it must be new or empty. A run that was interrupted in
            this folder with the same arguments resumes, if its networks start from the same weights, and a
            finished one is read. Default: None, no files are written.
        track: trackers of metrics: names such as ``"tensorboard"``, or custom :class:`fedstill.track.Tracker`
            objects. They write into ``out``, which is required. Default: none.
        progress: show progress on standard error, as bars on a terminal and as lines elsewhere. Default:
            False.

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
    if engine is not None and engine.backend != "local":
        raise ArgumentError(
            "engine.backend",
            engine.backend,
            "'local'; run_preset and the command line support the other backends",
        )
    # NumPy numbers as Python numbers, which can be written as JSON.
    seed, every = int(seed), None if every is None else int(every)
    mean, std = tuple(map(float, mean)), tuple(map(float, std))
    task_config = TASKS[task]() if isinstance(task, str) else task
    if not isinstance(classes, Sequence):
        by_node = {f"data[{index}]": examples for index, examples in enumerate(data)}
        in_memory_data.require_same_class_order({**by_node, "test": test})
    table_schema = read_schema(schema) if isinstance(schema, str | Path) else schema or NO_SCHEMA
    given_names = _class_names(classes, table_schema)
    learning_task = task_config.make(given_names if isinstance(classes, Sequence) else int(classes))
    if table_schema and len(table_schema.classes) != learning_task.classes:
        expected = f"{len(table_schema.classes)}, as the schema has {', '.join(table_schema.classes)}"
        raise ArgumentError("classes", learning_task.classes, expected)
    to_tensors = partial(
        _convert_examples, task=learning_task, mean=mean, std=std, schema=table_schema, classes=given_names
    )
    if local_loss is not None:
        learning_task = with_loss(learning_task, local_loss, "local_loss")
    test_data = to_tensors(test, "test")
    label_names = given_names or (
        table_schema.classes if table_schema else tuple(map(str, range(learning_task.classes)))
    )
    shape = tuple(test_data.inputs.shape[1:])
    parts = [to_tensors(examples, f"data[{index}]") for index, examples in enumerate(data)]
    noise = isinstance(public, str)
    if noise and (public != GAUSSIAN or not features):
        raise ArgumentError("public", public, f"examples, or {GAUSSIAN!r} with features=")
    public_config = PublicConfig(GAUSSIAN, seed=seed) if noise else PublicConfig()
    public_data = None if noise else _convert_public(public, to_tensors, learning_task)
    space = None
    if features is not None and features:
        channels = shape[0] if learning_task.form == "images" else 0
        raw = RawInputs(shape, mean or (0.5,) * channels, std or (0.5,) * channels, vocabulary)
        learning_task = learning_task.on_features()
        if table_schema:
            raise ArgumentError("features", features.backbone, "none for rows of a table")
        parts, test_data, public_data, space = to_feature_space(
            features,
            raw,
            public_config,
            parts,
            test_data,
            public_data,
            compute=Compute(engine),
            progress=progress,
        )
        shape, mean, std, vocabulary = (space.width,), (), (), 0
    interface = Interface(learning_task, label_names, shape, vocabulary, mean, std, table_schema)
    modules = [_convert_model(model, interface, index, seed) for index, model in enumerate(models)]
    for name, network in (("student", student), *((f"models[{i}]", each) for i, each in enumerate(modules))):
        if isinstance(network, PretrainedUNet):
            network.require_normalization(mean, std, name)
    nodes = make_nodes(parts, modules, names, policies, privacies)
    spec = RunSpec(
        seed=seed,
        task=task_config,
        data=InMemoryData(),
        split=InMemorySplit(nodes=len(nodes)),
        nodes=NodesConfig(
            models=tuple(type(module).__name__ for module in modules),
            local=local or LocalConfig(),
            perceptual=str(perceptual),
            perceptual_weights=str(perceptual_weights),
        ),
        method=METHODS[method]() if isinstance(method, str) else method or FedIOD(),
        student=StudentConfig(model=network_name(student, learning_task, shape, vocabulary)),
        public=public_config,
        features=features or Features(),
        engine=engine or EngineConfig(),
        link=link or LinkConfig(),
        evaluation=EvaluationConfig(every=every, centralized=False),
    )
    setting = Setting(
        spec=spec,
        task=learning_task,
        nodes=nodes,
        student=student,
        test=test_data,
        public=public_data,
        classes=given_names,
        mean=mean,
        std=std,
        vocabulary=vocabulary,
        schema=table_schema,
        feature_space=space,
    )
    if track and out is None:
        raise ArgumentError("track", list(map(str, track)), "() unless out= is given, where trackers write")
    listeners = TrackerGroup(track, {"method": spec.method, "local": spec.nodes.local, "seed": seed})
    simulation = Simulation(setting)
    simulation.listeners = listeners
    folder = None if out is None else parse_folder(out)
    if folder is None:
        return Outcome(simulation, simulation.run(bars=ProgressBar(progress)))
    if _open_folder(folder, {**_fingerprint(setting), "local_loss": describe_loss(local_loss)}):
        simulation.load_finished(folder)
        return Outcome(simulation, read_object(folder / "result.json"), folder)
    about = {"data": {"classes": list(label_names)}}
    bars = progress_bars(folder, progress, write_report)
    results = simulation.run(folder, bars=bars)
    results = write_simulation_result(simulation, about, results, folder, keep_state=True)
    write_report(folder)
    return Outcome(simulation, results, folder)


@caller_context("options")
@use_torch_defaults()
def run_preset(
    target: str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    progress: bool = False,
) -> Mapping[str, Any]:
    """Run a preset or a TOML file, as the command ``fedstill run`` does.

    Args:
        target: name of a preset, or path of a run's ``.toml`` file.
        options: options to change, by dotted name, such as ``{"method.steps": 50, "seed": 1}``. Default:
            none.
        out: folder of the run. A run of the same options that was interrupted there resumes, and a finished
            one is read.
        progress: show progress on standard error, as bars on a terminal and as lines elsewhere. Default:
            False.

    Returns:
        Content of ``result.json``: metrics in their units, bytes, queries, seconds, and the privacy cost.

    Raises:
        RunFolderError: ``out`` holds another run or other files.
        UnknownName: there is no such preset or option.
        ArgumentError: an option has an invalid value.
        FedstillError: base class of all of these; also raised if the run fails.

    Example:
        >>> result = fedstill.run_preset("demo", {"method.steps": 50}, out="runs/demo")  # doctest: +SKIP
        >>> result["accuracy"]  # doctest: +SKIP
        91.7
    """
    config = from_dict(merge_tables(RunSpec, to_dict(load(str(target))), unflatten(options or {})))
    folder = parse_folder(out)
    again = shlex.join(["fedstill", "run", str(folder / "config.toml")])
    run.run_or_resume(config, folder, command=again, progress=progress, report=write_report)
    write_report(folder)
    return read_object(folder / "result.json")  # read, as it is read again: without numbers that JSON has not


@caller_context("options")
@use_torch_defaults()
def compare_methods(
    methods: str | Path | Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    base: str | Path | None = None,
    seeds: int | None = None,
    leakage: bool = False,
    jobs: int | str | None = None,
    devices: Sequence[str] = (),
    progress: bool = False,
) -> Compared:
    """Compare several methods on equal terms, as the command ``fedstill compare`` does.

    Args:
        methods: names of methods, presets or TOML files of runs; or the ``.toml`` file of one comparison.
        options: options to change, by dotted name: of all runs, as ``{"split.nodes": 10}``, or of one of
            several methods, as ``{"fediod.steps": 50}``. Default: none.
        out: folder of the comparison. An equal comparison that was interrupted there resumes, also with more
            seeds.
        base: preset or TOML file with all options except the method. Default: None, the comparison's file or
            the digits.
        seeds: number of seeds, 1 or more. Default: None, the comparison's file or 1.
        leakage: also attack each run. Default: False.
        jobs: number of runs at once, 1 or more. With more than one, each has its own process. ``"ray"`` or
            ``"ray://HOST:PORT"``: tasks of a Ray cluster. Default: None, one, or one for each device.
        devices: GPUs of these processes in turn, such as ``["cuda:0", "cuda:1"]``. Default: all processes see
            all GPUs.
        progress: show progress on standard error. Default: False.

    Returns:
        The results of all runs, and reasons why some could not run.

    Raises:
        RunFolderError: ``out`` holds another comparison or other files.
        UnknownName: a name or an option does not exist.
        ArgumentError: an option has an invalid value.
        FedstillError: base class of all of these; also raised if no method can run.

    Example:
        >>> fedstill.compare_methods(["fedkd", "fedavg"], out="runs/compare", seeds=3)  # doctest: +SKIP
    """
    folder, given = parse_folder(out), dict(options or {})
    names = [str(methods)] if isinstance(methods, (str, Path)) else [str(name) for name in methods]
    if len(names) == 1 and is_file_listing_methods(names[0]):
        if base is not None:
            raise ArgumentError("base", str(base), f"None with {names[0]}, which has its own")
        plan = read_comparison(Path(names[0]), seeds=seeds, changes=given, leakage=leakage)
    else:
        base_target = None if base is None else str(base)
        shared = to_dict(base_run(names, base_target))  # also registers its plugins
        options_by_method: dict[str, dict[str, Any]] = {}
        for label in methods_by_label(names, {}):
            method_options = [name for name in given if name.startswith(f"{label}.")]
            if (
                method_options and label not in shared
            ):  # otherwise options of all runs in a table of this name
                options_by_method[label] = unflatten(
                    {name.removeprefix(f"{label}."): given.pop(name) for name in method_options}
                )
        seed_count = 1 if seeds is None else seeds
        plan = plan_comparison(
            names,
            base=base_target,
            seeds=seed_count,
            changes=given,
            options=options_by_method,
            leakage=leakage,
        )
    comparison_runner.compare(
        plan,
        folder,
        command=shlex.join(["fedstill", "compare", str(folder / COMPARISON_FILE)]),
        report=write_report,
        jobs=jobs,
        devices=devices,
        quiet=not progress,
        bars=progress,
    )
    comparison = read_comparison_folder(folder)
    write_comparison(folder, comparison)
    found = comparison_runner.read_results(folder, comparison)
    return Compared(folder, found, comparison_runner.read_not_run(folder))


def _class_names(classes: int | Sequence[str], schema: TableSchema) -> tuple[str, ...]:
    """Return the normalized class names, or an empty tuple if ``classes`` is a number.

    Raises:
        ArgumentError: a name is empty or occurs twice.
    """
    if not isinstance(classes, Sequence):
        return ()
    names = tuple(map(str, classes))
    if schema and names == schema.classes:
        return names
    try:
        return normalize_class_names(names, "classes")
    except DataError as error:
        detail = str(error).removeprefix("classes: ").partition(" (expected")[0]
        raise ArgumentError("classes", list(names), f"each name once, and none empty; {detail}") from error


def _convert_model(model: Any, interface: Interface, index: int, seed: int) -> nn.Module:
    """Return a node's model as a module, also of a model that can only predict."""
    if isinstance(model, nn.Module) and wrap_hugging_face(model) is model:
        return model
    argument = f"models[{index}]"
    if isinstance(model, str | Path):
        model = read_model_config(str(model), Path(), argument)
    elif not isinstance(model, ModelConfig):
        model = CustomModel(source=model)
    return custom_model.build_model(model, interface, Path(), seed, "model", index, option=argument)


def _open_folder(folder: Path, fingerprint: Mapping[str, str]) -> bool:
    """Create a run's folder, or check that it holds the same run, and return whether that is finished.

    Raises:
        RunFolderError: it holds another run or other files.
    """
    objects_file = folder / OBJECTS_FILE
    if not objects_file.exists():
        require_empty_folder(folder)
        make_folder(folder)
        write_text(objects_file, json.dumps(fingerprint, indent=2) + "\n")
        return False
    try:
        saved = dict(json.loads(objects_file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"cannot read {objects_file}: choose another folder") from error
    for name, value in fingerprint.items():
        if saved.get(name) != value:
            raise RunFolderError(f"{folder} holds a run with another {name}: choose another folder")
    return (folder / "result.json").exists()


def _fingerprint(setting: Setting) -> dict[str, str]:
    """Return the arguments that must be equal to resume a run, as texts by name."""
    spec, nodes = setting.spec, setting.nodes
    data = {f"data[{index}]": node.data for index, node in enumerate(nodes)} | {"test": setting.test}
    public = {} if setting.public is None else {"x": setting.public.inputs}
    if setting.public is not None and setting.public.labels is not None:
        public["y"] = setting.public.labels
    compared = {
        "method": spec.method,
        "local": spec.nodes.local,
        "engine": spec.engine,
        "names": [node.name for node in nodes],
        "policies": [node.policy for node in nodes],
        "privacies": [node.privacy for node in nodes],
        "mean": setting.mean,
        "std": setting.std,
        "seed": spec.seed,
        "every": spec.evaluation.every,
        "link": spec.link,
        "classes": setting.classes,
        "vocabulary": setting.vocabulary,
        "perceptual": spec.nodes.perceptual,
        "perceptual_weights": spec.nodes.perceptual_weights,
        "features": None if setting.feature_space is None else setting.feature_space.to_record(),
    }
    return {
        "task": f"{setting.task.name} {sorted(vars(setting.task).items())}",
        **{name: repr(value) for name, value in compared.items()},
        "schema": repr(to_table(setting.schema)),  # its repr is abbreviated
        **{name: digest("", {"x": part.inputs, "y": part.targets}) for name, part in data.items()},
        "public": digest("", public),
        "models": " ".join(f"{node.model}{_frozen_digest(node.model)}" for node in nodes),
        "student": str(setting.student),
    }


def _frozen_digest(model: nn.Module) -> str:
    """Return a digest of the weights of a model that is not trained; others change in their run."""
    trained = any(parameter.requires_grad for parameter in model.parameters())
    return "" if trained else digest("", dict(model.state_dict()))


def _convert_public(
    examples: Any, to_tensors: Callable[[Any, str], TensorData], task: Task
) -> PublicData | None:
    if examples is None:
        return None
    if isinstance(examples, torch.Tensor | np.ndarray):
        inputs = as_tensor(examples, "public")
        return PublicData("given", _convert_inputs(inputs, "public", task))
    data = to_tensors(examples, "public")
    return PublicData("given", data.inputs, data.targets)


def _convert_examples(
    examples: Any,
    what: str,
    task: Task,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    schema: TableSchema = NO_SCHEMA,
    classes: Sequence[str] = (),
) -> TensorData:
    """Convert a user's examples to tensors.

    Args:
        examples: in any of the forms that :func:`distil` accepts.
        what: name of the argument, for error messages.
    """
    if isinstance(examples, TensorData):
        return examples
    if is_data_frame(examples):
        if not schema or task.form != "rows":
            raise DataError(f"{what} is a DataFrame (expected one with schema=, for a task of tables)")
        return encode_frame(examples, schema, what)
    if in_memory_data.is_hugging_face(examples):
        examples = in_memory_data.hugging_face_tensors(examples, what, task, mean, std, classes)
    raw_inputs, targets = extract_inputs_and_targets(examples, what)
    inputs, labels = (
        to_input_tensor(raw_inputs, what, mean, std),
        _convert_labels(targets, what, task, classes),
    )
    return TensorData(_convert_inputs(inputs, what, task), _convert_targets(labels, what, task))


def _convert_inputs(inputs: torch.Tensor, what: str, task: Task) -> torch.Tensor:
    """Convert inputs to the task's dtype."""
    if task.form != "texts":
        return inputs.float()
    if inputs.is_floating_point() and (inputs != inputs.round()).any():
        raise DataError(f"{what} has token ids that are not integers (expected ids from 0)")
    return inputs.long()


def _convert_labels(labels: Any, what: str, task: Task, classes: Sequence[str]) -> torch.Tensor:
    """Convert labels to a tensor, and class names to class indices."""
    first = labels[0] if isinstance(labels, list | tuple) and labels else None
    if not isinstance(labels, np.ndarray) and not isinstance(first, str | np.str_):
        return to_target_tensor(labels, what)
    label_array = np.asarray(labels)
    if label_array.dtype.kind not in TEXT_DTYPE_KINDS:
        return to_target_tensor(labels, what)
    if task.kind != "class":
        raise DataError(f"{what}: labels are texts (expected numbers for task {task.name})")
    return torch.from_numpy(in_memory_data.renumber_labels(label_array, what, classes))


def _convert_targets(labels: torch.Tensor, what: str, task: Task) -> torch.Tensor:
    """Convert targets to the task's shape and dtype."""
    if task.kind == "image":
        return labels.float()
    if task.kind == "number":
        return labels.float().reshape(-1, 1)
    if task.kind == "time":
        return labels.float()
    if task.kind == "class" and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # as MedMNIST's are
    if labels.is_floating_point() and (labels != labels.round()).any():
        raise DataError(f"{what} has labels that are not integers (expected class indices)")
    return labels.long()


# --- type checks of the arguments ---------------------------------------------------------------------------


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse an argument of an invalid type.

    Args:
        given: arguments by name; arguments without a check are ignored.

    Raises:
        ArgumentError: naming the first invalid argument, its value and the expected type.

    >>> check_arguments({"seed": "x"})
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ArgumentError: invalid seed = 'x' (expected an integer from 0 up)
    """
    for name, value in given.items():
        if name in CHECKS:
            expected, fits = CHECKS[name]
            if not fits(value):
                raise ArgumentError(name, _plain_value_or_class_name(value), expected)


def _plain_value_or_class_name(value: object) -> object:
    """Return plain values unchanged, and other objects by the name of their class."""
    items = value if isinstance(value, list | tuple) else [value]
    plain = all(each is None or isinstance(each, str | int | float | dict) for each in items)
    return value if plain else type(value).__name__


def _is_integer(value: object, minimum: int = 0) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= minimum


def _as_sequence(value: object) -> Sequence[object] | None:
    """Return a list, tuple or other sequence; None for other values."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else None


def _is_list(value: object) -> bool:
    return _as_sequence(value) is not None


def _is_list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        items = _as_sequence(value)
        return items is not None and all(map(fits, items))

    return check


def _is_none_or(kind: type) -> Callable[[object], bool]:
    return lambda value: value is None or isinstance(value, kind)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _is_class_count_or_list(value: object) -> bool:
    return _is_integer(value, 1) or bool(_as_sequence(value))


def _is_list_over_nodes(value: object) -> bool:
    """Return whether a value is a sequence over nodes, and not one node's pair of tensors."""
    items = _as_sequence(value)
    return items is not None and not (items and all(isinstance(each, torch.Tensor) for each in items))


NUMBERS = "a tuple of numbers, one for each channel"
CHECKS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "data": ("a list with the examples of each node", _is_list_over_nodes),
    "models": ("a list with the model of each node", _is_list),
    "classes": ("the number of classes, >= 1, or a list of their names", _is_class_count_or_list),
    "task": ("the name of a task, or its config", lambda value: isinstance(value, str | TaskConfig)),
    "local": ("a fedstill.LocalConfig", _is_none_or(LocalConfig)),
    "local_loss": ("a function of outputs and targets", lambda value: value is None or callable(value)),
    "engine": ("a fedstill.EngineConfig", _is_none_or(EngineConfig)),
    "names": ("a list of names", _is_list_of(_is_name)),
    "policies": (
        "a list of fedstill.PolicyConfig, one for each node",
        _is_list_of(lambda each: isinstance(each, PolicyConfig)),
    ),
    "privacies": (
        "a list of mechanisms such as fedstill.DPSGD(...), one for each node",
        _is_list_of(lambda each: isinstance(each, PrivacyConfig)),
    ),
    "mean": (NUMBERS, _is_list_of(_is_number)),
    "std": (NUMBERS, _is_list_of(_is_number)),
    "seed": ("an integer from 0 up", _is_integer),
    "vocabulary": ("an integer from 0 up", _is_integer),
    "schema": (
        "a fedstill.TableSchema, or the path of a file",
        lambda value: value is None or isinstance(value, str | PathLike | TableSchema),
    ),
    "perceptual": ("a backbone, or the path of a file", lambda value: isinstance(value, str | PathLike)),
    "perceptual_weights": ("the path of a file", lambda value: isinstance(value, str | PathLike)),
    "features": ("a fedstill.Features", _is_none_or(Features)),
    "every": ("an integer from 0 up, or None", lambda value: value is None or _is_integer(value)),
    "link": ("a fedstill.LinkConfig", _is_none_or(LinkConfig)),
    "track": ("a list of trackers", _is_list),
    "progress": ("True or False", lambda value: isinstance(value, bool)),
}
