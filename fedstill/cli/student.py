"""``fedstill predict``, ``evaluate`` and ``export``: a run's student, once the run is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.cli.arguments import ParsedArgs, number
from fedstill.cli.console import print_json
from fedstill.core.errors import FedstillError
from fedstill.core.text_format import format_count

if TYPE_CHECKING:
    from fedstill.data.new_data import EvaluationDataOptions


def predict(args: ParsedArgs) -> None:
    """Write the student's predictions as a CSV file."""
    from fedstill.student.predict import predict
    from fedstill.student.student_model import load

    run, data = args.positionals
    options = reading(args)
    out = args.path("--out", f"{Path(data).stem}-predictions.csv")
    if out.exists() and "--out" not in args:
        raise FedstillError(f"{out} exists: --out names another file, or this one to replace it")
    student = load(run, args.get("--model"))
    count = predict(student, data, replace(options, words=student.about.words), out)
    if "--json" in args:
        print_json({"answers": count, "file": str(out)})
        return
    place = "" if "--out" in args else " (in the current folder)"
    print(f"{format_count(count, 'response')}: {out}{place}")


def evaluate(args: ParsedArgs) -> None:
    """All figures of the student's task on other data."""
    from fedstill.student.evaluate import evaluate

    run, data = args.positionals[0], str(args.get("--data"))
    found = evaluate(run, data, reading(args), args.get("--model"))
    if "--json" in args:
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


def export(args: ParsedArgs) -> None:
    """The student in another tool's form, with its preprocessing, compared; and its card."""
    from fedstill.report.model_card import CARD_FILE, model_card
    from fedstill.student.export import export, export_format_by_name
    from fedstill.student.student_model import load

    run, kind = Path(args.positionals[0]), str(args.get("--format"))
    default_name = export_format_by_name(kind).name  # before the run is read: a wrong format is seen at once
    student = load(run, args.get("--model"))
    folder = run if run.is_dir() else run.parent
    out = args.path("--out", folder / default_name)
    apart = export(student, kind, out)
    card = None
    if (folder / "result.json").exists():
        use = export_format_by_name(kind).use.format(file=out.name, inputs=student.preprocessing.input_name)
        card = out / CARD_FILE if out.is_dir() else out.with_name(f"{out.name}.md")
        card.write_text(model_card(folder, student.preprocessing.description, use), encoding="utf-8")
    if "--json" in args:
        summary = {"file": str(out), "apart": apart, "takes": student.preprocessing.description}
        print_json({**summary, "card": None if card is None else str(card)})
        return
    print(f"{out}: loaded back, and the same to {apart:.1e}")
    print(f"It takes {student.preprocessing.description}; the preprocessing is inside.")
    if card is not None:
        print(f"Model card: {card}")


def reading(args: ParsedArgs) -> EvaluationDataOptions:
    """Return how data are read, by the options."""
    from fedstill.data.new_data import EvaluationDataOptions

    channels = tuple(number("--channels", each, int) for each in args.options.get("--channels", ()))
    return EvaluationDataOptions(
        root=args.get("--root") or "",
        fit="--fit" in args,
        label=args.get("--label") or "label",
        image=args.get("--image") or "",
        channels=channels,
        slices=number("--slices", args.get("--slices") or "0", int, lambda count: count >= 0),
        sites=tuple(args.options.get("--sites", ())),
    )
