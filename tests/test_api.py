"""The Python API: ``distil`` with custom modules and data; runs and comparisons as in the command."""

from __future__ import annotations

import copy
import csv
import inspect
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedstill
from fedstill import api
from fedstill.__main__ import main
from fedstill.core import compute
from fedstill.core.errors import (
    ArgumentError,
    DataError,
    FedstillError,
    ModelError,
    RunFolderError,
    UnknownName,
)
from fedstill.core.run_writer import OBJECTS_FILE, RunWriter
from fedstill.models import MLP, SmallCNN
from tests.support.bright_rows import SHAPE, bright_rows, few
from tests.support.errors import raises_invalid, raises_refused

LEARNING = fedstill.LocalConfig(epochs=20, batch=16, lr=3e-3)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", "a"),
        ("seed", 1.5),
        ("seed", True),
        ("seed", -1),
        ("every", -1),
        ("mean", 0.5),
    ],
)
def test_rejects_numbers_of_other_types(option: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=rf"{option}.*{value}"):
        fedstill.distil(**few(**{option: value}))


# --- data ----------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["array", "list", "pairs"])
def test_accepts_class_names_as_labels(form: str) -> None:
    classes = ["cat", "dog", "M\u00fcller"]

    def texts(examples: tuple[torch.Tensor, torch.Tensor]) -> Any:
        labels = [["cat", "dog\u200b", "Mu\u0308ller "][label] for label in examples[1].tolist()]
        if form == "pairs":
            return list(zip(examples[0], labels, strict=True))
        return examples[0], np.array(labels) if form == "array" else labels

    given = few(
        data=[texts(bright_rows(60, 1)), texts(bright_rows(90, 2))],
        test=texts(bright_rows(60, 3)),
        classes=classes,
    )
    by_name = fedstill.distil(**given)
    assert metrics(by_name) == metrics(fedstill.distil(**few(classes=classes)))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"classes": ["a"] * 3}, "invalid classes = ['a', 'a', 'a']"),
        ({"classes": ["a", "b", "b\u200b"]}, "'b' and 'b\\u200b' are one name"),
        ({"names": ["north", "north\u200b"]}, "invalid names = "),
        (
            {"test": (bright_rows(3, 1)[0], ["a", "b", "c"])},
            "test: labels are texts such as 'a', and classes have no",
        ),
        (
            {"test": (bright_rows(3, 1)[0], ["a", "b", "d"]), "classes": ["a", "b", "c"]},
            r"test: the label of example 2 is 'd' (expected a, b, c",
        ),
        ({"test": (bright_rows(3, 1)[0], torch.tensor([1, 2, 3]))}, "they count from 1"),
    ],
)
def test_rejects_invalid_class_names_and_labels(changes: dict[str, Any], line: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=re.escape(line)):
        fedstill.distil(**few(**changes))


def metrics(outcome: fedstill.Outcome) -> dict[str, Any]:
    """Return the metrics of a run without durations and paths, which differ between equal runs."""
    keys = ("student", "standalone", "ensemble", "bytes", "queries_by_name", "nodes")
    return {key: outcome.result[key] for key in keys}


def test_color_run_writes_all_files(tmp_path: Path) -> None:
    """Color images are in channels-last format in memory; files must contain all values."""
    color = [
        (x.expand(-1, 3, -1, -1).contiguous(), y)
        for x, y in (bright_rows(60, 1), bright_rows(90, 2), bright_rows(60, 3))
    ]
    networks = [SmallCNN((3, 8, 8), 3, 8) for _ in range(3)]
    given = few(data=color[:2], test=color[2], models=networks[:2], student=networks[2], every=2)
    fedstill.distil(**given, out=tmp_path / "run")
    pictures = load_file(tmp_path / "run" / "samples.safetensors")
    assert {tuple(images.shape) for images in pictures.values()} == {(12, 3, 8, 8)}


