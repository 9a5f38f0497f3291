"""A custom data set in a separate package: in runs, as public data, and at a node."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.support.my_lab import SITES, Lab, write_plates

TABLES = {
    "data": {"name": "plates", "white": 16.0},
    "split": {"name": "column", "column": "site", "nodes": 0},
    "public": {"name": "held-out"},
    "nodes": {"models": ["mlp:8"], "local": {"epochs": 20, "lr": 0.1}},
    "method": {"name": "fedkd", "student": {"epochs": 40, "lr": 0.01}, "z_max": 20.0},
}


@pytest.fixture(scope="module")
def lab(lab: Lab) -> Lab:
    """Return the folder of the package, with its data and a run."""
    write_plates(lab.here / "data" / "plates.csv", slice(600))
    lab.write("small.toml", **TABLES)
    lab.run("whole")
    return lab


def test_metrics_equal_those_of_the_same_data_from_a_file(lab: Lab) -> None:
    digits = load_digits()
    images = (digits.images[:600] / 16).astype(np.float32)
    site = np.array([SITES[number % 3] for number in range(600)])
    np.savez(lab.here / "same.npz", images=images, labels=digits.target[:600], site=site)
    lab.run("same", "--data", "same.npz")
    result, same = lab.result("whole"), lab.result("same")
    assert result["data"] == {
        **same["data"],
        "name": "plates",
        "note": f"plates as written by the lab's machine; {same['data']['note']}",
    }
    assert (result["data"]["train"], result["data"]["test"]) == (384, 120)
    assert result["split"]["nodes"] == 3
    for name in ("accuracy", "local", "bytes"):
        assert result[name] == same[name], name
    assert result["accuracy"] > 25, "chance is 10; usually about 55"


def test_compares_methods_on_a_custom_data_set(lab: Lab) -> None:
    """Several methods, by path instead of entry point."""
    lab.write("path.toml", **{**TABLES, "data": {"name": "my_lab.plates:Plates", "white": 16.0}})
    words = ["fedavg", "fedkd", "--base", "path.toml", "--evaluation.every", "0", "--out", "both"]
    lab("compare", *words, "--quiet")
    for name in ("fedavg", "fedkd"):
        result = lab.result(f"both/{name}-seed0")
        assert result["data"] == lab.result("whole")["data"]  # both names are stored as one
        assert result["accuracy"] > 25, "chance is 10; usually about 70"
    assert "plates, 3 nodes, one for each site" in lab.text("both/compare.html")


def test_lists_the_custom_data_set_with_its_options(lab: Lab) -> None:
    assert "diabetes, plates" in " ".join(lab("list").split())
    helped = lab("run", "small.toml", "--help-all")
    assert "--data.white" in helped
    assert "--data.download" not in helped
    assert "plates, or a path" in " ".join(helped.split())


def test_custom_data_set_as_public_data(lab: Lab) -> None:
    digits = ["--data", "digits", "--split.name", "iid", "--split.nodes", "2", "--data.train_limit", "100"]
    words = [*digits, "--public.name", "plates", "--public.root", "data", "--public.limit", "50"]
    lab.run("public", *words)
    record = lab.result("public")["public"]
    assert (record["name"], record["examples"]) == ("plates", 50)


def test_node_loads_custom_data(lab: Lab) -> None:
    pytest.importorskip("cryptography")
    node = lab.here / "north"
    lab("node", "init", str(node))
    # White is 255, unless a subclass in the folder of the node changes it.
    write_plates(node / "scans" / "plates.csv", slice(1, 600, 3))
    (node / "ours.py").write_text(
        "from dataclasses import dataclass\nfrom my_lab.plates import Plates\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Ours(Plates):\n    white: float = 16.0\n"
    )
    file = (node / "node.toml").read_text()
    file = file.replace('\nsource = "npz"\n', '\nsource = "ours:Ours"\n').replace(
        "online = true", "online = false"
    )
    file = file.replace('\npath = "data.npz"\n', '\npath = "scans"\n').replace("epochs = 5.0", "epochs = 1.0")
    (node / "node.toml").write_text(file.replace('\nname = "small-cnn"\n', '\nname = "mlp:8"\n'))
    assert "200 examples, 1 x 8 x 8, from ours:Ours" in lab("node", "check", str(node), "small.toml")
    lab("offline", "make", "small.toml")
    lab("offline", "answer", str(node), "queries.safetensors", "--server-key", "server.pub")
    words = ["--queries", "queries.safetensors", "--out", "distilled", "--quiet"]
    lab("offline", "combine", "responses-north.safetensors", *words)
    (record,) = lab.result("distilled")["nodes"]
    assert record["label_counts"] == np.bincount(load_digits().target[1:600:3], minlength=10).tolist()
