"""A comparison's figures: of each run, and of each method their mean and deviation over seeds.

Every figure is that of the last round on data that no node saw. Means and standard deviations are over
seeds; the standard deviation is the sample's (n - 1), and one seed alone has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedstill.attacks.found import Leakage
from fedstill.attacks.rows import Column
from fedstill.core.words import number
from fedstill.privacy.statement import NO_GUARANTEE, epsilon_text
from fedstill.protocol.kinds import PRIVATE_DATA
from fedstill.report import budgets
from fedstill.report.compare_leakage import best
from fedstill.report.files import Metrics
from fedstill.report.privacy import guaranteed
from fedstill.report.result import ACCURACY, Result
from fedstill.report.result_parts import OverNodes
from fedstill.tasks.task import Figure

if TYPE_CHECKING:
    from fedstill.runs.config import PaperFigure


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds.

    >>> Spread.of([90.0, 92.0, 94.0])
    Spread(mean=92.0, std=2.0)
    >>> Spread.of([90.0])
    Spread(mean=90.0, std=None)
    """

    mean: float
    std: float | None = None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Of values, or None where one is missing: no mean over fewer seeds than the others have."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        mean = math.fsum(known) / len(known)
        if len(known) == 1:
            return cls(mean)
        return cls(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1)))

    def text(self, digits: int = 1) -> str:
        """ "93.0 ± 3.6": without a unit."""
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" \u00b1 {self.std:.{digits}f}")


TRAFFIC: Mapping[str, Callable[[Result], float | None]] = {
    "bytes up": lambda result: result.bytes.up,
    "bytes down": lambda result: result.bytes.down,
    "questions": lambda result: result.questions,
    "turns": lambda result: result.turns,
    "seconds": lambda result: result.seconds.total,
}
LOCAL, ALL_TESTS = "local ", ", all tests"  # around the key of a figure


@dataclass(frozen=True)
class Run:
    """One finished run: what its files say."""

    seed: int
    folder: str
    result: Result
    metrics: Metrics
    leakage: Leakage | None = None  # what attacks with the comparison's options got

    def figure(self, name: str) -> float | None:
        """One of the figures that means are taken of.

        Args:
            name: of :data:`TRAFFIC`; or a figure's key, for the central model; or "local <key>", for the
                nodes' own models (of what models are judged by, each on its share of the test data);
                "local <key>, all tests", "standalone <key>", "ensemble <key>" or "centralised <key>".
        """
        if name in TRAFFIC:
            return TRAFFIC[name](self.result)
        whose, _, key = name.removesuffix(ALL_TESTS).rpartition(" ")
        if not whose:
            return self.result.reached.get(key)
        if whose in ("local", "standalone"):
            on_shares = whose == "local" and key == self.result.metric.key and not name.endswith(ALL_TESTS)
            figures = self.result.local if whose == "local" else self.result.standalone
            return (figures or {}).get("share" if on_shares else key, OverNodes()).mean
        return number(self.result.ensemble if whose == "ensemble" else self.result.centralised, key)

    def over_nodes(self, key: str) -> float | None:
        """How far a figure of the nodes' own models is spread over the nodes."""
        return (self.result.local or {}).get(key, OverNodes()).std


@dataclass(frozen=True)
class Row:
    """One method in one setting."""

    label: str
    method: str
    title: str
    central: str
    leaves: tuple[str, ...]
    needs: tuple[str, ...]
    runs: tuple[Run, ...] = ()
    not_run: Mapping[int, str] = field(default_factory=dict)  # reasons by seed
    missing: tuple[int, ...] = ()  # seeds whose runs are not finished
    published: Mapping[str, PaperFigure] = field(default_factory=dict)  # by figure
    budget: float = math.inf  # epsilon that a run may cost each node
    metric: str = "accuracy"  # the key of what its models are judged by

    @property
    def name(self) -> str:
        """As people write it; where a method stands here more than once, as the comparison calls it."""
        return self.title if self.label == self.method else self.label

    def spread(self, figure: str) -> Spread | None:
        """A figure over seeds."""
        return Spread.of([run.figure(figure) for run in self.runs])

    def shown(self, figure: str, digits: int = 1) -> str | None:
        """A figure over seeds, as tables have it; None is not measured.

        Of one seed alone the nodes' mean has its deviation over the nodes, as papers give it of models that
        were trained alone.
        """
        ours = self.spread(figure)
        if ours is not None and self.spread_is_over_nodes and not figure.startswith(LOCAL):
            ours = Spread(ours.mean, self.runs[0].over_nodes(figure))
        return None if ours is None else ours.text(digits)

    @property
    def spread_is_over_nodes(self) -> bool:
        """Whether what stands behind the sign is no deviation over seeds."""
        return self.central == "nodes" and len(self.runs) == 1

    def gap(self, figure: str) -> float | None:
        """Ours minus the paper's."""
        ours, paper = self.spread(figure), self.published.get(figure)
        return None if ours is None or paper is None else ours.mean - paper.value

    def epsilon(self) -> tuple[float, float] | None:
        """An epsilon and a delta that hold at each node in each run; None if one has no guarantee."""
        kept = [price for run in self.runs if (price := guaranteed(run.result)) is not None]
        if not kept or len(kept) < len(self.runs):
            return None
        return max(epsilon for epsilon, _ in kept), max(delta for _, delta in kept)

    def price(self) -> str:
        """That epsilon, or "no guarantee", or that nothing left the nodes."""
        kept = self.epsilon()
        if all(run.figure("bytes up") == 0 for run in self.runs):
            return "nothing left"
        return NO_GUARANTEE if kept is None else epsilon_text(kept[0])

    def leak(self, column: Column) -> tuple[str, Spread] | None:
        """A figure of the strongest attack over seeds, with its name; None where a run has none."""
        got = best(column, [run.leakage for run in self.runs])
        spread = None if got is None else Spread.of(got[1])
        return None if got is None or spread is None else (got[0], spread)

    def leaked(self, column: Column) -> str | None:
        """That figure as tables have it."""
        found = self.leak(column)
        return None if found is None else found[1].text(column.digits)

    def traffic(self) -> float | None:
        """Bytes up and down of a whole run, all nodes, the mean over seeds."""
        up, down = self.spread("bytes up"), self.spread("bytes down")
        return None if up is None or down is None else up.mean + down.mean

    def reason(self) -> str:
        """Why runs are lacking, in one line; empty where none is."""
        reasons: dict[str, list[int]] = {}
        for seed, text in self.not_run.items():
            reasons.setdefault(text if text.startswith("stopped: ") else f"refused: {text}", []).append(seed)
        for seed in self.missing:
            reasons.setdefault("not finished", []).append(seed)
        if len(reasons) == 1 and not self.runs:
            return next(iter(reasons))
        return "; ".join(f"{text} (seed {', '.join(map(str, seeds))})" for text, seeds in reasons.items())

    def curve(self) -> list[tuple[float, float]]:
        """What models are judged by over the share of the run that is done, the mean over seeds."""
        lines = []
        for run in self.runs:
            last = run.figure("turns") or max(run.metrics.central, default=0)
            lines.append({step / last: value for step, value in run.metrics.central.items()} if last else {})
        shared = set.intersection(*map(set, lines)) if lines else set()
        return [(share, math.fsum(line[share] for line in lines) / len(lines)) for share in sorted(shared)]