def test_accepts_examples_as_list_or_data_set() -> None:
    plain = fedstill.distil(**few())
    (x, y), (v, w) = bright_rows(60, 1), bright_rows(90, 2)
    others = fedstill.distil(**few(data=[[x.double(), y.int()], [v.numpy(), w.tolist()]]))
    sets = fedstill.distil(**few(data=[torch.utils.data.TensorDataset(x, y), [v, w]]))
    assert metrics(others) == metrics(sets) == metrics(plain)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


USELESS = [
    (Stream(), "data[1] is a Stream"),
    ([], "data[1] has no examples"),
    (torch.utils.data.TensorDataset(bright_rows(9, 0)[0]), "not pairs (input, label)"),
    ((torch.zeros(4, 64), torch.zeros(4)), "float32 of shape (N, C, H, W)"),
    ((bright_rows(9, 0)[0], torch.zeros(8)), "9 inputs but 8 targets"),
]


# --- networks and frozen parameters ---------------------------------------------------------------


@pytest.mark.parametrize("both", ["node-1 and the student", "node-0 and node-1"])
def test_rejects_networks_with_shared_parameters(both: str) -> None:
    given = few()
    first, second = given["models"]
    if "student" in both:
        given["student"] = second
    else:
        second[0] = first[0]
    before = copy.deepcopy([module.state_dict() for module in (*given["models"], given["student"])])
    with pytest.raises(
        ArgumentError, match=rf"invalid models = '{both}' \(expected networks that share no param"
    ):
        fedstill.distil(**given)
    for module, old in zip((*given["models"], given["student"]), before, strict=True):
        assert all(torch.equal(module.state_dict()[name], value) for name, value in old.items())


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
def test_frozen_node_model_only_predicts(engine: Any) -> None:
    given = few(
        engine=fedstill.EngineConfig(batching=engine), local=fedstill.LocalConfig(epochs=20, batch=16)
    )
    finished = given["models"][0].requires_grad_(False)
    before = copy.deepcopy([model.state_dict() for model in given["models"]])
    outcome = fedstill.distil(**given)
    assert all(torch.equal(finished.state_dict()[name], value) for name, value in before[0].items())
    assert not any(parameter.requires_grad for parameter in finished.parameters())
    assert not torch.equal(given["models"][1].state_dict()["0.weight"], before[1]["0.weight"])
    first, second = outcome.result["standalone"]["accuracy"]["per_node"]
    assert second > 80 > first
    assert outcome.result["nodes"][0]["bytes"]["up"] > 0


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
def test_frozen_layers_stay_frozen(engine: Any) -> None:
    given = few(engine=fedstill.EngineConfig(batching=engine))
    networks = [*given["models"], given["student"]]
    for network in networks:
        network[0].requires_grad_(False)
    before = copy.deepcopy([network.state_dict() for network in networks])
    fedstill.distil(**given)
    for network, old in zip(networks, before, strict=True):
        assert torch.equal(network.state_dict()["0.weight"], old["0.weight"])
        assert not torch.equal(network.state_dict()["4.weight"], old["4.weight"])
        flags = [parameter.requires_grad for parameter in network.parameters()]
        assert flags == [False, False] + [True] * (len(flags) - 2)


class Tied(nn.Module):
    """Network with two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.two(torch.relu(self.one(x.flatten(1)))))
        out: torch.Tensor = self.out(y)
        return out


def test_saves_student_with_tied_weights(tmp_path: Path) -> None:
    outcome = fedstill.distil(**few(student=Tied(), out=tmp_path / "run"))
    weights = load_file(tmp_path / "run" / "student.safetensors")
    again = Tied()
    again.load_state_dict(weights)
    assert all(torch.equal(weights[name], value) for name, value in outcome.student.state_dict().items())
    assert torch.equal(again.one.weight, outcome.student.get_parameter("two.weight"))


def test_student_is_in_evaluation_mode() -> None:
    outcome = fedstill.distil(**few(student=nn.Sequential(nn.Dropout(0.5), MLP(SHAPE, 3, 16))))
    assert not any(module.training for module in outcome.student.modules())


def test_rejects_low_query_limit_before_training(tmp_path: Path) -> None:
    given = few(policies=[fedstill.PolicyConfig(), fedstill.PolicyConfig(max_queries=6)])
    before = copy.deepcopy([model.state_dict() for model in given["models"]])
    with raises_refused("max_queries: 6", "asks 7", node="node-1"):
        fedstill.distil(**given, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for model, old in zip(given["models"], before, strict=True):
        assert all(torch.equal(model.state_dict()[name], value) for name, value in old.items())


# --- interruptions -------------------------------------------------------------------------------


class Stop(BaseException):
    """Exception in place of Ctrl-C."""


def stopped_at(moment: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, save a checkpoint at chance ``moment - 1``, and stop two chances later."""
    chances = 0

    def due(records: RunWriter) -> bool:
        nonlocal chances
        chances += 1
        if chances > moment:
            raise Stop
        return chances == moment - 1  # later steps are lost

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "is_save_due", due)
        with pytest.raises(Stop):
            fedstill.distil(**given)


