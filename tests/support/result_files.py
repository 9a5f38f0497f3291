"""Handmade results of runs, and a parser for report pages."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from rich.console import Console
from safetensors.numpy import save_file

from fedstill.core.progress import PROGRESS_FILE, ProgressSnapshot
from fedstill.report import print_table, write_report
from tests.support import audit_logs

VOID = {"meta", "link", "img", "br", "hr", "input"}  # HTML elements without end tag
INLINE = {"a", "abbr", "b", "code", "em", "i", "img", "small", "span", "strong", "sub", "sup"}


class Page(HTMLParser):
    """Strict parser of a page: tags must be closed in order; keeps text, tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._lines: list[list[str]] = [[]]  # words, one list for each block
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._break(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
            if "svg" not in self.open:
                self._lines[-1].extend(data.split())

    def _break(self, tag: str) -> None:
        """Begin a new line, except inside a row of a table."""
        if tag in ("td", "th"):
            self._lines[-1].append("|")
        elif tag not in INLINE and "tr" not in self.open:
            self._lines.append([])

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def lines(self) -> str:
        """Return the text without drawings, with one line for each paragraph, heading and row of a table."""
        lines = (" ".join(words).replace("| |", "|") for words in self._lines)
        return "\n".join(line for line in lines if line)

    def part(self, first: str, last: str = "") -> str:
        """Return the lines from the one that begins with ``first`` to the one before ``last``."""
        lines = self.lines.splitlines()
        begin = next(k for k, line in enumerate(lines) if line.startswith(first))
        ends = (k for k, line in enumerate(lines) if last and k > begin and line.startswith(last))
        return "\n".join(lines[begin : next(ends, None)])

    def attributes(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]


def a_node(name: str, model: str, parameters: int, examples: int, *counts: int) -> dict[str, Any]:
    sent = {"up": 40_080, "down": 36_000}
    head = {"name": name, "model": model, "parameters": parameters, "examples": examples}
    return {**head, "label_counts": list(counts), "bytes": sent}


def a_result() -> dict[str, Any]:
    data = {"name": "digits", "classes": ["zero", "one", "two"], "train": 1437, "test": 360}
    by_kind = {
        "logits": {"up": 20_000, "down": 0},
        "inputs": {"up": 0, "down": 64_000},
        "gradients": {"up": 60_000, "down": 8_000},
        "label counts": {"up": 160, "down": 0},
    }
    groups = {"local_training": [["a", "b"], ["c", "d", "e"], ["f"]], "distillation": [["north"], ["south"]]}
    return {
        "fedstill": "0.1.0",
        "name": "digits-fediod",
        "method": "fediod",
        "title": "FedIOD",
        "task": "classification",
        "seed": 17,
        "command": "fedstill run digits-fediod --seed 17 --out runs/x",
        "data": {**data, "shape": [1, 8, 8], "note": "Handwritten."},
        "split": {"name": "dirichlet", "about": "Dirichlet alpha 0.5", "alpha": 0.5, "nodes": 2},
        "nodes": [
            a_node("north", "small-cnn", 24330, 703, 700, 3, 0),
            a_node("south", "resnet-8", 78042, 734, 34, 300, 400),
        ],
        "student": {"model": "small-cnn", "parameters": 24330, "accuracy": 93.37},
        "standalone": {"accuracy": {"mean": 81.1, "std": 4.24, "per_node": [76.86, 85.34]}},
        "ensemble": {"accuracy": 92.5},
        "centralized": {"accuracy": 96.9},
        "bytes": {"up": 80_160, "down": 72_000, "by_kind": by_kind},
        "queries": 5,
        "queries_by_name": {"predict_logits": 4, "count_labels": 1},
        "seconds": {"total": 192.4, "local_training": 41.2, "centralized": 9.9, "distillation": 141.3},
        "peak_memory_mb": 812.4,
        "engine": {
            "backend": "local",
            "batching": "auto",
            "device": "cpu",
            "precision": "float32",
            "threads": 2,
            "groups": groups,
        },
        "privacy": {"guarantee": None, "text": "no guarantee"},
        "machine": "2-core x86_64, Linux",
        "date": "2026-11-21T23:12:40+00:00",
        "versions": {"python": "3.11.7", "torch": "2.9.0", "fedstill": "0.1.0"},
    }


def an_audit() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for node in ("north", "south"):
        head = {"node": node, "mechanism": "none", "no_guarantee": 1}
        counts = {"query": "count_labels", "part": "response", "down": {}, "up": {"label counts": 80}}
        lines.append({**head, "number": 0, **counts})
        for step in range(1, 5):
            query = {**head, "number": step, "query": "predict_logits"}
            lines.append({**query, "part": "response", "down": {"inputs": 8000}, "up": {"logits": 2500}})
            gradients = {"down": {"gradients": 1000}, "up": {"gradients": 7500}}
            lines.append({**query, "part": "gradient", **gradients})
    return lines


def measured(folder: Path, lines: list[dict[str, Any]]) -> Path:
    """Write lines of metrics into a run's folder and return the folder."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def read(folder: Path) -> Page:
    """Return the page of a run's folder."""
    return Page(write_report(folder).read_text(encoding="utf-8"))


def a_folder(folder: Path, result: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    metrics: list[dict[str, Any]] = [
        {"phase": "local", "node": node, "step": step, "loss": 2.0 / (step + 1)}
        for node in ("north", "south")
        for step in range(6)
    ]
    metrics += [
        {"phase": "centralized", "node": "centralized", "step": step, "loss": 0.5 / step} for step in (1, 2)
    ]
    for step in range(1, 5):
        losses = {"gan": 0.7, "student": 1.5 / step}
        metrics.append({"phase": "distillation", "step": step, "seconds": 0.2 * step, "losses": losses})
    metrics[-3]["accuracy"], metrics[-1]["accuracy"] = 50.0, 93.37
    (folder / "result.json").write_text(json.dumps(result))
    measured(folder, metrics)
    audit_logs.write(folder, an_audit())
    (folder / "config.toml").write_text('[method]\nname = "fediod" # <&>\n')
    pictures = np.arange(3 * 64, dtype=np.uint8).reshape(3, 1, 8, 8)
    save_file({"000002": pictures, "000004": pictures[::-1].copy()}, folder / "samples.safetensors")
    return folder


def page_of(folder: Path, result: dict[str, Any] | None = None) -> Page:
    return read(a_folder(folder, result or a_result()))


def only_result(folder: Path, result: object) -> Page:
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result))
    return read(folder)


