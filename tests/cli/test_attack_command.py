"""``fedstill attack``: arguments, output, and one-line errors with exit code 2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedstill.attacks.attack import Leakage
from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.attacks.gradient_inversion import GradientInversion
from fedstill.attacks.label_counts import LabelCounts
from fedstill.attacks.label_inference import LabelInference
from fedstill.attacks.membership_inference import MembershipInference
from fedstill.attacks.memorization import Memorization
from fedstill.attacks.property_inference import PropertyInference
from fedstill.cli.attack import print_leakage, printed
from fedstill.core.config_tables import changed_options_as_cli_words, read_received_dataclass
from fedstill.core.errors import FedstillError
from tests.support import attack_results
from tests.support.attack_results import interval

Main = Callable[..., tuple[int, str, str]]


LIRA = attack_results.member_attack(
    "LiRA", interval(0.614, 0.58, 0.64),
    attack_results.rate_record(0.01, interval(0.031, 0.0, 0.5)),
    attack_results.rate_record(0.001, interval(0.004, 0.0, 0.5), 0),
)  # fmt: skip
VGG = {
    "extractor": "VGG", "generated": 500, "dimensions": 64, "average": 27.2, "average_held_out": 25.7,
    "full_rank": True, "nodes": {"node-0": {"fid": 27.2, "kid": 0.1, "real": 9}}, "held_out": {},
}  # fmt: skip
COPIED = attack_results.memorization(
    attack_results.space("pixels", p_value=0.0004, share=0.75, low=0.7, high=0.8, fresh=None),
    distances=[VGG],
    scores={"images": 200, "adapted": 5.1, "student": 7.7, "nodes": {"node-0": 5.1}},
)
FOUND: dict[str, Any] = {
    "sentence": "Parameters left the nodes. [b]One[/b] in three was found.",
    "audit": "node-0: 10 bytes of logits by the audit log, 12 observed",
    "skipped": [{"attack": "memorization", "reason": "the server made no images"}],
    "attacks": attack_results.attack_entries(
        inversion=attack_results.inversion(attack_results.inversion_result("DLG", 31.25, 4.0)),
        membership=[attack_results.target("student", LIRA)],
        memorization=COPIED,
        counts=[
            attack_results.counts_node("node-0", True),
            attack_results.counts_node("node-1", False, 0.25),
        ],
    ),
}


class Attacks:
    """Replaces ``run_attacks`` and records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, LeakageConfig, str, bool]] = []
        self.raises: BaseException | None = None

    def __call__(self, folder: Path, config: LeakageConfig, *, command: str, progress: bool) -> Any:
        self.calls.append((folder, config, command, progress))
        if self.raises is not None:
            raise self.raises
        return FOUND


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Attacks:
    attacks = Attacks()
    monkeypatch.setattr("fedstill.attacks.attack_runner.run_attacks", attacks)
    return attacks


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working directory with a finished run, an unfinished run, and a comparison."""
    monkeypatch.chdir(tmp_path)
    for folder, files in {
        "a run": ("config.toml", "result.json"),
        "half": ("config.toml",),
        "many": ("compare.toml",),
        "empty": (),
    }.items():
        (tmp_path / folder).mkdir()
        for file in files:
            (tmp_path / folder / file).write_text("{}", encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("here")
def test_attack_receives_options_and_prints_report(command: Main, attacks: Attacks) -> None:
    words = ("attack", "a run", "--seed", "3", "--membership.shadows=4", "--inversion.victims", "2")
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    [(folder, ours, output, progress)] = attacks.calls
    assert (folder, progress) == (Path("a run"), True)
    inversion, membership, *others = ours.attacks
    assert ours.seed == 3
    assert (inversion, membership) == (GradientInversion(victims=2), MembershipInference(shadows=4))
    assert others == [Memorization(), LabelCounts(), LabelInference(), PropertyInference()]
    assert output == "fedstill attack 'a run' --seed 3 --membership.shadows=4 --inversion.victims 2"
    assert "[b]One[/b] in three was found" in out  # brackets are not parsed as markup
    assert out.endswith("Report: a run/report.html\n")


@pytest.mark.usefixtures("here")
def test_default_attacks(command: Main, attacks: Attacks) -> None:
    assert command("attack", "a run", "--quiet")[0] == 0
    assert [(call[1], call[3]) for call in attacks.calls] == [(LeakageConfig(), False)]


@pytest.mark.usefixtures("here")
def test_quick_attacks_are_fast_and_report_duration(command: Main, attacks: Attacks) -> None:
    Path("a run/result.json").write_text('{"seconds": {"total": 75}}', encoding="utf-8")
    err = command("attack", "a run", "--quick", "--membership.records", "40")[2]
    assert err == "The run is repeated first (it took 1 min 15 s), then 6 attacks.\n"
    quick = {type(attack): attack for attack in LeakageConfig.quick().attacks}
    chosen = {type(attack): attack for attack in attacks.calls[0][1].attacks}
    assert chosen == {**quick, MembershipInference: replace(quick[MembershipInference], records=40)}
    assert chosen[MembershipInference].shadows < MembershipInference().shadows
    assert "--quick is a first look" in command("attack", "a run")[2]
    assert attacks.calls[1][1] == LeakageConfig()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", ["--help-all", "nowhere --help-all"])
def test_help_shows_every_option(command: Main, attacks: Attacks, words: str) -> None:
    code, out, err = command("attack", *words.split())
    assert (code, err, attacks.calls) == (0, "", [])
    for name in ("attacks", "seed", "inversion.victims", "membership.shadows", "memorization.permutations"):
        assert f"--{name} " in out
    assert out.startswith("Usage: fedstill attack [OPTIONS] RUN\n")


@pytest.mark.usefixtures("here")
def test_accepts_only_options_of_selected_attacks(command: Main, attacks: Attacks) -> None:
    out = command("attack", "--attacks", "membership", "--help-all")[1]
    assert "--membership.shadows " in out
    assert "--memorization" not in out
    assert command("attack", "a run", "--attacks", "membership", "--membership.shadows", "8")[0] == 0
    assert attacks.calls[0][1] == LeakageConfig((MembershipInference(shadows=8),))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "fedstill attack needs RUN (see `fedstill attack --help`)"),
        ("nowhere", "there is no folder nowhere (expected the folder of a finished run"),
        ("empty", "empty holds no run: there is no config.toml in it"),
        ("half", "the run in half is not finished: there is no result.json; fedstill run --resume half"),
        ("many", "many holds a comparison: name one of its runs, or repeat its command with --leakage"),
        ("ready --sed 3", "unknown option '--sed': did you mean '--seed'?"),
        ("ready --seed -1", "invalid seed = -1 (expected 0 or more"),
        ("ready --membership.shadows 3", "invalid membership.shadows = 3 (expected "),
        ("ready --attacks inversions", "unknown attack 'inversions': did you mean 'inversion'?"),
        (
            "ready --attacks counts --memorization.pairs 3",
            "invalid --memorization.pairs = '3' (expected none, as attack 'memorization' is not",
        ),
        (
            "ready --attacks counts counts",
            "invalid attacks = ['counts', 'counts'] (expected some of inversion, ",
        ),
        ("ready another", "fedstill attack takes no 'another'"),
    ],
)
def test_invalid_words_are_one_line(
    command: Main, here: Path, attacks: Attacks, words: str, line: str
) -> None:
    (here / "a run").rename(here / "ready")
    code, out, err = command("attack", *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.removeprefix("fedstill: ").startswith(line)
    assert attacks.calls == []


@pytest.mark.usefixtures("here")
def test_inapplicable_run_is_one_line(command: Main, attacks: Attacks) -> None:
    attacks.raises = FedstillError("the run\nwas deployed")
    assert command("attack", "a run") == (2, "", "fedstill: the run was deployed\n")


# --- output -----------------------------------------------------------------------------------------


def read(record: dict[str, Any]) -> Leakage:
    return read_received_dataclass(Leakage, json.loads(json.dumps(record)), Path("leakage.json"))


def test_prints_a_line_for_each_attack_with_its_baseline() -> None:
    assert printed(read(FOUND)) == [
        ("inversion, DLG", "all parameters",
         "PSNR 31.2 \u00b1 4.0 dB, labels right 3 of 4", "9.8 dB, guessed"),
        ("membership, LiRA", "student",
         "AUC 61.4% (58.0 to 64.0), members found at 1% false alarms 3.1% (0.0 to 50.0)", "50%, 1%"),
        ("memorization, pixels", "1,000 images",
         "nearer to private than to held-out 75.0% (70.0 to 80.0), p 0.0004", "50%, p uniform"),
        ("memorization, in VGG", "mean of nodes", "FID, generated 27.20", "FID 25.7 for held-out images"),
        ("memorization", "the nodes' own models, on average", "inception score 5.10", "1 at least"),
        ("memorization", "the student", "inception score 7.70", "1 at least"),
        ("counts", "2 nodes", "label counts recovered exactly at 1 of 2 nodes, off by 0.0% to 25.0%", ""),
    ]  # fmt: skip


def shown(record: dict[str, Any], width: int) -> str:
    out = StringIO()
    print_leakage(read(record), Console(file=out, width=width, color_system=None))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 160])
def test_prints_summary_table_and_skipped_attacks(width: int) -> None:
    text = shown(FOUND, width)
    assert text.startswith("Parameters left the nodes.")
    assert max(map(len, text.splitlines())) <= width
    whole = " ".join(text.split())
    assert "Not tried: memorization: the server made no images" in whole
    assert "The repetition is not the run of this folder: node-0: 10 bytes of logits by" in whole
    if width == 160:
        assert re.search(r"LiRA +student +AUC 61\.4% \(58\.0 to 64\.0\)", text)


def test_prints_only_reasons_if_no_attack_applies() -> None:
    parts = ("inversion", "membership", "memorization", "distances", "scores", "counts")
    nothing = {"attacks": [], "audit": None, "sentence": "Nothing left.", "skipped": []}
    assert shown(nothing, 80) == "Nothing left.\n\n"
    nothing["skipped"] = [{"attack": part, "reason": "nothing left the nodes"} for part in parts]
    output = " ".join(shown(nothing, 80).split())
    # the common reason is printed once
    assert output == f"Nothing left. Not tried: {', '.join(parts)}: nothing left the nodes"


def test_changed_options_round_trip_as_cli_words(command: Main, attacks: Attacks, here: Path) -> None:
    table = {"seed": 5, "attacks": ["counts", "memorization"], "memorization": {"pairs": 4}}
    ours = LeakageConfig.from_table(json.loads(json.dumps(table)))
    words = changed_options_as_cli_words(ours.to_table(), LeakageConfig().to_table())
    assert changed_options_as_cli_words(LeakageConfig().to_table(), LeakageConfig().to_table()) == []
    assert command("attack", str(here / "a run"), *words)[0] == 0
    assert attacks.calls[0][1] == ours
