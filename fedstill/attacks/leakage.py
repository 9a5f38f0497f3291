"""What an adversary gets of a run: every attack that applies to what left its nodes, in one file.

The run is done once more and heard (:mod:`fedstill.attacks.heard`); then each attack has what its adversary
would have, and the figures of all are written beside the run's own, for its report.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedstill.attacks import generated, label_counts, members, victims
from fedstill.attacks.config import LeakageConfig
from fedstill.attacks.heard import Heard, Replay, hear, replay
from fedstill.attacks.sentence import sentence
from fedstill.attacks.tap import Overheard
from fedstill.core.errors import ArgumentError, FedstillError, MethodRefused
from fedstill.core.records import holding, read_result, write_text
from fedstill.core.tables import as_table
from fedstill.core.version import __version__
from fedstill.protocol.method import method_name
from fedstill.runs.run import machine

FILE, PICTURES = "leakage.json", "leakage.safetensors"
PARTS = ("inversion", "membership", "copying", "distances", "scores", "counts")


def attack(
    folder: Path, config: LeakageConfig | None = None, *, command: str = "", progress: bool = False
) -> dict[str, Any]:
    """Attack a finished run, and add what was got to its folder and its report.

    Args:
        folder: of the run.
        config: which attacks, how strong; None is the default.
        command: that repeats it, for the report.
        progress: say on standard error what is being done.

    Returns:
        What ``leakage.json`` holds.

    Raises:
        FedstillError: there is no finished run in the folder, its data are not here, or no attack applies.
    """
    from rich.console import Console

    config = config or LeakageConfig()
    console, start = Console(stderr=True, quiet=not progress), time.monotonic()
    with console.status("the run once more, to hear what leaves") as status:
        again = replay(folder)
        experiment, heard, wrong = hear(folder, again, max(config.membership.answers, config.copying.images))
        found = _Found(again, experiment, heard, config)
        for name in config.attacks:
            status.update(name)
            getattr(found, name)()
    result = read_result(folder / "result.json")
    leakage: dict[str, Any] = {
        "fedstill": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "command": command,
        "seconds": time.monotonic() - start,
        "config": as_table(config),
        "method": method_name(experiment.method),
        "title": experiment.method.title,
        "task": experiment.task.name,
        "epsilon": _epsilon(result),
        "leaves": list(experiment.side.leaves()),
        "ledger": wrong,
        "skipped": found.skipped,
        **{part: found.told.get(part) for part in PARTS},
    }
    leakage["sentence"] = sentence(leakage)
    with holding(folder, "run"):
        (folder / FILE).unlink(missing_ok=True)  # figures and pictures of two attacks never stand together
        (folder / PICTURES).unlink(missing_ok=True)
        if found.pictures:
            save_file(found.pictures, str(folder / PICTURES))
        write_text(folder / FILE, json.dumps(_finite(leakage), indent=2, allow_nan=False) + "\n")
    return leakage


class _Found:
    """What the attacks on one run have got so far."""

    def __init__(self, again: Replay, experiment: Overheard, heard: Heard, config: LeakageConfig) -> None:
        self.again, self.experiment, self.heard, self.config = again, experiment, heard, config
        self.told: dict[str, Any] = {}
        self.pictures: dict[str, torch.Tensor] = {}
        self.skipped: list[dict[str, str]] = []

    def inversion(self) -> None:
        """Images from parameters."""

        def tried() -> None:
            got = victims.section(self.again, self.config.inversion, self.config.seed)
            self.told["inversion"] = got.told
            self.pictures.update(got.pictures)
            self.skipped += [_skip(attack, reason) for attack, reason in got.refused]

        self._try("inversion", tried)

    def membership(self) -> None:
        """Who was in the training data."""

        def tried() -> None:
            config = self.config.membership
            found = members.section(self.again, self.experiment, self.heard, config, self.config.seed)
            self.told["membership"] = found
            if len(found) == 1:
                reason = "no answers to questions left the nodes"
                if not config.answers or not config.shadows:
                    reason = "membership.answers or membership.shadows is 0"
                self.skipped.append(_skip("membership through answers", reason))

        self._try("membership", tried)

    def copying(self) -> None:
        """Generated images beside private ones."""
        inputs = self.heard.inputs
        if inputs is None or not self.heard.made or self.experiment.task.tokens:
            reason = "the server made no images that left it: it asked about none, or about public ones"
            self.skipped += [_skip(part, reason) for part in ("copying", "distances", "scores")]
            return

        def tried() -> None:
            got = generated.section(inputs, self.experiment, self.config.copying, self.config.seed)
            self.told |= {"copying": got.copying, "distances": got.distances, "scores": got.scores}
            self.pictures.update(got.pictures)
            self.skipped += got.skipped

        self._try("copying", tried)

    def counts(self) -> None:
        """Label counts that were told."""
        if not self.heard.counts:
            self.skipped.append(_skip("counts", "no node was asked for its label counts"))
            return
        self._try(
            "counts", lambda: self.told.update(counts=label_counts.counts(self.heard.counts, self.experiment))
        )

    def _try(self, attack: str, tried: Callable[[], None]) -> None:
        """An attack that does not apply is told of, with the reason."""
        try:
            tried()
        except MethodRefused as error:
            self.skipped.append(_skip(attack, error.reason))
        except ArgumentError as error:
            if error.name in ("inversion.round", "inversion.victims"):
                raise  # a mistake, and no property of the run
            self.skipped.append(_skip(attack, str(error)))
        except FedstillError as error:
            self.skipped.append(_skip(attack, str(error)))


def _skip(attack: str, reason: str) -> dict[str, str]:
    return {"attack": attack, "reason": reason}


def _epsilon(result: Mapping[str, Any]) -> float | None:
    """The largest of the nodes' epsilons; None where some node has none."""
    told = [node.get("epsilon") for node in (result.get("privacy") or {}).get("nodes", [])]
    return max(told) if told and None not in told else None


def _finite(value: Any) -> Any:
    """The same without numbers that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
