"""Run all attacks that apply to the releases of a finished run, and write their results to its folder.

:class:`LeakageConfig` names the attacks, with their options. The run is replayed to collect its releases
(:mod:`fedstill.attacks.transcript`). Each attack then gets the data that its adversary would have. The
results are stored next to the run's own, for its report.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fedstill.attacks.attack import ATTACKS, LEAKAGE_FILE, Attack, AttackResult, ComparisonColumn, Target
from fedstill.attacks.transcript import ObservedRelease, load_run, replay_run
from fedstill.core.config_tables import read_value, to_table
from fedstill.core.errors import ArgumentError, FedstillError, MethodRefused, UnknownName
from fedstill.core.options import CheckedOptions, NonNegativeInt
from fedstill.core.progress import ProgressBar
from fedstill.core.run_writer import lock_folder, read_result, write_text
from fedstill.core.safe_console import SafeConsole
from fedstill.core.text_format import format_seconds, json_text, replace_nonfinite
from fedstill.core.version import __version__
from fedstill.protocol.method import method_name
from fedstill.protocol.payload_kinds import LABEL_MAPS, PRIVATE_DATA
from fedstill.runs.run import machine

RESERVED_KEYS = ("attacks", "seed")  # keys that are not attacks
IMAGES_FILE = "leakage.safetensors"


def run_attacks(
    folder: Path, config: LeakageConfig | None = None, *, command: str = "", progress: bool = False
) -> dict[str, Any]:
    """Attack a finished run, and add the results to its folder and its report.

    Args:
        folder: of a finished run.
        config: attacks and their options; None: the defaults.
        command: command line that repeats the attacks, for the report.
        progress: show progress on standard error; without a terminal, one line per attack.

    Returns:
        The contents of ``leakage.json``.

    Raises:
        FedstillError: the folder holds no finished run, or its data are not on this machine.
    """
    config = config or LeakageConfig()
    console, start = SafeConsole(stderr=True, quiet=not progress, highlight=False), time.monotonic()
    results: dict[str, AttackResult] = {}
    skipped: list[tuple[str, str]] = []
    with ProgressBar(progress) as bars:
        steps = itertools.count()

        def show_progress(message: str) -> None:
            if console.is_terminal:
                bars.update("attacks", next(steps), len(config.attacks) + 1, message)
            else:
                bars.update("attacks", 0, 0, message)  # repeated while it takes long
                console.print(f"{message}  after {format_seconds(time.monotonic() - start)}", soft_wrap=True)

        show_progress("repeating the run to record its releases")
        run, kept_releases = (
            load_run(folder),
            {attack.registered_name: list[ObservedRelease]() for attack in config.attacks},
        )

        def keep_release(release: ObservedRelease) -> None:
            for attack in config.attacks:
                if attack.keeps_release(release):
                    kept_releases[attack.registered_name].append(release)

        max_rows = max(attack.transcript_rows for attack in config.attacks)
        experiment, transcript, disagreement = replay_run(folder, run, max_rows, keep_release)
        for attack in config.attacks:
            name = attack.registered_name
            show_progress(f"attack: {name}")
            reason = attack.refusal(experiment.side)
            try:
                if reason is None:
                    results[name] = attack.run(
                        Target(run, experiment, transcript, kept_releases[name], config.seed)
                    )
                    skipped += results[name].skipped
            except FedstillError as error:
                if isinstance(error, ArgumentError) and error.name in attack.user_errors:
                    raise
                reason = error.reason if isinstance(error, MethodRefused) else str(error)
            if reason is not None:
                skipped.append((name, reason))
    result = read_result(folder / "result.json")
    leakage: dict[str, Any] = {
        "fedstill": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "command": command,
        "seconds": time.monotonic() - start,
        "config": config.to_table(),
        "method": method_name(experiment.method),
        "title": experiment.method.title,
        "task": experiment.task.name,
        "epsilon": _largest_epsilon(result),
        "releases": result["releases"],
        "audit": disagreement,
        "skipped": [{"attack": name, "reason": reason} for name, reason in skipped],
        "attacks": [
            attack_record(attack, results[attack.registered_name].part)
            for attack in config.attacks
            if attack.registered_name in results
        ],
    }
    leakage["sentence"] = leakage_sentence(leakage)
    leakage = replace_nonfinite(leakage)
    images = {
        f"{name}.{stack}": images
        for name, attack in results.items()
        for stack, images in attack.pictures.items()
    }
    text = json_text(leakage) + "\n"
    with lock_folder(folder, "run"):
        (folder / LEAKAGE_FILE).unlink(missing_ok=True)  # never mix the results and images of two attacks
        (folder / IMAGES_FILE).unlink(missing_ok=True)
        if images:
            save_file(images, str(folder / IMAGES_FILE))
        write_text(folder / LEAKAGE_FILE, text)
    return leakage


@dataclass(frozen=True)
class LeakageConfig(CheckedOptions):
    """Attacks of ``fedstill attack``.

    Args:
        attacks: attacks with their options, in order; each attack once.
        seed: seed of every random number of the attacks.

    >>> [attack.registered_name for attack in LeakageConfig().attacks]
    ['inversion', 'membership', 'memorization', 'counts', 'labels', 'properties']
    """

    attacks: tuple[Attack, ...] = field(
        default_factory=lambda: tuple(ATTACKS[name]() for name in ATTACKS.builtin)
    )
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [attack.registered_name for attack in self.attacks]
        if not names or len(set(names)) < len(names):
            raise ArgumentError("attacks", names, f"some of {', '.join(ATTACKS)}, each once")

    @classmethod
    def quick(cls) -> LeakageConfig:
        """Return all attacks with few models, victims and permutations, for a first look.

        The results are weaker than with the defaults: 4 shadow models detect fewer members than 16.
        """
        options: Mapping[str, Mapping[str, Any]] = {
            "membership": {"shadows": 4, "records": 500, "responses": 500},
            "inversion": {"victims": 1, "attacks": ("idlg",)},
            "memorization": {"images": 300, "permutations": 199, "pairs": 4},
            "properties": {"shadows": 8},
        }
        return cls(tuple(ATTACKS[name](**options.get(name, {})) for name in ATTACKS.builtin))

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> LeakageConfig:
        """Read attacks from a TOML table: their names, and one table of options for each.

        Raises:
            FedstillError: an unknown key, options of an attack that is not chosen, or an invalid value.

        >>> chosen = LeakageConfig.from_table({"attacks": ["membership"], "membership": {"shadows": 4}})
        >>> chosen.to_table()["membership"]["shadows"]
        4
        """
        table = {ATTACKS.canonical_name(key): value for key, value in table.items()}
        named = read_value(tuple[str, ...], table.get("attacks", list(ATTACKS.builtin)), "leakage.attacks")
        names = [ATTACKS.canonical_name(name) for name in named]
        kinds = {name: ATTACKS[name] for name in names}
        for key, value in table.items():
            if key in RESERVED_KEYS or key in kinds:
                continue
            if key in ATTACKS:
                raise ArgumentError(f"leakage.{key}", value, "none, as it is not among leakage.attacks")
            raise UnknownName(
                "key", f"leakage.{key}", [f"leakage.{name}" for name in (*RESERVED_KEYS, *kinds)]
            )
        attacks = tuple(read_value(kinds[name], table.get(name, {}), f"leakage.{name}") for name in names)
        return cls(attacks, read_value(int, table.get("seed", 0), "leakage.seed"))

    def to_table(self) -> dict[str, Any]:
        """Return a table that :meth:`from_table` reads."""
        named = {attack.registered_name: to_table(attack) for attack in self.attacks}
        return {"attacks": list(named), "seed": self.seed, **named}

    @property
    def comparison_columns(self) -> tuple[ComparisonColumn, ...]:
        """Columns of a comparison of attacked runs, first those with an axis for a figure."""
        ordered = sorted(self.attacks, key=lambda attack: not any(column.axis for column in attack.columns))
        return tuple(column for attack in ordered for column in attack.columns)


def attack_record(attack: Attack, part: Any) -> dict[str, Any]:
    """Return the entry of one attack in ``leakage.json``, with metrics and texts ready to show.

    Raises:
        ArgumentError: the attack's record is not JSON.
    """
    name, part = attack.registered_name, replace_nonfinite(part)
    try:
        json.dumps(part)
    except TypeError as error:
        raise ArgumentError(f"record of {name}", str(error), "JSON values") from error
    pictures = [asdict(table) for table in attack.pictures(part)]
    for strip in (strip for table in pictures for strip in table["strips"]):
        strip["stack"] = f"{name}.{strip['stack']}"
    return {
        "name": name,
        "title": attack.title,
        "sentence": attack.sentence(part),
        "strength": attack.describe_strength(part),
        "about": [list(line) for line in attack.explanations(part)],
        "rows": [{**asdict(row), "text": row.written} for row in attack.rows(part)],
        "columns": [asdict(column) for column in attack.columns],
        "notes": list(attack.notes),
        "pictures": pictures,
        "result": part,
    }


def leakage_sentence(leakage: Mapping[str, Any]) -> str:
    """Summarize the releases and the result of each attack.

    Args:
        leakage: contents of ``leakage.json``.

    >>> leakage_sentence({"title": "FedKD", "releases": ["logits"], "attacks": []})
    'FedKD: logits left the nodes. None of the attacks applied, which says nothing about others.'
    """
    released = ", ".join(leakage["releases"]) or "nothing"
    private_kinds = [kind for kind in (PRIVATE_DATA, LABEL_MAPS) if kind in leakage["releases"]]
    warning = (
        f" The {' and '.join(private_kinds)} left in plain form, so that no attack is needed."
        if private_kinds
        else ""
    )
    sentences = [attack["sentence"] for attack in leakage["attacks"] if attack["sentence"]]
    findings = " ".join(sentences) or "None of the attacks applied, which says nothing about others."
    disagreement = leakage.get("audit")
    notice = (
        f"The run could not be repeated exactly ({disagreement}): the results are of another run. "
        if disagreement
        else ""
    )
    return f"{notice}{leakage['title']}: {released} left the nodes.{warning} {findings}"


def _largest_epsilon(result: Mapping[str, Any]) -> float | None:
    """Largest epsilon of the nodes; None if a node has none."""
    epsilons = [node.get("epsilon") for node in (result.get("privacy") or {}).get("nodes", [])]
    return max(epsilons) if epsilons and None not in epsilons else None
