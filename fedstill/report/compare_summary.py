"""Summary: a comparison's values, of each run and of each method with mean and deviation over seeds.

Every figure is that of the last round on data that no node saw. Standard deviations are the sample's (n - 1),
and one seed alone has none. A figure of attacks is that of the strongest attack: of those that were tried on
a row's runs, the one with the highest mean over seeds (of a p-value: the lowest).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedstill.attacks.leakage_file import Leakage
from fedstill.attacks.leakage_rows import Column
from fedstill.core.text_format import listed
from fedstill.privacy.statement import NO_GUARANTEE, epsilon_text
from fedstill.protocol.kinds import PRIVATE_DATA
from fedstill.report.metric_text import bare, in_a_sentence
from fedstill.report.paired import Draws, Gap, difference
from fedstill.report.privacy_section import guaranteed, most
from fedstill.report.result import ACCURACY, OverNodes, Result
from fedstill.report.run_files import Metrics
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
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

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
    draws: Draws | None = None  # what it is judged by in each draw of test cases

    @property
    def tested(self) -> int | None:
        """How many test cases were drawn from."""
        kept = self.result.intervals
        return None if kept is None else kept.cases

    def figure(self, name: str) -> float | None:
        """One of :data:`TRAFFIC`; or by a figure's key, of the central model; or by "local <key>", of the
        nodes' own models (of what they are judged by, each on its share of the test data); or by "local
        <key>, all tests", "standalone <key>", "ensemble <key>", "centralised <key>".
        """
        if name in TRAFFIC:
            return TRAFFIC[name](self.result)
        whose, _, key = name.removesuffix(ALL_TESTS).rpartition(" ")
        result = self.result
        if not whose:
            return result.reached.get(key)
        if whose in ("local", "standalone"):
            on_shares = whose == "local" and key == result.metric.key and not name.endswith(ALL_TESTS)
            figures = result.local if whose == "local" else result.standalone
            return figures.get("share" if on_shares else key, OverNodes()).mean
        return (result.ensemble if whose == "ensemble" else result.centralised).get(key)


@dataclass(frozen=True)
class Entry:
    """One method in one setting."""

    place: int  # its number, from 1 up
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

    def has(self, figure: str) -> bool:
        """Whether any run has a figure."""
        return any(run.figure(figure) is not None for run in self.runs)

    def shown(self, figure: str, digits: int = 1) -> str | None:
        """A figure over seeds, as tables have it; of one seed a nodes' mean has its deviation over them."""
        ours = self.spread(figure)
        if ours is not None and self.spread_is_over_nodes and not figure.startswith(LOCAL):
            ours = Spread(ours.mean, self.runs[0].result.local.get(figure, OverNodes()).std)
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
        return most([guaranteed(run.result) for run in self.runs])

    def price(self) -> str:
        """That epsilon, or "no guarantee", or that nothing left the nodes."""
        kept = self.epsilon()
        if all(run.figure("bytes up") == 0 for run in self.runs):
            return "nothing left"
        return NO_GUARANTEE if kept is None else epsilon_text(kept[0])

    def leak(self, column: Column) -> tuple[str, Spread] | None:
        """A figure of the strongest attack over seeds, with its name; None where a run has none."""
        tried = [strongest(column, run.leakage) for run in self.runs]
        means = {name: Spread.of([each.get(name) for each in tried]) for name in (tried[0] if tried else ())}
        known = {name: spread for name, spread in means.items() if spread is not None}
        if not known:
            return None
        chosen = pick(column, [spread.mean for spread in known.values()])
        return next((name, spread) for name, spread in known.items() if spread.mean == chosen)

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

    def curve(self) -> dict[float, Spread]:
        """What models are judged by over the share of the run that is done, the mean over seeds."""
        lines = []
        for run in self.runs:
            last = run.figure("turns") or max(run.metrics.central, default=0)
            lines.append({step / last: value for step, value in run.metrics.central.items()} if last else {})
        shared = set.intersection(*map(set, lines)) if lines else set()
        return {share: Spread(statistics.fmean(line[share] for line in lines)) for share in sorted(shared)}


def strongest(column: Column, found: Leakage | None) -> dict[str, float]:
    """A column's figures in one run, by attack: of several targets the one of which it got most."""
    told: dict[str, list[float]] = {}
    for attack in () if found is None else found.attacks:
        for row in attack.rows:
            if row.column == column.name and row.value is not None:
                told.setdefault(row.attack or attack.name, []).append(row.value)
    return {name: pick(column, values) for name, values in told.items()}


def pick(column: Column, values: Iterable[float]) -> float:
    return min(values) if column.lowest else max(values)