ENGINES = ["one-by-one", "stacked"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("moment", [2, 6], ids=["local training", "distillation"])
def test_resumed_run_reaches_equal_metrics(
    engine: Any, moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.runs.group_training.CHUNK", 6)
    how = {"engine": fedstill.EngineConfig(batching=engine)}
    whole = fedstill.distil(**few(**how, out=tmp_path / "whole"))
    stopped_at(moment, few(**how, out=tmp_path / "run"), monkeypatch)
    phases = {json.loads(line)["phase"] for line in (tmp_path / "run/metrics.jsonl").open()}
    assert ("distillation" in phases) == (moment == 6)
    outcome = fedstill.distil(**few(**how, out=tmp_path / "run"))
    assert metrics(outcome) == metrics(whole)
    for name, value in whole.student.state_dict().items():
        assert torch.equal(outcome.student.state_dict()[name], value), name


def test_progress_prints_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    fedstill.distil(**few())
    assert capsys.readouterr() == ("", "")
    fedstill.distil(**few(progress=True))
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(" 0 of ")[0] for line in err.splitlines() if " 0 of " in line] == [
        "local training",
        "distillation",
        "evaluation",
    ]


def test_seconds_cover_all_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("fedstill.core.timing.time", clock)
    whole = fedstill.distil(**few(out=tmp_path / "whole")).result["seconds"]
    assert whole["local_training"] > 0 < whole["distillation"]
    phases = sum(value for name, value in whole.items() if name != "total")
    assert whole["total"] >= phases
    stopped_at(6, few(out=tmp_path / "run"), monkeypatch)
    saved = clock.saved
    clock.now += 1000.0  # the run does not execute between stop and resume
    seconds = fedstill.distil(**few(out=tmp_path / "run")).result["seconds"]
    assert saved > 0
    assert seconds["total"] < whole["total"] + 100
    assert seconds["total"] >= sum(value for name, value in seconds.items() if name != "total")
    assert seconds["local_training"] >= whole["local_training"]
    assert seconds["distillation"] >= whole["distillation"] - 3


class Clock:
    """Clock that advances by one second per call."""

    now = 0.0
    saved = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        self.saved = self.now
        return self.now


OTHERS = {
    "data[0]": {"data": [bright_rows(60, 7), bright_rows(90, 2)]},
    "method": {
        "method": fedstill.FedIOD(
            steps=7, generator=fedstill.InputGenerator(width=8), critic=fedstill.Discriminators(width=8)
        )
    },
    "policies": {"policies": [fedstill.PolicyConfig(), fedstill.PolicyConfig(max_bytes=10**9)]},
    "mean": {"mean": (0.45,), "std": (0.55,)},
    "student": {"student": MLP(SHAPE, 3, 8)},
}


def test_rejects_folder_of_run_with_other_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    stopped_at(4, few(out=out), monkeypatch)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for name, changes in OTHERS.items():
        with pytest.raises(RunFolderError, match=re.escape(f"{out} holds a run with another {name}: choose")):
            fedstill.distil(**few(**changes, out=out))
    more = {"data": [*few()["data"], bright_rows(30, 5)], "models": [*few()["models"], MLP(SHAPE, 3)]}
    with pytest.raises(RunFolderError, match="with another"):
        fedstill.distil(**few(**more, out=out))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


# --- precision -----------------------------------------------------------------------------------


def test_resumed_run_keeps_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_gains_from_bfloat16", lambda shape, network: True)
    monkeypatch.setattr(compute, "is_bfloat16_faster", lambda device: True)
    unbroken = fedstill.distil(**few())
    stopped_at(4, few(out=tmp_path / "run"), monkeypatch)
    monkeypatch.setattr(compute, "is_bfloat16_faster", lambda device: False)  # another machine
    resumed = fedstill.distil(**few(out=tmp_path / "run"))
    assert resumed.result["engine"]["precision"] == "bfloat16"
    assert resumed.result["accuracy"] == unbroken.result["accuracy"]


def test_fingerprint_covers_all_arguments(tmp_path: Path) -> None:
    """Otherwise a run with other arguments could resume in this folder."""
    fedstill.distil(**few(out=tmp_path / "run"))
    arguments = set(inspect.signature(fedstill.distil).parameters) - {"out", "track", "progress", "data"}
    data = {f"data[{index}]" for index in range(len(few()["data"]))}
    assert set(json.loads((tmp_path / "run" / OBJECTS_FILE).read_text())) == arguments | data


def test_class_names_and_features_reach_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[api.Setting] = []

    class Stop(Exception):
        pass

    def experiment(setting: api.Setting) -> None:
        met.append(setting)
        raise Stop

    monkeypatch.setattr(api, "Simulation", experiment)
    for classes in (["cat", "dog", "owl"], 3):
        with pytest.raises(Stop):
            fedstill.distil(**few(classes=classes, perceptual=tmp_path / "vgg.safetensors"))
    named, numbered = met
    assert (tuple(named.classes), tuple(numbered.classes)) == (("cat", "dog", "owl"), ())
    assert named.task.classes == numbered.task.classes == 3
    assert named.spec.nodes.perceptual == str(tmp_path / "vgg.safetensors")
    with raises_invalid("classes", "cat"):
        fedstill.distil(**few(classes="cat"))


def test_reports_labels_by_name() -> None:
    x, y = bright_rows(60, 1)
    labels = torch.nn.functional.one_hot(y, 3)
    outcome = fedstill.distil(
        **few(
            data=[(x, labels)] * 2,
            test=(x, labels),
            classes=["Mass", "Edema", "Hernia"],
            task="multi-label",
            method=fedstill.FedIOD(
                steps=1, generator=fedstill.InputGenerator(width=8), critic=fedstill.Discriminators(width=8)
            ),
        )
    )
    assert outcome.result["labels"]["names"] == ["Mass", "Edema", "Hernia"]


# --- valid and invalid arguments -------------------------------------------------------------------


def test_distil_trains_custom_modules(tmp_path: Path) -> None:
    given = few(names=["north", "south"], local=LEARNING, out=tmp_path / "run")
    outcome = fedstill.distil(**given)
    assert outcome.student is given["student"]
    # the rows of bright pixels are easy to classify
    assert outcome.result["standalone"]["accuracy"]["mean"] > 95
    assert [node["name"] for node in outcome.result["nodes"]] == ["north", "south"]
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"models": [MLP(SHAPE, 3)]}, ArgumentError, "invalid models = 1"),
        ({"names": ["a", "a"]}, ArgumentError, "each name once"),
        ({"student": MLP(SHAPE, 4)}, ModelError, "student returns outputs of shape (4,)"),
        (
            {"data": [bright_rows(60, 1), (bright_rows(90, 2)[0] * 100, bright_rows(90, 2)[1])]},
            DataError,
            "mean and std",
        ),
        ({"mean": (0.1, 0.2)}, ArgumentError, "1 channels"),
        ({"method": "fedio"}, ArgumentError, "did you mean 'fediod'"),
        ({"method": 3}, ArgumentError, "FedIOD"),
        ({"student": MLP(SHAPE, 3).requires_grad_(False)}, ArgumentError, "invalid student = 'all frozen'"),
        ({"perceptual": "none.safetensors"}, DataError, "file not found"),
        (
            {"engine": fedstill.EngineConfig(backend="flare")},
            ArgumentError,
            "invalid engine.backend = 'flare' (expected",
        ),
        *(({"data": [bright_rows(60, 1), examples]}, DataError, message) for examples, message in USELESS),
    ],
)
def test_distil_rejects_invalid_arguments(changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        fedstill.distil(**few(**changes))
    assert "\n" not in str(caught.value)


def test_distil_rejects_non_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RunFolderError):
        fedstill.distil(**few(out=tmp_path))