@dataclass(frozen=True)
class Setting:
    """One setting of a comparison: its methods, in the order in which they were given."""

    name: str
    context: str
    rows: tuple[Row, ...]
    figures: tuple[Figure, ...] = (ACCURACY,)  # of its task

    @property
    def metric(self) -> Figure:
        """What its models are judged by."""
        return self.figures[0]

    def best(self, figure: Figure | None = None) -> set[str]:
        """Labels with the best mean among those that are judged by the same kind of model.

        Where the data themselves leave the nodes there is no federation, but a mark to reach.

        Args:
            figure: None is what models are judged by.
        """
        figure = self.metric if figure is None else figure
        sign = 1 if figure.better == "higher" else -1
        best: dict[str, tuple[float, str]] = {}
        rows = [row for row in self.rows if row.spread(figure.key) and PRIVATE_DATA not in row.leaves]
        kinds = [row.central for row in rows]
        for row in rows:
            ours = row.spread(figure.key)
            if ours is None or kinds.count(row.central) < 2:
                continue
            if row.central not in best or sign * ours.mean > best[row.central][0]:
                best[row.central] = (sign * ours.mean, row.label)
        return {label for _, label in best.values()}


@dataclass(frozen=True)
class Summary:
    """A comparison with its figures."""

    name: str
    about: str
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    published: tuple[PaperFigure, ...]  # those that stand in the table
    command: str
    leakage: bool = False  # whether runs were to be attacked
    leaks: tuple[Column, ...] = ()  # the figures of those attacks

    @property
    def rows(self) -> list[Row]:
        """Of all settings."""
        return [row for setting in self.settings for row in setting.rows]

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Of all settings' tasks; what models of the first setting are judged by first."""
        return tuple({figure.key: figure for setting in self.settings for figure in setting.figures}.values())

    @property
    def metric(self) -> Figure:
        """What models are judged by."""
        return self.figures[0]

    def figure(self, name: str) -> Figure:
        """The figure that a name such as "local accuracy" is about."""
        return next(figure for figure in self.figures if figure.key == name.removeprefix(LOCAL))

    def names(self) -> list[str]:
        """Of the figures that papers publish: of the central model, then "local" ones of the nodes' own."""
        first, *others = (figure.key for figure in self.figures)
        return [first, f"{LOCAL}{first}", *others, *(f"{LOCAL}{key}" for key in others)]

    def compared(self) -> list[str]:
        """Those that a paper has for some row."""
        return [name for name in self.names() if any(name in row.published for row in self.rows)]

    @property
    def priced(self) -> bool:
        """Whether any row has a guarantee of privacy."""
        return any(row.epsilon() is not None for row in self.rows)

    def budgets(self) -> list[budgets.Line]:
        """What each method reaches under each budget; none unless settings differ in it, each from each."""
        lines = []
        for place, rows in enumerate(zip(*(setting.rows for setting in self.settings), strict=True), start=1):
            asked = [row.budget for row in rows]
            if len(rows) < 2 or len(set(asked)) < len(rows):
                return []
            points = [
                budgets.Point(row.budget, reached.mean, reached.std)
                for row in rows
                if (reached := row.spread(row.metric)) is not None
            ]
            lines.append(budgets.Line(place, rows[0].name, points))
        return lines if any(line.points for line in lines) else []

    def privacy(self) -> str:
        """Which runs have a formal guarantee of privacy."""
        runs = [run for row in self.rows for run in row.runs if run.figure("bytes up")]
        kept = sum(guaranteed(run.result) is not None for run in runs)
        if kept == 0:
            return "There is no formal guarantee of privacy."
        if kept == len(runs):
            return "What left the nodes has a formal guarantee of privacy in every run: see epsilon."
        have = f"{kept} {'has' if kept == 1 else 'have'} a formal guarantee of privacy (see epsilon)"
        return f"Of {len(runs)} runs in which anything left the nodes {have}, the others none."