@dataclass(frozen=True)
class Setting:
    """One setting of a comparison: its methods, in the order in which they were given."""

    name: str
    context: str
    entries: tuple[Entry, ...]
    figures: tuple[Figure, ...] = (ACCURACY,)  # of its task

    @property
    def metric(self) -> Figure:
        """What its models are judged by."""
        return self.figures[0]

    def best(self, figure: Figure) -> set[str]:
        """Labels that are above all others judged by the same kind of model, by more than chance explains."""
        return {
            first.label
            for first, *others in self.ranked(figure)
            if all(self.above(first, other, figure).told for other in others)
        }

    def ranked(self, figure: Figure) -> list[list[Entry]]:
        """Those judged by the same kind of model, by their means, the best first; of each kind two or more.

        Where the data themselves leave the nodes there is no federation, but a mark to reach.
        """
        sign = 1 if figure.better == "higher" else -1
        kinds: dict[str, list[tuple[float, Entry]]] = {}
        for entry in self.entries:
            ours = entry.spread(figure.key)
            if ours is not None and PRIVATE_DATA not in entry.leaves:
                kinds.setdefault(entry.central, []).append((sign * ours.mean, entry))
        lists = [sorted(alike, key=lambda each: -each[0]) for alike in kinds.values() if len(alike) > 1]
        return [[entry for _, entry in alike] for alike in lists]

    def above(self, first: Entry, second: Entry, figure: Figure) -> Gap:
        """The paired difference of two methods that have the figure, over the seeds that both have."""
        others = {run.seed: run for run in second.runs}
        pairs = [(run, others[run.seed]) for run in first.runs if run.seed in others]
        ours = [[run.figure(figure.key) or 0.0 for run in pair] for pair in pairs]
        if not pairs:
            return Gap(math.nan, None)
        drawn = [
            one.draws - other.draws
            for one, other in pairs
            if one.draws is not None and other.draws is not None and one.tested == other.tested
        ]
        paired = figure.key == self.metric.key and len(drawn) == len(pairs)
        return difference([one - other for one, other in ours], drawn if paired else ())

    def verdicts(self) -> list[str]:
        """What may be said of the order of methods by what they are judged by: a sentence for each kind."""
        figure, told = self.metric, []
        for first, *others in self.ranked(figure):
            found = {other.name: self.above(first, other, figure) for other in others}
            level = {name: each for name, each in found.items() if not each.told}
            if any(each.half is None for each in found.values()):
                told.append(f"{figure.title}: one seed alone, so no order is told.")
            elif level:
                gaps = listed([f"{name} ({_gap(figure, each)})" for name, each in level.items()])
                told.append(f"{figure.title}: {first.name} is level with {gaps}.")
            else:
                name, each = min(found.items(), key=lambda item: abs(item[1].mean))
                told.append(f"{figure.title}: {first.name} is first, {_gap(figure, each)} above {name}.")
        return list(dict.fromkeys(told))


def _gap(figure: Figure, each: Gap) -> str:
    return f"{bare(figure, abs(each.mean))} \u00b1 {bare(figure, each.half or 0.0)}"


@dataclass(frozen=True)
class Line:
    """One method's line: its number, its name, what it reaches by epsilon, or by the share of its run."""

    place: int
    name: str
    reached: Mapping[float, Spread]


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
    def entries(self) -> list[Entry]:
        """Of all settings."""
        return [entry for setting in self.settings for entry in setting.entries]

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

    def called(self, name: str) -> str:
        """A figure in a sentence: "local accuracy", "HD95"."""
        title = in_a_sentence(self.figure(name).title)
        return f"{LOCAL}{title}" if name.startswith(LOCAL) else title

    def names(self) -> list[str]:
        """Of the figures that papers publish: of the central model, then "local" ones of the nodes' own."""
        first, *others = (figure.key for figure in self.figures)
        return [first, f"{LOCAL}{first}", *others, *(f"{LOCAL}{key}" for key in others)]

    def shown(self) -> list[str]:
        """Those in tables: of the central model what any run has, and of the nodes' own the first."""
        first, local, *_ = self.names()
        others = [figure.key for figure in self.figures[1:] if figure.brief]
        return [first, local, *(key for key in others if any(entry.has(key) for entry in self.entries))]

    def compared(self) -> list[str]:
        """Those that a paper has for some row."""
        return [name for name in self.names() if any(name in entry.published for entry in self.entries)]

    @property
    def priced(self) -> bool:
        """Whether any row has a guarantee of privacy."""
        return any(entry.epsilon() is not None for entry in self.entries)

    def budgets(self) -> list[Line]:
        """What each method reaches under each budget; none unless settings differ in it, each from each."""
        lines = []
        for entries in zip(*(setting.entries for setting in self.settings), strict=True):
            if len(entries) < 2 or len({entry.budget for entry in entries}) < len(entries):
                return []
            found = {entry.budget: entry.spread(entry.metric) for entry in entries}
            reached = {epsilon: found[epsilon] for epsilon in sorted(found)}
            known = {epsilon: spread for epsilon, spread in reached.items() if spread is not None}
            lines.append(Line(entries[0].place, entries[0].name, known))
        return lines if any(line.reached for line in lines) else []

    def privacy(self) -> str:
        """Which runs have a formal guarantee of privacy."""
        runs = [run for entry in self.entries for run in entry.runs if run.figure("bytes up")]
        kept = sum(guaranteed(run.result) is not None for run in runs)
        if kept == 0:
            return "There is no formal guarantee of privacy."
        if kept == len(runs):
            return "What left the nodes has a formal guarantee of privacy in every run: see epsilon."
        have = f"{kept} {'has' if kept == 1 else 'have'} a formal guarantee of privacy (see epsilon)"
        return f"Of {len(runs)} runs in which anything left the nodes {have}, the others none."
