"""What is said of a model: by name in a file, or from Python with the model itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen

from fedstill.core import toml
from fedstill.core.config_tables import read_table
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.options import CheckedOptions
from fedstill.core.registry import first_line

MODEL_SUFFIXES = (".skops", ".onnx")  # of models that are no torch modules
PICKLE_SUFFIXES = (".pkl", ".pickle", ".joblib", ".pt", ".pth")


@dataclass(frozen=True)
class ModelConfig(CheckedOptions):
    """Which model a node has."""

    section: ClassVar[str] = "model"

    name: Annotated[str, MinLen(1), "the name of a model, or package.module:factory"] = "small-cnn"
    """One of ours (`fedstill list` names them; small-cnn:16 has width 16); hf:folder, a Hugging Face model; a
    .skops or .onnx file, from the folder of this file; http://127.0.0.1:8080/predict, an endpoint; or
    package.module:factory, your own, called with the shape of an input and the number of classes, which gives
    a torch module, an estimator, an ONNX session or a function."""

    weights: str = ""
    """A .safetensors file with the model's first weights, from the folder of this file; if empty, they are
    drawn."""

    train: bool = True
    """Let the model learn from the data; false: it is used as it is."""

    input_format: Literal["inputs", "raw", "frame"] = "inputs"
    """What a model that is no torch module is given: inputs as networks get them; raw: pixels from 0 to 1, or
    a table's columns in their own units, categories as their numbers from 0, NaN for what is missing (and
    numbers that it gives are in the target's unit); frame: these as a pandas DataFrame, categories as
    texts."""

    output_format: Literal["auto", "logits", "probabilities"] = "auto"
    """What a model that is no torch module gives; auto: probabilities where it says so (predict_proba, an
    ONNX output or an endpoint's answer of that name), else logits."""

    classes: tuple[str, ...] = ()
    """Of each of the model's outputs, in its order, which of the federation's classes it is, by name; "" is
    none of them. Empty: as the model itself says, or all in order."""


@dataclass(frozen=True)
class CustomModel(ModelConfig):
    """A model that is here already, for :func:`fedstill.distil`: ``CustomModel(source=forest, input_format="raw")``."""

    source: Any = None
    """A torch module, an estimator, an ONNX session or a function; None: what has the name."""


def read_model_config(name: str, folder: Path, whose: str) -> ModelConfig:
    """What a name says of a model, or a ``.toml`` file with the same keys as [model] in a node's file.

    Args:
        folder: from which paths count; in a file, from where it is.
        whose: the argument that names it, for errors.

    Raises:
        ArgumentError: there is no such file, or not with these keys.
        FedstillError: it is not TOML.
    """
    if not name.endswith(".toml"):
        return _with_absolute_paths(ModelConfig(name=name), folder, whose)
    path = resolve_path(name, folder, whose)
    try:
        text = toml.read_text(path)
    except FedstillError as error:
        allowed = f"a file that says which model it is ({first_line(error)})"
        raise ArgumentError(whose, name, allowed) from error
    said = read_table(ModelConfig, toml.parse(text, str(path)), f"{path.name}: ")
    return _with_absolute_paths(said, path.parent, whose)


def resolve_path(path: str, folder: Path, whose: str) -> Path:
    """A path from a folder, where it does not begin elsewhere.

    Raises:
        ArgumentError: it cannot be one.
    """
    try:
        sound = "\0" not in path and Path(path).expanduser()
    except RuntimeError:  # there is no such user
        sound = False
    if not sound:
        allowed = "a path without zero characters, after ~ a user of this machine"
        raise ArgumentError(whose, path, allowed)
    return folder / sound


def _with_absolute_paths(config: ModelConfig, folder: Path, whose: str) -> ModelConfig:
    """The same from whatever folder it is looked at."""
    name, weights = config.name, config.weights
    if name.endswith(MODEL_SUFFIXES):
        name = str(resolve_path(name, folder, whose).resolve())
    if weights:
        weights = str(resolve_path(weights, folder, f"{whose}: weights").resolve())
    return replace(config, name=name, weights=weights)
