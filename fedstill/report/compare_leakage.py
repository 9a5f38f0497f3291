"""What attacks got from the runs of a comparison: the figures that its tables have of leakage.json.

Each figure is that of the strongest attack: of those that were tried on a row's runs, the one with the
highest mean over seeds (of a p-value: the lowest). Nothing here calls a method safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.core.words import number, pick, whole, words

Found = Mapping[str, Any]  # what a leakage.json holds
RATE = 0.01  # of false positives, at which true positives are told


@dataclass(frozen=True)
class Leak:
    """One figure of attacks.

    Args:
        key: what terminals and Markdown call its column.
        head: what the page calls it, with its unit.
        column: its name in CSV.
        digits: after the point.
        values: its value by attack (by extractor, for copying) in one run's leakage.json.
        strongest: of several values the one that an adversary would choose.
    """

    key: str
    head: str
    column: str
    digits: int
    values: Callable[[Found], Mapping[str, float]]
    strongest: Callable[..., float] = max

    def best(self, runs: Sequence[Found | None]) -> tuple[str, list[float]] | None:
        """The strongest attack of those tried on all runs, with its values; None where there is none."""
        tried = [{} if found is None else self.values(found) for found in runs]
        shared = [name for name in tried[0] if all(name in each for each in tried)] if tried else []
        means = {name: math.fsum(each[name] for each in tried) / len(tried) for name in shared}
        if not means:
            return None
        chosen = self.strongest(means.values())
        name = next(name for name in shared if means[name] == chosen)
        return name, [each[name] for each in tried]

    def text(self, value: float) -> str:
        return f"{value:.{self.digits}f}"


def _central(found: Found) -> Found:
    """The membership attacks on the central model, or on what stands for it: the first part."""
    parts = pick(found, "membership")
    return parts[0] if isinstance(parts, list) and parts else {}


def _by(parts: object, name: str, *keys: str) -> dict[str, float]:
    """The numbers at a path of keys in a list of records, by the name of each."""
    listed = parts if isinstance(parts, list) else []
    found = {words(part, name) or "attack": number(part, *keys) for part in listed}
    return {title: value for title, value in found.items() if value is not None}


def _aucs(found: Found) -> dict[str, float]:
    attacks = _by(_central(found).get("attacks"), "title", "auc", "value")
    return {title: 100 * value for title, value in attacks.items()}


def _answered(found: Found) -> dict[str, float]:
    """Through what nodes answered: each attack's most, by its title."""
    parts, told = pick(found, "membership"), dict[str, float]()
    for part in parts[1:] if isinstance(parts, list) else ():
        for title, value in _by(pick(part, "attacks"), "title", "auc", "value").items():
            told[title] = max(told.get(title, 0.0), 100 * value)
    return told


def _true_positives(found: Found) -> dict[str, float]:
    told = {}
    for attack in _central(found).get("attacks") or ():
        for at in pick(attack, "at") or ():
            rate, value = number(at, "rate"), number(at, "true_positives", "value")
            if rate is not None and value is not None and math.isclose(rate, RATE):
                told[words(attack, "title") or "attack"] = 100 * value
    return told


def _psnrs(found: Found) -> dict[str, float]:
    return _by(pick(found, "inversion", "attacks"), "title", "psnr", "mean")


def _copying(found: Found) -> dict[str, float]:
    return _by(pick(found, "copying", "spaces"), "extractor", "p_value")


AUC = Leak("membership AUC", "Membership AUC %", "membership_auc", 1, _aucs)
LEAKS = (
    AUC,
    Leak("TPR at 1%", "TPR % at 1%", "tpr_at_1_percent", 1, _true_positives),
    Leak("answers' AUC", "Answers\u2019 AUC %", "answers_auc", 1, _answered),
    Leak("PSNR", "PSNR dB", "psnr_db", 1, _psnrs),
    Leak("copying p", "Copying p", "copying_p", 3, _copying, min),
)

NOTES = (
    "An attack that gets little shows that this attack, at this strength, got little; it shows nothing of "
    "stronger ones. Nothing here is called safe.",
    "Each of these figures is of the strongest attack of those tried (the highest mean over seeds). "
    "Membership AUC: how often an attack on the central model, or on what stands for it, ranks a record that "
    "was trained on above one that was not, in percent; 50 is guessing. TPR at 1%: the percentage of members "
    "that it finds where it accuses 1% of the others; 1 is guessing. Answers' AUC: the same through what one "
    "node answered, as the server sees it. PSNR: how close inverted updates come to private images, in dB; "
    "the run's own report has what guessing gives. Copying p: how often generated images that copy nothing "
    "would lie as close to private ones; where it is small they depend on these very images, and the closest "
    "pairs in the run's report say whether one is copied. The best of several attacks lies a little above "
    "guessing by chance, and one run's AUC has an interval, in its report: marks that are close to each "
    "other, or to the dashed line, are not told apart.",
)


def sentence(found: Found) -> str:
    """What attacks got, for people who answer for the data; empty where it is not told."""
    return words(found, "sentence") or ""


def strength(found: Found) -> str:
    """The attacks that were tried, and how strong they were, in one line.

    >>> strength({"membership": [{"shadows": 16, "trained": "alone", "attacks": [{"title": "LiRA"}]}]})
    'Tried: membership by LiRA (16 shadow models, trained alone).'
    """
    parts = []
    central = _central(found)
    if central:
        shadows, trained = whole(central, "shadows"), words(central, "trained")
        told = [] if shadows is None else [f"{shadows} shadow models"]
        told += {"alone": ["trained alone"], "federations": ["each of a federation"]}.get(trained or "", [])
        parts.append(f"membership by {_titles(central)}" + (f" ({', '.join(told)})" if told else ""))
    inversion = pick(found, "inversion")
    if inversion:
        victims, images = whole(inversion, "victims"), whole(inversion, "images")
        told = [] if victims is None else [f"{victims} victim{'' if victims == 1 else 's'}"]
        told += [] if images is None else [f"{images} image{'' if images == 1 else 's'} each"]
        parts.append(f"inversion by {_titles(inversion)}" + (f" ({', '.join(told)})" if told else ""))
    spaces = pick(found, "copying", "spaces")
    if spaces:
        parts.append(f"copying in {', '.join(words(space, 'extractor') or '' for space in spaces)}")
    return f"Tried: {'; '.join(parts)}." if parts else "Nothing was tried."


def _titles(part: Found) -> str:
    titles = [words(attack, "title") or "" for attack in part.get("attacks") or ()]
    return ", ".join(title.replace(", ", " ") for title in titles)  # "LiRA, offline" is one


def skipped(found: Found) -> list[str]:
    """What was not tried, and why; one text a reason.

    >>> skipped({"skipped": [{"attack": name, "reason": "no images"} for name in ("copying", "scores")]})
    ['copying, scores: no images']
    """
    reasons: dict[str, list[str]] = {}
    for part in pick(found, "skipped") or ():
        reasons.setdefault(words(part, "reason") or "", []).append(words(part, "attack") or "")
    return [f"{', '.join(attacks)}: {reason}" for reason, attacks in reasons.items()]
