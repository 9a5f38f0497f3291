"""Writes a student for other tools, with its preprocessing inside, and compares what they make of it.

Done is only said of a file that was loaded back and answered as the student does. What other tools run can
raise no error of ours: it answers NaN to inputs that are none (``central_model.Portable``).
"""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fedstill.core.errors import ArgumentError, FedstillError, ModelError
from fedstill.core.registry import first_line
from fedstill.core.seeds import torch_generator
from fedstill.student.student_model import PortableStudent, StudentModel, describe_export

TEST_INPUTS = 8  # that both forms are asked about
TOLERANCE = 1e-4  # over the largest output: what sums of another order may move


class Format(NamedTuple):
    """One form of a student.

    Args:
        name: of the file or folder, in the run's.
        outputs: loads the export and returns its outputs for inputs.
        use: how others use it, in Python.
    """

    name: str
    write: Callable[[PortableStudent, torch.Tensor, Path], None]
    outputs: Callable[[Path, torch.Tensor], torch.Tensor]
    use: str


def export(student: StudentModel, kind: str, out: Path) -> float:
    """Write a student in a format, load it back, and compare.

    Args:
        kind: one of :data:`FORMATS`.
        out: a file, or of some formats a folder; an old one is written over, once all is well.

    Returns:
        The largest difference between outputs on inputs drawn at random.

    Raises:
        ArgumentError: no such format, what it needs is not installed, or ``out`` cannot be written.
        ModelError: the network cannot be written so, or answers otherwise when it is loaded back.
    """
    if not out.parent.is_dir():
        raise ArgumentError("--out", str(out), f"a path in a folder that is there, and {out.parent} is none")
    with TemporaryDirectory(dir=out.parent, prefix=".export-") as folder:
        made = Path(folder) / out.name
        apart = _write_and_compare(student, kind, made)
        if out.exists() and out.is_dir() != made.is_dir():
            raise ArgumentError(
                "--out", str(out), f"a {'folder' if made.is_dir() else 'file'}, or a new path"
            )
        if not out.is_dir():
            made.replace(out)
        else:
            for file in made.iterdir():
                file.replace(out / file.name)
    return apart


def _write_and_compare(student: StudentModel, kind: str, out: Path) -> float:
    form, portable = format_of(kind), PortableStudent(student).eval()
    x = student.preprocessing.sample(TEST_INPUTS, torch_generator(0, "export"))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' talk among themselves
            mine = portable(x)
            form.write(portable, x, out)
            theirs = form.outputs(out, x)
    except FedstillError:
        raise
    except Exception as error:  # of three libraries, which share no class
        cause: BaseException = error
        while cause.__cause__ is not None:  # what is around it tells of the exporter's own steps
            cause = cause.__cause__
        told = f"{student.about.model!r} cannot be exported as {kind}"
        raise ModelError(f"{told}: {type(cause).__name__}: {first_line(cause)}") from error
    if mine.shape != theirs.shape:
        gives = f"{tuple(theirs.shape)}, and the student {tuple(mine.shape)}"
        raise ModelError(f"{out.name}: gives outputs {gives}")
    apart = float((mine - theirs).abs().max())
    if not apart <= TOLERANCE * max(1.0, float(mine.abs().max())):
        raise ModelError(f"{out.name}: answers otherwise than the student, by up to {apart:.3g}")
    return apart


def format_of(kind: str) -> Format:
    """A format by its name; an ArgumentError if there is none."""
    if kind not in FORMATS:
        raise ArgumentError("--format", kind, f"one of {', '.join(FORMATS)}")
    return FORMATS[kind]


def _import_onnx() -> tuple[ModuleType, ModuleType]:
    """onnx and onnxruntime, if all of the extra "onnx" is installed."""
    try:
        importlib.import_module("onnxscript")  # what torch's exporter writes with
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise FedstillError(f"--format onnx needs {error.name}: pip install 'fedstill[onnx]'") from error


# --- formats ------------------------------------------------------------------------------------------------


def _write_onnx(portable: PortableStudent, x: torch.Tensor, out: Path) -> None:
    onnx, _ = _import_onnx()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of libraries that nothing here uses
    program = torch.onnx.export(
        portable,
        (x,),
        input_names=[portable.student.preprocessing.input_name],
        output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        verbose=False,
        optimize=True,
    )
    if program is None:
        raise ModelError("the exporter gave no program")
    program.save(str(out))
    model = onnx.load(str(out))
    for key, value in _metadata(portable.student).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.checker.check_model(model)
    onnx.save(model, str(out))


def _run_onnx(out: Path, x: torch.Tensor) -> torch.Tensor:
    session = _import_onnx()[1].InferenceSession(str(out), providers=["CPUExecutionProvider"])
    [given] = session.get_inputs()
    # One by one, too: a batch of another size is no other model.
    responses = [session.run(None, {given.name: some.numpy()})[0] for some in (x[:1], x[1:])]
    return torch.cat([torch.from_numpy(each) for each in responses])


def _write_torchscript(portable: PortableStudent, x: torch.Tensor, out: Path) -> None:
    traced = torch.jit.trace(portable, x)  # type: ignore[no-untyped-call]
    files = {METADATA_FILE: json.dumps(_metadata(portable.student))}
    torch.jit.save(traced, str(out), _extra_files=files)


def _run_torchscript(out: Path, x: torch.Tensor) -> torch.Tensor:
    loaded = torch.jit.load(str(out))  # type: ignore[no-untyped-call]
    return torch.cat([loaded(some) for some in (x[:1], x[1:])])


def _write_hugging_face(portable: PortableStudent, x: torch.Tensor, out: Path) -> None:
    from fedstill.student.hugging_face import save

    save(portable.student, out)


def _run_hugging_face(out: Path, x: torch.Tensor) -> torch.Tensor:
    from fedstill.student.hugging_face import run_export

    return run_export(out, x)


METADATA_FILE = "fedstill.json"  # in a file of TorchScript

ONNX = """\
import onnxruntime

outputs = onnxruntime.InferenceSession("{file}").run(None, {{"{inputs}": array}})[0]"""
TORCHSCRIPT = """\
import torch

outputs = torch.jit.load("{file}")(tensor)"""
HUGGING_FACE = """\
import fedstill.student.hugging_face  # registers the kind
from transformers import AutoModel

outputs = AutoModel.from_pretrained("{file}")(tensor).logits"""
FORMATS: Mapping[str, Format] = {
    "onnx": Format("student.onnx", _write_onnx, _run_onnx, ONNX),
    "torchscript": Format("student.pt", _write_torchscript, _run_torchscript, TORCHSCRIPT),
    "huggingface": Format("student-huggingface", _write_hugging_face, _run_hugging_face, HUGGING_FACE),
}


def _metadata(student: StudentModel) -> dict[str, str]:
    told: dict[str, Any] = describe_export(student)
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in told.items()}
