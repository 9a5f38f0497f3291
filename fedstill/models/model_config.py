"""Options of a model: by name in a file, or from Python with the model itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen

from fedstill.core.config_tables import parse_toml, read_table, read_text
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.options import CheckedOptions
from fedstill.core.registry import first_line

MODEL_SUFFIXES = (".skops", ".onnx")  # files of models that are not torch modules
PICKLE_SUFFIXES = (".pkl", ".pickle", ".joblib", ".pt", ".pth")
ENCODER_MODELS = ("unet", "residual-unet")  # networks that may have a pretrained encoder


def encoder_backbone(name: str) -> str:
    """Return the backbone in the name of a U-Net with a pretrained encoder; empty for other models.

    >>> encoder_backbone("unet:timm:resnet18"), encoder_backbone("unet:16"), encoder_backbone("my.nets:unet")
    ('timm:resnet18', '', '')
    """
    model, _, backbone = name.partition(":")
    is_backbone = ":" in backbone or backbone.endswith(MODEL_SUFFIXES)
    return backbone if model in ENCODER_MODELS and is_backbone else ""


@dataclass(frozen=True)
class ModelConfig(CheckedOptions):
    """Model of a node, by name or file, with its weights, its inputs and its classes.

    Example:
        >>> ModelConfig(name="small-cnn:16").train
        True
    """

    section: ClassVar[str] = "model"

    name: Annotated[str, MinLen(1), "the name of a model, or package.module:factory"] = "small-cnn"
    """A built-in network (see `fedstill list`; small-cnn:16 has width 16); unet:BACKBONE or
    residual-unet:BACKBONE, a U-Net with a pretrained encoder (timm:NAME, torchvision:NAME or
    package.module:factory); hf:folder, a Hugging Face model; a .skops or .onnx file, relative to this file;
    http://127.0.0.1:8080/predict, an endpoint; or package.module:factory, a custom factory. The factory
    receives the shape of an input and the number of classes and returns a torch module, an estimator, an ONNX
    session or a function."""

    weights: str = ""
    """A .safetensors file with the model's initial weights, relative to this file. If empty, the weights are
    random."""

    encoder_weights: str = ""
    """A .safetensors file with the pretrained weights of a U-Net's encoder, relative to this file. Needed for
    timm and torchvision unless weights has those of the whole network."""

    train: bool = True
    """Train the model on the data; false: use it unchanged."""

    input_format: Literal["inputs", "raw", "frame"] = "inputs"
    """Input format of a model that is not a torch module. inputs: the same as for networks. raw: pixels from
    0 to 1, or a table's columns in their own units, categories as numbers from 0, NaN for missing values;
    predicted numbers are in the target's unit. frame: the raw columns as a pandas DataFrame, categories as
    texts."""

    output_format: Literal["auto", "logits", "probabilities"] = "auto"
    """Output format of a model that is not a torch module. auto: probabilities if it declares them
    (predict_proba, or a name of an ONNX output or in an endpoint's response), else logits."""

    classes: tuple[str, ...] = ()
    """Name of the federation's class for each of the model's outputs, in order; "" for none. Empty: the
    model's own class names, or the federation's order."""


@dataclass(frozen=True)
class CustomModel(ModelConfig):
    """Model from Python, for the ``models`` argument of :func:`fedstill.distil`, with its input and output
    formats.

    Args:
        source: a torch module, a scikit-learn estimator, an ONNX session or a function of an array. None: the
            model with the given ``name``.

    The other arguments are the options of a model in a file: ``weights``, ``encoder_weights``, ``train``,
    ``input_format``, ``output_format`` and ``classes``.

    Example:
        >>> from sklearn.ensemble import RandomForestClassifier
        >>> forest = RandomForestClassifier()  # fitted on the node's own data
        >>> CustomModel(source=forest, input_format="raw").input_format
        'raw'
    """

    source: Any = None
    """A torch module, an estimator, an ONNX session or a function. None: the model with the given name."""


def read_model_config(name: str, folder: Path, option: str) -> ModelConfig:
    """Return the options of a model from its name, or from a ``.toml`` file with the keys of [model] in
    node.toml.

    Args:
        name: name of a model, or path of a ``.toml`` file.
        folder: folder for relative paths. Paths within a file are relative to that file.
        option: name of the argument, for errors.

    Raises:
        ArgumentError: the file does not exist or has unknown keys.
        FedstillError: the file is not TOML.
    """
    if not name.endswith(".toml"):
        return _with_absolute_paths(ModelConfig(name=name), folder, option)
    path = resolve_path(name, folder, option)
    try:
        text = read_text(path)
    except FedstillError as error:
        expected = f"a .toml file with the model's options ({first_line(error)})"
        raise ArgumentError(option, name, expected) from error
    config = read_table(ModelConfig, parse_toml(text, str(path)), f"{path.name}: ")
    return _with_absolute_paths(config, path.parent, option)


def resolve_path(path: str, folder: Path, option: str) -> Path:
    """Return a path relative to a folder; absolute paths and paths in a home directory stay as they are.

    Raises:
        ArgumentError: the path has a NUL character or names an unknown user.
    """
    try:
        expanded = "\0" not in path and Path(path).expanduser()
    except RuntimeError:  # unknown user
        expanded = False
    if not expanded:
        raise ArgumentError(option, path, "a path without NUL characters, with an existing user after ~")
    return folder / expanded


def _with_absolute_paths(config: ModelConfig, folder: Path, option: str) -> ModelConfig:
    name, files = config.name, dict[str, Any](weights=config.weights, encoder_weights=config.encoder_weights)
    if name.endswith(MODEL_SUFFIXES) and not encoder_backbone(name):
        name = str(resolve_path(name, folder, option).resolve())
    for key, path in files.items():
        if path:
            files[key] = str(resolve_path(path, folder, f"{option}: {key}").resolve())
    return replace(config, name=name, **files)
