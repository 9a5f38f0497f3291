"""The command ``fedstill``: results, and one-line errors with exit code 2."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedstill import __version__, report
from fedstill.cli import main as cli
from fedstill.cli.main import COMMANDS
from fedstill.cli.tools import kinds
from fedstill.compare.comparison import Comparison
from fedstill.core.config_tables import option_types
from fedstill.core.errors import FedstillError, QueryRefused, RunFolderError
from fedstill.protocol.method import METHODS
from fedstill.protocol.needs import Needs
from fedstill.runs import presets, spec
from fedstill.runs.spec import RunSpec
from fedstill.tasks import TASKS
from tests.support.golden import Golden

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working directory with one configuration, ``mine.toml``."""
    monkeypatch.chdir(tmp_path)
    text = '# A run of mine.\nseed = 4\n[method]\nname = "fediod"\ntau = 2.0\n[split]\nnodes = 7\n'
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    return tmp_path


class Runs:
    """Replaces ``fedstill.runs.run`` and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.raises: BaseException | None = None

    def run(self, config: RunSpec, out: Path, *, command: str, progress: bool, report: Any) -> dict[str, Any]:
        self.calls.append(("run", {"config": config, "out": out, "command": command, "progress": progress}))
        return self._result()

    def resume(
        self, out: Path, *, progress: bool, startup_kit: Path | None = None, report: Any
    ) -> dict[str, Any]:
        self.calls.append(("resume", {"out": out, "progress": progress, "startup_kit": startup_kit}))
        return self._result()

    def _result(self) -> dict[str, Any]:
        if self.raises is not None:
            raise self.raises
        return {"student": {"accuracy": 97.25}}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    module = ModuleType("fedstill.runs.run")
    vars(module).update(run=runs.run, resume=runs.resume)
    monkeypatch.setitem(sys.modules, "fedstill.runs.run", module)
    real = report.write_report
    written = lambda folder: folder / "report.html" if runs.calls else real(folder)  # noqa: E731
    monkeypatch.setattr(report, "write_report", written)
    monkeypatch.setattr("fedstill.report.print_table", lambda result, console: console.print(result))
    return runs


def one_line(outcome: tuple[int, str, str]) -> str:
    """Return the error line of a refusal, after checking the output and exit code 2."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("fedstill: ")
    return err.removeprefix("fedstill: ").rstrip("\n")


# --- help -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("help",), ("-h",), ("--help",)])
def test_overview_has_examples_and_every_command_in_30_lines(command: Main, words: tuple[str, ...]) -> None:
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 30
    assert max(map(len, out.splitlines())) <= 110
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", out, re.MULTILINE), name
    assert re.findall(r"^  fedstill (\w+)", out, re.MULTILINE) == ["run", "compare", "attack"]


HELP = """
import sys
from fedstill.cli.main import main
for words in sys.argv[1:]:
    print(f"$ fedstill {words} --help")
    try:
        main([*words.split(), "--help"])
    except SystemExit as leaving:
        assert leaving.code == 0
    print()
"""


def test_help_of_each_command(golden: Golden) -> None:
    """Uses a new process, so that output of other tests or registered plug-ins have no effect."""
    environment = {**os.environ, "COLUMNS": "100"}
    call = [sys.executable, "-c", HELP, "", *COMMANDS]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    golden("help", done.stdout.removesuffix("\n"))


def test_help_of_run_shows_few_options_without_importing_torch(command: Main) -> None:
    out = command("run", "--help")[1]
    assert len(out.splitlines()) <= 45
    assert "--split.alpha" in out
    assert "--help-all" in out
    assert command("run", "demo", "-h")[1] == out


def test_version(command: Main) -> None:
    for words in ("--version", "-V"):
        assert command(words) == (0, f"fedstill {__version__}\n", "")


@pytest.mark.usefixtures("here")
def test_help_of_a_run_shows_every_option_with_its_default(command: Main) -> None:
    code, out, err = command("run", "mine.toml", "--help-all")
    assert (code, err) == (0, "")
    for name in option_types(spec.from_dict({"method": {"name": "fediod"}})):
        assert f"--{name} " in out
    words = " ".join(re.sub(r"[\u2500-\u257f]", " ", out).split())  # without borders and line breaks
    assert "Seed of all random draws of the run. (default: 4; 0 or more)" in words


