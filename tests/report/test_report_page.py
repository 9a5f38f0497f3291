"""HTML page of a run, from the files in its folder."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedstill.core.errors import RunFolderError
from fedstill.node.audit_log import AuditError
from fedstill.report import write_report
from fedstill.report.records import Result
from fedstill.report.run_page import run_sentence
from tests import audited

VOID = {"meta", "link", "img", "br", "hr", "input"}  # what HTML never closes


class Page(HTMLParser):
    """Strict parser of a page: tags must be closed in order; keeps text, tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

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
    audited.write(folder, an_audit())
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


def test_page_shows_metrics_and_context(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    for expected in (
        "FedIOD on digits",
        "Two nodes, each with its own private data, trained one global model by responding to five queries, "
        "four of them about inputs generated by the server. No node released training data or models. "
        "Each node also released its number of examples per class.",
        "Node zero one two All north 700 3 0 703 south 34 300 400 734",
        "Student accuracy 93.4% on 360 test examples",
        "Gain over standalone +12.3 points",
        "Traffic 152 kB 80.2 kB from nodes, 72.0 kB to nodes",
        "Time 3 min 12 s of which 2 min 21 s distillation",
        "81.1% ± 4.2",
        "92.5%",
        "96.9%",
        "north small-cnn 24,330 703 76.9%",
        "south resnet-8 78,042 734 85.3%",
        "fedstill run digits-fediod --seed 17 --out runs/x",
        "Data: digits, 1,437 training and 360 test examples of 1 \u00d7 8 \u00d7 8. "
        "Split over the nodes: Dirichlet alpha 0.5. Handwritten.",
        "Seed 17",
        "auto, cpu, float32, 2 threads",
        "local training: 5 nodes stacked in two groups, 1 node one by one distillation: 2 nodes one by one",
        "2026-11-21 23:12:40 UTC",
        "python 3.11.7, torch 2.9.0, fedstill 0.1.0",
        "2-core x86_64, Linux",
        'name = "fediod" # <&>',
        "no guarantee",
    ):
        assert expected in page.text, expected
    assert "not measured" not in page.text
    shades = [style for style in page.attributes("style") if style.startswith("--shade")]
    assert shades[0] == "--shade:0.92"  # of the largest class
    assert shades[2] == "--shade:0.00"  # none


def test_page_shows_releases_of_each_node(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    # queries; logits, gradients, label counts, all; inputs, gradients, all
    assert "north 5 10.0 kB 30.0 kB 80 B 40.1 kB 32.0 kB 4.0 kB 36.0 kB" in page.text
    assert "All nodes 5 20.0 kB 60.0 kB 160 B 80.2 kB 64.0 kB 8.0 kB 72.0 kB" in page.text
    assert "40,080 bytes" in page.attributes("title")
    assert "agree on all totals" in page.text
    assert "disagree" not in page.text


def test_page_shows_nodes_of_audit_log_alone(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    extra = {
        "node": "stranger",
        "number": 1,
        "query": "predict_logits",
        "down": {},
        "up": {"logits": 123_456},
    }
    audited.write(folder, [*an_audit(), extra])
    text = read(folder).text
    assert "stranger 1 123 kB" in text
    assert "the run's result disagree" in text


def test_page_has_losses_and_generated_images(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    labels = page.attributes("aria-label")
    assert "gan, from step 1 to 4: 0.7 to 0.7." in labels
    assert "student, from step 1 to 4: 1.5 to 0.375." in labels
    assert "north, from step 0 to 5: 2 to 0.3333." in labels
    assert "centralized, from step 1 to 2: 0.5 to 0.25." in labels
    assert "3 generated inputs at step 2" in labels
    assert sum(tag == "img" for tag, _ in page.tags) == 6
    label = next(label for label in labels if label.startswith("Accuracy on the test data over"))
    assert "student 93.4%" in label
    assert "centralized 96.9%" in label


def test_generated_images_are_subsampled_evenly_with_the_last(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    pictures = np.zeros((40, 3, 8, 8), np.uint8)
    save_file({f"{step:06d}": pictures for step in range(0, 1001, 20)}, folder / "samples.safetensors")
    labels = read(folder).attributes("aria-label")
    rows = [label for label in labels if "generated inputs at step" in label]
    assert rows == [f"12 generated inputs at step {step}" for step in range(40, 1001, 120)]


def refuse_loading(page: Page, source: str) -> None:
    """Assert that a page runs and loads nothing and links to other reports only."""
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "iframe", "object", "embed", "base", "form", "audio", "video"}
    for name in ("src", "href", "srcset", "xlink:href", "data", "action", "poster", "background"):
        # Or a part of the page itself, which a drawing shows again.
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


def test_page_loads_and_runs_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    refuse_loading(page, (tmp_path / "report.html").read_text(encoding="utf-8"))


def test_figures_and_tables_have_accessible_texts(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    drawings = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("class") == "plot"]
    assert len(drawings) == 8  # accuracy for three widths, two losses, two nodes, centralized
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in drawings)
    assert all("alt" in attrs for tag, attrs in page.tags if tag == "img")
    assert sum(tag == "caption" for tag, _ in page.tags) == sum(tag == "table" for tag, _ in page.tags)


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    hostile = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    result = a_result()
    for key in ("name", "title", "command", "machine", "date"):
        result[key] = hostile
    result["data"].update(name=hostile, note=hostile, classes=[hostile, "b", "c"])
    result["nodes"][0].update(name=hostile, model=hostile, site=hostile)
    result["notes"] = [hostile]
    result["versions"] = {hostile: hostile}
    result["engine"].update(backend=hostile, groups={hostile: [[hostile]]})
    result["privacy"] = {"guarantee": {hostile: hostile}, "text": hostile}
    result["bytes"]["by_kind"][hostile] = {"up": 1, "down": 1}
    folder = a_folder(tmp_path, result)
    (folder / "config.toml").write_text(hostile)
    losses = {"phase": "distillation", "step": 1, "accuracy": 10.0, "losses": {hostile: 1.0}}
    local = {"phase": "local", "node": hostile, "step": 1, "loss": 1.0}
    measured(folder, [losses, local])
    page = read(folder)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not page.attributes("onerror")
    assert page.text.count(hostile) >= 14
    assert f"Note: {hostile}. Data: " in page.text  # what the nodes' side tells stands before the figures


def test_result_without_other_files_is_enough(tmp_path: Path) -> None:
    page = only_result(tmp_path, a_result())
    for expected in (
        "not measured : the run's metrics have no accuracy of the student",
        "not measured : the run stored no generated images",
        "not measured : the run's metrics have no losses of the distillation",
        "not measured : the run's metrics have no losses of local training",
        "The nodes' audit log is not in the run's folder",
        "The run's folder has no config.toml",
    ):
        assert expected in page.text, expected
    # The sums are the result's own, the table by kind is not invented.
    assert "north not measured not measured not measured not measured 40.1 kB" in page.text
    assert "All nodes 5 20.0 kB 60.0 kB 160 B 80.2 kB" in page.text


def test_run_from_python_needs_no_data_and_command(tmp_path: Path) -> None:
    result = a_result()
    for key in ("data", "split", "command", "name", "machine", "date", "versions", "peak_memory_mb"):
        del result[key]
    text = page_of(tmp_path, result).text
    assert "Data: 1,437 training examples. " in text
    assert "Node 0 1 2 All north 700 3 0 703" in text
    assert "it was started from Python. Seed 17 Engine local, auto" in text
    assert "not measured" not in text


def test_empty_result_shows_not_measured(tmp_path: Path) -> None:
    page = only_result(tmp_path, {})
    for name in ("Student accuracy", "Gain over standalone", "Traffic", "Time"):
        assert f"{name} not measured" in page.text
    assert "The releases of the nodes were not measured" in page.text
    assert "No node released training data" not in page.text
    assert "Assume that there is none" in page.text
    assert not re.search(r"\d%", page.text.replace("0 to 100%", ""))


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    lines = [
        {"phase": "distillation", "step": step, "losses": {"gan": value, "gone": float("nan")}}
        for step, value in enumerate([1.0, float("nan"), 2.0])
    ]
    measured(folder, lines)
    page = read(folder)
    assert "gan, from step 0 to 2: 1 to 2." in page.attributes("aria-label")
    assert "1 step with a value that is not finite" in page.text
    assert "gone not finite 3 steps with a value that is not finite" in page.text


def test_same_files_give_same_page(tmp_path: Path) -> None:
    first = write_report(a_folder(tmp_path / "a", a_result())).read_bytes()
    second = write_report(a_folder(tmp_path / "b", a_result())).read_bytes()
    assert first == second
    assert write_report(tmp_path / "a") == tmp_path / "a" / "report.html"
    assert (tmp_path / "a" / "report.html").read_bytes() == first
    assert str(tmp_path).encode() not in first


def test_every_table_is_in_a_scroll_box(tmp_path: Path) -> None:
    link = {"starting": 1.0, "training": 1.0, "nodes": 1.0, "waiting": 1.0, "link": 1.0, "server": 1.0}
    sites = {"names": ["a"], "global_model": {"a": {"accuracy": 1.0}}}
    page_of(tmp_path, {**a_result(), "link": link, "sites": sites})
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    tables = [position.start() for position in re.finditer("<table", source)]
    assert len(tables) == 6
    for position in tables:
        before = source[:position].rstrip()
        assert re.search(r'<div class="(card )?scroll( whole)?" tabindex="0"[^>]*>$', before), before[-200:]
    box = re.findall(r"\.scroll \{([^}]*)\}", source)[0]
    assert "overflow: auto" in box
    assert box.count("no-repeat local") == box.count("no-repeat scroll") == 2


def sentence_with(kinds: dict[str, dict[str, int]], **changes: Any) -> str:
    result = {**a_result(), **changes}
    result["bytes"] = {"up": 1, "down": 1, "by_kind": kinds}
    return run_sentence(Result.from_record(result))


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


def test_page_of_a_method_in_rounds(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result_in_rounds())
    lines = [
        {"phase": "distillation", "step": k, "losses": {}, "accuracy": 80.0 + k, "local_accuracy": 60.0 + k}
        for k in range(1, 5)
    ]
    measured(folder, lines)
    page = read(folder)
    for expected in (
        "Accuracy of the average 88.2% on 360 test examples",
        "Local models 70.0% ± 2.0 over nodes",
        "of which 2 min 21 s in rounds",
        "local models (mean) each node's local model at the end 70.0% ± 2.0",
        "average (FedPer)",
        "Accuracy over the rounds",
        "north small-cnn 24,330 703 68.0%",
        "south resnet-8 78,042 734 72.0%",
        "Accuracy (local model)",
        "average small-cnn 24,330 88.2%",
        "Public data: mosaics, 500 examples. cut from photographs.",
    ):
        assert expected in page.text, expected
    expected = next(
        label for label in page.attributes("aria-label") if label.startswith("Accuracy on the test data")
    )
    head, ends = expected.split(" Final values: ")
    assert head == "Accuracy on the test data over 4 rounds."
    assert ends == "average 84.0%; centralized 96.9%; local models 64.0%."
    for word in ("standalone", "Standalone", "ensemble", "distillation"):
        assert word not in page.text, word


def test_page_of_standalone_nodes(tmp_path: Path) -> None:
    metrics = {"mean": 70.0, "std": 2.0, "per_node": [68.0, 72.0]}
    result = {
        **a_result_in_rounds(),
        "title": "Standalone",
        "evaluated_model": "nodes",
        "accuracy": 70.0,
        "student": None,
    }
    result.update(iterations=0, queries=0, standalone={"accuracy": metrics}, public=None)
    result["bytes"] = {"up": 0, "down": 0, "by_kind": {}}
    page = only_result(tmp_path, result)
    for expected in (
        "Two nodes, each with its own private data, trained their models standalone. "
        "No node released anything.",
        "Mean accuracy of local models 70.0%",
        "local models (Standalone)",
        "70.0% ± 2.0",
        "This method has no rounds at the server.",
        "north small-cnn 24,330 703 68.0%",
    ):
        assert expected in page.text, expected
    assert "student" not in page.text
    assert "standalone mean" not in page.text


def test_sentence_names_released_payload_kinds() -> None:
    head = sentence_with({"head parameters": {"up": 9, "down": 9}, "data sizes": {"up": 4, "down": 0}})
    assert head.endswith(
        "No node released training data, but nodes released head parameters of models. "
        "Each node released its number of examples."
    )
    both = sentence_with({"head parameters": {"up": 9}, "generator parameters": {"up": 9}})
    assert "released generator parameters and head parameters of models" in both
    sentence = sentence_with({"logits": {"up": 9, "down": 0}, "parameters": {"up": 0, "down": 10}})
    assert "or models" not in sentence
    assert sentence.endswith("model parameters were sent to the nodes.")
    data = sentence_with({"private data": {"up": 9, "down": 0}})
    assert data.endswith("The nodes released their training data.")
    assert "No node released" not in data


def test_sentence_names_released_label_maps() -> None:
    maps = {"label maps": {"up": 9, "down": 0}, "logits": {"up": 9, "down": 0}}
    assert sentence_with(maps).endswith(
        "No node released images or models, but each released the label maps of its images."
    )
    # Sent to the nodes they say nothing of a node's own images.
    assert "label maps" not in sentence_with({"label maps": {"up": 0, "down": 9}, "logits": {"up": 9}})
    mixed = sentence_with({**maps, "latent features": {"up": 9, "down": 0}})
    assert "No node released images" not in mixed


def test_sentence_makes_no_claims_on_custom_payload_kinds() -> None:
    bytes_of = {"up": 10, "down": 0}
    about = {"description": "a model", "category": "model", "unknown key": 1}
    theirs = {
        **a_result(),
        "method": "lab:Theirs",
        "kinds": {"lab: theta": about, "parameters": {"description": "", "category": "query"}},
    }
    sentences = {
        kind: run_sentence(
            Result.from_record({**theirs, "bytes": {"up": 10, "down": 0, "by_kind": {kind: bytes_of}}})
        )
        for kind in ("lab: theta", "parameters")
    }
    sentences["records"] = sentence_with({"records": bytes_of})  # that nobody knows
    for unknown in ("lab: theta", "records"):
        assert "or models" not in sentences[unknown]
        assert "No node released" not in sentences[unknown]
        assert sentences[unknown].endswith("The releases of each node are listed below by payload kind.")
    # A file cannot redeclare the package's payload kinds.
    assert sentences["parameters"] == sentence_with({"parameters": bytes_of})


def test_sentence_writes_small_numbers_in_words() -> None:
    logits = {"logits": {"up": 1, "down": 0}}
    one = sentence_with(logits, nodes=[{"name": "a"}], queries=1)
    assert one.startswith(
        "One node, with its own private data, trained one global model by responding to one query. "
    )
    many = sentence_with(logits, nodes=[{"name": str(k)} for k in range(25)], queries=12_000)
    assert many.startswith("25 nodes, each")
    assert "by responding to 12,000 queries. " in many
    inputs = {**logits, "inputs": {"up": 0, "down": 5}}
    public = sentence_with(inputs, queries=4, queries_by_name={"predict_logits": 4})
    assert "responding to four queries about inputs sent by the server. " in public


def test_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    whole = write_report(folder).read_bytes()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "distil')
    assert write_report(folder).read_bytes() == whole


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_rejects_folder_without_result(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"result\.json"):
        write_report(tmp_path)


def test_broken_files_are_named_in_errors(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    (folder / "samples.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(RunFolderError, match=r"samples\.safetensors"):
        write_report(folder)
    (folder / "samples.safetensors").unlink()
    (folder / "audit.sqlite").write_bytes(b"no log" * 1000)
    with pytest.raises(AuditError, match=r"audit\.sqlite: cannot be read"):
        write_report(folder)


def test_inputs_that_are_not_images_are_not_shown(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    save_file({"000002": np.zeros((4, 30), np.uint8)}, folder / "samples.safetensors")
    assert "not measured : the run stored no generated images" in read(folder).text
