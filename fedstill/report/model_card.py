"""Model card of a student in Markdown: model, training data, metrics, privacy and attacks.

The front matter follows the Hugging Face Hub. The publisher fills in the license.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstill.attacks.attack import Leakage
from fedstill.core.run_writer import read_result
from fedstill.core.text_format import NOT_MEASURED, format_bytes, format_count, join_names
from fedstill.report import privacy_section
from fedstill.report.records import RESULT_FILE, Result
from fedstill.report.run_page import detail_sentences, lead_sentence
from fedstill.report.run_tables import interval_label, metrics_table
from fedstill.report.tables import markdown

CARD_FILE = "README.md"
PIPELINES = {"classification": "image-classification", "multi-label": "image-classification",
             "segmentation": "image-segmentation", "text": "text-classification",
             "tabular": "tabular-classification", "regression": "tabular-regression"}  # fmt: skip

COUNTS, SIZES = "label counts", "data sizes"
NOT_ATTACKED = "No attacks were run (`fedstill attack`), so leakage was not measured."

NO_NOTES = "The run has no notes."
NOTES_WITHHELD = "Notes of the run are withheld: they may depend on protected data without noise."

CARD = """\
---
license: unknown  # to be filled in by the publisher
library_name: fedstill
tags: [federated-learning, knowledge-distillation]
{pipeline}---

# {name}

Student (global model) of a federated run: {model}, {parameters}, trained by {method} ({task}).
Inputs: {inputs}. Classes or outputs: {classes}.

```python
{use}
```

## Training

{training}

## Data

{data}

## Metrics

Measured on {test}.{intervals}

{metrics}

## Privacy

{privacy}

{releases}

## Attacks

{leakage}

## Limitations and notes

{notes}

## License

*To be filled in: license of the weights, and permissions of the data owners.*

Created by fedstill {version}, {date}: `{command}`
"""


def model_card(folder: Path, inputs: str, usage: str) -> str:
    """Return the model card of a finished run's student in Markdown.

    A card is public, and what nodes released to their server is not. So it has no counts of single nodes, and
    the number of all training examples only if nodes released their sizes without noise.

    Args:
        folder: folder of the run.
        inputs: inputs of the student, in words.
        usage: Python code that uses the student.

    Raises:
        RunFolderError: the folder holds no finished run, or the run has no global model.
    """
    result, leakage = Result.read(folder), Leakage.read(folder)
    releases = ", ".join(
        f"{kind} ({format_bytes(sums.up)})" for kind, sums in (result.bytes.by_kind or {}).items() if sums.up
    )
    data, names = result.data, result.data.classes
    # With a privacy mechanism, nodes release noisy counts if any, but the result of a simulation has exact
    # ones.
    private = any(node.mechanism != "none" for node in result.node_privacy)
    has_size = not private and bool({COUNTS, SIZES} & set(result.releases))
    # With a privacy mechanism, metrics of models trained without it are withheld.
    scores = metrics_table(result)
    shown = [row for row in scores.rows if row.highlight or not private]
    pipeline = PIPELINES.get(task := str(read_result(folder / RESULT_FILE)["task"]), "")
    public = result.public
    training = (
        f"{_count(data.train)} training examples" if has_size else "training examples (number withheld)"
    )
    sentences = [
        f"Data set {data.name or NOT_MEASURED}: {training} at {format_count(len(result.nodes), 'node')}, "
        f"{_count(data.test)} test examples.",
        f"Split: {result.split.about}." if result.split.about else "",
        f"Public data: {public.name}, {_count(public.examples)} examples." if public.name else "",
        f"Note: {data.note}." if data.note and has_size else "",
    ]
    fields: dict[str, Any] = {
        "pipeline": f"pipeline_tag: {pipeline}\n" if pipeline else "",
        "use": usage,
        "name": result.name or "Student",
        "model": result.student.model or NOT_MEASURED,
        "parameters": f"{_count(result.student.parameters)} parameters",
        "method": result.method_title,
        "task": task,
        "inputs": inputs,
        "classes": join_names(names) or NOT_MEASURED,
        "training": f"{lead_sentence(result)} {detail_sentences(result)}",
        "data": " ".join(part for part in sentences if part),
        "test": f"{_count(data.test)} test examples",
        "intervals": f" Intervals: {interval_label(result)}." if result.intervals else "",
        "metrics": "\n".join(markdown(replace(scores, rows=shown))),
        "privacy": privacy_section.describe_privacy(result) or NOT_MEASURED,
        "releases": f"Releases of the nodes: {releases or 'nothing'}.",
        "leakage": NOT_ATTACKED if leakage is None else leakage.sentence,
        "notes": NOTES_WITHHELD
        if private
        else "\n".join(f"- {note}" for note in result.note_sentences) or NO_NOTES,
        "version": result.fedstill or NOT_MEASURED,
        "date": (result.date or NOT_MEASURED).partition("T")[0],
        "command": result.command or "from Python",
    }
    return CARD.format(**fields)


def _count(count: int | None) -> str:
    return NOT_MEASURED if count is None else f"{count:,}"
