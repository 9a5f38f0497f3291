"""``fedstill attack``: what an adversary gets from what left the nodes in a finished run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstill.core.errors import ArgumentError, RunFolderError

if TYPE_CHECKING:
    from rich.console import Console

ABOUT = """\
Attack a finished run with what left its nodes.

RUN is the folder of a run on this machine. The run is repeated from its config.toml to hear every release
as it leaves its gate, and what was heard is compared with the run's ledger. Attacks then see that, what the
server knows, and the student. Figures go to RUN/leakage.json, pictures to RUN/leakage.safetensors, and both
into the section Leakage of RUN/report.html, in place of those of an attack before. Pictures show private
records: mind who gets the report. Beside the options below: --quiet hides progress.
"""

USAGE = "fedstill attack RUN"


def main(words: list[str]) -> None:
    """Do what the words after ``fedstill attack`` say.

    Raises:
        FedstillError: a wrong word, no finished run in the folder, or a run that cannot be repeated here.
    """
    command = shlex.join(["fedstill", "attack", *words])
    quiet = "--quiet" in words
    words = [word for word in words if word != "--quiet"]
    named = bool(words) and not words[0].startswith("-")
    rest = words[1:] if named else words
    if not any(word in ("-h", "--help") for word in rest):  # before torch is imported, which takes seconds
        if not named:
            allowed = "the folder of a finished run, then options"
            raise ArgumentError("fedstill attack", " ".join(words), allowed)
        _check(Path(words[0]))

    from fedstill.attacks.config import LeakageConfig
    from fedstill.cli.options import override

    config = override(LeakageConfig(), rest, USAGE, ABOUT)
    folder = Path(words[0])

    from rich.console import Console

    from fedstill.attacks.leakage import attack
    from fedstill.report import write_report

    found = attack(folder, config, command=command, progress=not quiet and sys.stderr.isatty())
    report = write_report(folder)
    print_leakage(found, Console())
    print(f"Report: {report}")


def _check(folder: Path) -> None:
    """Refuse what is no folder of a finished run."""
    if not folder.is_dir():
        raise RunFolderError(f"there is no folder {folder}: allowed is the folder of a finished run")
    if (folder / "compare.toml").exists():
        raise RunFolderError(
            f"{folder} holds a comparison: name one of its runs, or repeat its command with --leakage"
        )
    if not (folder / "config.toml").exists():
        raise RunFolderError(f"{folder} holds no run: there is no config.toml in it")
    if not (folder / "result.json").exists():
        again = shlex.join(["fedstill", "run", "--resume", str(folder)])
        raise RunFolderError(f"the run in {folder} is not finished: there is no result.json; {again}")


class Line(NamedTuple):
    """What one attack got: its name, of what, its figures, and what one has without attacking."""

    attack: str
    of: str
    got: str
    without: str


def print_leakage(found: Mapping[str, Any], console: Console) -> None:
    """Print what ``leakage.json`` holds: the sentence, a line an attack, and what was not tried."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from fedstill.core.words import words
    from fedstill.report.compare_leakage import skipped

    told = words(found, "sentence")
    if told is not None:
        console.print(Text(told))
        console.print()
    rows = list(lines(found))
    if rows:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for head in ("attack", "of", "got", "without it"):
            table.add_column(head)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    if (wrong := words(found, "ledger")) is not None:
        console.print(Text(f"The repetition is not the run of this folder: {wrong}"))
    for reason in skipped(found):
        console.print(Text(f"Not tried: {reason}"))


def lines(found: Mapping[str, Any]) -> Iterator[Line]:
    """The lines of the table, in the order of the report."""
    from fedstill.core.words import pick

    yield from _inversion(pick(found, "inversion") or {})
    for part in pick(found, "membership") or ():
        yield from _membership(part)
    yield from _copying(pick(found, "copying") or {})
    yield from _distances(pick(found, "distances") or {})
    yield from _scores(pick(found, "scores") or {})
    yield from _counts(pick(found, "counts") or [])


def _inversion(part: Mapping[str, Any]) -> Iterator[Line]:
    from fedstill.core.words import number, whole, words

    guess = number(part, "guess")
    for attack in part.get("attacks") or ():
        got = [_with(number(attack, "psnr", "mean"), number(attack, "psnr", "std"), " dB")]
        right, of = whole(attack, "labels", "right"), whole(attack, "labels", "of")
        if right is not None and of is not None:
            got.append(f"labels {right} of {of}")
        without = "" if guess is None else f"{guess:.1f} dB, guessed"
        yield Line(
            f"inversion, {words(attack, 'title')}", words(part, "shared") or "", ", ".join(got), without
        )


def _membership(part: Mapping[str, Any]) -> Iterator[Line]:
    from fedstill.core.words import number, whole, words

    for attack in part.get("attacks") or ():
        auc = [number(attack, "auc", key) for key in ("value", "low", "high")]
        got = [f"AUC {_share(auc[0])}"]
        if auc[1] is not None and auc[2] is not None:
            got[0] += f" ({_share(auc[1])} to {_share(auc[2])})"
        rates = []
        for at in attack.get("at") or ():
            rate, found = number(at, "rate"), number(at, "true_positives", "value")
            if rate is not None and whole(at, "allowed"):  # of few others no low rate can be told
                got.append(f"TPR {_share(found)} at {100 * rate:g}%")
                rates.append(f"{100 * rate:g}%")
        of = words(part, "of") or ""
        yield Line(f"membership, {words(attack, 'title')}", of, ", ".join(got), ", ".join(["50%", *rates]))


def _copying(part: Mapping[str, Any]) -> Iterator[Line]:
    from fedstill.core.words import number, whole, words

    for space in part.get("spaces") or ():
        p, share = number(space, "p_value"), number(space, "share")
        got = [f"p {_small(p)}"]
        if share is not None:
            got.append(f"{_share(share)} closer to private images")
        count = whole(part, "images")
        of = "" if count is None else f"{count:,} images"
        yield Line(f"copying, {words(space, 'extractor')}", of, ", ".join(got), "any p alike")


def _distances(part: Mapping[str, Any]) -> Iterator[Line]:
    from fedstill.core.words import number, whole, words

    for space in part.get("spaces") or ():
        average, held = number(space, "average"), number(space, "average_held_out")
        count = whole(space, "generated")
        of = "" if count is None else f"{count:,} images"
        without = "" if held is None else f"{held:.1f} to held-out images"
        yield Line(f"FID, {words(space, 'extractor')}", of, _with(average, None, " mean of nodes"), without)


def _scores(part: Mapping[str, Any]) -> Iterator[Line]:
    from fedstill.core.words import number, whole

    if not part:
        return
    count, student = whole(part, "images"), number(part, "student")
    got = [f"{_with(number(part, 'adapted'), None, '')} by the nodes' models"]
    got += [] if student is None else [f"{student:.2f} by the student"]
    yield Line("inception score", "" if count is None else f"{count:,} images", ", ".join(got), "1 at least")


def _counts(nodes: list[Mapping[str, Any]]) -> Iterator[Line]:
    from fedstill.core.words import number

    if not nodes:
        return
    exact = sum(bool(node.get("exact")) for node in nodes)
    off = [value for node in nodes if (value := number(node, "total_variation")) is not None]
    got = f"exact of {exact} of {len(nodes)}"
    if off and max(off) > 0:
        got += f", off by {_share(min(off))} to {_share(max(off))}"
    yield Line("label counts", f"{len(nodes)} nodes", got, "")


def _with(value: float | None, spread: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" + ("" if spread is None else f" \u00b1 {spread:.1f}") + unit


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value >= 0.001 else "below 0.001"
