"""A data set of somebody else's, beside a library that stays as it is: in runs, as public data, at a node."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.test_own_method import ROOT, Lab, result

RUN = """
[data]
name = "plates"
white = 16.0
[split]
how = "column"
column = "site"
nodes = 0
[public]
name = "held-out"
[nodes]
models = ["mlp:8"]
[nodes.local]
epochs = 20
lr = 0.1
[student]
model = "mlp:8"
[evaluation]
centralised = false
[engine]
name = "one-by-one"
threads = 1
[method]
name = "fedkd"
epochs = 40
lr = 0.01
z_max = 20.0
"""
SITES = ("east", "north", "west")


def plates(file: Path, rows: slice) -> None:
    """Some of scikit-learn's digits as the lab's reader writes them."""
    digits, lines = load_digits(), ["label,site," + ",".join(f"p{n}" for n in range(64))]
    for number in range(len(digits.target))[rows]:
        pixels = ",".join(f"{value:g}" for value in digits.data[number])
        lines.append(f"{digits.target[number]},{SITES[number % 3]},{pixels}")
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The package as its users have it, and its data."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "examples" / "my_lab", home / "source")
    how = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(home / "installed")]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, str(home / "source")], check=True)
    plates(home / "data" / "plates.csv", slice(600))
    (home / "run.toml").write_text(RUN)
    made = Lab(home, home / "installed")
    made("run", "run.toml", "--quiet", "--out", "whole")
    return made


def test_it_is_one_short_file() -> None:
    assert len((ROOT / "examples/my_lab/my_lab/plates.py").read_text().splitlines()) <= 60


def test_its_figures_are_those_of_the_same_data_from_a_file(lab: Lab) -> None:
    digits = load_digits()
    images = (digits.images[:600] / 16).astype(np.float32)
    site = np.array([SITES[number % 3] for number in range(600)])
    np.savez(lab.here / "same.npz", images=images, labels=digits.target[:600], site=site)
    lab("run", "run.toml", "--data", "same.npz", "--quiet", "--out", "same")
    found, same = result(lab.here / "whole"), result(lab.here / "same")
    assert found["data"] == {  # type: ignore[comparison-overlap]
        **same["data"],  # type: ignore[dict-item]
        "name": "plates",
        "note": f"plates as the lab's reader wrote them; {same['data']['note']}",  # type: ignore[index]
    }
    assert (found["data"]["train"], found["data"]["test"]) == (384, 120)  # type: ignore[index]
    assert found["split"]["nodes"] == 3  # type: ignore[index]
    for name in ("accuracy", "local", "bytes"):
        assert found[name] == same[name], name
    assert found["accuracy"] > 50  # type: ignore[operator]


def test_what_a_run_wrote_names_it_again(lab: Lab) -> None:
    text = (lab.here / "whole" / "config.toml").read_text()
    assert '[data]\nname = "plates"\n' in text
    assert "white = 16.0" in text
    shutil.copytree(lab.here / "whole", lab.here / "again")
    (lab.here / "again" / "result.json").unlink()
    lab("run", "--resume", "again")
    assert result(lab.here / "again")["accuracy"] == result(lab.here / "whole")["accuracy"]
    assert "Report" in lab("report", "whole")


def test_methods_side_by_side_on_what_module_and_name_say(lab: Lab) -> None:
    """Beside each other, and without the entry point."""
    (lab.here / "path.toml").write_text(RUN.replace('"plates"', '"my_lab.plates:Plates"'))
    words = ["fedavg", "fedkd", "--base", "path.toml", "--evaluation.every", "0", "--out", "both"]
    lab("compare", *words, "--quiet")
    for name in ("fedavg", "fedkd"):
        found = result(lab.here / "both" / f"{name}-seed0")
        assert found["data"] == result(lab.here / "whole")["data"]  # one thing, one name
        assert found["accuracy"] > 40  # type: ignore[operator]
    assert "plates, 3 nodes, one for each site" in (lab.here / "both/compare.html").read_text()


def test_it_is_listed_and_its_options_are_its_own(lab: Lab) -> None:
    assert "ag-news, plates" in " ".join(lab("list").split())
    helped = lab("run", "run.toml", "--help")
    assert "--data.white" in helped
    assert "--data.download" not in helped
    assert "plates, or a path" in " ".join(helped.split())


def test_public_data_may_be_it_too(lab: Lab) -> None:
    digits = ["--data", "digits", "--split.how", "iid", "--split.nodes", "2", "--data.train_limit", "100"]
    words = [*digits, "--public.name", "plates", "--public.root", "data", "--public.limit", "50"]
    lab("run", "run.toml", *words, "--quiet", "--out", "public")
    told = result(lab.here / "public")["public"]
    assert (told["name"], told["examples"]) == ("plates", 50)  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "plate"], "data.name is 'plate': allowed is one of digits, mnist"),
        (["--data.white", "0"], "data.white is 0.0: allowed is a number above 0"),
    ],
)
def test_what_is_wrong_with_it_is_one_line(lab: Lab, options: list[str], said: str) -> None:
    printed = lab("run", "run.toml", *options, "--quiet", "--out", "none", code=2)
    assert said in printed
    assert printed.count("\n") == 1
    assert not (lab.here / "none").exists()


def test_a_node_answers_questions_about_its_own(lab: Lab) -> None:
    pytest.importorskip("cryptography")
    node = lab.here / "north"
    lab("node", "init", str(node))
    # White is 255 unless its owner's own class says otherwise: a subclass in the node's folder does.
    plates(node / "scans" / "plates.csv", slice(1, 600, 3))
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
    assert "200 examples, 1 x 8 x 8, from ours:Ours" in lab("node", "check", str(node), "run.toml")
    lab("questions", "make", "run.toml")
    lab("node", "answer", str(node), "questions.safetensors", "--server-key", "server.pub")
    words = ["--questions", "questions.safetensors", "--out", "distilled", "--quiet"]
    lab("distil", "answers-north.safetensors", *words)
    (told,) = result(lab.here / "distilled")["nodes"]  # type: ignore[misc]
    assert told["label_counts"] == np.bincount(load_digits().target[1:600:3], minlength=10).tolist()  # type: ignore[index]
