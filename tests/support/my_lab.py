"""A lab's own package, installed outside of the repository and used from the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from sklearn.datasets import load_digits

from tests.support.processes import Command

ROOT = Path(__file__).parents[2]
MY_LAB = ROOT / "examples" / "my_lab"
SMALL: dict[str, dict[str, Any]] = {  # takes seconds; tests replace some tables
    "data": {"name": "digits"},
    "split": {"nodes": 2},
    "nodes": {"models": ["mlp:8"], "local": {"epochs": 2}},
    "student": {"model": "mlp:8"},
    "evaluation": {"centralized": False},
    "engine": {"batching": "one-by-one", "threads": 1},
}
SITES = ("east", "north", "west")


def install(home: Path) -> Path:
    """Build the package with pip, as users do, and return the folder into which it is installed."""
    shutil.copytree(MY_LAB, home / "source")
    how = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(home / "installed")]
    subprocess.run([sys.executable, "-m", "pip", "install", *how, str(home / "source")], check=True)
    return home / "installed"


class Lab:
    """A working folder, and the installed package.

    Args:
        here: the working folder.
        installed: the folder of the package.
    """

    def __init__(self, here: Path, installed: Path) -> None:
        self.here, self.installed = here, installed

    def __call__(self, *words: str, code: int = 0, begin: str = "") -> str:
        """Run the command and return its output.

        Args:
            words: arguments after ``fedstill``.
            code: expected exit code.
            begin: Python code that the process runs first.
        """
        ended, printed = Command(words, self.here, [self.installed, ROOT], begin).end()
        assert ended == code, printed
        return printed

    def write(self, file: str, **tables: Any) -> None:
        """Write a run's configuration: the small one with some tables replaced."""
        (self.here / file).write_text(tomli_w.dumps({**SMALL, **tables}))

    def run(self, out: str, *options: str, file: str = "small.toml", code: int = 0) -> str:
        """Run a file's configuration into the folder ``out``."""
        return self("run", file, *options, "--quiet", "--out", out, code=code)

    def refused(self, *options: str) -> str:
        """Run a configuration that is refused before it has a folder; return the error's line."""
        line = self.run("none", *options, code=2)
        assert line.startswith("fedstill: ")
        assert line.count("\n") == 1
        assert not (self.here / "none").exists()
        return line

    def add_broken_package(self) -> None:
        """Install another package whose plug-ins cannot be imported."""
        (self.here / "broken.py").write_text("import a_library_that_is_not_here\n")
        info = self.here / "broken-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
        groups = ("splits", "models", "ensembles")
        offers = [f"[fedstill.{what}]\nbroken = broken:thing\n" for what in groups]
        (info / "entry_points.txt").write_text("".join(offers))

    def node(self, name: str, toml: str, images: Any, labels: Any) -> Path:
        """Create the folder of a node with the given images that responds to files, and return it.

        ``toml`` contains the other options.
        """
        self("node", "init", name)
        folder = self.here / name
        np.savez(folder / "data.npz", images=images, labels=labels)
        (folder / "node.toml").write_text(f'name = "{name}"\nonline = false\n{toml}')
        return folder

    def result(self, out: str) -> dict[str, Any]:
        """Return the result of a run."""
        result: dict[str, Any] = json.loads((self.here / out / "result.json").read_text())
        return result

    def text(self, file: str) -> str:
        """Return the text of a file."""
        return (self.here / file).read_text()


def write_plates(file: Path, rows: slice) -> None:
    """Write some of scikit-learn's digits in the format of the lab's reader."""
    digits, lines = load_digits(), ["label,site," + ",".join(f"p{n}" for n in range(64))]
    for number in range(len(digits.target))[rows]:
        pixels = ",".join(f"{value:g}" for value in digits.data[number])
        lines.append(f"{digits.target[number]},{SITES[number % 3]},{pixels}")
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
