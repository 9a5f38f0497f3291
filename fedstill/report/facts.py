"""How a run was computed, on what, for how long, and by which files: what its page says at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstill.core.words import human_bytes, human_seconds, number, pick, whole, words
from fedstill.report.sentence import count_word


def _engine(result: Mapping[str, Any]) -> str | None:
    """The engine with what it ran on: "auto, cpu, float32, 1 thread"."""
    threads = whole(result, "engine", "threads")
    parts = [words(result, "engine", key) for key in ("name", "device", "precision")]
    if threads is not None:
        parts.append(f"{threads:,} thread{'' if threads == 1 else 's'}")
    return ", ".join(part for part in parts if part) or None


def _grouping(result: Mapping[str, Any]) -> list[str]:
    """How the engine computed the nodes, a sentence a phase."""
    phases = pick(result, "engine", "groups")
    lines = []
    for phase, groups in phases.items() if isinstance(phases, Mapping) else ():
        sizes = (
            [len(group) for group in groups if isinstance(group, list)] if isinstance(groups, list) else []
        )
        stacked = [size for size in sizes if size > 1]
        alone = sizes.count(1)
        parts = []
        if stacked:
            many = f"{count_word(len(stacked))} group{'' if len(stacked) == 1 else 's'}"
            parts.append(f"{sum(stacked):,} nodes stacked in {many}")
        if alone:
            parts.append(f"{alone:,} node{'' if alone == 1 else 's'} one by one")
        if parts:
            in_rounds = phase == "distillation" and words(result, "turn") == "round"
            name = "rounds" if in_rounds else str(phase).replace("_", " ")
            lines.append(f"{name}: {', '.join(parts)}{_ratios(result, str(phase))}")
    return lines


def _ratios(result: Mapping[str, Any], phase: str) -> str:
    """What the engine measured before it chose, for each kind of node by the name of its first."""
    stored = pick(result, "engine", "stacked_over_one_by_one", phase)
    names = list(stored) if isinstance(stored, Mapping) else []
    measured = {str(name): ratio for name in names if (ratio := number(stored, name)) is not None}
    if not measured:
        return ""
    times = {name: f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}" for name, ratio in measured.items()}
    if len(times) == 1:
        return f" (stacked measured {next(iter(times.values()))} times as long)"
    each = ", ".join(f"{time} for {name} and its like" for name, time in times.items())
    return f" (stacked measured, times as long: {each})"


def facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What else the result tells of the run; a run from Python records less."""
    seconds = [
        f"{label} {human_seconds(value)}"
        for label, key in (
            ("local training", "local_training"),
            ("centralised", "centralised"),
            ("rounds" if words(result, "turn") == "round" else "distillation", "distillation"),
        )
        if (value := number(result, "seconds", key)) is not None
    ]
    versions = pick(result, "versions")
    memory = whole(result, "peak_memory_mb")
    date = words(result, "date")
    facts = [
        ("Seed", words(result, "seed")),
        ("Date", date and date.replace("T", " ", 1).replace("+00:00", " UTC")),
        ("Machine", words(result, "machine")),
        ("Engine", _engine(result)),
        ("Nodes computed", "\n".join(_grouping(result)) or None),
        ("Files", "\n".join(_files(result)) or None),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
         if isinstance(versions, Mapping) and versions else words(result, "fedstill")),
        ("Time", ", ".join(seconds) or None),
        ("Peak memory", None if memory is None else f"{memory:,} MB"),
    ]  # fmt: skip
    return [(name, value) for name, value in facts if value]


def _files(result: Mapping[str, Any]) -> list[str]:
    """What was carried by hand, and whose keys signed it, where questions and answers came as files."""
    asked, answers = pick(result, "files", "questions"), pick(result, "files", "answers")
    lines = []
    if isinstance(asked, Mapping):
        size, inputs = human_bytes(whole(asked, "bytes") or 0), whole(asked, "public_inputs") or 0
        lines.append(f"questions: {size} with {inputs:,} public inputs, SHA-256 {words(asked, 'sha256')}")
    for node in answers if isinstance(answers, list) else []:
        known = "the node's own" if pick(node, "key_known") else "which nobody compared"
        size = human_bytes(whole(node, "bytes") or 0)
        asker = pick(node, "asker_known")
        asked = "" if asker is None else f"; it had {'' if asker else 'not '}compared the server's key"
        lines.append(
            f"{words(node, 'node')}: {size}, signed by key {words(node, 'signed_by')}, {known}{asked}"
        )
    return lines