@pytest.mark.sample(5)
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "call",
    [
        "run mine.toml",
        "compare",
        "compare fedkd dsfl --base digits-fedkd --seeds 3",
        "reproduce fediod-table2 --scale small",
        "offline make digits-fedkd --out x",
        "offline combine",
        "privacy plan folder digits-fedkd-private --epsilon 3",
        "attack --quick",
    ],
)
def test_help_all_starts_with_the_options_of_the_command(command: Main, call: str) -> None:
    words = [word for word in call.split() if word in ("run", "compare", "reproduce", "offline", "make")]
    words += [word for word in call.split() if word in ("combine", "privacy", "plan", "attack")]
    code, out, err = command(*call.split(), "--help-all")
    assert (code, err) == (0, "")
    own = command(*words, "--help")[1]
    assert out.startswith(own)
    assert ("--membership.shadows" if words == ["attack"] else "--nodes.local.epochs ") in out[len(own) :]


@pytest.mark.usefixtures("here")
def test_help_all_of_a_comparison_shows_options_of_its_methods(command: Main) -> None:
    out = command("compare", "fedkd", "dsfl", "--help-all")[1]
    assert "--fedkd.levels INT" in out
    assert "--method." not in out
    assert "--method." not in command("compare", "--help-all")[1]


def test_list_has_one_line_per_method_in_80_columns(command: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command("list")
    assert (code, err) == (0, "")
    for name in (*METHODS, "digits", "fashion-mnist", "small-cnn", "resnet8", "segmentation"):
        assert name in out
    assert len(out.splitlines()) <= len(METHODS) + 22  # names of other kinds follow
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("need", [part.name for part in dataclasses.fields(Needs)])
def test_list_of_a_method_names_each_need(command: Main, monkeypatch: pytest.MonkeyPatch, need: str) -> None:
    monkeypatch.setattr(METHODS["standalone"], "needs", lambda method: Needs())
    assert "nothing special" in command("list", "standalone")[1]
    monkeypatch.setattr(METHODS["standalone"], "needs", lambda method: Needs(**{need: True}))
    assert "nothing special" not in command("list", "standalone")[1]


def test_list_prints_details_of_one_name(command: Main) -> None:
    output = " ".join(command("list", "fedavg")[1].split())
    assert "options rounds 20, participation 1.0 usage fedstill run digits-fedavg; " in output
    assert "fedstill run PRESET --method.name fedavg" in output
    assert "--fedavg.OPTION" in output
    output = command("list", "lg-fedavg")[1]
    assert "data sizes, head parameters" in output
    assert "same architecture, extractor and head" in output
    listed = command("list", "presets")[1].splitlines()
    assert listed[0] == "preset\tdescription"
    assert [line.split("\t")[0] for line in listed[1:]] == presets.names()
    assert one_line(command("list", "fedavgs")).startswith("unknown method 'fedavgs'")
    assert one_line(command("list", "FedIOD")) == "unknown method 'FedIOD': did you mean 'fediod'?"
    assert one_line(command("list", "fedavg", "fedkd"))


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind != "tasks"])
def test_list_has_one_line_per_name_of_a_kind(command: Main, kind: str) -> None:
    all_kinds = {**json.loads(command("list", "--json")[1]), "presets": presets.names()}
    lines = [line.split("\t") for line in command("list", kind)[1].splitlines()]
    assert [name for name, description in lines[1:] if description] == list(all_kinds[kind])


def test_list_of_tasks_fits_80_columns_and_breaks_no_word(
    command: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = command("list", "tasks")[1]
    assert max(map(len, out.splitlines())) <= 80
    assert {*TASKS, *METHODS} <= set(re.findall(r"[a-z0-9-]+", out))
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line}
    assert lines["fedavg"] == "all"
    assert lines["fedmd-cg"] == "classification, text, tabular"
    assert lines["fl-mrcm"] == "all but text, tabular, regression, survival"


