"""Export a student for other tools, with its preprocessing, and check that the export computes the same.

An export is reported only after it has been loaded back and compared. It raises no errors of fedstill:
outputs for invalid inputs are NaN (:class:`.PortableStudent`).
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
from fedstill.models.backbones import ONNX_GRAPH, BackboneWithHead, OnnxEncoder
from fedstill.models.module_utils import deep_copy
from fedstill.student.student_model import PortableStudent, StudentModel, export_metadata

TEST_INPUTS = 8  # inputs for the comparison
TOLERANCE = 1e-4  # relative to the largest output, for another order of summation


class Format(NamedTuple):
    """An export format.

    Args:
        name: default name of the file or folder, in the folder of the run.
        write: writes the export.
        outputs: loads the export and returns its outputs for inputs.
        use: Python code that uses the export.
    """

    name: str
    write: Callable[[PortableStudent, torch.Tensor, Path], None]
    outputs: Callable[[Path, torch.Tensor], torch.Tensor]
    use: str


def export(student: StudentModel, kind: str, out: Path) -> float:
    """Export a student, load it back, and compare.

    Args:
        student: the student.
        kind: one of :data:`FORMATS`.
        out: a file, or for some formats a folder. An existing one is replaced after the comparison.

    Returns:
        The largest difference of outputs for random inputs.

    Raises:
        ArgumentError: unknown format, missing package, or ``out`` cannot be written.
        ModelError: the network cannot be exported, or the export computes something else.
    """
    named = {Path(each.name).suffix: name for name, each in FORMATS.items() if Path(each.name).suffix}
    if named.get(out.suffix, kind) != kind:
        raise ArgumentError("--out", str(out), f"another suffix than that of {named[out.suffix]}")
    if not out.parent.is_dir():
        raise ArgumentError("--out", str(out), f"a path in an existing folder, which {out.parent} is not")
    with TemporaryDirectory(dir=out.parent, prefix=".export-") as folder:
        exported = Path(folder) / out.name
        difference = _write_and_compare(student, kind, exported)
        if out.exists() and out.is_dir() != exported.is_dir():
            raise ArgumentError(
                "--out", str(out), f"a {'folder' if exported.is_dir() else 'file'}, or a new path"
            )
        if not out.is_dir():
            exported.replace(out)
        else:
            for file in exported.iterdir():
                file.replace(out / file.name)
    return difference


def _write_and_compare(student: StudentModel, kind: str, out: Path) -> float:
    if isinstance(network := student.network, BackboneWithHead):
        student = StudentModel(deep_copy(network).as_float32(), student.about)
    export_format, portable = export_format_by_name(kind), PortableStudent(student).eval()
    if kind != "onnx" and any(isinstance(module, OnnxEncoder) for module in portable.modules()):
        raise ArgumentError("--format", kind, "onnx, as the backbone is an ONNX graph")
    x = student.preprocessing.sample(TEST_INPUTS, torch_generator(0, "export"))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the exporters
            expected = portable(x)
            export_format.write(portable, x, out)
            outputs = export_format.outputs(out, x)
    except FedstillError:
        raise
    except Exception as error:  # of three libraries without a common error class
        cause: BaseException = error
        while cause.__cause__ is not None:  # outer errors describe steps of the exporter
            cause = cause.__cause__
        message = f"{student.about.model!r} cannot be exported as {kind}"
        raise ModelError(f"{message}: {type(cause).__name__}: {first_line(cause)}") from error
    if expected.shape != outputs.shape:
        shapes = f"{tuple(outputs.shape)} (expected {tuple(expected.shape)})"
        raise ModelError(f"{out.name}: has outputs {shapes}")
    difference = float((expected - outputs).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ModelError(f"{out.name}: differs from the student by up to {difference:.3g}")
    return difference


def export_format_by_name(kind: str) -> Format:
    """Return a format by name.

    Raises:
        ArgumentError: there is no such format.
    """
    if kind not in FORMATS:
        raise ArgumentError("--format", kind, f"one of {', '.join(FORMATS)}")
    return FORMATS[kind]


def _import_onnx() -> tuple[ModuleType, ModuleType]:
    """Import onnx and onnxruntime of the extra "onnx"."""
    try:
        importlib.import_module("onnxscript")  # used by torch's exporter
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise FedstillError(f"--format onnx needs {error.name}: pip install 'fedstill[onnx]'") from error


# --- formats ------------------------------------------------------------------------------------------------


def _write_onnx(portable: PortableStudent, x: torch.Tensor, out: Path) -> None:
    onnx, _ = _import_onnx()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # suppress warnings about unused libraries
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
        raise ModelError("the exporter returned no program")
    program.save(str(out))
    model = onnx.load(str(out))
    for module in portable.modules():
        if isinstance(module, OnnxEncoder):
            _insert_graph(model, module)
    for key, value in _metadata(portable.student).items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.checker.check_model(model)
    onnx.save(model, str(out))


def _insert_graph(model: Any, encoder: OnnxEncoder) -> None:
    """Replace the node that stands for an encoder by the encoder's ONNX graph."""
    onnx, _ = _import_onnx()
    compose = importlib.import_module("onnx.compose")
    domain, name = ONNX_GRAPH.split("::")
    version = next(each.version for each in model.opset_import if not each.domain)
    inner = onnx.load_model_from_string(encoder.graph)
    if any(not each.domain and each.version != version for each in inner.opset_import):
        inner = importlib.import_module("onnx.version_converter").convert_version(inner, version)
    prefix = "backbone/"
    inner = compose.add_prefix(inner, prefix)
    nodes = []
    for node in model.graph.node:
        if (node.domain, node.op_type) != (domain, name):
            nodes.append(node)
            continue
        first, last = prefix + encoder.input_name, inner.graph.output[0].name
        nodes.append(onnx.helper.make_node("Identity", [node.input[0]], [first]))
        nodes.extend(inner.graph.node)
        nodes.append(onnx.helper.make_node("Identity", [last], [node.output[0]]))
    domains = [each for each in model.opset_import if each.domain != domain]
    domains += [each for each in inner.opset_import if each.domain]
    for part, new in ((model.graph.node, nodes), (model.opset_import, domains)):
        del part[:]
        part.extend(new)
    model.graph.initializer.extend(inner.graph.initializer)
    model.functions.extend(inner.functions)


