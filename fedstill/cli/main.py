"""Entry point of the command ``fedstill``.

A user's mistake is one line on standard error and exit code 2. Importing torch takes seconds, so only the
commands that need it import it, and help is printed at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from fedstill.cli.arguments import HELP_FLAGS, dispatch, leave
from fedstill.cli.commands import COMMANDS, overview
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.safe_output import safe_output
from fedstill.core.version import __version__

CLOSED_PIPE = 128 + signal.SIGPIPE  # exit code of a shell for a command that wrote into a closed pipe


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and exit.

    Exit codes: 0; 1 (done in part); 2 (invalid input, one line on standard error); 130 (Ctrl+C); 141 (the
    reader of the output closed the pipe, as ``head`` does).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with safe_output():
        _main(words)


def _main(words: list[str]) -> NoReturn:
    try:
        try:
            _run(words)
            sys.stdout.flush()  # here, where errors are handled, and not at the end of the interpreter
        except FedstillError as error:
            leave(str(error), 2)
        except OSError as error:  # a folder that cannot be written, a full disk
            if _is_closed_output(error):
                raise
            leave(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 2)
        except KeyboardInterrupt:
            leave("stopped", 130)
    except (BrokenPipeError, SystemExit) as end:
        # rich exits with 1 where its pipe is closed, after it has replaced standard output.
        from_rich = end.args == (1,) and isinstance(end.__context__, BrokenPipeError)
        if not from_rich and not _is_closed_output(end) and not _is_closed_output(end.__context__):
            raise
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED_PIPE)
    sys.exit(0)


def _is_closed_output(error: BaseException | None) -> bool:
    """Return whether the reader of our output has gone; a broken connection raises the same error."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _run(words: list[str]) -> None:
    for word in words:
        if any("\ud800" <= sign <= "\udfff" for sign in word):  # bytes that the locale's encoding lacks
            encoding = sys.getfilesystemencoding()
            raise ArgumentError("argument", ascii(word), f"text in the encoding of the locale ({encoding})")
    if not words or words[0] in (*HELP_FLAGS, "help"):
        print(overview(), end="")
    elif words[:1] in (["--version"], ["-V"]):
        print(f"fedstill {__version__}")
    else:
        dispatch(words, COMMANDS)
