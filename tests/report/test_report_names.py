"""Display names of nodes with their sites, which the run records but no message contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fedstill.report import write_report
from fedstill.report.records import Result, model_rows
from fedstill.runs.run import run
from fedstill.runs.spec import from_dict
from tests.support.audit_logs import entries
from tests.support.result_files import FOUND, TRUTH, Page, a_case, a_folder, a_result, read


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
    node = "north \u00b7 Utrecht"  # a reader of the page's text makes all spaces alike
    for listed in (
        f"{node} 80.0",  # site by site
        f"{node} accuracy of the patient 2.0%",  # below a picture
        f"{node} 700 3 0",  # what it holds
        f"{node} 0.333",  # over the losses of its training
        f"{node} 5 10.0 kB",  # what left it
        f"{node} label counts 80 B , logits 10.0 kB",  # what that cost
        f"Mechanism of {node}",
        f"{node}: ",  # what was paid
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
    assert result["sites"]["names"] == ["east", "west"]  # of the test part, as before
    messages = str(entries(tmp_path / "out"))
    assert "node-0" in messages
    assert "west" not in messages
    page = Page(write_report(tmp_path / "out").read_text(encoding="utf-8")).text
    assert "node-1 \u00b7 west" in page
