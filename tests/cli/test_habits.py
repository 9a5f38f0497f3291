"""Common ways to call the commands without reading the docs, and output for scripts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
from fedstill.cli import compare
from fedstill.cli.arguments import Call, split_overrides
from fedstill.cli.main import COMMANDS, make_app
from fedstill.cli.run import out_folder
from fedstill.cli.tools import EXTRAS
from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.data.raw_images import raw_images_from_arrays
from fedstill.models import MLP
from fedstill.protocol.method import METHODS
from fedstill.runs import presets

Main = Callable[..., tuple[int, str, str]]


def planned(*words: str) -> Any:
    own, overrides = split_overrides(words, ["--seeds", "--base"])
    return compare.plan_comparison(own, Call("fedstill compare", own, overrides))


def test_comparison_accepts_short_names_and_options_of_one_method() -> None:
    own = ("--fediod.steps", "20", "--fedmd-cg.rounds=3")
    plan = planned("fediod", "fedavg", "fedmd-cg", "--nodes", "7", *own)
    configs = {planned.label: plan.run_config(planned) for planned in plan.planned_runs()}
    assert {config.split.nodes for config in configs.values()} == {7}
    assert configs["fediod"].method.steps == 20
    assert configs["fedmd-cg"].method.rounds == 3
    assert plan.changed == ("fediod.steps", "fedmd-cg.rounds", "split.nodes")
    assert configs["fedavg"].method == METHODS["fedavg"]()
    assert configs["fediod"].method.tau == METHODS["fediod"]().tau


@pytest.mark.parametrize(
    ("words", "error", "output"),
    [
        (("fediod", "--fediod.stepz", "20"), UnknownName, "'--fediod.stepz': did you mean '--fediod.steps'"),
        (("fediod", "--fediod.steps", "few"), ArgumentError, "invalid method.steps = 'few'"),
        (("fediod", "--fedavg.rounds", "2"), UnknownName, "'--fedavg.rounds'"),
    ],
)
def test_options_of_one_method_are_checked(
    words: tuple[str, ...], error: type[Exception], output: str
) -> None:
    with pytest.raises(error, match=output):
        planned(*words)


def test_method_by_name_and_labels_as_column() -> None:
    """Labels may have shape (n, 1), as in MedMNIST."""
    x, y = torch.rand(24, 1, 8, 8), (torch.arange(24) % 2).view(-1, 1)
    outcome = fedstill.distil(
        [(x[:8], y[:8]), (x[8:16], y[8:16])],
        [MLP((1, 8, 8), 2, width=4) for _ in range(2)],
        MLP((1, 8, 8), 2, width=4),
        (x[16:], y[16:]),
        2,
        method="standalone",
        local=fedstill.LocalConfig(epochs=1),
    )
    assert outcome.result["method"] == "standalone"
    arrays = {"images": np.zeros((3, 8, 8), dtype=np.uint8), "labels": np.array([[1], [0], [1]])}
    assert raw_images_from_arrays(Path("x.npz"), arrays, "class").labels.tolist() == [1, 0, 1]


def test_finished_run_does_not_block_default_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new run gets the next free folder; an unfinished one is resumed in its own."""
    default = tmp_path / "demo-seed0"
    for folder in (default, tmp_path / "demo-seed0-2", tmp_path / "demo-seed0-3"):
        assert out_folder(None, str(default)) == folder
        assert f"The run's folder is {folder};" in capsys.readouterr().err
        folder.mkdir()
        (folder / "config.toml").touch()
        assert out_folder(None, str(default)) == folder, "an unfinished run keeps its folder"
        (folder / "result.json").touch()
    assert out_folder(None, str(default), "comparison") == default, "finished comparisons are resumed"


