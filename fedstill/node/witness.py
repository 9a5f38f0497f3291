"""A second witness of what a node's data have cost: the lines that its runs' own ledgers hold.

A copy of the account and of its anchor that are put back together, as from a backup, look sound. But each
release has left a line in ``runs/RUN/ledger.jsonl``, written after its charge: an account that shows less
than these lines has lost something. It may show more: what was charged and, after a stop, never released,
and runs whose folders are gone.

Where several nodes share an account, each bears witness to its own runs alone.
"""

from __future__ import annotations

from pathlib import Path

from fedstill.core.errors import ArgumentError, RunFolderError
from fedstill.node.account import DATA
from fedstill.node.anchor import Totals
from fedstill.node.chain import BARE, BYTES, QUESTIONS
from fedstill.node.ledger import Ledger
from fedstill.privacy.events import from_text


def released(folder: Path, holder: str = DATA) -> Totals:
    """What a node's runs have released, by holder, run and event.

    To be read before the account is opened: what is charged and released in between is then no trouble.

    Args:
        folder: the node's.
        holder: who has paid for it. Names that the node had at the time do not matter.

    Raises:
        RunFolderError: a run's ledger cannot be read, or a line of it is broken that is not its last.
    """
    totals = Totals()
    for path in sorted(folder.glob("runs/*/ledger.jsonl")):
        try:
            lines = Ledger.read(path)
            for node in lines.nodes:
                events, bare = lines.spent(node)
                for event, times in from_text(events).items():
                    totals[holder, path.parent.name, str(event)] += times
                counted = ((BARE, bare), (QUESTIONS, lines.questions(node)), (BYTES, lines.up(node)))
                for what, times in counted:
                    totals[holder, path.parent.name, what] += times
        except FileNotFoundError:  # its run was deleted meanwhile
            continue
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error
        except ArgumentError as error:
            raise RunFolderError(f"{path} holds a price that is none: {error}") from error
    return +totals
