"""Mutation testing: measure the share of small planted faults that the tests catch.

    python -m pip install cosmic-ray pytest-cov
    python -m pytest -n 2 --cov=fedstill --cov-context=test --cov-report= --junitxml=times.xml fedstill tests
    python benchmarks/planted_faults.py --times times.xml --out faults.jsonl

cosmic-ray makes the faults, such as another comparison, a number off by one, an added ``not``, or a removed
loop or decorator. For each package, ``--each`` faults are sampled with ``--seed``. The position is sampled
before the variant, so that positions with many variants do not count more. Type annotations are left alone,
as nothing reads them at run time.

For each fault, the tests that cover its line run, fastest first, until one fails or ``--seconds`` of tests
have run. For lines that run at import, the tests of all declarations run first. A fault that makes the tests
hang or crash counts as caught. All work is done in a copy of the tree. Results in ``--out`` are kept, and
their faults are not planted again. Tests of real processes have no coverage, so a fault that only these would
catch counts as missed: the printed share is a lower bound.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.plugins
import coverage
import pytest

PACKAGES = ("methods", "node", "privacy", "federation", "tasks")
COPIED = (
    "fedstill",
    "tests",
    "examples",
    "experiments",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "README.md",
    "Makefile",
)
STARTUP_SECONDS = 20.0  # of pytest and the package
TIMEOUT_FACTOR = 4  # relative to the duration without a fault; tests that take longer count as hung
DECLARATIONS = "tests/test_options.py"  # tests of the declarations of all files
POLL_SECONDS = 0.05
OUTPUT = "pytest-output.txt"
PRELOADED = (
    "torch",
    "numpy",
    "scipy.stats",
    "sklearn.metrics",
    "torchmetrics",
    "dp_accounting",
    "hypothesis",
)


def annotation_spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the first and last (line, column) of each type annotation in a file."""
    annotations: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
            annotations.append(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns:
            annotations.append(node.returns)
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in annotations]


def import_lines(source: str) -> set[int]:
    """Return the lines outside the bodies of functions, which run once, at the first import."""
    lines = set(range(1, source.count("\n") + 2))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            lines -= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return lines


def possible_faults(path: Path) -> Iterator[tuple[tuple[int, int], str, int]]:
    """Yield the possible faults of a file: position, operator, and index among the operator's faults."""
    spans = annotation_spans(path.read_text())
    tree = cosmic_ray.ast.get_ast_from_path(path)
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        positions = (
            spot for node in cosmic_ray.ast.ast_nodes(tree) for spot in operator.mutation_positions(node)
        )
        for occurrence, (start, _) in enumerate(positions):
            if not any(first <= start < last for first, last in spans):
                yield start, name, occurrence


def sampled_faults(tree: Path, packages: list[str], each: int, seed: int) -> list[dict[str, Any]]:
    """Return the faults to plant, ``each`` in each package."""
    faults = []
    for package in packages:
        rng = random.Random(f"{seed} {package}")
        sites: dict[tuple[str, int, int], list[tuple[str, int]]] = defaultdict(list)
        for path in sorted((tree / "fedstill" / package).rglob("*.py")):
            for (line, column), name, occurrence in possible_faults(path):
                sites[str(path.relative_to(tree)), line, column].append((name, occurrence))
        for file, line, column in rng.sample(sorted(sites), min(each, len(sites))):
            name, occurrence = rng.choice(sites[file, line, column])
            faults.append(
                {"package": package, "file": file, "line": line, "operator": name, "occurrence": occurrence}
            )
    return faults


def read_durations(times: Path) -> dict[str, float]:
    """Return the seconds of each test that passes without a fault, by id (``tests/test_a.py::test_b[1]``)."""
    seconds = {}
    for case in ET.parse(times).iter("testcase"):
        *parts, last = str(case.get("classname")).split(".")
        if not any(case.iter("failure")) and not any(case.iter("error")):
            seconds["/".join([*parts, last]) + f".py::{case.get('name')}"] = float(case.get("time") or 0)
    return seconds


