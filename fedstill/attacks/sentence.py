"""What attacks on a run got, in sentences that whoever is in charge of data understands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIVEN_TO_NOBODY = ("average of the nodes' models", "nodes' models")
GREY = 48.2  # dB of an error of one of 256 greys
NO_BETTER = 1.0  # dB above a guess, below which an attack is called no better than it


def sentence(leakage: Mapping[str, Any]) -> str:
    """One to four sentences: what left, and what each attack got, at its strength.

    Args:
        leakage: what ``leakage.json`` holds.

    >>> found = {"title": "FedKD", "leaves": ["logits"], "inversion": None, "membership": None}
    >>> sentence({**found, "copying": None, "counts": None})
    'FedKD: logits left the nodes. None of the attacks applied, which says nothing about others.'
    """
    left = ", ".join(leakage["leaves"]) or "nothing"
    held = [kind for kind in ("private data", "label maps") if kind in leakage["leaves"]]
    known = f" Whoever has the {' and '.join(held)} needs no attack." if held else ""
    told = [
        part(leakage[name])
        for name, part in (
            ("inversion", _inversion),
            ("membership", _membership),
            ("copying", _copying),
            ("counts", _counts),
        )
        if leakage.get(name)
    ]
    got = " ".join(told) or "None of the attacks applied, which says nothing about others."
    wrong = leakage.get("ledger")
    other = (
        f"The run could not be repeated as it was ({wrong}): what follows is of another run. "
        if wrong
        else ""
    )
    return f"{other}{leakage['title']}: {left} left the nodes.{known} {got}"


def _inversion(found: Mapping[str, Any]) -> str:
    best = next(attack for attack in found["attacks"] if attack["name"] == found["best"])
    db, guess = best["psnr"]["mean"], found["guess"]
    image = "one image" if found["images"] == 1 else f"{found['images']} images"
    above = "more than" if db > guess + NO_BETTER else "no better than"
    fine = " (an error of less than one of 256 greys)" if db > GREY else ""
    return (
        f"Had a node held no more than {image}, the case that is easiest for an attacker (the smallest here "
        f"holds {found['smallest']}, and its own updates were not attacked), {best['title']} would have "
        f"recovered images from {found['shared']} at {db:.1f} dB on the mean{fine}, {above} a guess without "
        f"any attack ({guess:.1f})."
    )


def _membership(found: list[Mapping[str, Any]]) -> str:
    parts = []
    for target in found:
        best = next(attack for attack in target["attacks"] if attack["name"] == target["best"])
        auc = best["auc"]
        hint = " (not told from chance)" if auc["low"] <= 0.5 else ""
        nobody = ", which nobody was given," if target["of"] in GIVEN_TO_NOBODY else ""
        parts.append(f"{100 * auc['value']:.0f} times in 100 by the {target['of']}{nobody}{hint}")
    return (
        f"Shown a record that was learned from and one that was not, the best attack picked the former "
        f"{' and '.join(parts)}; chance is 50."
    )


def _copying(found: Mapping[str, Any]) -> str:
    space = found["spaces"][0]
    pair = space["pairs"][0]["ratio"] if space["pairs"] else None
    fresh = (
        "" if space["fresh"] is None else f", where held-out images themselves come to {space['fresh']:.2f}"
    )
    closest = (
        "" if pair is None else f"; the closest lies at {pair:.2f} of its distance to a held-out one{fresh}"
    )
    depends = "depend on" if space["p_value"] < 0.01 else "do not measurably depend on"
    return (
        f"The images that the server made {depends} the nodes' own ones, by {space['extractor']} "
        f"(p = {space['p_value']:.2g}){closest}."
    )


def _counts(found: list[Mapping[str, Any]]) -> str:
    exact = sum(bool(node["exact"]) for node in found)
    if exact == len(found):
        return "Each node told exactly how many examples of each class it holds."
    worst = max(node["total_variation"] for node in found)
    return f"Nodes told their class counts with noise: up to {100 * worst:.0f} % are in a wrong class."