# --- from arguments to a configuration --------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_config_output_is_complete_and_round_trips(command: Main) -> None:
    code, out, err = command("config", "mine.toml", "--split.nodes", "9", "--method.tau=inf")
    assert (code, err) == (0, "")
    run = spec.read_toml(out)
    assert (run.name, run.seed, run.split.nodes, run.method.tau) == ("mine", 4, 9, float("inf"))
    assert spec.to_toml(run) == out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--seed 5", "seed", 5),
        ("--seed 5 --seed 6", "seed", 6),
        ("--evaluation.centralized false", "evaluation.centralized", False),
        ("--nodes.models mlp resnet8:16 a.b:c", "nodes.models", ("mlp", "resnet8:16", "a.b:c")),
        ("--nodes.local.min_steps 3", "nodes.local.min_steps", 3),
        ("--nodes.policy.queries", "nodes.policy.queries", ()),
        ("--data.root 'a folder'", "data.root", "a folder"),
        ("--method.name fediod --method.tau 3", "method.tau", 3.0),
        ("--nodes 3", "split.nodes", 3),
        ("--engine flare-poc", "engine.backend", "flare-poc"),
        ("--engine flare --startup-kit federation/admin", "engine.startup_kit", "federation/admin"),
        ("--link.quorum 0.5", "link.quorum", 0.5),
    ],
)
def test_options_change_one_value(command: Main, runs: Runs, words: str, name: str, value: object) -> None:
    code, _, _ = command("run", "mine.toml", *shlex.split(words), "--out", "there")
    assert code == 0
    configured: Any = runs.calls[0][1]["config"]
    for part in name.split("."):
        configured = getattr(configured, part)
    assert configured == value
    assert type(configured) is type(value)


BAD_WORDS = """
fly
--verison
run
list all
report nowhere
run no.toml
run fedprox
run unheard
run mnist
run fashion-mnist
config lain
config a_lab:Their
run mine.toml other.toml
run mine.toml --splt.nodes 3
run mine.toml --zzz 3
run --resume x --method.steps 3
run mine.toml --method fedkd
run mine.toml --method fekdd
run mine.toml --method.name fekdd
run digits-fekdd
rnu
offline init
run mine.toml --nodez.count 3
run mine.toml --stpes 3
compare fedkd fedavg --fekd.epochs 3
run mine.toml --seed x
run mine.toml --seed
run mine.toml --seed=
run mine.toml --data.root
run mine.toml --seed -1
run mine.toml --split.alpha nan
run mine.toml --seed 1_0
run mine.toml --split.alpha 1_0
compare fedavg --seeds 1_0
run mine.toml --split.alpha 0.5 --split.name iid
run mine.toml --split.alpha.x 3
compare fedavg --split.name iid --split.alpha 1
run mine.toml --evaluation.centralized so
run mine.toml --nodes.models
run mine.toml --method.tau -1
run mine.toml --resume there
run plan.toml
run mine.toml --nodes.epochs 3
compare fedavg --public digits
run mine.toml --quite
compare fedav
compare fedavg no.toml
compare fedavg --seeds 0
compare fedavg --seed 3
compare fedavg fedavg
compare fedavg --fedavg.zz 3
compare fedavg --zz 3
compare fedavg --method.rounds 3
compare fedavg --split.alpha few
compare fedavg --split.nodes 2 fediod
compare fedavg plan.toml
run demo --split.alfa 1
run demo --split.turns 1
compare --resume there
"""


def test_invalid_words_are_one_line(command: Main, here: Path, runs: Runs, golden: Golden) -> None:
    (here / "folder.toml").mkdir()
    (here / "lain").mkdir()
    (here / "lain" / "config.toml").touch()
    (here / "plan.toml").write_text('methods = ["fedavg"]', encoding="utf-8")
    words = BAD_WORDS.strip().splitlines()
    lines = [f"$ fedstill {each}\n{one_line(command(*each.split()))}" for each in words]
    golden("errors-of-the-command", "\n".join(lines))
    assert runs.calls == []
    assert sorted(file.name for file in here.iterdir()) == ["folder.toml", "lain", "mine.toml", "plan.toml"]


@pytest.mark.usefixtures("here")
def test_error_names_the_invalid_option_only(command: Main, runs: Runs) -> None:
    """``method.batch`` above ``method.student.memory`` is refused, unless the memory is larger too."""
    alone = one_line(command("run", "mine.toml", "--method.batch", "200000"))
    assert alone.startswith("invalid method.student.memory = 100000 (expected ")
    both = ("--method.batch", "200000", "--method.student.memory", "300000")
    assert one_line(command("run", "mine.toml", *both, "--seed", "x")).startswith("invalid seed = 'x'")
    code, _, _ = command("run", "mine.toml", *both)
    assert code == 0


def test_misspelled_table_is_not_read_as_comparison(command: Main, here: Path) -> None:
    (here / "many.toml").write_text('[methods]\nname = "fediod"\n', encoding="utf-8")
    assert "'methods'" in (output := one_line(command("run", "many.toml")))
    assert "compares runs" not in output