def _run_onnx(out: Path, x: torch.Tensor) -> torch.Tensor:
    session = _import_onnx()[1].InferenceSession(str(out), providers=["CPUExecutionProvider"])
    [model_input] = session.get_inputs()
    # Two batch sizes, as the batch size must not be fixed.
    responses = [session.run(None, {model_input.name: batch.numpy()})[0] for batch in (x[:1], x[1:])]
    return torch.cat([torch.from_numpy(response) for response in responses])


def _write_torchscript(portable: PortableStudent, x: torch.Tensor, out: Path) -> None:
    traced = torch.jit.trace(portable, x)  # type: ignore[no-untyped-call]
    files = {METADATA_FILE: json.dumps(_metadata(portable.student))}
    torch.jit.save(traced, str(out), _extra_files=files)


def _run_torchscript(out: Path, x: torch.Tensor) -> torch.Tensor:
    loaded = torch.jit.load(str(out))  # type: ignore[no-untyped-call]
    return torch.cat([loaded(batch) for batch in (x[:1], x[1:])])


def _write_hugging_face(portable: PortableStudent, x: torch.Tensor, out: Path) -> None:
    from fedstill.student.hugging_face import save

    save(portable.student, out)


def _run_hugging_face(out: Path, x: torch.Tensor) -> torch.Tensor:
    from fedstill.student.hugging_face import run_export

    return run_export(out, x)


METADATA_FILE = "fedstill.json"  # extra file in a TorchScript export

ONNX = """\
import onnxruntime

outputs = onnxruntime.InferenceSession("{file}").run(None, {{"{inputs}": array}})[0]"""
TORCHSCRIPT = """\
import torch

outputs = torch.jit.load("{file}")(tensor)"""
HUGGING_FACE = """\
import fedstill.student.hugging_face  # registers the model type
from transformers import AutoModel

outputs = AutoModel.from_pretrained("{file}")(tensor).logits"""
FORMATS: Mapping[str, Format] = {
    "onnx": Format("student.onnx", _write_onnx, _run_onnx, ONNX),
    "torchscript": Format("student.pt", _write_torchscript, _run_torchscript, TORCHSCRIPT),
    "huggingface": Format("student-huggingface", _write_hugging_face, _run_hugging_face, HUGGING_FACE),
}


def _metadata(student: StudentModel) -> dict[str, str]:
    description: dict[str, Any] = export_metadata(student)
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in description.items()}
