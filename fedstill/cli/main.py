"""The command ``fedstill``.

Whatever a user gets wrong becomes one line on stderr and exit code 2. torch takes seconds to
import, so it is imported by the commands that need it, not by this module: help is quick.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from fedstill.cli.arguments import dispatch, imported, leave
from fedstill.core.console import safe_output
from fedstill.core.errors import ArgumentError, FedstillError
from fedstill.core.version import __version__

CLOSED = 128 + signal.SIGPIPE  # as a shell says it of a command that wrote into a closed pipe

FIRST = """\
fedstill trains one central model from private data that stays in many places.

  fedstill run demo                 a federation on this machine, about a minute, and its report
  fedstill list                     methods, tasks, data, models and presets
  fedstill compare fedavg fediod    methods side by side, on equal terms; --seeds N
  fedstill attack RUN               what an adversary gets from what left the nodes in a run
  fedstill predict RUN DATA         what a run's student answers about new data
  fedstill node init DIR            a node of a real federation, for its data's owner
  fedstill doctor                   what is installed here, and what is missing for what

All commands: fedstill --help; one command: fedstill COMMAND --help; all options: fedstill run demo --help
"""

HELP = """\
fedstill trains one central model from private data that stays in many places.

usage:
  fedstill run PRESET|FILE.toml [--OPTION VALUE ...] [--out DIR] [--quiet] [--json]
                                            one run, from data to report
  fedstill run --resume DIR [--startup-kit DIR] [--quiet] [--json]
                                            go on with a run that was stopped
  fedstill compare METHOD|PRESET|FILE.toml ... [--seeds N] [--base PRESET|FILE.toml] [--OPTION VALUE ...]
                            [--only NAME ...] [--data NAME] [--leakage] [--out DIR] [--quiet] [--json]
                                            several methods side by side, on equal terms
  fedstill compare FILE.toml                the comparison that a file describes
  fedstill compare --resume DIR [--only NAME ...] [--quiet] [--json]
                                            go on with a comparison that was stopped
  fedstill reproduce [NAME|FILE.toml] [--scale small|paper] [--seeds N] [--OPTION VALUE ...] [--out DIR]
                            [--only NAME ...] [--plan] [--record] [--recorded] [--quiet] [--json]
                                            list the papers' tables and figures, or run one of them
  fedstill attack RUN [--quick] [--quiet] [--json] [--OPTION VALUE ...]
                                            what an adversary gets from what left the nodes in a finished run
  fedstill predict RUN DATA [--out FILE] [--fit] [--label COLUMN] [--image COLUMN] [--channels N ...]
                            [--model NAME] [--json]
                                            what the student answers about new data, as a csv
  fedstill evaluate RUN --data DATA [--sites NAME ...] [--fit] [--label COLUMN] [--image COLUMN]
                            [--channels N ...] [--slices N] [--root DIR] [--model NAME] [--json]
                                            what the student reaches on other data, site by site
  fedstill export RUN --format onnx|torchscript|huggingface [--out FILE] [--model NAME]
                            [--json]        the student for other tools, preprocessing inside, and its card
  fedstill list [METHOD|KIND] [--json]      what can be named; more of a method, or of presets, models, tasks,
                                            or another kind that it lists
  fedstill schema FILE ... --target COLUMN [--event COLUMN] [--out FILE]
                                            a first schema of a csv or Parquet table, for you to correct
  fedstill doctor [--json]                  what is installed and computes here, and what is missing for what
  fedstill completion bash|zsh|fish         what makes a shell complete commands, presets and methods
  fedstill show PRESET|FILE.toml [--OPTION VALUE ...]   all settings of a run, as TOML
  fedstill report DIR                       write the report of a run or a comparison again
  fedstill figures DIR [--format pdf|svg|png] [--out DIR]   its figures as files, for a paper
  fedstill page DIR [--port N]              a page of what goes on, for a browser of this machine: in the
                                            folder of a node, of a server, of a run or of several
  fedstill run PRESET --help                every option, with its meaning and default
  fedstill node init|check|start|answer|approve|log DIR     a node of a real federation, for its data's owner
  fedstill server init|start|status|stop DIR    the server that they join
  fedstill privacy plan|price|audit ...         what a run will cost a node, before anything is trained
  fedstill audit show|verify|export|settle DIR  what has left a node, when, to which run, at which price
  fedstill queries make ...                   queries in a file, for nodes without a live link
  fedstill distil ANSWERS ...                   a student from the files of answers that came back
  fedstill --version

options of `run` beside those of the preset:
  --out DIR       the run's folder (default: runs/NAME-seedSEED; where one is done there already, -2, -3, ...)
  --resume DIR    go on with the run in this folder, to the figures that it would have reached
  --quiet         no progress: bars on a terminal, else lines, on standard error
  --json          the result as JSON in place of the table; so have list, compare, reproduce,
                  attack, predict, evaluate, export, doctor, audit show and verify, node check, status,
                  requests and log, server status, and privacy plan, price and audit
  --nodes N, --data NAME    short for --split.nodes, --data.name
  --engine flare-poc        nodes as processes of their own, deployed on this machine with NVIDIA FLARE
  --engine flare --startup-kit DIR    nodes of a deployed federation, with their own data and models;
                            beside --resume, where the kit is another by now

