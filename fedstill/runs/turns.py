"""The server's turns, one after the other, with what is measured and remembered on the way.

The same loop drives a simulation and a federation whose nodes are elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from fedstill.core.progress import Bars
from fedstill.core.records import Records
from fedstill.methods.server import Server

PHASES = {"step": "distillation", "epoch": "distillation", "round": "rounds"}  # in the progress bar


def drive(
    server: Server,
    records: Records,
    bars: Bars,
    *,
    metric: str,
    every: int | None,
    samples: int,
    pixels: Callable[[torch.Tensor], torch.Tensor],
    before: float,
    look: Callable[[], Mapping[str, float]],
    save: Callable[[], None],
) -> None:
    """Take a server's turns, from where it is to the last.

    Args:
        server: the method's program.
        records: of the run.
        bars: progress.
        metric: that the bar shows, if ``look`` finds it.
        every: turns between two looks; 0 is only at the end, None ten times a run.
        samples: generated inputs kept at each look, with the label maps that they were made from.
        pixels: normalised inputs (n, C, H, W) as bytes.
        before: seconds that earlier turns took.
        look: what is measured.
        save: remembers where the run stands.
    """
    total, start = server.total, time.monotonic()
    every = max(total // 10, 1) if every is None else every
    while server.done < total:
        losses = server.step()
        done = server.done
        line = {"phase": "distillation", "step": done, "losses": losses}
        line["seconds"] = round(before + time.monotonic() - start, 3)
        note = ""
        if done == total or (every and done % every == 0):
            told = look()
            line.update(told)
            note = f"{metric} {told[metric]:.1f} %" if metric in told else ""
            images = server.imagine(samples) if samples else None
            if images is not None:
                records.samples[f"{done:06d}"] = pixels(images.cpu())
                maps = server.imagined_from(samples)
                if maps is not None:
                    # A copy: a file takes no two names for one memory.
                    records.samples[f"{done:06d}.maps"] = maps.cpu().contiguous().clone()
        records.metric(line)
        bars.show(PHASES[server.unit], done, total, note)
        if records.due():
            save()