def test_doctor_lists_missing_extras_with_their_use(command: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"nvflare"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr("fedstill.cli.tools.EXTRAS", {"flare": ("nodes", ("nvflare", "json"))})
    output = json.loads(command("doctor", "--json")[1])
    assert output["missing"] == {"flare": ["nvflare"]}
    assert output["versions"]["fedstill"] == fedstill.__version__
    assert output["threads"] == torch.get_num_threads()
    assert "cpu" in output["devices"]
    code, out, _ = command("doctor")
    assert code == 0
    assert "nodes: pip install -e '.[flare]'" in " ".join(out.split())
    assert torch.__version__ in out


def test_doctor_imports_installed_modules(
    command: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A torchvision that does not match torch has metadata, but fails at import."""
    (tmp_path / "broken_vision.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("fedstill.cli.tools.EXTRAS", {"vision": ("networks", ("json", "broken_vision"))})
    output = json.loads(command("doctor", "--json")[1])
    assert output["missing"] == {"vision": ["broken_vision"]}
    assert output["broken"] == {"broken_vision": "RuntimeError: operator nms does not exist"}
    assert "nms does not exist" in " ".join(command("doctor")[1].split())


def test_doctor_output_has_no_home_folder(command: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug report form asks for this output, which must not contain the user name."""
    monkeypatch.setenv("FEDSTILL_DATA", os.pathsep.join([str(Path.home() / "sets"), "~/more", "/srv/all"]))
    for words in (["doctor"], ["doctor", "--json"]):
        out = command(*words)[1]
        assert "~/sets (not there)" in out
        assert "~/more (not there)" in out
        assert str(Path.home() / "") not in out.replace("/srv/all", "")


def test_doctor_lists_every_extra() -> None:
    import tomli

    file = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomli.loads(file.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"dev"}


def test_lists_are_json_for_scripts(command: Main) -> None:
    output: Mapping[str, Any] = json.loads(command("list", "--json")[1])
    assert set(output["methods"]) >= {"fediod", "fedkd"}
    assert "digits" in output["data"]
    assert json.loads(command("list", "presets", "--json")[1]).keys() == set(presets.names())
    assert "two hidden layers" in json.loads(command("list", "models", "--json")[1])["mlp"]
    assert json.loads(command("list", "fedavg", "--json")[1])["fedavg"]["needs"].startswith(
        "same architecture"
    )


def test_completion_covers_every_command_and_option() -> None:
    for shell in ("bash", "zsh", "fish"):
        script = make_app().generate_completion(shell=shell)
        for word in (*COMMANDS, "verify", "--sites", "--startup-kit"):
            assert re.search(rf"(?<!\w){word.lstrip('-')}(?![\w-])", script), (shell, word)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_a_word(command: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    script = command("completion", "bash")[1]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    call = 'COMP_WORDS=(fedstill {}); COMP_CWORD={}; _fedstill; echo "${{COMPREPLY[@]}}"'
    commands = "\n".join([script, call.format("eval", 1), call.format("run digits-fediod-s", 2)])
    done = subprocess.run(["bash", "-c", commands], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split("\n")[:2] == ["evaluate", "digits-fediod-skewed"]
    assert "expected one of 'bash', 'zsh', 'fish'" in command("completion", "tcsh")[2]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_registers_the_script(command: Main) -> None:
    start = "autoload -Uz compinit; compinit -u -D; "
    call = f"{start}{command('completion', 'zsh')[1]}\nprint ${{_comps[fedstill]}}"
    done = subprocess.run(["zsh", "-f", "-c", call], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.startswith("_")


def test_no_color_is_respected(command: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "FORCE_COLOR", "1")
    dimmed = command("list", "tasks")[1]
    monkeypatch.setitem(os.environ, "NO_COLOR", "1")
    plain = command("list", "fediod")[1]
    assert "\x1b[" in dimmed
    assert "\x1b[3" not in plain


def _listed(redirected: str = "", *words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    call = shlex.join([sys.executable, "-m", "fedstill", *(words or ("list", "fediod"))]) + redirected
    utf8 = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    return subprocess.run(call, shell=True, env={**os.environ, **utf8, **environment}, capture_output=True)


def test_unencodable_letters_are_written_as_placeholders() -> None:
    """Results contain a plus-minus sign, and an encoding error must not lose the results of a run."""
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "from fedstill.core.safe_output import safe_output as s\nwith s(): print('97 \u00b1 1')",
        ],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert (shown.returncode, shown.stdout) == (0, b"97 ? 1\n")


def test_closed_standard_output_is_no_error() -> None:
    closed = _listed(" >&-")
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_rejects_arguments_that_the_locale_cannot_decode() -> None:
    refused = _listed("", "list", "m\u00fcll")
    assert refused.returncode == 2
    assert refused.stderr.count(b"\n") == 1
    assert b"argument" in refused.stderr


def test_export_checks_its_format_before_it_reads_the_run(command: Main) -> None:
    code, _, err = command("export", "nowhere", "--format", "onxx")
    assert code == 2
    assert "invalid --format = 'onxx'" in err
    code, _, err = command("predict", "nowhere", "new.csv", "--channels", "x")
    assert code == 2
    assert "invalid --channels[0] = 'x'" in err
