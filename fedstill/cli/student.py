"""``fedstill predict``, ``evaluate`` and ``export``: a run's student, once the run is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedstill.cli.arguments import AsJson
from fedstill.cli.console import print_json
from fedstill.core.errors import FedstillError
from fedstill.core.options import NonNegativeInt
from fedstill.core.text_format import format_count

RunFolder = Annotated[Path, Parameter(help="folder of a run")]
Label = Annotated[str, Parameter(help="column of labels in a CSV file (default: label)")]
Image = Annotated[str, Parameter(help="column of image files in a CSV file (default: pixels in columns)")]
Fit = Annotated[bool, Parameter(help="resize images, and convert their channels, to the student's input")]
Channels = Annotated[tuple[int, ...], Parameter(help="channels of the images to use")]
Model = Annotated[
    str | None,
    Parameter(help="the student's network as package.module:factory, if it is not part of fedstill"),
]

Backbone = Annotated[
    str, Parameter(help="hf:FOLDER or FILE.onnx of the student's backbone, if it has moved since the run")
]
BackboneWeights = Annotated[str, Parameter(help="file of the backbone's weights, if it has moved")]


def predict(
    run: RunFolder,
    data: Path,
    /,
    *,
    out: Path | None = None,
    label: Label = "label",
    image: Image = "",
    fit: Fit = False,
    channels: Channels = (),
    model: Model = None,
    backbone: Backbone = "",
    backbone_weights: BackboneWeights = "",
    as_json: AsJson = False,
) -> None:
    """Write the student's predictions for new data as a CSV file.

    example: fedstill predict runs/demo new-images/ --out predictions.csv

    Args:
        data: folder of images, CSV, Parquet or npz file
        out: CSV file to write (default: DATA-predictions.csv in the current folder)
    """
    from fedstill.data.new_data import EvaluationDataOptions
    from fedstill.student.predict import predict as write_predictions
    from fedstill.student.student_model import load

    file = out or Path(f"{data.stem}-predictions.csv")
    if out is None and file.exists():
        raise FedstillError(f"{file} exists: --out names another file, or this one to replace it")
    student = load(run, model, backbone, backbone_weights)
    options = EvaluationDataOptions(fit=fit, label=label, image=image, channels=channels)
    count = write_predictions(student, str(data), replace(options, words=student.about.words), file)
    if as_json:
        print_json({"answers": count, "file": str(file)})
        return
    place = " (in the current folder)" if out is None else ""
    print(f"{format_count(count, 'response')}: {file}{place}")


def evaluate(
    run: RunFolder,
    /,
    *,
    data: str,
    root: str = "",
    sites: tuple[str, ...] = (),
    label: Label = "label",
    image: Image = "",
    fit: Fit = False,
    channels: Channels = (),
    slices: NonNegativeInt = 0,
    model: Model = None,
    backbone: Backbone = "",
    backbone_weights: BackboneWeights = "",
    as_json: AsJson = False,
) -> None:
    """Evaluate the student on other labeled data, in total and by site.

    example: fedstill evaluate runs/demo --data hospital-d.csv --label diagnosis

    Args:
        data: built-in data set, file or folder
        root: folder of the built-in data sets
        sites: evaluate on these sites only
        slices: slices of each NIfTI volume
    """
    from fedstill.data.new_data import EvaluationDataOptions
    from fedstill.student.evaluate import evaluate as evaluate_student

    options = EvaluationDataOptions(
        root=root, fit=fit, label=label, image=image, channels=channels, slices=slices, sites=sites
    )
    found = evaluate_student(run, data, options, model, backbone, backbone_weights)
    if as_json:
        print_json(found)
        return
    from fedstill.core.safe_console import SafeConsole
    from fedstill.report.tables import print_rows
    from fedstill.report.terminal import data_overlap_text, evaluation_table
    from fedstill.tasks.task import Metric

    metrics = tuple(Metric(**each) for each in found["measures"])
    print_rows(evaluation_table(found, metrics), SafeConsole())
    print(data_overlap_text(found))
    for note in found["notes"]:
        print(f"Note: {note}")


def export(
    run: RunFolder,
    /,
    *,
    kind: Annotated[str, Parameter(name="--format")],
    out: Path | None = None,
    model: Model = None,
    backbone: Backbone = "",
    backbone_weights: BackboneWeights = "",
    as_json: AsJson = False,
) -> None:
    """Export the student with its preprocessing to ONNX, TorchScript or Hugging Face.

    example: fedstill export runs/demo --format onnx --out student.onnx

    Args:
        kind: onnx, torchscript or huggingface
        out: file or folder to write (default: in the run's folder)
    """
    from fedstill.report.model_card import CARD_FILE, model_card
    from fedstill.student.export import export as export_student
    from fedstill.student.export import export_format_by_name
    from fedstill.student.student_model import load

    default_name = export_format_by_name(kind).name  # before the run is read: a wrong format is seen at once
    student = load(run, model, backbone, backbone_weights)
    folder = run if run.is_dir() else run.parent
    out = out or folder / default_name
    apart = export_student(student, kind, out)
    card = None
    if (folder / "result.json").exists():
        use = export_format_by_name(kind).use.format(file=out.name, inputs=student.preprocessing.input_name)
        card = out / CARD_FILE if out.is_dir() else out.with_name(f"{out.name}.md")
        card.write_text(model_card(folder, student.preprocessing.description, use), encoding="utf-8")
    if as_json:
        summary = {"file": str(out), "apart": apart, "takes": student.preprocessing.description}
        print_json({**summary, "card": None if card is None else str(card)})
        return
    print(f"{out}: loaded back, and the same to {apart:.1e}")
    print(f"It takes {student.preprocessing.description}; the preprocessing is inside.")
    if card is not None:
        print(f"Model card: {card}")
