"""The file of a run's student, ``student.safetensors``, which contains a description of its inputs.

The header has the network's name, its inputs and their preprocessing as JSON. It contains no code, and no
pickle is written or read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from fedstill.core.config_tables import read_table, to_table
from fedstill.core.errors import ArgumentError, FedstillError, ModelError, RunFolderError, by_caller
from fedstill.core.registry import first_line
from fedstill.core.version import __version__
from fedstill.data.data_spec import DataSpec
from fedstill.data.text_data import TextData
from fedstill.models import MODELS, build
from fedstill.models.backbones import (
    Backbone,
    BackboneWithHead,
    Features,
    RawInputs,
    ScaledHead,
    empty_scale,
    load_backbone,
)
from fedstill.models.ensemble import Ensemble, member_names
from fedstill.models.hugging_face import PREFIX
from fedstill.models.model_config import encoder_backbone
from fedstill.models.pretrained_unet import PretrainedUNet
from fedstill.runs.build import Setting, input_shape, normalization
from fedstill.runs.spec import load_toml
from fedstill.tasks import Task

FILE = "student.safetensors"
FORMAT = "fedstill student 1"
KEY = "fedstill"  # of the file's header
LOCAL_OPTIONS = ("batch", "cache", "cache_gib")  # of features, which a file from elsewhere does not choose


@dataclass(frozen=True)
class StudentFile:
    """Description of a student in its file.

    Args:
        model: name of the network, as :func:`fedstill.models.build` takes it, or the class of a custom
            module.
        spec: inputs, classes and normalization; None if unknown.
        words: tokenizer of texts, as in ``data.vocabulary``.
        features: backbone whose features the network takes; without one it takes the inputs themselves.
            Its cache and batch size are not in the file.
        backbone_digest: digest of the backbone.
        width: number of its features.
    """

    model: str
    spec: DataSpec | None
    words: str = ""
    features: Features = field(default_factory=Features)
    backbone_digest: str = ""
    width: int = 0

    def header(self) -> dict[str, str]:
        """Return the file's header, as JSON under one key, since safetensors does not keep the order of
        keys."""
        spec = {} if self.spec is None else self.spec.to_dict()
        metadata = {
            "format": FORMAT,
            "version": __version__,
            "model": self.model,
            **spec,
            "words": self.words,
        }
        if self.features:
            metadata["features"] = {
                **{key: value for key, value in to_table(self.features).items() if key not in LOCAL_OPTIONS},
                "digest": self.backbone_digest,
                "width": self.width,
            }
        return {KEY: json.dumps(metadata)}

    @classmethod
    def parse(cls, header: Mapping[str, str], where: str, tasks: Collection[str] = ()) -> StudentFile:
        """Parse a header. Only the package's own tasks and ``tasks`` are imported.

        Raises:
            RunFolderError: it has another format or invalid values.
        """
        try:
            table = dict(json.loads(header.get(KEY, "{}")))
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"{where}: {first_line(error)}") from error
        if table.pop("format", None) != FORMAT:
            raise RunFolderError(f"{where}: is not of {FORMAT!r} (expected a student of this version)")
        try:
            model, words = str(table.pop("model")), str(table.pop("words"))
            table.pop("version")
            backbone = dict(table.pop("features", {}))
            digest, width = str(backbone.pop("digest", "")), int(backbone.pop("width", 0))
            for local in LOCAL_OPTIONS:
                backbone.pop(local, None)
            features = read_table(Features, backbone, "features.")
            spec = DataSpec.from_dict(table, tasks) if table else None
            return cls(model, spec, words, features, digest, width)
        except (ValueError, KeyError, TypeError) as error:  # ArgumentError is a ValueError
            raise RunFolderError(f"{where}: {first_line(error)}") from error

    def network(self, given: str | nn.Module = "", own: str = "", custom_backbone: str = "") -> nn.Module:
        """Build a network of the student's architecture, with initial weights.

        Args:
            given: a network that replaces the file's, or its name; with a backbone the head.
            own: name of a custom network that may be imported if the file names it.
            custom_backbone: name of a custom backbone that may be imported if the file names it.

        Raises:
            ArgumentError: the name may not be imported, or the backbone's files do not exist.
            ModelError: the backbone differs from the one of the run.
        """
        model_name = given if isinstance(given, str) and given else self.model
        if given == "" and not all(own == name or _is_builtin(name) for name in member_names(model_name)):
            option = by_caller("--model", "model=", "model=")
            raise ArgumentError(
                "the student's model", model_name, f"one of fedstill's own; or name it with {option}"
            )
        spec = self.spec_or_error
        if isinstance(given, nn.Module) and not self.features:
            return given
        if not self.features:
            return build(
                model_name,
                spec.shape,
                len(spec.classes),
                0,
                "student",
                vocabulary=spec.vocabulary,
                mean=spec.mean,
                std=spec.std,
            )
        backbone = self._backbone(custom_backbone)
        width = self.features.model_width(backbone.width)
        if isinstance(given, nn.Module):
            head = given
        else:
            head = build(model_name, (width,), len(spec.classes), 0, "student")
        return BackboneWithHead(backbone, ScaledHead(empty_scale(self.features, backbone.width), head))

    def with_backbone(self, backbone: str = "", weights: str = "") -> StudentFile:
        """Return the description with other paths of the backbone and its weights.

        Args:
            backbone: path as in ``features.backbone``, ``hf:FOLDER`` or ``FILE.onnx``; empty: as in the run.
            weights: path as in ``features.weights``; empty: as in the run.

        Raises:
            ArgumentError: there is no such file or folder, or the backbone needs none.
        """
        own = self.features
        unneeded = f"none, as {own.backbone} needs none" if own else "none, as the student has no backbone"
        is_found, expected = False, unneeded
        if own.backbone.startswith(PREFIX):
            path, expected = Path(backbone.removeprefix(PREFIX)), "hf:FOLDER, an existing folder"
            is_found = backbone.startswith(PREFIX) and path.expanduser().is_dir()
        elif own.backbone.endswith(".onnx"):
            expected = "an existing .onnx file"
            is_found = backbone.endswith(".onnx") and Path(backbone).expanduser().is_file()
        if backbone and not is_found:
            raise ArgumentError(by_caller("--backbone", *2 * ("backbone",)), backbone, expected)
        if weights and not (own.weights and Path(weights).expanduser().is_file()):
            option = by_caller("--backbone-weights", *2 * ("backbone_weights",))
            raise ArgumentError(option, weights, "an existing file" if own.weights else unneeded)
        features = replace(own, backbone=backbone or own.backbone, weights=weights or own.weights)
        return replace(self, features=features)

    def _require_backbone_files(self) -> None:
        """Raise an error that names the option of another path if a file of the backbone is missing."""
        backbone, weights = self.features.backbone, self.features.weights
        is_path = backbone.startswith(PREFIX) or backbone.endswith(".onnx")
        paths = {
            by_caller("--backbone", *2 * ("backbone=",)): backbone.removeprefix(PREFIX) if is_path else "",
            by_caller("--backbone-weights", *2 * ("backbone_weights=",)): weights,
        }
        for option, path in paths.items():
            if path and not Path(path).expanduser().exists():
                raise ArgumentError(
                    "the student's backbone", path, f"an existing path; or name its new one with {option}"
                )

    def _backbone(self, custom: str) -> Backbone:
        """Load the backbone, and check that it is the one of the run."""
        name, spec = self.features.backbone, self.spec_or_error
        self._require_backbone_files()
        if self.features.is_custom and name != custom:
            allowed = "one of fedstill's own; a custom one is imported for the folder of its run only"
            raise ArgumentError("the student's backbone", name, allowed)
        backbone = load_backbone(self.features, RawInputs(spec.shape, spec.mean, spec.std, spec.vocabulary))
        if backbone.digest != self.backbone_digest:
            options = by_caller(
                "--backbone and --backbone-weights name", *2 * ("backbone= and backbone_weights= name",)
            )
            raise ModelError(
                f"backbone {name} differs from the one of the run: its digest is {backbone.digest} (expected "
                f"{self.backbone_digest}; {options} the files of the run's backbone)"
            )
        return backbone

    @property
    def spec_or_error(self) -> DataSpec:
        """The spec.

        Raises:
            RunFolderError: the file has none.
        """
        if self.spec is None:
            raise RunFolderError(
                "the student's file does not describe its inputs, as the run had features without a schema: "
                "run with schema=, or use outcome.student in Python"
            )
        return self.spec


def _is_builtin(model_name: str) -> bool:
    """Return whether a name is one of the package's own networks, whose encoder imports no custom code."""
    backbone = encoder_backbone(model_name)
    return model_name.partition(":")[0] in MODELS.builtin and not (backbone and Features(backbone).is_custom)


