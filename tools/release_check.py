"""Whether a release can be installed: wheel and sdist, in empty environments, by Python, versions and extra.

    python tools/release_check.py                            the whole matrix, as far as Pythons are found
    python tools/release_check.py --pythons python3.12 --versions lowest newest --extras none
    make release-check                                       the first of these

Wheel and sdist are built once, the wheel from the sdist, so that both are known to be whole. Each case is a
new virtual environment with the wheel and one extra in it, and nothing else; there the command lists methods,
a small federation runs, and ``fedstill doctor`` misses nothing of the extra. A table of all cases is printed.
Python 3.11 or newer runs this.

Versions: ``pinned`` are those of constraints.txt, ``newest`` whatever pip finds, ``lowest`` those that
pyproject.toml names as least.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name not in ("dev", "docs")]
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")
LEAST = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)>=(?P<version>[0-9.]+)")
FEW = ["--method.steps", "3", "--nodes.local.epochs", "1", "--evaluation.centralized", "false"]
Case = tuple[str, str, str]  # Python, versions, extra or "none"


def main() -> int:
    """Run the cases that were asked for; 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pythons", nargs="+", default=list(PYTHONS))
    parser.add_argument("--versions", nargs="+", choices=["pinned", "lowest", "newest"], default=[])
    parser.add_argument("--extras", nargs="+", choices=["none", *EXTRAS], default=[])
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        wheel = built(home)
        for case in cases(given.pythons, given.versions, given.extras):
            start, why = time.monotonic(), tried(case, wheel, home)
            rows.append((*case, why or "works", f"{time.monotonic() - start:.0f}"))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print("| Python | versions | extra | | seconds |\n|---|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return int(any(row[3] != "works" for row in rows))


def cases(pythons: Sequence[str], versions: Sequence[str], extras: Sequence[str]) -> Iterator[Case]:
    """As asked; else each Python with pinned versions, and one with the lowest, the newest, each extra."""
    working = [name for name in pythons if works(name)]
    if versions or extras:
        yield from ((p, v, e) for p in working for v in versions or ["pinned"] for e in extras or ["none"])
        return
    yield from ((python, "pinned", "none") for python in working)
    one = "python3.11" if "python3.11" in working else working[0]
    yield from ((one, which, "none") for which in ("lowest", "newest"))
    yield from ((one, "pinned", extra) for extra in EXTRAS)


def works(python: str) -> bool:
    """Whether there is such a Python; it is said where there is none."""
    executable = (
        shutil.which(python) and not subprocess.run([python, "-c", ""], capture_output=True).returncode
    )
    if not executable:
        print(f"{python}: not found, left out", file=sys.stderr)
    return bool(executable)


def built(home: Path) -> Path:
    """The wheel, made of the sdist, made of this folder."""
    tool = home / "build"
    stdout_of([sys.executable, "-m", "venv", str(tool)])
    python = str(tool / "bin" / "python")
    stdout_of([python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), "hatchling"])
    stdout_of([python, "-m", "hatchling", "build", "-t", "sdist", "-d", str(home / "dist")], cwd=ROOT)
    [sdist] = (home / "dist").glob("*.tar.gz")
    shutil.unpack_archive(sdist, home / "unpacked", filter="data")
    [source] = (home / "unpacked").iterdir()
    stdout_of([python, "-m", "hatchling", "build", "-t", "wheel", "-d", str(home / "dist")], cwd=source)
    [wheel] = (home / "dist").glob("*.whl")
    return wheel


def tried(case: Case, wheel: Path, home: Path) -> str:
    """Why a case does not work; empty where it does."""
    python, versions, extra = case
    folder = home / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command, pip = (
        str(folder / "env" / "bin" / "fedstill"),
        [str(folder / "env" / "bin" / "python"), "-m", "pip"],
    )
    wanted = f"{wheel}[{extra}]" if extra != "none" else str(wheel)
    try:
        stdout_of([python, "-m", "venv", str(folder / "env")])
        stdout_of([*pip, "install", "-q", *bound(versions, extra, folder), wanted])
        stdout_of([*pip, "check"])
        if stdout_of([command, "--version"]) != f"fedstill {wheel.name.split('-')[1]}\n":
            return "another version"
        if "fediod" not in stdout_of([command, "list"], cwd=folder) + stdout_of(
            [command, "reproduce"], cwd=folder
        ):
            return "no methods"
        missing = json.loads(stdout_of([command, "doctor", "--json"], cwd=folder))["missing"]
        if extra in missing:
            return f"doctor misses {', '.join(missing[extra])}"
        reached = json.loads(
            stdout_of([command, "run", "demo", *FEW, "--quiet", "--json", "--out", "run"], cwd=folder)
        )["accuracy"]
        return "" if 0 <= reached <= 100 else f"accuracy {reached}"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip() and "WARNING" not in line]
        return f"{Path(error.cmd[0]).name} {error.cmd[1]}: {' '.join(lines[-3:])}".replace("|", "/")[:300]


def bound(versions: str, extra: str, folder: Path) -> list[str]:
    """What pip must hold to."""
    if versions == "newest":
        return []
    if versions == "pinned":
        return ["-c", str(ROOT / "constraints.txt")]
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, ())]
    least = [match for line in lines if (match := LEAST.match(line))]
    text = "".join(f"{match['name']}=={match['version']}\n" for match in least)
    (folder / "lowest.txt").write_text(text, encoding="utf-8")
    return ["-c", str(folder / "lowest.txt")]


def stdout_of(words: Sequence[str], cwd: Path | None = None) -> str:
    """What a command prints; CalledProcessError where it fails."""
    ours = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(words, cwd=cwd, env=clean, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
