"""The audit trail: one line in ``ledger.jsonl`` for each release, written before it is handed over."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import Any

from fedstill.core import owner_only
from fedstill.core.errors import RunFolderError

Release = tuple[str, int, str]  # node, question number, part
Answered = tuple[str, str, str]  # a release's content, after what, and a fingerprint of what left
ANSWER, GRADIENT = "answer", "gradient"  # parts of a question: each that is answered has the first
SEAL = "seal"


class Ledger:
    """Appends audit lines and keeps their sums. One file may serve several nodes of a simulation.

    A run that goes on after a stop asks some questions again; a release that the file already shows,
    to the last bit, is not counted twice. Without a file only the sums are kept.
    """

    def __init__(self) -> None:
        self._up: Counter[str] = Counter()  # bytes that left each node
        self.bytes: dict[tuple[str, str, str], int] = defaultdict(int)  # node, direction, kind
        self._releases: dict[Release, dict[Answered, Mapping[str, Any]]] = defaultdict(dict)  # its privacy
        self._last: dict[Release, Answered] = {}  # what was written, or asked for again, last
        self._answers: Counter[str] = Counter()  # questions that each node answered
        self._further: Counter[str] = Counter()  # gradients of an answer of which one has left before
        self._learned: set[tuple[str, ...]] = set()  # by node: what was learned, and paid for with a line
        self._asked: dict[tuple[int, str], str] = {}  # number and content -> the question's name
        self._votes: dict[str, list[Sequence[int]]] = defaultdict(list)
        self._spoken: set[str] = set()  # nodes that have released something
        self._events: dict[str, Counter[str]] = defaultdict(Counter)  # by node: events and how often
        self._bare: Counter[str] = Counter()  # releases without any guarantee, by node
        self._file: FileIO | None = None
        self.rows: set[int] = set()  # of the account, that lines name
        self._told: set[tuple[str, int, str]] = set()  # by node, those of releases, and when
        self.sign: Callable[[str], str] | None = None  # seals lines, where a node has a secret for that

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """The sums of a file's lines, to look at; the file is neither locked nor changed.

        Raises:
            RunFolderError: a line that is not the last is broken.
            OSError: the file cannot be read.
        """
        ledger = cls()
        ledger._read(path)
        return ledger

    def open(self, path: Path) -> None:
        """Take up the lines of a file, if there is one, and append to it from now on.

        The file is locked until :meth:`close`: two processes at work on one run would spoil each other's.

        Raises:
            RunFolderError: another process has the file open.
            RunFolderError: a line that is not the last is broken. A broken last line is what a kill while
                writing leaves; the release it announced was never handed over, so it is cut.
        """
        self._file = FileIO(path, "a", opener=owner_only.opener)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise RunFolderError(f"{path} is in use: another process is at work on this run") from error
        self._take_up(path)

    def answers(self, node: str) -> int:
        """How many answers have left a node."""
        return self._answers[node]

    def questions(self, node: str) -> int:
        """For how many questions what has left a node counts: each answer, each further gradient of it."""
        return self._answers[node] + self._further[node]

    def answered(self, node: str, number: int, content: str, after: str = "") -> bool:
        """Whether an answer to this content, after what was answered before, has left already."""
        written = self._releases.get((node, number, ANSWER), {})
        return any(known[:2] == (content, after) for known in written)

    def pulled(self, node: str, number: int, after: str) -> bool:
        """Whether a gradient of this answer has left already."""
        return any(known[1] == after for known in self._releases.get((node, number, GRADIENT), {}))

    def released(
        self, node: str, number: int, part: str, content: str, after: str = "", left: str = ""
    ) -> bool:
        """Whether a release that answers this content, after what was answered before, is written already.

        If it is, it leaves once more, and :meth:`privacy` tells of it.
        """
        release, answered = (node, number, part), (content, after, left)
        if answered not in self._releases[release]:
            return False
        self._last[release] = answered
        return True

    def has_learned(self, *what: str) -> bool:
        """Whether a line has told the price of this, beside that of its own release."""
        return what in self._learned

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes that have released something."""
        return frozenset(self._spoken)

    def spent(self, node: str) -> tuple[Counter[str], int]:
        """What this node's releases cost: events as text and how often; and how many had no price."""
        return Counter(self._events[node]), self._bare[node]

    def votes(self, node: str) -> Sequence[Sequence[int]]:
        """Rows of votes behind a node's releases, without noise: whether it was answered, then each class's.

        Empty where the owner has not asked for them to be kept.
        """
        return self._votes[node]

    def privacy(self, node: str, number: int, part: str) -> Mapping[str, Any]:
        """Under which mechanism, at which price and ``after`` what the last release under a number left.

        A number may have several, where a server went back and asked something else, or in another order.
        """
        release = node, number, part
        answered = self._last[release]
        return {**self._releases[release][answered], "after": answered[1]}

    def write(
        self,
        *,
        node: str,
        number: int,
        question: str,
        part: str,
        content: str,
        down: Mapping[str, int],
        up: Mapping[str, int],
        privacy: Mapping[str, Any],
        after: str = "",
        left: str = "",
        learned: Mapping[str, str] | None = None,
        row: int = 0,
        votes: Sequence[Sequence[int]] = (),
    ) -> None:
        """Write one line and hand it to the operating system before returning.

        Args:
            node: that releases.
            number: of the question.
            question: its name.
            part: of its answer.
            content: digest of what was asked.
            down: bytes that came with it, by kind.
            up: bytes that leave, by kind.
            privacy: mechanism and price.
            after: fingerprint of what was answered before.
            left: fingerprint of what leaves.
            learned: fingerprints of what the price holds beside the release's own, by what it is.
            row: of the account, which holds the charge; 0 is none.
            votes: behind it.

        Raises:
            OSError: it cannot be written whole; then nothing of it stays.
        """
        line = {
            **_head(node, number, question),
            "part": part,
            "content": content,
            **({"after": after} if after else {}),
            **({"left": left} if left else {}),
            **({"learned": dict(learned)} if learned else {}),
            **({"row": row} if row else {}),
            "down": dict(down),
            "up": dict(up),
            "privacy": dict(privacy),
            **({"votes": votes} if votes else {}),
        }
        self._put(line)
        self._count(line)

    def refuse(self, *, node: str, number: int, question: str, rule: str) -> None:
        """Write one line of a question that was refused; it counts nothing.

        Raises:
            OSError: it cannot be written whole; then nothing of it stays.
        """
        self._put({**_head(node, number, question), "refused": rule})

    def hold(self, *, node: str, number: int, question: str, row: int) -> None:
        """Write one line of a release that was charged and never handed over: a stop came between.

        Raises:
            OSError: it cannot be written whole; then nothing of it stays.
        """
        line = {**_head(node, number, question), "held": True, "row": row}
        self._put(line)
        self._count(line)

    def up(self, node: str) -> int:
        """Bytes that left this node so far."""
        return self._up[node]

    def summary(self) -> dict[str, Any]:
        """Bytes ``up`` and ``down``, in all, ``by_kind`` and ``by_node``, and questions asked."""
        by_kind: dict[str, dict[str, int]] = {}
        by_node: dict[str, dict[str, int]] = {}
        total = {"up": 0, "down": 0}
        for (node, way, kind), size in sorted(self.bytes.items()):
            for table, key in ((by_kind, kind), (by_node, node)):
                table.setdefault(key, {"up": 0, "down": 0})[way] += size
            total[way] += size
        return {
            **total,
            "by_kind": by_kind,
            "by_node": by_node,
            "questions": len(self._asked),  # one to K nodes, answered in parts, is one
            "questions_by_name": dict(sorted(Counter(self._asked.values()).items())),
        }

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _take_up(self, path: Path) -> None:
        good = self._read(path)
        with path.open("rb+") as file:
            file.truncate(good)

    def _read(self, path: Path) -> int:
        """Count the whole lines of a file; how many bytes these are."""
        good = 0
        with path.open("rb") as file:
            lines = file.readlines()
        for position, raw in enumerate(lines):
            whole = raw.endswith(b"\n")
            if position == len(lines) - 1 and not whole:
                break
            try:
                self._count(json.loads(raw))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise RunFolderError(
                    f"{path}: line {position + 1} is no line of a ledger: {error}"
                ) from error
            good += len(raw)
        return good

    def _put(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            seal = {} if self.sign is None else {SEAL: self.sign(_text(line))}
            self._append(self._file, (_text({**line, **seal}) + "\n").encode())

    def _append(self, file: FileIO, line: bytes) -> None:
        end = file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(line):  # a disk that fills up takes a part first
                written += file.write(line[written:])
        except OSError:
            file.truncate(end)
            raise

    def _count(self, line: Mapping[str, Any]) -> None:
        if "row" in line:
            self.rows.add(line["row"])
        if "refused" in line or "held" in line:
            return
        if "row" in line:  # with the time, since rows that were lost leave their numbers to others
            this = line["node"], line["row"], line["at"]
            if this in self._told:
                return  # the same line, copied by somebody
            self._told.add(this)
        release = line["node"], line["number"], line["part"]
        answered = line["content"], line.get("after", ""), line.get("left", "")
        if line["part"] == GRADIENT and self.pulled(line["node"], line["number"], answered[1]):
            self._further[line["node"]] += 1
        self._releases[release][answered], self._last[release] = line["privacy"], answered
        for what, fingerprint in line.get("learned", {}).items():
            self._learned.add((line["node"], what, fingerprint))
        self._spoken.add(line["node"])
        self._votes[line["node"]] += line.get("votes", ())
        price = line["privacy"].get("price")
        if price is None:
            self._bare[line["node"]] += 1
        else:
            self._events[line["node"]].update(price)
        for way in ("down", "up"):
            for kind, size in line[way].items():
                self.bytes[line["node"], way, kind] += size
        self._up[line["node"]] += sum(line["up"].values())
        if line["part"] == ANSWER:
            self._answers[line["node"]] += 1
            self._asked[line["number"], line["content"]] = line["question"]


def unsealed(line: Mapping[str, Any]) -> tuple[str, str]:
    """The text of a line without its seal, as it was sealed, and that seal; none is empty."""
    return _text({name: value for name, value in line.items() if name != SEAL}), str(line.get(SEAL, ""))


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"))


def _head(node: str, number: int, question: str) -> dict[str, Any]:
    """What every line begins with."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return {"at": now, "node": node, "number": number, "question": question}