def header(setting: Setting) -> dict[str, str]:
    """Return the header of the file of a setting's student."""
    spec, data_spec = setting.spec, None
    mean, std = (tuple(values.flatten().tolist()) for values in normalization(setting))
    class_names = setting.schema.classes if setting.schema else setting.classes
    names = tuple(class_names or map(str, range(setting.task.classes)))
    shape, vocabulary, space = input_shape(setting), setting.vocabulary, setting.feature_space
    if space is not None:
        raw = space.backbone.raw
        shape, mean, std, vocabulary = raw.shape, raw.mean, raw.std, raw.vocabulary
    with suppress(ArgumentError):  # for example, rows without a schema
        data_spec = DataSpec(spec.task, names, shape, mean, std, vocabulary, setting.schema)
    words = spec.data.vocabulary if isinstance(spec.data, TextData) else ""
    if space is None:
        return StudentFile(spec.student.model, data_spec, words).header()
    backbone = space.backbone
    features = replace(space.options, precision=backbone.precision)  # as the metrics were computed
    about = StudentFile(spec.student.model, data_spec, words, features, backbone.digest, backbone.width)
    return about.header()


def file_module(setting: Setting) -> nn.Module:
    """Return the module whose weights the file of a setting's student has: of features, the head alone."""
    space = setting.feature_space
    return setting.student if space is None else ScaledHead(space.scale, setting.student)