class Watched(torch.utils.data.Dataset[Any]):
    """Data set that signals its first access and may wait."""

    def __init__(self, wait: threading.Event | None = None) -> None:
        self.examples, self.read, self.wait = bright_rows(30, 1), threading.Event(), wait

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.set()
        assert self.wait is None or self.wait.wait(60)
        return self.examples[0][index], int(self.examples[1][index])


def test_runs_in_threads_are_serialized() -> None:
    """All threads share the global generator of torch, which dropout uses."""
    go = threading.Event()
    first, second = Watched(go), Watched()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(fedstill.distil, **few(data=[first, bright_rows(60, 2)]))
        assert first.read.wait(60)
        other = pool.submit(fedstill.distil, **few(data=[second, bright_rows(60, 2)]))
        assert not second.read.wait(1)
        go.set()
        assert metrics(one.result()) == metrics(other.result())


# --- kinds of modules ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", [torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm])
@pytest.mark.parametrize("method", ["fedavg", "feddf"])
def test_averaging_accepts_older_norm_layers(norm: Any, method: str) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), norm(nn.Linear(64, 8)), nn.ReLU(), nn.Linear(8, 3))

    made = api.METHODS[method]
    short = made(rounds=2) if method == "fedavg" else made(rounds=2, steps=2)
    models = [network(), network()]
    models[0](bright_rows(2, 0)[0])  # the network was used before
    owners = [fedstill.PolicyConfig(outputs_only=False)] * 2
    public = bright_rows(20, 5)[0]
    outcome = fedstill.distil(
        **few(models=models, student=network(), method=short, policies=owners, public=public)
    )
    assert outcome.student is not None