options of `compare`; all others are run options, and hold for every method:
  --seeds N       each method runs with seeds 0 to N-1 (default: 1)
  --base PRESET   data, split, models and local training, from a preset or a run's file (default: data digits)
  --data NAME, --nodes N    short for --data.name, --split.nodes
  --METHOD.NAME VALUE       an option of one method alone, as --fediod.steps 200
  --only NAME     run these methods, or these settings of a file, alone; the others stay to be run
  --leakage       attack each run, as `fedstill attack` does; also of a comparison that has run without
  --out DIR       its folder (default: runs/compare, or runs/NAME for NAME.toml); --quiet, --resume as above

options of `reproduce`; all others are run options, as --data.root:
  --scale SCALE   small (default): what two cores carry, its reduction is said beside the table; paper: the
                  published setting, for a GPU
  --seeds N       as above; a folder with fewer goes on with more
  --out DIR       the folder of all tables' folders (default: runs/reproduce)
  --only NAME     run these methods, or these settings, of a comparison alone
  --record        keep the figures beside the file; with --only, in place of those methods' and settings' own
  --plan          run nothing: print the runs' whole base, and each method's options, as TOML
  --recorded      run nothing: print what was recorded, the paper's figures beside it

options of `predict`, `evaluate` and `export`, as far as their lines above have them:
  --out FILE      its answers (default: DATA-answers.csv here), or the export (default: in the run's folder)
  --fit           bring images of another size or number of channels into the student's form
  --label, --image COLUMN   of a csv: its labels (default: label), its image files (else: pixels)
  --sites NAME    measure on these sites alone; --channels N of images, --slices N of each NIfTI volume
  --model NAME    the student's network, package.module:factory, where its file may not import it

try:
  fedstill run demo
  fedstill compare standalone fedavg fediod --seeds 3
"""

# Each in a file of its own, imported when it is called.
COMMANDS = {
    "run": "fedstill.cli.run:run",
    "compare": "fedstill.cli.compare:compare",
    "reproduce": "fedstill.cli.reproduce:reproduce",
    "predict": "fedstill.cli.student:predict",
    "evaluate": "fedstill.cli.student:evaluate",
    "export": "fedstill.cli.student:export",
    "list": "fedstill.cli.list_command:names",
    "schema": "fedstill.cli.schema:schema",
    "doctor": "fedstill.cli.doctor:doctor",
    "completion": "fedstill.cli.completion:completion",
    "show": "fedstill.cli.run:show",
    "report": "fedstill.cli.run:report",
    "figures": "fedstill.cli.run:figures",
    "page": "fedstill.cli.page:page",
}
ROOMS = {  # commands that have commands, or a help of their own
    "node": "fedstill.cli.node:main",
    "audit": "fedstill.cli.audit_log:main",
    "privacy": "fedstill.cli.privacy:main",
    "attack": "fedstill.cli.attack:main",
    "server": "fedstill.cli.server:main",
    "queries": "fedstill.cli.offline:main",
    "distil": "fedstill.cli.offline:distil",
    "distill": "fedstill.cli.offline:distil",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with 0, 1 (done, but not all of it), 2 (bad input, one line on stderr),
    130 (Ctrl-C) or 141 (whoever read what is printed has closed the pipe, as `head` does)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with safe_output():
        _main(words)


def _main(words: list[str]) -> NoReturn:
    try:
        try:
            _do(words)
            sys.stdout.flush()  # here, and not when the interpreter ends and nobody answers for it
        except FedstillError as error:
            leave(str(error), 2)
        except OSError as error:  # a folder that cannot be written, a full disk
            if _unread(error):
                raise
            leave(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 2)
        except KeyboardInterrupt:
            leave("stopped", 130)
    except (BrokenPipeError, SystemExit) as end:
        # So rich leaves where its pipe is closed, and by then it has put another file in its place.
        rich = end.args == (1,) and isinstance(end.__context__, BrokenPipeError)
        if not rich and not _unread(end) and not _unread(end.__context__):
            raise
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED)
    sys.exit(0)


def _unread(error: BaseException | None) -> bool:
    """Whether whoever read our output has gone; a broken connection raises the same error."""
    if not isinstance(error, BrokenPipeError):
        return False
    gone = select.poll()
    for number in (1, 2):
        gone.register(number, 0)
    return any(told & (select.POLLERR | select.POLLHUP) for _, told in gone.poll(0))


def _do(words: list[str]) -> None:
    for word in words:
        if any("\ud800" <= sign <= "\udfff" for sign in word):  # bytes that the locale's encoding lacks
            encoding = sys.getfilesystemencoding()
            raise ArgumentError("argument", ascii(word), f"text in the encoding of the locale ({encoding})")
    if words and words[0] in ROOMS:
        imported(ROOMS[words[0]])(words[1:])
    elif not words:
        print(FIRST, end="")
    elif words[:1] in (["--version"], ["-V"]):
        print(f"fedstill {__version__}")
    elif words == ["help"]:
        print(HELP, end="")
    else:
        dispatch("", words, HELP, COMMANDS, beside=ROOMS)
