"""A model card from a run's facts, in Markdown: what the student is, learned from, reaches and gives away.

The front matter is what Hugging Face's hub reads. The licence is for whoever publishes it to fill in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstill.attacks.leakage_file import Leakage
from fedstill.core.run_writer import read_result
from fedstill.core.text_format import MISSING, counted, human_bytes, listed
from fedstill.report import privacy_section
from fedstill.report.result import FILE, Result
from fedstill.report.run_levels import table, tested
from fedstill.report.run_text import plain_sentence
from fedstill.report.table_formats import Cell, Column, Row, Table, markdown

NAME = "README.md"
PIPELINES = {"classification": "image-classification", "multi-label": "image-classification",
             "segmentation": "image-segmentation", "text": "text-classification",
             "tabular": "tabular-classification", "regression": "tabular-regression"}  # fmt: skip

UNTRIED = "The run was not attacked (`fedstill attack`), which says nothing of what attacks would get."

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
import fedstill

student = fedstill.load("FOLDER OR student.safetensors")
```

## What happened

{happened}

## Data, by counts

{data}

{nodes}

## What it reaches

On {test}.{tested}

{figures}

## Privacy

{privacy}

{left}

## Attacks

{leakage}

## What to mind

{notes}

## Licence

*To be filled in: of the weights, and of what the data's owners allow.*

Made by fedstill {version}, {date}: `{command}`
"""


def model_card(folder: Path, says: str) -> str:
    """The card of a finished run's student.

    Args:
        folder: of the run.
        says: what the student takes, in words.

    Raises:
        RunFolderError: there is no finished run, or it has no central model.
    """
    result, leakage = Result.read(folder), Leakage.read(folder)
    left = ", ".join(
        f"{kind} ({human_bytes(sums.up)})" for kind, sums in (result.bytes.by_kind or {}).items() if sums.up
    )
    data, names = result.data, result.data.classes
    rows = [
        Row(
            node.name,
            [
                Cell(None if node.examples is None else f"{node.examples:,}"),
                *(Cell(None if count is None else f"{count:,}") for count in node.label_counts or ()),
            ],
        )
        for node in result.nodes
    ]
    counted_classes = names if any(node.label_counts for node in result.nodes) else ()
    columns = [Column("examples"), *(Column(name) for name in counted_classes)]
    pipeline = PIPELINES.get(task := str(read_result(folder / FILE)["task"]), "")
    public = result.public
    told = [
        f"Data set {data.name or MISSING}: {_count(data.train)} training examples at "
        f"{counted(len(result.nodes), 'node')}, {_count(data.test)} test examples.",
        f"Divided {result.split.about}." if result.split.about else "",
        f"Public data: {public.name}, {_count(public.examples)} examples." if public.name else "",
        data.note or "",
    ]
    fields: dict[str, Any] = {
        "pipeline": f"pipeline_tag: {pipeline}\n" if pipeline else "",
        "name": result.name or "A student",
        "model": result.student.model or MISSING,
        "parameters": f"{_count(result.student.parameters)} parameters",
        "method": result.method_title,
        "task": task,
        "inputs": says,
        "classes": listed(names) or MISSING,
        "happened": plain_sentence(result),
        "data": " ".join(part for part in told if part),
        "nodes": "\n".join(markdown(Table("", "node", columns, rows))) if rows else "",
        "test": f"{_count(data.test)} test examples",
        "tested": f" Intervals: {tested(result)}." if result.intervals else "",
        "figures": "\n".join(markdown(table(result))),
        "privacy": privacy_section.in_words(result) or MISSING,
        "left": f"What left the nodes: {left or 'nothing'}.",
        "leakage": UNTRIED if leakage is None else leakage.sentence,
        "notes": "\n".join(f"- {note}" for note in result.sentences) or "Nothing was noted by the run.",
        "version": result.fedstill or MISSING,
        "date": (result.date or MISSING).partition("T")[0],
        "command": result.command or "from Python",
    }
    return CARD.format(**fields)


def _count(count: int | None) -> str:
    return MISSING if count is None else f"{count:,}"
