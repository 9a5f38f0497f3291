"""Measure what a reader opens to follow a task through the package.

Usage:
    ``python tools/reading.py``             print the table; exit 1 if a task is above its limit
    ``python tools/reading.py --check``     also run each task that has a command, and exit 1 if code ran in a
                                            file that ``tools/reading.toml`` does not list
    ``python tools/reading.py --files TASK``  print the files of one task with their lines, in reading order

``tools/reading.toml`` has the files of each task: ``read`` are opened as a whole and counted. Those of
``by_name`` also run, but a reader knows from the name at the call what they do.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fedstill"

# Runs in a process of its own: notes which files of the package run code inside of one function.
RECORDER = """
import importlib, json, os, sys, threading
package, entry, calls, out, *command = sys.argv[1:]
module, _, path = entry.partition(":")
owner = importlib.import_module(module)
*parents, name = path.split(".")
for parent in parents:
    owner = getattr(owner, parent)
original, files, number = getattr(owner, name), set(), 0
recording = False

def note(frame, event, argument):
    if recording and event == "call":
        files.add(frame.f_code.co_filename)

def recorded(*given, **options):
    global recording, number
    number += 1
    recording = number == int(calls)
    try:
        return original(*given, **options)
    finally:
        recording = False

setattr(owner, name, recorded)
threading.setprofile(note)
sys.setprofile(note)
sys.argv = ["fedstill", *command]
from fedstill.cli.main import main
try:
    main()
except SystemExit as end:
    if end.code:
        raise
finally:
    sys.setprofile(None)
inside = sorted(os.path.relpath(file, package) for file in files if file.startswith(package + os.sep))
with open(out, "w") as file:
    json.dump(inside, file)
"""


def line_count(name: str) -> int:
    """Return the number of lines of a file of the package."""
    return len((PACKAGE / name).read_text(encoding="utf-8").splitlines())


def files_that_run(task: dict[str, Any]) -> list[str]:
    """Run a task's command and return the files that run code within its entry function."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "files.json"
        command = [part.format(folder=folder) for part in task["command"]]
        arguments = [str(PACKAGE), task["entry"], str(task.get("call", 1)), str(out), *command]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            [sys.executable, "-c", RECORDER, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if not out.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        found: list[str] = json.loads(out.read_text())
    return found


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Yield the syntax tree of each file of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def import_share() -> float:
    """Return the share of the package's lines that are imports, in percent."""
    imports = lines = 0
    for path, tree in trees():
        lines += len(path.read_text(encoding="utf-8").splitlines())
        imports += sum(
            node.end_lineno - node.lineno + 1
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom) and node.end_lineno is not None
        )
    return 100 * imports / lines


def lambdas_in_declarations() -> int:
    """Return the number of lambdas inside of calls of ``Query`` and ``QueryDetails``."""
    found: set[tuple[Path, int, int]] = set()
    for path, tree in trees():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Query", "QueryDetails"):
                lambdas = (node for node in ast.walk(call) if isinstance(node, ast.Lambda))
                found |= {(path, node.lineno, node.col_offset) for node in lambdas}
    return len(found)


def most_ancestors() -> int:
    """Return the largest number of ancestors of a method's class, without ``object``."""
    sys.path.insert(0, str(ROOT))
    from fedstill.protocol.method import METHODS

    return max(len(METHODS[name].__mro__) - 2 for name in METHODS)


def measures() -> list[tuple[str, str, bool]]:
    """Return title, value and verdict of each measure that has no list of files."""
    lengths = [line_count(str(path.relative_to(PACKAGE))) for path, _ in trees()]
    ancestors, lambdas, share = most_ancestors(), lambdas_in_declarations(), import_share()
    guide = len((ROOT / "docs/custom-method.md").read_text(encoding="utf-8").splitlines())
    return [
        ("lines of docs/custom-method.md (at most 250)", str(guide), guide <= 250),
        ("ancestors of a method's class (at most 3)", str(ancestors), ancestors <= 3),
        ("lambdas in declarations of queries (0)", str(lambdas), lambdas == 0),
        ("share of lines that are imports, %", f"{share:.1f}", True),
        ("files of the package", str(len(lengths)), True),
        ("median lines of a file", f"{statistics.median(lengths):.0f}", True),
        ("lines of the package", str(sum(lengths)), True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="run the tasks and compare with the lists")
    parser.add_argument("--files", metavar="TASK", help="print the files of one task")
    chosen = parser.parse_args()
    tasks: dict[str, dict[str, Any]] = tomllib.loads(
        (ROOT / "tools/reading.toml").read_text(encoding="utf-8")
    )
    if chosen.files is not None:
        if chosen.files not in tasks:
            parser.error(f"invalid TASK = {chosen.files} (expected one of {', '.join(tasks)})")
        for name in tasks[chosen.files]["read"]:
            print(f"{line_count(name):5d}  fedstill/{name}")
        return 0
    sound = True
    for key, task in tasks.items():
        read: list[str] = task["read"]
        lines = sum(map(line_count, read))
        within = lines <= task["lines"] and len(read) <= task["files"]
        sound &= within
        limits = f"limit {task['lines']} in {task['files']}, goal {task['goal'][0]} in {task['goal'][1]}"
        fault = "" if within else "  ABOVE THE LIMIT"
        print(f"{task['title']}: {lines} lines in {len(read)} files ({limits}){fault}")
        if chosen.check and "command" in task:
            known = {*read, *task.get("by_name", ())}
            for name in (name for name in files_that_run(task) if name not in known):
                sound = False
                print(f"  tools/reading.toml: [{key}] runs fedstill/{name}, which it does not list")
    for title, value, good in measures():
        sound &= good
        print(f"{title}: {value}{'' if good else '  ABOVE THE LIMIT'}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
