"""A package of somebody else's with a method of its own, beside a library that stays as it is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KIND = "my_lab: class logits"
SMALL = """
[data]
name = "digits"
[split]
nodes = 2
[nodes]
models = ["mlp:8"]
[nodes.local]
epochs = 2
[student]
model = "mlp:8"
[evaluation]
centralised = false
[engine]
name = "one-by-one"
threads = 1
[method]
name = "feddistill"
rounds = 3
"""


class Lab:
    """A folder to work in, where the package is installed."""

    def __init__(self, here: Path, installed: Path) -> None:
        self.here = here
        search = os.pathsep.join([str(installed), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.env = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        (here / "small.toml").write_text(SMALL)

    def start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "fedstill", *words],
            cwd=self.here,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *words: str, code: int = 0) -> str:
        process = self.start(words)
        printed, _ = process.communicate(timeout=110)
        assert process.returncode == code, printed
        return printed

    def run(self, out: str, *options: str, method: str = "feddistill", code: int = 0) -> str:
        chosen = ["--method.name", method, "--method.rounds", "3"]
        allowed = ["--nodes.policy.kinds", KIND]
        return self("run", "small.toml", *chosen, *allowed, *options, "--quiet", "--out", out, code=code)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The package as its users have it: built, and installed from a folder outside of the repository."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "examples" / "my_lab", home / "source")
    how = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(home / "installed")]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, str(home / "source")], check=True)
    made = Lab(home, home / "installed")
    made.run("whole")
    return made


def result(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "result.json").read_text())
    return found


def test_it_is_one_short_file() -> None:
    assert len((ROOT / "examples/my_lab/my_lab/feddistill.py").read_text().splitlines()) <= 100


def test_it_runs_by_name_and_its_release_is_named(lab: Lab) -> None:
    found = result(lab.here / "whole")
    assert (found["method"], found["title"], found["turns"]) == ("feddistill", "FedDistill", 3)
    assert found["leaves"] == [KIND]
    assert found["bytes"]["by_kind"][KIND]["up"] == 3 * 2 * 4 * 10 * 10  # type: ignore[index]
    page = (lab.here / "whole" / "report.html").read_text()
    assert KIND in page
    assert "a mean score vector for each class" in page
    assert "No training data and no model left" not in page, (
        "what somebody else says of a kind is not vouched for"
    )


def test_what_it_learns_is_shared(lab: Lab) -> None:
    """What all nodes say holds a node back, as far as gamma wants it."""
    lab.run("held", "--method.gamma", "0")
    moved = []
    for name in ("whole", "held"):
        lines = (lab.here / name / "metrics.jsonl").read_text().splitlines()
        turns = [json.loads(line) for line in lines if "distillation" in line]
        moved.append([line["losses"]["moved"] for line in turns])
    assert moved[0][0] == moved[1][0], "in the first round nobody has said anything"
    assert moved[0][1] != moved[1][1]


def test_module_and_name_do_without_an_entry_point(lab: Lab) -> None:
    lab.run("by path", method="my_lab.feddistill:FedDistill")
    whole, by_path = result(lab.here / "whole"), result(lab.here / "by path")
    assert by_path["local"] == whole["local"]
    assert by_path["method"] == whole["method"] == "feddistill"  # one thing, one name


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("fedistill", "unknown method 'fedistill': did you mean 'feddistill'?"),
        ("my_lab.feddistill:Missing", "has no 'Missing'"),
        ("my_lab.gone:FedDistill", "allowed is one in"),
        ("my_lab.feddistill:CLASS_LOGITS", "allowed is one of"),
        ("json:JSONDecoder", "a subclass of Method"),
    ],
)
def test_an_unknown_or_broken_one_is_one_line(lab: Lab, method: str, said: str) -> None:
    printed = lab.run("none", method=method, code=2)
    assert said in printed
    assert printed.count("\n") == 1
    assert not (lab.here / "none").exists()


def test_outputs_only_lets_out_what_its_owner_names_and_nothing_else(lab: Lab) -> None:
    line = lab("run", "small.toml", "--out", "none", code=2)
    assert f"outputs_only: no {KIND}, unless its owner names it in policy.kinds" in line
    (lab.here / "liar.py").write_text(
        "import dataclasses\nfrom fedstill.methods import kinds, question\n"
        "from my_lab.feddistill import FedDistill\n\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\nclass Liar(FedDistill):\n"
        "    @question(sends={'shared': kinds.LOGITS, 'round': kinds.SCHEDULE},"
        " releases={'mean': kinds.LOGITS}, reads=())\n"
        "    def learn(self, nodes, shared, round):\n        return super().learn(nodes, shared, round)\n"
    )
    line = lab.run("none", method="liar:Liar", code=2)
    assert "outputs_only: no liar: logits" in line, "whatever it calls what leaves"


def test_beside_fedavg_on_equal_terms(lab: Lab) -> None:
    lab("compare", "feddistill", "fedavg", "--base", "small.toml", "--evaluation.every", "0", "--out", "both")
    table = (lab.here / "both" / "compare.csv").read_text()
    assert "feddistill" in table
    assert "fedavg" in table
    assert KIND in (lab.here / "both" / "compare.html").read_text()


def test_killed_it_goes_on_to_the_same_figures(lab: Lab) -> None:
    words = ["run", "small.toml", "--nodes.policy.kinds", KIND, "--method.rounds", "12", "--quiet"]
    lab(*words, "--out", "unbroken")
    (lab.here / "sitecustomize.py").write_text("import fedstill.core.records as r; r.SECONDS_BETWEEN = 0.0\n")
    slow = Lab(lab.here, lab.here)
    slow.env = {**lab.env, "PYTHONPATH": os.pathsep.join([str(lab.here), lab.env["PYTHONPATH"]])}
    process = slow.start([*words, "--out", "killed"])
    ledger, end = lab.here / "killed" / "ledger.jsonl", time.monotonic() + 60
    while not ledger.exists() or ledger.read_text().count("\n") < 10:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (lab.here / "killed" / "result.json").exists()
    lab("run", "--resume", "killed")
    whole, again = result(lab.here / "unbroken"), result(lab.here / "killed")
    for name in ("local", "bytes", "questions", "turns"):
        assert again[name] == whole[name], name


def test_under_a_budget_it_pays_for_each_class(lab: Lab) -> None:
    private = ["--nodes.privacy.mechanism", "noisy-outputs", "--nodes.privacy.epsilon", "8"]
    lab.run("private", *private, "--nodes.privacy.outputs.bound", "5")
    told = result(lab.here / "private")["privacy"]["nodes"]  # type: ignore[index]
    assert all(node["guarantee"] and 7 < node["epsilon"] <= 8 for node in told)
    assert (
        f"{KIND} of learn" in (lab.here / "private" / "report.html").read_text()
        or KIND in (lab.here / "private" / "report.html").read_text()
    )
    plan = lab("privacy", "plan", "private/config.toml")
    assert "learn" in plan
    assert "10 x laplace" in plan
    line = lab.run("none", *private, "--nodes.privacy.mechanism", "dp-sgd", code=2)
    assert KIND in line, "means over the records are not what a network has learned"


def test_attacks_say_what_they_can_of_it(lab: Lab) -> None:
    printed = lab("attack", "whole", "--membership.shadows", "4", "--quiet")
    assert "membership" in printed
    assert "gradient inversion needs parameters, and none leave" in printed
    assert "my_lab" in (lab.here / "whole" / "report.html").read_text()


def test_a_node_answers_only_methods_that_its_owner_allows(lab: Lab) -> None:
    pytest.importorskip("nvflare")
    lab.run("flare", "--engine.name", "flare")
    assert result(lab.here / "flare")["local"] == result(lab.here / "whole")["local"]
    shutil.copytree(lab.here / "flare", lab.here / "refused")
    for rest in ("result.json", "report.html"):
        (lab.here / "refused" / rest).unlink()
    shutil.rmtree(lab.here / "refused" / "federation" / "runs")
    node = lab.here / "refused" / "federation" / "nodes" / "node-1"
    shutil.rmtree(node / "runs")
    file = (node / "node.toml").read_text()
    (node / "node.toml").write_text(file.replace('methods = [\n    "feddistill",\n]', "methods = []"))
    assert "methods = []" in (node / "node.toml").read_text()
    line = lab("run", "--resume", "refused", code=2)
    assert "policy.methods" in line
