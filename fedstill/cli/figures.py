"""``fedstill figures``: the figures of a run or a comparison, as files for a paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedstill.core.errors import ArgumentError

ABOUT = """\
Write the figures of a finished run or a comparison: what its models reach on their way and its losses, or
what methods reach against bytes, epsilon and leakage. From Python, fedstill.figures has each as a matplotlib
Figure.
"""


@dataclass(frozen=True)
class FiguresConfig:
    """How figures are written.

    Args:
        format: of the files.
        out: their folder; none is the folder figures in RUN.
    """

    format: Literal["pdf", "svg", "png"] = "pdf"
    out: str = ""


def main(words: list[str]) -> None:
    """Do what the words after ``fedstill figures`` say.

    Raises:
        FedstillError: a wrong word, or no finished run or comparison in the folder.
    """
    from fedstill.cli.options import override

    named = bool(words) and not words[0].startswith("-")
    rest = words[1:] if named else words
    if not named and not any(word in ("-h", "--help") for word in rest):
        raise ArgumentError(
            "fedstill figures", " ".join(words), "the folder of a run or comparison, then options"
        )
    config = override(FiguresConfig(), rest, "fedstill figures RUN", ABOUT)

    from fedstill.figures import write

    for path in write(Path(words[0]), Path(config.out) if config.out else None, config.format):
        print(path)