def test_scripted_model_only_predicts() -> None:
    torch.manual_seed(0)
    model = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).requires_grad_(False))
    outcome = fedstill.distil(**few(models=[model, MLP(SHAPE, 3, 8)]))
    assert outcome.result["nodes"][0]["bytes"]["up"] > 0


SMALL = {
    "data.train_limit": 60,
    "split.nodes": 2,
    "nodes.local.epochs": 1.0,
    "nodes.models": ["mlp"],
    "student.model": "mlp",
    "engine.threads": 1,
    "evaluation.centralized": False,
}


def words(options: dict[str, Any]) -> list[str]:
    """Return the options as words of a command line."""
    result = {name: value[0] if isinstance(value, list) else value for name, value in options.items()}
    return [word for name, value in result.items() for word in (f"--{name}", str(value).lower())]


def test_run_preset_equals_command(tmp_path: Path) -> None:
    options = {**SMALL, "method.rounds": 2, "seed": 3}
    result = fedstill.run_preset("digits-fedavg", options, out=tmp_path / "python")
    with pytest.raises(SystemExit, match="0"):
        main(["run", "digits-fedavg", *words(options), "--out", str(tmp_path / "command"), "--quiet"])
    results = json.loads((tmp_path / "command" / "result.json").read_text())
    assert result["accuracy"] == results["accuracy"]
    assert result["seed"] == results["seed"] == 3
    one, other = ((tmp_path / of / "config.toml").read_text() for of in ("python", "command"))
    assert one.partition("\n")[2] == other.partition("\n")[2]
    assert (tmp_path / "python" / "report.html").exists()
    before = (tmp_path / "python" / "result.json").stat().st_mtime_ns
    assert fedstill.run_preset("digits-fedavg", options, out=tmp_path / "python") == result
    assert (tmp_path / "python" / "result.json").stat().st_mtime_ns == before, "the run was repeated"
    with pytest.raises(RunFolderError, match="other options"):
        fedstill.run_preset("digits-fedavg", {**options, "seed": 4}, out=tmp_path / "python")


