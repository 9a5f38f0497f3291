"""Text of other parties is printed without control characters; colors and bars of fedstill remain."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedstill.cli import main as cli
from fedstill.core.errors import FedstillError
from fedstill.core.safe_console import SafeConsole
from fedstill.core.safe_output import printable, safe_output

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1A let out\r\u202e"


def test_command_output_and_errors_have_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def do(words: list[str]) -> None:
        print(f"first{EVIL}\n\tsecond")
        raise FedstillError(f"a file of {EVIL}")

    monkeypatch.setattr(cli, "_run", do)
    with pytest.raises(SystemExit):
        cli.main(["run"])
    out, err = capsys.readouterr()
    assert out == "first ]0;owned  [2J 1A let out  \n\tsecond\n"
    assert err.startswith("fedstill: a file of  ]0;owned  [2J 1A let out")
    assert printable(err) == err


def test_rich_keeps_only_its_own_colors(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("head")
    table.add_row(EVIL)
    with safe_output():
        console = SafeConsole(force_terminal=True, color_system="standard")
        console.print(Text(f"red{EVIL}", style="red"), table)
        console.print(f"plain{EVIL}", markup=False)
    output = capsys.readouterr().out
    assert "\x1b[31mred" in output
    assert "\x1b]" not in output
    assert "\x1b[2J" not in output
    for sign in "\x07\x9b\r\u202e":
        assert sign not in output


def test_plain_rich_console_does_not_filter() -> None:
    """``SafeConsole`` exists because of this."""
    console = Console(file=io.StringIO())
    console.print(Text(EVIL))
    assert isinstance(console.file, io.StringIO)
    assert "\x1b]0;" in console.file.getvalue()


def test_streams_are_restored() -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError), safe_output():
        sys.stdout.write(str(1 // (1 - sys.stdout.write("\x1b"))))
    assert (sys.stdout, sys.stderr) == before
    with safe_output():
        assert sys.stdout.isatty() == before[0].isatty()
