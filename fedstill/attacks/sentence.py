"""What attacks on a run got, in sentences that whoever is in charge of data understands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.protocol.kinds import LABEL_MAPS, PRIVATE_DATA


def sentence(leakage: Mapping[str, Any]) -> str:
    """What left, and what each attack got, at its strength.

    Args:
        leakage: what ``leakage.json`` holds.

    >>> sentence({"title": "FedKD", "leaves": ["logits"], "attacks": []})
    'FedKD: logits left the nodes. None of the attacks applied, which says nothing about others.'
    """
    left = ", ".join(leakage["leaves"]) or "nothing"
    held = [kind for kind in (PRIVATE_DATA, LABEL_MAPS) if kind in leakage["leaves"]]
    known = f" Whoever has the {' and '.join(held)} needs no attack." if held else ""
    told = [attack["sentence"] for attack in leakage["attacks"] if attack["sentence"]]
    got = " ".join(told) or "None of the attacks applied, which says nothing about others."
    wrong = leakage.get("audit")
    other = (
        f"The run could not be repeated as it was ({wrong}): what follows is of another run. "
        if wrong
        else ""
    )
    return f"{other}{leakage['title']}: {left} left the nodes.{known} {got}"
