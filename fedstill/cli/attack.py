"""``fedstill attack``: attacks on a finished run, with what left its nodes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.cli.arguments import AsJson, Call, CalledAs, Quiet, list_options, override, split_options
from fedstill.cli.console import print_json
from fedstill.core.config_tables import read_received_dataclass
from fedstill.core.errors import ArgumentError, RunFolderError
from fedstill.core.text_format import finite_number_at_keys, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from fedstill.attacks.attack import Leakage
    from fedstill.attacks.attack_runner import LeakageConfig


def attack(
    run: Path, /, *, quick: bool = False, quiet: Quiet = False, as_json: AsJson = False, call: CalledAs
) -> None:
    """Attack a finished run with what left its nodes: membership inference, inversion and more.

    example: fedstill attack runs/demo --quick

    The run is repeated from its config.toml to observe every release, and the
    repetition is checked against the run's audit log. Results go to
    RUN/leakage.json, images to RUN/leakage.safetensors, and both to
    RUN/report.html. Images show private records: consider who receives the report.

    options of the attacks (--help-all lists all with defaults):
      --attacks NAME ...   attacks to run (default: all; `fedstill list attacks`)
      --ATTACK.NAME VALUE  option of one attack
      --seed N             seed of the attacks

    Args:
        run: folder of a finished run on this machine
        quick: fewer shadow models and restarts: a first look, which underestimates leakage
    """
    folder = run
    _check(folder)  # before torch is imported, which takes seconds
    config = configured(call.overrides, quick)
    if (expected_time := duration(folder, len(config.attacks), quick)) and not quiet:
        print(expected_time, file=sys.stderr)

    from fedstill.attacks.attack import LEAKAGE_FILE, Leakage
    from fedstill.attacks.attack_runner import run_attacks
    from fedstill.core.safe_console import SafeConsole
    from fedstill.report import write_report

    found = run_attacks(folder, config, command=call.command, progress=not quiet)
    report = write_report(folder)
    if as_json:
        print_json(found)
        return
    print_leakage(read_received_dataclass(Leakage, found, folder / LEAKAGE_FILE), SafeConsole())
    print(f"Report: {report}")


def _check(folder: Path) -> None:
    from fedstill.core.run_writer import ATTACK_NEEDS_CONFIG, reject_run_of_python_objects

    if not folder.is_dir():
        raise RunFolderError(f"there is no folder {folder} (expected the folder of a finished run)")
    if (folder / "compare.toml").exists():
        raise RunFolderError(
            f"{folder} holds a comparison: name one of its runs, or repeat its command with --leakage"
        )
    reject_run_of_python_objects(folder, ATTACK_NEEDS_CONFIG)
    if not (folder / "config.toml").exists():
        raise RunFolderError(f"{folder} holds no run: there is no config.toml in it")
    if not (folder / "result.json").exists():
        again = shlex.join(["fedstill", "run", "--resume", str(folder)])
        raise RunFolderError(f"the run in {folder} is not finished: there is no result.json; {again}")


def duration(folder: Path, attacks: int, quick: bool) -> str:
    """Return a line on the expected time, from the run's own and an earlier attack's; empty if not known."""
    from fedstill.attacks.attack import Leakage
    from fedstill.core.run_writer import read_result

    took, before = (
        finite_number_at_keys(read_result(folder / "result.json"), "seconds", "total"),
        Leakage.read(folder),
    )
    if took is None:
        return ""
    last = None if before is None else before.seconds
    parts = [
        f"The run is repeated first (it took {format_seconds(took)}), then {format_count(attacks, 'attack')}"
    ]
    if not quick:
        parts.append("which train models and take several times as long (--quick is a first look)")
    if last is not None:
        parts.append(f"the last time all took {format_seconds(last)}")
    return f"{', '.join(parts)}."


def configured(words: Sequence[str], quick: bool = False) -> LeakageConfig:
    """Return the attacks that the options choose, with their options."""
    from fedstill.attacks.attack_runner import LeakageConfig

    chosen, spelled = _parse_attacks(words, quick)
    got = override(chosen, spelled, "fedstill attack RUN")
    attacks = (getattr(got, _attack_option_prefix(name)) for name in chosen.attacks)
    return LeakageConfig(tuple(attacks), got.seed)


def _parse_attacks(words: Sequence[str], quick: bool) -> tuple[Any, list[str]]:
    """Return the chosen attacks as one configuration with a field for each, and the options for it."""
    from fedstill.attacks.attack import ATTACKS
    from fedstill.attacks.attack_runner import LeakageConfig

    config = LeakageConfig.quick() if quick else LeakageConfig()
    given = split_options(list(words))
    for option in given:
        if option.name == "attacks":
            start = {each.registered_name: each for each in config.attacks}
            named = LeakageConfig.from_table({"attacks": option.values})
            config = LeakageConfig(
                tuple(start.get(each.registered_name, each) for each in named.attacks), named.seed
            )
    fields = {_attack_option_prefix(attack.registered_name): attack for attack in config.attacks}
    for option in given:
        whose = ATTACKS.canonical_name(option.name.rpartition(".")[0])
        if whose in ATTACKS and _attack_option_prefix(whose) not in fields:
            reason = f"none, as attack {whose!r} is not among --attacks"
            raise ArgumentError(option.option, " ".join(option.values), reason)
    own = [("attacks", tuple[str, ...]), ("seed", int)]
    form: Any = make_dataclass(
        "Leakage", [*own, *((name, type(each)) for name, each in fields.items())], frozen=True
    )
    now = form(tuple(each.registered_name for each in config.attacks), config.seed, **fields)
    return now, [_with_canonical_attack_name(word) for word in words]


def list_attack_options(call: Call) -> str:
    """Return every option of the attacks."""
    from fedstill.attacks.attack import ATTACKS

    listed = list_options(*_parse_attacks(call.overrides, "--quick" in call.words))
    return f"all options of the attacks ({', '.join(ATTACKS)}):\n\n{listed}"


def _attack_option_prefix(name: str) -> str:
    """Return the name of an attack in options: ``--my_lab_Guess.NAME`` for ``my_lab:Guess``."""
    return re.sub(r"\W", "_", name)


def _with_canonical_attack_name(word: str) -> str:
    from fedstill.attacks.attack import ATTACKS

    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    whose, dot, option = name.rpartition(".")
    return f"--{_attack_option_prefix(ATTACKS.canonical_name(whose))}{dot}{option}{equals}{value}"


def print_leakage(found: Leakage, console: Console) -> None:
    """Print ``leakage.json``: its summary, a line for each attack, and the attacks that were not run."""
    from rich.text import Text

    from fedstill.attacks.attack import skipped_texts
    from fedstill.report.tables import Cell, Column, Row, Table, print_rows

    if found.sentence:
        console.print(Text(found.sentence))
        console.print()
    rows = [Row(name, [Cell(text) for text in texts]) for name, *texts in printed(found)]
    if rows:
        heads = ("of", "result", "by chance")
        table = Table("", "attack", [Column(head, "") for head in heads], rows)
        print_rows(table, console, wrapped=heads)
    if found.audit is not None:
        console.print(Text(f"The repetition is not the run of this folder: {found.audit}"))
    for reason in skipped_texts(found):
        console.print(Text(f"Not tried: {reason}"))


def printed(found: Leakage) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: attack, target, metrics, and the values without an attack."""
    from fedstill.attacks.attack import group_metrics_into_lines

    rows = []
    for attack in found.attacks:
        for line in group_metrics_into_lines(row for row in attack.rows if not row.detail):
            name = ", ".join(part for part in (attack.name, line.attack) if part)
            got = [f"{metric} {row.written}" for metric, row in line.metrics.items()]
            without = [row.baseline for row in line.metrics.values() if row.baseline]
            rows.append((name, line.target, ", ".join(got), ", ".join(without)))
    return rows