def test_invalid_files_are_one_line(command: Main, here: Path, golden: Golden) -> None:
    assert one_line(command("run", "mine.toml", "--method.name")).startswith("--method.name needs a value (")
    lines = []
    for text in (
        '[method]\nname = "fediod"\n[split]\nnods = 3',
        '[method]\nname = "fediod"\nnam = "x"',
        'method.name = "fediod"\nseed = "a\\nb"',
        'extends = "mine"',
    ):
        (here / "mine.toml").write_text(text, encoding="utf-8")
        lines.append(f"{text}\n=> {one_line(command('run', 'mine.toml'))}\n")
    golden("errors-in-files", "\n".join(lines))
    # Other errors list all methods or contain the message of the parser.
    (here / "mine.toml").write_text("seed = 3", encoding="utf-8")
    assert one_line(command("run", "mine.toml")).startswith("invalid method.name = '' (expected one of ")
    (here / "mine.toml").write_text("seed 3", encoding="utf-8")
    assert one_line(command("run", "mine.toml")).startswith("mine.toml is not TOML: ")


# --- runs -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_run_receives_options_and_prints_table_and_report(command: Main, runs: Runs) -> None:
    code, out, err = command("run", "mine.toml", "--data.root", "a b", "--out", "there", "--seed", "3")
    assert (code, err) == (0, "")
    assert "97.25" in out
    assert out.endswith("Report: there/report.html\n")
    [(what, arguments)] = runs.calls
    assert (what, arguments["out"], arguments["progress"]) == ("run", Path("there"), True)
    assert arguments["command"] == "fedstill run mine.toml --data.root 'a b' --out there --seed 3"
    assert (arguments["config"].seed, arguments["config"].data.root) == (3, "a b")


