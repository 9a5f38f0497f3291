"""How a run was computed, on what, for how long, and by which files: what its page says at its end."""

from __future__ import annotations

from fedstill.core.words import human_bytes, human_seconds
from fedstill.report.result import Result
from fedstill.report.sentence import count_word
from fedstill.report.tables import Fact


def _engine(result: Result) -> str | None:
    threads = result.engine.threads
    parts = [result.engine.name, result.engine.device, result.engine.precision]
    if threads is not None:
        parts.append(f"{threads:,} thread{'' if threads == 1 else 's'}")
    return ", ".join(part for part in parts if part) or None


def _grouping(result: Result) -> list[str]:
    lines = []
    for phase, groups in result.engine.groups.items():
        sizes = [len(group) for group in groups]
        stacked = [size for size in sizes if size > 1]
        alone = sizes.count(1)
        parts = []
        if stacked:
            many = f"{count_word(len(stacked))} group{'' if len(stacked) == 1 else 's'}"
            parts.append(f"{sum(stacked):,} nodes stacked in {many}")
        if alone:
            parts.append(f"{alone:,} node{'' if alone == 1 else 's'} one by one")
        if parts:
            in_rounds = phase == "distillation" and result.turn == "round"
            name = "rounds" if in_rounds else phase.replace("_", " ")
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def facts(result: Result) -> list[Fact]:
    """What else the result tells of the run; a run from Python records less."""
    spans = result.seconds
    seconds = {
        "local training": spans.local_training,
        "centralised": spans.centralised,
        "rounds" if result.turn == "round" else "distillation": spans.distillation,
    }
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    memory, date = result.peak_memory_mb, result.date or ""
    told = [
        Fact("Seed", None if result.seed is None else str(result.seed)),
        Fact("Date", date.replace("T", " ", 1).replace("+00:00", " UTC")),
        Fact("Machine", result.machine),
        Fact("Engine", _engine(result)),
        Fact("Nodes computed", "\n".join(_grouping(result))),
        Fact("Files", "\n".join(_files(result))),
        Fact("Versions", versions or result.fedstill),
        Fact(
            "Time",
            ", ".join(f"{of} {human_seconds(took)}" for of, took in seconds.items() if took is not None),
        ),
        Fact("Peak memory", None if memory is None else f"{memory:,.0f} MB"),
    ]
    return [fact for fact in told if fact.value]


def _files(result: Result) -> list[str]:
    if result.files is None:
        return []
    asked = result.files.questions
    size, inputs = human_bytes(asked.bytes), asked.public_inputs
    lines = [f"questions: {size} with {inputs:,} public inputs, SHA-256 {asked.sha256}"]
    for node in result.files.answers:
        known = "the node's own" if node.key_known else "which nobody compared"
        end = ""
        if node.asker_known is not None:
            end = f"; it had {'' if node.asker_known else 'not '}compared the server's key"
        size = human_bytes(node.bytes)
        lines.append(f"{node.node}: {size}, signed by key {node.signed_by}, {known}{end}")
    return lines
