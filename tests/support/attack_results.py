"""Handmade results of attacks, as in ``leakage.json``."""

from __future__ import annotations

from typing import Any

from fedstill.attacks.attack_runner import attack_record
from fedstill.attacks.gradient_inversion import GradientInversion
from fedstill.attacks.label_counts import LabelCounts
from fedstill.attacks.membership_inference import MembershipInference
from fedstill.attacks.memorization import Memorization

Part = dict[str, Any]


def attack_entries(
    inversion: Any = None, membership: Any = None, memorization: Any = None, counts: Any = None
) -> list[Part]:
    """Return the entries of the given attacks."""
    parts = (
        (GradientInversion(), inversion),
        (MembershipInference(), membership and {"targets": membership}),
        (Memorization(), memorization),
        (LabelCounts(), counts and {"nodes": counts}),
    )
    return [attack_record(attack, part) for attack, part in parts if part]


def interval(value: float, low: float = 0.0, high: float = 1.0) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def inversion_result(
    title: str, mean: float, std: float = 0.0, each: list[float] | None = None, right: int = 3
) -> Part:
    psnr = {"mean": mean, "std": std, "per_image": each or []}
    labels = {"right": right, "of": 4}
    return {"name": title.split()[0].lower(), "title": title, "psnr": psnr, "labels": labels, "seconds": 3.1}


def inversion(*attacks: Part, **changes: Any) -> Part:
    record = {"shared": "all parameters", "known": "the weights sent to the node, and the protocol"}
    counts = {"images": 1, "round": 0, "steps": 1, "optimizer": "sgd", "victims": 4, "smallest": 7}
    rest = {"guess": 9.84, "attacks": list(attacks), "best": attacks[0]["name"]}
    return {**record, **counts, **rest, **changes}


def rate_record(rate: float, share: dict[str, float], accused: int = 1, count: int = 3) -> Part:
    """Return the record of members found at a rate of false alarms."""
    counts = {"allowed": accused, "accused": accused, "found": count, "members": 1437, "others": 360}
    return {"rate": rate, "true_positives": share, **counts}


def member_attack(title: str, auc: dict[str, float], *rates: Part) -> Part:
    return {"name": title.lower(), "title": title, "auc": auc, "at": list(rates)}


def target(of: str, *attacks: Part, **changes: Any) -> Part:
    counts = {"members": 1437, "others": 360, "shadows": 16, "trained": "federations"}
    sees = {"target": of, "view": "the student's outputs about any input"}
    return {**sees, **counts, "attacks": list(attacks), "best": attacks[0]["name"], **changes}


def space(extractor: str, **changes: Any) -> Part:
    counts = {"generated": 1000, "private": 1437, "held_out": 360, "permutations": 999}
    nearer = {"statistic": 0.012, "expected": 0.001, "p_value": 0.034, "share": 0.582, "low": 0.5512}
    rest = {
        "high": 0.6122,
        "z": -3.21,
        "z_p_value": 0.00066,
        "held_out_ratio": 0.71,
        "caveats": [],
        "pairs": [],
    }
    return {"extractor": extractor, **counts, **nearer, **rest, **changes}


def memorization(*spaces: Part, **changes: Any) -> Part:
    record = {"images": 1000, "of": "inputs that the server sent to nodes"}
    return {**record, "spaces": list(spaces), "distances": [], "scores": None, **changes}


def counts_node(node: str, exact: bool, off: float = 0.0, **changes: Any) -> Part:
    errors = {"total_variation": off, "largest_error": off, "largest_class": "one", "size_error": 0.0}
    return {"node": node, "exact": exact, **errors, "absent": [], "reported_absent": [], **changes}