@pytest.mark.usefixtures("here")
def test_default_folder_is_named_by_run_and_seed_and_printed(command: Main, runs: Runs) -> None:
    code, _, err = command("run", "mine.toml", "--seed", "3")
    assert code == 0
    assert runs.calls[0][1]["out"] == Path("runs/mine-seed3")
    assert "runs/mine-seed3" in err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_unless_quiet(
    terminal: bool, command: Main, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    command("run", "mine.toml", "--out", "there")
    command("run", "mine.toml", "--out", "there", "--quiet")
    command("run", "--resume", "there")
    assert [arguments["progress"] for _, arguments in runs.calls] == [True, False, True]


def test_resume(command: Main, runs: Runs) -> None:
    code, out, err = command("run", "--resume", "there")
    assert (code, err) == (0, "")
    assert runs.calls == [("resume", {"out": Path("there"), "progress": True, "startup_kit": None})]
    assert out.endswith("Report: there/report.html\n")
    command("run", "--resume", "there", "--startup-kit", "admin")
    assert runs.calls[1][1]["startup_kit"] == Path("admin")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", ["run mine.toml --out there", "run --resume there"])
@pytest.mark.parametrize(
    "error",
    [
        RunFolderError("there holds another run"),
        QueryRefused("clinic", "predict_logits", "queries: count_labels"),
        FedstillError("two\nlines"),
        PermissionError(13, "Permission denied", "there/config.toml"),
    ],
)
def test_errors_of_a_run_are_one_line(command: Main, runs: Runs, words: str, error: Exception) -> None:
    runs.raises = error
    line = one_line(command(*words.split()))
    if isinstance(error, PermissionError):
        assert line == "Permission denied: there/config.toml"
    else:
        assert line == str(error).replace("\n", " ")


@pytest.mark.usefixtures("here")
def test_unexpected_errors_are_raised(runs: Runs) -> None:
    runs.raises = ZeroDivisionError("a fault")
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "mine.toml"])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", [["run", "mine.toml", "--out", "my run"], ["run", "--resume", "my run"]])
def test_ctrl_c_prints_resume_command(command: Main, runs: Runs, words: list[str]) -> None:
    runs.raises = KeyboardInterrupt()
    assert command(*words)[::2] == (130, "fedstill: stopped; nothing was written\n")
    Path("my run").mkdir()
    code, _, err = command(*words)
    assert code == 130
    assert err == "fedstill: stopped; to resume: fedstill run --resume 'my run'\n"


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", ["--help", "list"])  # printed by fedstill and by rich
def test_closed_pipe_ends_the_command_quietly(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fedstill", words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_reports_broken_connection(command: Main, runs: Runs) -> None:
    runs.raises = BrokenPipeError(32, "Broken pipe")  # raised by a socket and not by standard output
    assert command("run", "demo", "--out", "out")[::2] == (2, "fedstill: [Errno 32] Broken pipe\n")


# --- comparisons -------------------------------------------------------------------------------------


class Comparisons:
    """Replaces the comparison runner and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Comparison, Path, dict[str, Any]]] = []
        self.raises: BaseException | None = None

    def __call__(self, comparison: Comparison, out: Path, **how: Any) -> None:
        self.calls.append((comparison, out, how))
        if self.raises is not None:
            raise self.raises


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> Comparisons:
    comparisons = Comparisons()
    monkeypatch.setattr("fedstill.compare.comparison_runner.compare", comparisons)
    monkeypatch.setattr(
        "fedstill.cli.compare._show_comparison", lambda folder, only: print(f"table of {folder}")
    )
    return comparisons


def test_comparison_notes_that_data_of_preset_are_not_used(
    command: Main, here: Path, comparisons: Comparisons
) -> None:
    taken = "Of fashion-fediod the method alone is taken: all run on digits, not on its fashion-mnist"
    output = f"{taken}; --base fashion-fediod takes all else from it, too.\n"
    words = ("compare", "fedavg", "fashion-fediod", "--out", "there")
    assert command(*words) == (0, "table of there\n", output)
    assert command(*words, "--quiet") == (0, "table of there\n", "")
    assert command(*words, "--data", "fashion-mnist") == (0, "table of there\n", "")
    (here / "part.toml").write_text('method.name = "fediod"\n[evaluation]\nnope = 3', encoding="utf-8")
    code, out, stderr = command("compare", "fedavg", "part.toml", "--out", "there")
    assert (code, out) == (0, "table of there\n")
    assert stderr.endswith("all run on digits; --base part.toml takes all else from it, too.\n")
    code, _, stderr = command("compare", "digits-fedkd", "fedavg", "--fedkd.levels", "2")
    assert code == 2
    assert stderr == "fedstill: unknown option '--fedkd.levels': did you mean '--digits-fedkd.levels'?\n"
    (here / "lab.py").touch()
    wanted = "unknown method or preset 'lab.py': did you mean 'lab:CLASS', a method in that file?"
    assert one_line(command("compare", "fedavg", "lab.py")) == wanted


@pytest.mark.usefixtures("here")
def test_compare_passes_options_to_runner(command: Main, comparisons: Comparisons) -> None:
    words = "compare fedavg mine.toml --seeds 2 --base mine.toml --data mnist --split.alpha 0.3 --out there"
    words += " --only fedavg --devices cuda:0,cuda:1"
    assert command(*words.split()) == (0, "table of there\n", "")
    [(comparison, out, how)] = comparisons.calls
    assert (list(comparison.methods), comparison.seeds, out) == (["fedavg", "mine"], (0, 1), Path("there"))
    wanted = {"command": f"fedstill {words}", "report": report.write_report, "quiet": False, "bars": True}
    assert how == {**wanted, "only": ["fedavg"], "jobs": None, "devices": ["cuda:0", "cuda:1"]}
    ours = comparison.run_config(comparison.planned_runs()[1])
    assert (ours.method.tau, ours.split.nodes, ours.split.alpha, ours.data.registered_name) == (
        2.0,
        7,
        0.3,
        "mnist",
    )


@pytest.mark.usefixtures("here")
def test_compare_reads_a_file_and_prints_its_folder(
    command: Main, comparisons: Comparisons, here: Path
) -> None:
    (here / "plan.toml").write_text('methods = ["fedavg"]\nseeds = 3', encoding="utf-8")
    code, _, err = command("compare", "plan.toml", "--seeds", "1", "--quiet")
    assert (code, err) == (0, "The comparison's folder is runs/plan; --out DIR chooses another.\n")
    [(comparison, out, how)] = comparisons.calls
    assert (comparison.seeds, out, how["quiet"]) == ((0,), Path("runs/plan"), True)
    assert comparison.leakage is None


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", ["compare --leakage fedavg", "compare fedavg --seeds 2 --leakage"])
def test_compare_accepts_leakage_at_any_position(command: Main, comparisons: Comparisons, words: str) -> None:
    assert command(*words.split(), "--out", "there")[0] == 0
    [(comparison, _, how)] = comparisons.calls
    assert comparison.leakage is not None
    assert comparison.leakage["seed"] == 0
    assert list(comparison.methods) == ["fedavg"]
    assert how["command"] == f"fedstill {words} --out there"


@pytest.mark.usefixtures("here")
def test_ctrl_c_in_comparison_prints_resume_command(command: Main, comparisons: Comparisons) -> None:
    comparisons.raises = KeyboardInterrupt()
    Path("my runs").mkdir()
    code, _, err = command("compare", "fedavg", "--out", "my runs")
    assert (code, err) == (130, "fedstill: stopped; to resume: fedstill compare --resume 'my runs'\n")


def test_published_metrics_stay_with_changed_options(command: Main, here: Path) -> None:
    metric = '[[paper]]\nmethod = "fediod"\nvalue = 90.5\nsource = "Table 1"\n'
    with (here / "mine.toml").open("a", encoding="utf-8") as file:
        file.write(metric)
    code, out, _ = command("config", "mine.toml", "--split.nodes", "9")
    assert code == 0
    [paper] = spec.read_toml(out).paper
    assert (paper.value, paper.source) == (90.5, "Table 1")
    assert "--paper" not in command("run", "mine.toml", "--help-all")[1]
    line = one_line(command("config", "mine.toml", "--paper.0.value", "3"))
    assert line.startswith("unknown option '--paper.0.value'")


# --- in a new process -------------------------------------------------------------------------------


def process(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "fedstill", *words, folder=folder)


def python(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(Path(cli.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env, command = {**os.environ, "PYTHONPATH": search}, [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=100
    )


def test_help_is_fast_without_torch(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = process("--help", folder=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time does not depend on the load of the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5
    assert (done.returncode, done.stderr) == (0, "")
    heavy = "{'torch', 'numpy', 'sklearn', 'scipy', 'matplotlib', 'cyclopts', 'rich'}"
    code = (
        "import sys\n"
        "from fedstill.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    assert python("-c", code, folder=tmp_path).stderr == "[]\n"


def test_complete_run_in_process(here: Path, command: Main) -> None:
    """One command gives a result and a report; a second run in the same folder is refused."""
    small = (
        "--split.nodes 2 --data.train_limit 200 --nodes.local.epochs 1 --method.steps 3 --method.batch 8 "
        "--method.generator.width 8 --method.critic.width 8 --evaluation.every 2 --engine.threads 1"
    )
    words = ["run", "mine.toml", *small.split(), "--out", "there"]
    done = process(*words, folder=here)
    assert done.returncode == 0
    assert done.stdout.endswith("Report: there/report.html\n")
    phases = ["local training", "centralized", "distillation", "evaluation"]
    lines = done.stderr.splitlines()
    begun = [line.partition(" 0 of ")[0] for line in lines if " 0 of " in line]
    assert (begun, sum("took" in line for line in lines)) == (phases, len(phases))
    (announced,) = [line for line in lines if "--evaluation.centralized false" in line]
    after = next(line for line in lines if line.startswith("centralized 0 of "))
    assert lines.index(announced) == lines.index(after) - 1
    assert "<html" in (here / "there" / "report.html").read_text(encoding="utf-8")
    result = json.loads((here / "there" / "result.json").read_text(encoding="utf-8"))
    assert 0 <= result["student"]["accuracy"] <= 100
    saved = spec.load_toml(here / "there" / "config.toml")
    assert (saved.name, saved.seed, saved.split.nodes, saved.method.steps) == ("mine", 4, 2, 3)
    assert "there" in one_line(command(*words, "--seed", "1"))
    assert command("report", "there")[:2] == (0, "Report: there/report.html\n")


def test_json_output_has_no_progress(here: Path, command: Main) -> None:
    small = (
        "--split.nodes 2 --data.train_limit 100 --nodes.local.epochs 1 --method.steps 2 --method.batch 8 "
        "--method.generator.width 8 --method.critic.width 8 --engine.threads 1"
    )
    words = ["run", "mine.toml", *small.split(), "--json"]
    code, out, err = command(*words, "--out", "there", "--evaluation.centralized", "false")
    assert (code, json.loads(out)["iterations"]) == (0, 2)
    assert "distillation 2 of 2" in err
    assert "centralized" not in err
    code, out, err = command(*words, "--out", "quiet", "--quiet")
    assert (code, json.loads(out)["iterations"], err) == (0, 2, "")


def test_invalid_values_read_the_same_with_pydantic_imported(command: Any, monkeypatch: Any) -> None:
    """Ray imports pydantic, with which cyclopts would check values itself."""
    without = command("reproduce", "fediod-table1", "--seeds", "0")
    monkeypatch.setitem(sys.modules, "pydantic", pytest.importorskip("pydantic"))
    assert command("reproduce", "fediod-table1", "--seeds", "0") == without
    assert "pydantic" in sys.modules