def refuse_loading(page: Page, source: str) -> None:
    """Assert that a page runs and loads nothing and links to other reports only."""
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "iframe", "object", "embed", "base", "form", "audio", "video"}
    for name in ("src", "href", "srcset", "xlink:href", "data", "action", "poster", "background"):
        # Or a part of the page itself, which a drawing uses again.
        values = [
            value for value in page.attributes(name) if ":" in value or not value.endswith("/report.html")
        ]
        assert all(value.startswith(("data:", "#")) for value in values), name
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    style = source[source.index("<style>") : source.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert all(attrs.get("scope") for tag, attrs in page.tags if tag == "th")


def a_result_in_rounds() -> dict[str, Any]:
    """Return the result of a method in rounds, without standalone models and evaluated by an average."""
    result = a_result()
    del result["student"]["accuracy"]
    return {
        **result,
        "title": "FedPer",
        "evaluated_model": "virtual",
        "accuracy": 88.25,
        "standalone": None,
        "ensemble": None,
        "local": {
            "accuracy": {"mean": 70.0, "std": 2.0, "per_node": [68.0, 72.0]},
            "share": {"mean": 71.0, "std": 1.0, "per_node": [70.0, 72.0]},
        },
        "iteration_unit": "round",
        "iterations": 4,
        "public": {"name": "mosaics", "examples": 500, "note": "cut from photographs"},
    }


TRUTH = np.zeros((6, 8), np.int32)
TRUTH[1:4, 2:5] = 1
FOUND = np.zeros((6, 8), np.int32)
FOUND[2:5, 2:5] = 1


def a_case(rank: str = "only", kind: str = "map", **changes: Any) -> dict[str, Any]:
    models = [{"name": "student", "score": 66.667}, {"name": "north", "score": None}]
    region = {"part": 4, "parts": 30, "window": [0, 0, 6, 8], "size": [6, 8]}
    case = {"case": "patient 7", "site": "Utrecht", "rank": rank, "kind": kind, "models": models}
    return {**case, **region, **changes}


def decoded(address: str) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image in a ``data:`` URL."""
    head = "data:image/png;base64,"
    assert address.startswith(head)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address[len(head) :], validate=True))))


def printed(result: dict[str, Any]) -> str:
    out = StringIO()
    print_table(result, Console(file=out, width=90, color_system=None))
    return out.getvalue()


def corruptions(value: Any, junk: object) -> Iterator[Any]:
    """Yield copies of a value, each with one part replaced by junk."""
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        inner = corruptions(part, junk) if isinstance(part, dict | list) else ()
        for other in (junk, *inner):
            changed = value.copy()
            changed[key] = other
            yield changed


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def unfinished_run(folder: Path, **changes: object) -> Path:
    about = {
        "title": "FedIOD",
        "metric": "accuracy",
        "metric_title": "Accuracy",
        "unit": "%",
        "better": "higher",
    }
    note = ProgressSnapshot(
        "distillation", 31, 400, updated_at=130.0, phase_started_at=100.0, phase_start_count=1, run_info=about
    )
    (folder / PROGRESS_FILE).write_text(json.dumps({**json.loads(note.to_json()), **changes}))
    return folder