def test_other_method_drops_options_of_preset(tmp_path: Path) -> None:
    options = {
        **SMALL,
        "method.name": "fedkd",
        "method.student.epochs": 1,
        "public.name": "noise",
        "public.limit": 16,
    }
    result = fedstill.run_preset("digits-fediod", options, out=tmp_path / "run")
    assert result["method"] == "fedkd"


def test_comparison_options_and_more_seeds(tmp_path: Path) -> None:
    options = {**SMALL, "fedavg.rounds": 2, "fedprox.rounds": 1}
    del options["evaluation.centralized"]
    comparison = fedstill.compare_methods(["fedavg", "fedprox"], options, out=tmp_path / "all")
    assert list(comparison.results) == ["fedavg-seed0", "fedprox-seed0"]
    assert [comparison.results[f"{name}-seed0"]["iterations"] for name in ("fedavg", "fedprox")] == [2, 1]
    assert comparison.not_run == {}
    again = fedstill.compare_methods(["fedavg", "fedprox"], options, out=tmp_path / "all", seeds=2)
    assert again.results["fedavg-seed0"] == comparison.results["fedavg-seed0"]
    with (again.folder / "compare.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("fedavg", "0"), ("fedavg", "1"), ("fedprox", "0"), ("fedprox", "1"),
    ]  # fmt: skip
    assert (again.folder / "compare.html").exists()


def test_compares_file_and_reports_failures(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('methods = ["standalone", "fedkd"]\n')
    comparison = fedstill.compare_methods(tmp_path / "mine.toml", SMALL, out=tmp_path / "all")
    assert list(comparison.results) == ["standalone-seed0"]
    assert list(comparison.not_run) == ["fedkd-seed0"]
    assert "public" in comparison.not_run["fedkd-seed0"]


def test_uses_base_and_seeds_of_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('methods = ["standalone"]\n')
    with raises_invalid("base", "demo", "None", "mine.toml"):
        fedstill.compare_methods(tmp_path / "mine.toml", SMALL, base="demo", out=tmp_path / "all")
    with pytest.raises(ArgumentError, match="seeds = 0"):
        fedstill.compare_methods("standalone", SMALL, seeds=0, out=tmp_path / "all")
    assert list(fedstill.compare_methods("standalone", SMALL, out=tmp_path / "all").results) == [
        "standalone-seed0"
    ]


def test_rejects_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("config.toml.part", "mine.txt"):
        (tmp_path / "folder" / name).write_text("mine")
    for part in ("file", "folder"):
        with pytest.raises(RunFolderError):
            fedstill.run_preset("digits-fedavg", SMALL, out=tmp_path / part)
    assert (tmp_path / "folder" / "config.toml.part").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"method.roundz": 2}, UnknownName, "method.roundz"),
        ({"split.nodez": 2}, UnknownName, "split.nodez"),
        ({"method.rounds": "two"}, ArgumentError, "method.rounds = 'two'"),
        ({"split": 3}, FedstillError, "split"),
        ({"split": {"nodes": 2}, "split.nodes": 3}, ArgumentError, "split.nodes"),
        (
            {"method": "fedavg", "method.rounds": 2},
            ArgumentError,
            r"invalid method = 'fedavg' \(expected",
        ),
    ],
)
def test_invalid_option_creates_no_folder(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        fedstill.run_preset("digits-fedavg", options, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fediod.stepz": 2}, "stepz"),
        ({"fedkd.epochs": 2}, "fedkd"),
        ({"method.steps": 2}, "option of all methods"),
        ({"seed": 2}, "option of all methods"),
    ],
)
def test_rejects_invalid_option_of_comparison(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(FedstillError, match=expected):
        fedstill.compare_methods(["fediod", "fedavg"], options, out=tmp_path / "all")
    assert not (tmp_path / "all").exists()
