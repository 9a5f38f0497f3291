"""A model card from a run's facts, in Markdown: what the student is, learned from, reaches and gives away.

The front matter is what Hugging Face's hub reads. The license is for whoever publishes it to fill in.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstill.attacks.leakage import Leakage
from fedstill.core.run_writer import read_result
from fedstill.core.text_format import NOT_MEASURED, format_bytes, format_count, join_names
from fedstill.report import privacy_section
from fedstill.report.model_scores import table, tested
from fedstill.report.result import FILE, Result
from fedstill.report.result_parts import NodeRecord
from fedstill.report.run_text import plain_sentence
from fedstill.report.table_formats import Cell, Column, Row, Table, markdown

NAME = "README.md"
PIPELINES = {"classification": "image-classification", "multi-label": "image-classification",
             "segmentation": "image-segmentation", "text": "text-classification",
             "tabular": "tabular-classification", "regression": "tabular-regression"}  # fmt: skip

COUNTS, SIZES = "label counts", "data sizes"
UNTRIED = "The run was not attacked (`fedstill attack`), which says nothing of what attacks would get."

NOTHING = "Nothing was noted by the run."
UNTOLD = "What the run noted is not told here, as it may follow from protected data without their noise."

CARD = """\
---
license: unknown  # to be filled in by whoever publishes it
library_name: fedstill
tags: [federated-learning, knowledge-distillation]
{pipeline}---

# {name}

The student of a federated run: {model}, {parameters}, learned by {method} ({task}).
It takes {inputs}. Classes or outputs: {classes}.

```python
{use}
```

## What happened

{happened}

## Data, by counts

{data}

{nodes}

## What it reaches

On {test}.{tested}

{metrics}

## Privacy

{privacy}

{left}

## Attacks

{leakage}

## What to mind

{notes}

## License

*To be filled in: of the weights, and of what the data's owners allow.*

Made by fedstill {version}, {date}: `{command}`
"""


def model_card(folder: Path, says: str, use: str) -> str:
    """The card of a finished run's student.

    A card is for everybody: what a node holds is told as far as the node told it without noise, though a
    simulation's own report knows more.

    Args:
        says: what the student takes, in words.
        use: how it is used, in Python.

    Raises:
        RunFolderError: there is no finished run, or it has no central model.
    """
    result, leakage = Result.read(folder), Leakage.read(folder)
    left = ", ".join(
        f"{kind} ({format_bytes(sums.up)})" for kind, sums in (result.bytes.by_kind or {}).items() if sums.up
    )
    data, names = result.data, result.data.classes
    # Under a mechanism counts leave with noise, if at all, and the result of a simulation has the true ones.
    private = any(node.mechanism != "none" for node in result.node_privacy)
    told = set() if private else set(result.leaves) & {COUNTS, SIZES}
    by_class = COUNTS in told and any(node.label_counts for node in result.nodes)
    rows = [
        Row(
            node.name,
            [
                Cell(None if node.examples is None else f"{node.examples:,}"),
                *(Cell(None if count is None else f"{count:,}") for count in _by_class(node, by_class)),
            ],
        )
        for node in (result.nodes if told else ())
    ]
    # Models that learned without protection, and what was seen in nodes' data, are a simulation's to know.
    levels = table(result)
    shown = [row for row in levels.rows if row.accent or not private]
    columns = [Column("examples"), *(Column(name) for name in names * by_class)]
    pipeline = PIPELINES.get(task := str(read_result(folder / FILE)["task"]), "")
    public = result.public
    learned = f"{_count(data.train)} training examples" if told else "training examples, not told how many,"
    sentences = [
        f"Data set {data.name or NOT_MEASURED}: {learned} at {format_count(len(result.nodes), 'node')}, "
        f"{_count(data.test)} test examples.",
        f"Divided {result.split.about}." if result.split.about else "",
        f"Public data: {public.name}, {_count(public.examples)} examples." if public.name else "",
        (data.note or "") if told else "",
    ]
    fields: dict[str, Any] = {
        "pipeline": f"pipeline_tag: {pipeline}\n" if pipeline else "",
        "use": use,
        "name": result.name or "A student",
        "model": result.student.model or NOT_MEASURED,
        "parameters": f"{_count(result.student.parameters)} parameters",
        "method": result.method_title,
        "task": task,
        "inputs": says,
        "classes": join_names(names) or NOT_MEASURED,
        "happened": plain_sentence(result),
        "data": " ".join(part for part in sentences if part),
        "nodes": "\n".join(markdown(Table("", "node", columns, rows))) if rows else "",
        "test": f"{_count(data.test)} test examples",
        "tested": f" Intervals: {tested(result)}." if result.intervals else "",
        "metrics": "\n".join(markdown(replace(levels, rows=shown))),
        "privacy": privacy_section.describe_privacy(result) or NOT_MEASURED,
        "left": f"What left the nodes: {left or 'nothing'}.",
        "leakage": UNTRIED if leakage is None else leakage.sentence,
        "notes": UNTOLD if private else "\n".join(f"- {note}" for note in result.note_sentences) or NOTHING,
        "version": result.fedstill or NOT_MEASURED,
        "date": (result.date or NOT_MEASURED).partition("T")[0],
        "command": result.command or "from Python",
    }
    return CARD.format(**fields)


def _by_class(node: NodeRecord, wanted: bool) -> tuple[int | None, ...]:
    return (node.label_counts or ()) if wanted else ()


def _count(count: int | None) -> str:
    return NOT_MEASURED if count is None else f"{count:,}"
