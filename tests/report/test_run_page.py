"""HTML page of a run, from the files in its folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedstill.core.errors import RunFolderError
from fedstill.node.audit_log import AuditError
from fedstill.report import write_report
from fedstill.report.records import Result, model_rows
from fedstill.report.run_page import detail_sentences
from fedstill.runs.run import run
from fedstill.runs.spec import from_dict
from tests.support import audit_logs
from tests.support.audit_logs import entries
from tests.support.golden import Golden
from tests.support.result_files import (
    FOUND,
    TRUTH,
    Page,
    a_case,
    a_folder,
    a_result,
    a_result_in_rounds,
    an_audit,
    measured,
    only_result,
    page_of,
    read,
    refuse_loading,
)

pytestmark = pytest.mark.all_widths


def test_page_shows_metrics_and_context(tmp_path: Path, golden: Golden) -> None:
    page = page_of(tmp_path)
    golden("run-page", page.lines)
    for metric in ("93.4%", "+12.3 points", "152 kB", "3 min 12 s", "17", "2026-11-21 23:12:40 UTC"):
        assert metric in page.lines.splitlines(), metric
    for row in (
        "| standalone mean baseline: each node trains alone on its own data | 81.1% ± 4.2 | |",
        "| north | 700 | 3 | 0 | 703 |",
        "| south | 34 | 300 | 400 | 734 |",
        "| north | small-cnn | 24,330 | 703 | 76.9% |",
        "| south | resnet-8 | 78,042 | 734 | 85.3% |",
        "fedstill run digits-fediod --seed 17 --out runs/x",
        '[method] name = "fediod" # <&>',
    ):
        assert row in page.lines.splitlines(), row
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
    audit_logs.write(folder, [*an_audit(), extra])
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
    assert rows == [f"12 generated inputs at step {step}" for step in (320, 660, 1000)]


def test_page_loads_and_runs_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    refuse_loading(page, (tmp_path / "report.html").read_text(encoding="utf-8"))


def test_figures_and_tables_have_accessible_texts(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    drawings = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("class") == "plot"]
    assert len(drawings) == 8  # accuracy at three widths, two losses, two nodes, centralized
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
    assert f"Note: {hostile}. Data: " in page.text  # notes from nodes are above the figures


def test_result_without_other_files_is_enough(tmp_path: Path, golden: Golden) -> None:
    page = only_result(tmp_path, a_result())
    golden("run-page-of-a-result-alone", page.lines)
    assert page.text.count("not measured :") == 4
    # The totals are those of the result; there is no table by kind.
    assert "north not measured not measured not measured not measured 40.1 kB" in page.text
    assert "All nodes 5 20.0 kB 60.0 kB 160 B 80.2 kB" in page.text


def test_run_from_python_needs_no_data_and_command(tmp_path: Path, golden: Golden) -> None:
    result = a_result()
    for key in ("data", "split", "command", "name", "machine", "date", "versions", "peak_memory_mb"):
        del result[key]
    page = page_of(tmp_path, result)
    golden("run-page-from-python", page.part("Reproduce this run"))
    assert "| Node | 0 | 1 | 2 | All |\n| north | 700 | 3 | 0 | 703 |" in page.lines
    assert "not measured" not in page.text


def test_empty_result_shows_not_measured(tmp_path: Path, golden: Golden) -> None:
    page = only_result(tmp_path, {})
    golden("run-page-of-an-empty-result", page.lines)
    assert "No node released training data" not in page.text
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
    return detail_sentences(Result.from_record(result))


def test_page_of_a_method_in_rounds(tmp_path: Path, golden: Golden) -> None:
    folder = a_folder(tmp_path, a_result_in_rounds())
    lines = [
        {"phase": "distillation", "step": k, "losses": {}, "accuracy": 80.0 + k, "local_accuracy": 60.0 + k}
        for k in range(1, 5)
    ]
    measured(folder, lines)
    page = read(folder)
    golden("run-page-in-rounds", page.lines)
    for row in (
        "88.2%",
        "| north | small-cnn | 24,330 | 703 | 68.0% |",
        "| south | resnet-8 | 78,042 | 734 | 72.0% |",
        "| average | small-cnn | 24,330 | | 88.2% |",
    ):
        assert row in page.lines.splitlines(), row
    expected = next(
        label for label in page.attributes("aria-label") if label.startswith("Accuracy on the test data")
    )
    head, ends = expected.split(" Final values: ")
    assert head == "Accuracy on the test data over 4 rounds."
    assert ends == "average 84.0%; centralized 96.9%; local models 64.0%."
    for word in ("standalone", "Standalone", "ensemble", "distillation"):
        assert word not in page.text, word


def test_page_of_standalone_nodes(tmp_path: Path, golden: Golden) -> None:
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
    golden("run-page-of-standalone-nodes", page.lines)
    assert "| north | small-cnn | 24,330 | 703 | 68.0% |" in page.lines.splitlines()
    assert "student" not in page.text
    assert "standalone mean" not in page.text


def test_sentence_names_released_payload_kinds(golden: Golden) -> None:
    one, many = [{"name": "a"}], [{"name": str(k)} for k in range(25)]
    logits = {"logits": {"up": 9, "down": 0}}
    maps = {**logits, "label maps": {"up": 9, "down": 0}}
    sentences = {
        "head": sentence_with({"head parameters": {"up": 9, "down": 9}, "data sizes": {"up": 4, "down": 0}}),
        "two parts": sentence_with({"head parameters": {"up": 9}, "generator parameters": {"up": 9}}),
        "model sent": sentence_with({**logits, "parameters": {"up": 0, "down": 10}}),
        "data": sentence_with({"private data": {"up": 9, "down": 0}}),
        "maps": sentence_with(maps),
        "maps sent": sentence_with({**logits, "label maps": {"up": 0, "down": 9}}),
        "maps and features": sentence_with({**maps, "latent features": {"up": 9, "down": 0}}),
        "one node": sentence_with(logits, nodes=one, queries=1),
        "25 nodes": sentence_with(logits, nodes=many, queries=12_000),
        "public inputs": sentence_with(
            {**logits, "inputs": {"up": 0, "down": 5}}, queries=4, queries_by_name={"predict_logits": 4}
        ),
    }
    golden("run-sentences", "\n".join(f"{name}: {sentence}" for name, sentence in sentences.items()))
    assert "or models" not in sentences["model sent"]
    assert "No node released" not in sentences["data"]
    assert "label maps" not in sentences["maps sent"]  # sent maps reveal nothing about a node's own images
    assert "No node released images" not in sentences["maps and features"]


def test_sentence_makes_no_claims_on_custom_payload_kinds() -> None:
    bytes_of = {"up": 10, "down": 0}
    about = {"description": "a model", "category": "model", "unknown key": 1}
    theirs = {
        **a_result(),
        "method": "lab:Theirs",
        "kinds": {"lab: theta": about, "parameters": {"description": "", "category": "query"}},
    }
    sentences = {
        kind: detail_sentences(
            Result.from_record({**theirs, "bytes": {"up": 10, "down": 0, "by_kind": {kind: bytes_of}}})
        )
        for kind in ("lab: theta", "parameters")
    }
    sentences["records"] = sentence_with({"records": bytes_of})  # an unknown payload kind
    for unknown in ("lab: theta", "records"):
        assert "or models" not in sentences[unknown]
        assert "No node released" not in sentences[unknown]
    # A file cannot redeclare the package's payload kinds.
    assert sentences["parameters"] == sentence_with({"parameters": bytes_of})


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
    with pytest.raises(AuditError, match=r"audit\.sqlite: cannot"):
        write_report(folder)


def test_inputs_that_are_not_images_are_not_shown(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_result())
    save_file({"000002": np.zeros((4, 30), np.uint8)}, folder / "samples.safetensors")
    assert "not measured : the run stored no generated images" in read(folder).text


# --- display names of nodes with their sites, which the run records but no message contains ----------


def of_sites() -> dict[str, Any]:
    """Return a result whose first node is a site."""
    result = a_result()
    result["nodes"][0]["site"] = "Utrecht"
    return result


def test_display_name_has_known_site() -> None:
    assert Result.from_record(of_sites()).node_display_names == {
        "north": "north \u00b7\u00a0Utrecht",
        "south": "south",
    }


def test_page_uses_display_names_everywhere(tmp_path: Path) -> None:
    result = of_sites()
    by_site = {"Utrecht": {"accuracy": 80.0}}
    result["sites"] = {
        "names": ["Utrecht"],
        "global_model": by_site,
        "nodes": {"north": by_site, "south": by_site},
    }
    result["events"] = [{"node": "north", "number": 3, "event": "excluded", "reason": "silent"}]
    result["pictures"] = [a_case(models=[{"name": "student", "score": 1.0}, {"name": "north", "score": 2.0}])]
    privacy = {"guarantee": True, "epsilon": 2.0, "delta": 1e-5, "mechanism": "dpsgd", "unit": "a record"}
    result["privacy"] = {
        "nodes": [{"name": "north", **privacy, "rules": ["one"]}, {"name": "south", **privacy}]
    }
    folder = a_folder(tmp_path, result)
    image = np.zeros((1, 6, 8), np.uint8)
    tensors = {"0/image": image, "0/truth": TRUTH, "0/output/0": FOUND, "0/output/1": FOUND.copy()}
    save_file(tensors, folder / "pictures.safetensors")
    text = read(folder).text
    node = "north \u00b7 Utrecht"  # the test's parser normalizes spaces
    for listed in (
        f"{node} 80.0",  # site by site
        f"{node} accuracy of the patient 2.0%",  # below a picture
        f"{node} 700 3 0",  # its data
        f"{node} 0.333",  # above its training losses
        f"{node} 5 10.0 kB",  # its releases
        f"{node} label counts 80 B , logits 10.0 kB",  # cost of its releases
        f"Mechanism of {node}",
        f"{node}: ",  # its privacy statement
        f"{node} excluded at query 3",
        f"{node} small-cnn",  # its model
    ):
        assert listed in text, listed
    assert "south \u00b7" not in text


def test_description_names_nodes_of_partial_mean() -> None:
    result = of_sites()
    result["standalone"]["accuracy"]["nodes"] = ["north"]
    assert model_rows(Result.from_record(result))[0].description.endswith("(only north \u00b7\u00a0Utrecht)")


def a_run(folder: Path, **split: Any) -> dict[str, Any]:
    """Return the result of a minimal run on masks of two sites."""
    draw = np.random.default_rng(0)
    images = draw.integers(20, 90, (48, 16, 16), dtype=np.uint8)
    masks = np.zeros_like(images)
    masks[:, 4:9, 5:9] = 1
    patient = np.arange(48) // 4
    site = np.where(patient % 3 == 0, "west", "east")
    np.savez(folder / "maps.npz", images=images, masks=masks, patient=patient, site=site)
    config = from_dict(
        {
            "task": {"name": "segmentation"},
            "data": {"name": str(folder / "maps.npz")},
            "split": {"minimum": 1, **split},
            "method": {"name": "fedavg", "rounds": 1},
            "nodes": {
                "models": ["unet:4"],
                "local": {"epochs": 1, "batch": 8},
                "policy": {"outputs_only": False},
            },
            "student": {"model": "unet:4"},
            "evaluation": {"centralized": False},
            "engine": {"batching": "one-by-one", "threads": 1},
        }
    )
    run(config, folder / "out", command="", progress=False)
    result: dict[str, Any] = json.loads((folder / "out" / "result.json").read_text())
    return result


def test_run_split_by_site_records_sites(tmp_path: Path) -> None:
    result = a_run(tmp_path, name="column", column="site", nodes=0)
    messages = [(node["name"], node["site"]) for node in result["nodes"]]
    assert messages == [("node-0", "east"), ("node-1", "west")]
    assert result["nodes"][0]["examples"] > result["nodes"][1]["examples"]  # east has two of three patients
    assert result["split"]["values"] == ["east", "west"]
    assert result["sites"]["names"] == ["east", "west"]  # sites of the test part, as before
    messages = str(entries(tmp_path / "out"))
    assert "node-0" in messages
    assert "west" not in messages
    page = Page(write_report(tmp_path / "out").read_text(encoding="utf-8")).text
    assert "node-1 \u00b7 west" in page