class CoveringTests:
    """Tests that cover each line, from coverage data with a context for each test."""

    def __init__(self, data: Path, tree: Path, seconds: dict[str, float], limit: float) -> None:
        self._data = coverage.CoverageData(str(data))
        self._data.read()
        self._tree, self.seconds, self._limit = tree, seconds, limit
        self._files = {file.rpartition("/fedstill/")[2]: file for file in self._data.measured_files()}

    def tests(self, file: str, line: int) -> list[str]:
        """Return the ids of the tests that cover a line, fastest first, within the limit of time.

        Lines that run at import are covered by all tests of the file.
        """
        measured = self._files.get(file.removeprefix("fedstill/"))
        if measured is None:
            return []
        by_line = self._data.contexts_by_lineno(measured)
        names = {name.partition("|")[0] for name in by_line.get(line, ())} - {""}
        chosen: list[str] = []
        if not names or line in import_lines((self._tree / file).read_text()):
            names = {name.partition("|")[0] for line_names in by_line.values() for name in line_names} - {""}
            chosen = [test for test in self.seconds if test.startswith(DECLARATIONS)]
        total = 0.0
        for test in sorted(names & self.seconds.keys() - set(chosen), key=self.seconds.__getitem__):
            total += self.seconds[test]
            if chosen and total > self._limit:
                break
            chosen.append(test)
        return chosen[:400]


def run_tests(copy: Path, tests: list[str], limit: float) -> int | None:
    """Return pytest's exit code, from a fork of this process with its loaded modules; None if it hangs."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(copy / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os._exit(pytest.main(["-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]))
    for _ in range(int(limit / POLL_SECONDS)):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def plant(copy: Path, fault: dict[str, Any], tests: list[str], limit: float) -> str:
    """Plant a fault, run the tests and return the result: found, missed, hung or untested."""
    if not tests:
        return "untested"
    path = copy / fault["file"]
    before = path.read_text()
    operator = cosmic_ray.plugins.get_operator(fault["operator"])()
    after = cosmic_ray.mutating.mutate_code(before, operator, fault["occurrence"])
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    fault["change"] = next(
        ([old.strip(), new.strip()] for old, new in lines if old != new), ["", "line removed"]
    )
    path.write_text(after)
    try:
        code = run_tests(copy, tests, limit)
    finally:
        path.write_text(before)
    if code is None:
        return "hung"
    if code < 0:  # it crashed, for example without memory
        return "found"
    if code not in (0, 1, 2, 4):  # 2 and 4: the package cannot be imported
        raise RuntimeError(f"pytest exits with {code} at {fault}; its output is in {copy / OUTPUT}")
    return "missed" if code == 0 else "found"


def main() -> None:
    """Plant faults and print the share that is caught, by package."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--tree", type=Path, default=Path())
    parser.add_argument("--coverage", type=Path, default=Path(".coverage"))
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    parser.add_argument("--each", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="of tests for each fault")
    parser.add_argument("--part", default="1/1", help="2/3: the second of three processes")
    options = parser.parse_args()
    tree = options.tree.resolve()
    covering = CoveringTests(options.coverage, tree, read_durations(options.times), options.seconds)
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {(fault["file"], fault["operator"], fault["occurrence"]) for fault in done}
    part, parts = map(int, options.part.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        sys.dont_write_bytecode = True
        for name in PRELOADED:
            importlib.import_module(name)
        for name in COPIED:
            if (tree / name).is_dir():
                shutil.copytree(tree / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (tree / name).exists():
                shutil.copy(tree / name, copy / name)
        for fault in sampled_faults(tree, options.packages, options.each, options.seed)[part - 1 :: parts]:
            if (fault["file"], fault["operator"], fault["occurrence"]) in known:
                continue
            tests = covering.tests(fault["file"], fault["line"])
            begin = time.perf_counter()
            usual = sum(covering.seconds[test] for test in tests)
            fault["result"] = plant(copy, fault, tests, TIMEOUT_FACTOR * usual + STARTUP_SECONDS)
            fault |= {"tests": len(tests), "seconds": round(time.perf_counter() - begin, 1)}
            done.append(fault)
            with options.out.open("a") as file:
                file.write(json.dumps(fault) + "\n")
    for package in options.packages:
        counts = Counter(fault["result"] for fault in done if fault["package"] == package)
        print(package, dict(counts), f"{(counts['found'] + counts['hung']) / counts.total():.1%}")
    caught = sum(fault["result"] in ("found", "hung") for fault in done)
    print(f"{caught} of {len(done)}: {caught / len(done):.1%}")


if __name__ == "__main__":
    main()