def network_name(network: nn.Module, task: Task, shape: tuple[int, ...], vocabulary: int = 0) -> str:
    """Return the name of a network given as a module, as on a command line for the package's own networks.

    Args:
        task: what it learns.
        shape: of an input.
        vocabulary: number of token ids, for texts.
    """
    if isinstance(network, PretrainedUNet | Ensemble):
        return str(network.name)
    name = MODELS.name_of(type(network))
    if name in MODELS.builtin:
        shapes = {key: each.shape for key, each in network.state_dict().items()}
        width = len(next(network.parameters()))  # width of the first layer, as in ``name:width``
        for known in (name, f"{name}:{width}"):
            with suppress(FedstillError):
                built = build(known, shape, task.output_shape(shape)[0], 0, "student", vocabulary=vocabulary)
                if {key: each.shape for key, each in built.state_dict().items()} == shapes:
                    return known
    return f"{type(network).__module__}:{type(network).__qualname__}"


def read(
    path_or_folder: str | Path,
    model: nn.Module | type | str | None = None,
    backbone: str = "",
    backbone_weights: str = "",
) -> tuple[nn.Module, StudentFile]:
    """Load a run's student, in evaluation mode on the CPU.

    Args:
        path_or_folder: folder of a run, or its file of the student.
        model: a network that gets the weights, or the name of one; None builds the network named in the file.
            A custom network that is not named here is imported only for a run's folder whose ``config.toml``
            names it, too: a file alone imports nothing.
        backbone, backbone_weights: paths of the backbone and its weights, if they have moved since the run
            (:meth:`StudentFile.with_backbone`).

    Returns:
        The network, and the file's description.

    Raises:
        RunFolderError: the file does not exist, is malformed, or lacks a description.
        ArgumentError: it names a network or a task that may not be imported.
        ModelError: the weights belong to another architecture.
    """
    if isinstance(model, type):
        class_name = model.__name__
        raise ArgumentError("model", class_name, f"an instance, such as {class_name}(...), or its name")
    path, folder = _find_file(Path(path_or_folder))
    try:
        with safe_open(str(path), "pt") as file:
            metadata, weights = (
                dict(file.metadata() or {}),
                {name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118
            )
    except (SafetensorError, OSError) as error:
        raise RunFolderError(f"cannot read {path}: {first_line(error)}") from error
    own: tuple[str, ...] = ()
    run_features = Features()
    if folder is not None and (folder / "config.toml").exists():
        spec = load_toml(folder / "config.toml")  # also registers its plugin folders
        own = (spec.student.model, spec.task.registered_name)
        run_features = spec.features
    about = StudentFile.parse(metadata, str(path), own[1:])
    local = {name: getattr(run_features, name) for name in LOCAL_OPTIONS}  # the defaults for a file alone
    about = replace(about, features=replace(about.features, **local))
    about = about.with_backbone(backbone, backbone_weights)
    about.spec_or_error  # noqa: B018
    network = about.network("" if model is None else model, "".join(own[:1]), run_features.backbone)
    try:
        (network.head if isinstance(network, BackboneWithHead) else network).load_state_dict(weights)
    except (RuntimeError, KeyError) as error:
        other = f"holds weights of another architecture than {type(network).__name__}"
        raise ModelError(f"{path}: {other}: {first_line(error)}") from error
    return network.eval(), about


def _find_file(path_or_folder: Path) -> tuple[Path, Path | None]:
    """Return the student's file, and the folder of its run if a folder was given."""
    if path_or_folder.is_file():
        return path_or_folder, None
    if not path_or_folder.is_dir():
        raise RunFolderError(
            f"file not found: {path_or_folder} (expected the folder of a finished run, or its {FILE})"
        )
    if not (path_or_folder / FILE).exists():
        reason = "its run is not finished, or its method trains no student (fedstill list METHOD)"
        runs = [
            file.parent for below in ("*", "*/*") for file in sorted(path_or_folder.glob(f"{below}/{FILE}"))
        ]
        if runs:  # as a comparison does, by settings if it has some
            reason = f"it holds several runs (expected one of them, as {runs[0]})"
        raise RunFolderError(f"{path_or_folder} holds no {FILE}: {reason}")
    return path_or_folder / FILE, path_or_folder
