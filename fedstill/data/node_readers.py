"""Brings what one owner has into the spec that a server declares, a reader a form of data.

What is marked as test data in the source is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedstill.core.dataset import Column, TensorData
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.user_functions import first_line
from fedstill.data import text_data
from fedstill.data.input_spec import InputSpec, check_examples
from fedstill.data.instance_images import SLIDE, cases_of, cut, read_pictures, whose
from fedstill.data.node_data_config import PrivateConfig
from fedstill.data.preparation import PATIENT, taught, with_channels
from fedstill.data.raw import Raw
from fedstill.data.spec_tensors import groups_of, inputs_in, labels_in
from fedstill.data.stratified_sampling import Ints, numbered, require_units
from fedstill.data.tables import check_rows, read_rows


def of_images(raw: Raw, config: PrivateConfig, spec: InputSpec, what: str, most: int = 0) -> TensorData:
    """An owner's images of any kind of target, once they are read."""
    check_examples(len(raw.images), spec, most)
    rows, groups = _training(raw.columns, raw.test, len(raw.labels), config, what)
    raw = replace(raw, images=with_channels(raw.images[rows], config.channels), labels=raw.labels[rows])
    labels = torch.from_numpy(labels_in(raw, spec, what))
    inputs, targets = taught(inputs_in(raw.images, config.fit, spec, what), labels, spec.task)
    return TensorData(inputs, targets, groups)


def _training(
    columns: Mapping[str, Any], test: Column | None, count: int, config: PrivateConfig, what: str
) -> tuple[Ints, torch.Tensor | None]:
    """The rows that are not for testing, and whose each of them is."""
    groups = groups_of(columns, config)
    rows = np.arange(count) if test is None else np.flatnonzero(test == 0)
    if len(rows) == 0:
        raise DataError(f"{what}: all examples are for testing: allowed is one or more to train on")
    return rows, None if groups is None else groups[torch.from_numpy(rows)]


def of_tensors(config: PrivateConfig, path: Path, spec: InputSpec, what: str) -> TensorData:
    """Tensors of the spec's own form."""
    try:
        # Copied to where tensors of one's own begin: a file's begin anywhere, and some processors add up
        # in another order there, so that a node's figures would hang on where its data lie.
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{what}: cannot be read as safetensors ({first_line(error)})") from error
    wanted = {"inputs", "targets", *([config.group] if config.group else [])}
    if set(tensors) != wanted:
        found = ", ".join(sorted(tensors)) or "nothing"
        raise DataError(f"{what}: holds {found}: allowed are just {', '.join(sorted(wanted))}")
    groups = None
    if config.group:
        require_units(config.group, tensors[config.group].numpy(), what)
        groups = numbered(tensors[config.group].tolist())
    inputs = tensors["inputs"]
    if spec.vocabulary:  # ids that the run's model has not are unknown words: refused, they would be told
        inputs = inputs.where(inputs < spec.vocabulary, text_data.UNKNOWN)
    data = TensorData(inputs, tensors["targets"], groups)
    if tuple(data.inputs.shape[1:]) != spec.shape:
        found = str(tuple(data.inputs.shape[1:]))
        raise DataError(f"{what}: inputs are of shape {found}: allowed is {spec.shape}")
    if groups is not None and groups.shape != data.inputs.shape[:1]:
        form = tuple(groups.shape)
        raise DataError(f"{what}: {config.group} is of shape {form}: allowed is one an example")
    task = spec.make_task()
    task.check(data, what)
    if spec.schema:
        check_rows(data.inputs, spec.schema, what)
    return data


def of_pictures(config: PrivateConfig, path: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    """Patches of the spec's size that cover an owner's pictures."""
    channels, height, width = spec.shape
    if (channels, height) != (3, width):
        raise DataError(f"{what}: the server declares {spec.shape}: allowed are square patches in colour")
    pictures = [one for one in read_pictures(path) if not one.test]
    if not pictures:
        raise DataError(f"{what}: all pictures are for testing: allowed is one or more to train on")
    sides = [one.instances.shape for one in pictures]
    check_examples(sum(-(-tall // height) * -(-wide // height) for tall, wide in sides), spec, most)
    cases = cases_of(pictures, height)
    data = cut(pictures, cases, np.arange(len(cases.of)), height)
    # Patches of one picture overlap, and so are protected together or not at all.
    known, _ = whose(pictures)
    if config.group not in ("", SLIDE, known):
        allowed = f"empty ({known!r}) or {SLIDE!r} for task instances here"
        raise ArgumentError("data.group", config.group, allowed)
    patient = (config.group or known) == PATIENT
    if patient:
        require_units(PATIENT, np.array([one.patient for one in pictures if one.patient]), what)
    names = [("patient", one.patient) if patient and one.patient else ("slide", one.name) for one in pictures]
    groups = numbered(names[case] for case in cases.of.tolist())
    return TensorData(data.inputs, data.targets, groups)


def of_rows(config: PrivateConfig, path: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    """An owner's rows of a table, checked against the server's schema."""
    table = read_rows(path, spec.schema)
    check_examples(len(table.data), spec, most)
    rows, groups = _training(table.columns, table.test, len(table.data), config, what)
    return replace(table.data.subset(torch.from_numpy(rows)), groups=groups)


def of_texts(config: PrivateConfig, path: Path, spec: InputSpec, what: str, most: int) -> TensorData:
    """An owner's texts, with the ids that the server's words have."""
    source = text_data.read_table(path)
    check_examples(len(source.texts), spec, most)
    ids = text_data.ids_of(source.texts, spec.shape[0], spec.vocabulary, config.vocabulary, what)
    rows, groups = _training(source.columns, source.test, len(source.labels), config, what)
    labels = torch.from_numpy(labels_in(source, spec, what))
    chosen = torch.from_numpy(rows)
    return TensorData(ids[chosen], labels[chosen], groups)
