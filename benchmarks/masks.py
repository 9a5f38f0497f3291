"""Seconds for the masks of one secure sum at a node and at the server, by numbers of nodes and of values.

    python benchmarks/masks.py --save

Runs on one thread, one node after the other, without certificates, which are read once per run. With
``recover``, the sum tolerates nodes that drop out: each node adds a mask of its own, and the server removes
all of these.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from fedstill.node.policy import PolicyConfig
from fedstill.node.secure_aggregation import SumHistory, SumMasks
from fedstill.protocol.secure_aggregation import (
    SumRequest,
    add_contributions,
    from_ring,
    mask_tensor,
    to_ring,
)

NODES, VALUES, ROUNDS = (3, 5, 20, 50), (640, 196_608, 1_000_000), 3


class Unproved:
    """Key cards without certificates."""

    def sign(self, claim: bytes, value: bytes) -> bytes:
        return value

    def verify(self, card: bytes, name: str, claim: Callable[[bytes], bytes]) -> bytes:
        return card


def measured(count: int, values: int, recover: bool, folder: Path) -> dict[str, float]:
    """Return the fastest of a few sums: milliseconds of a node and the server, and bytes sent per node."""
    names = [f"n{index}" for index in range(count)]
    policy = PolicyConfig(sums_may_differ=True)
    masks = {
        name: SumMasks({}, name, Unproved(), policy, SumHistory(folder / f"{count}-{name}"))  # type: ignore[arg-type]
        for name in names
    }
    start = time.perf_counter()
    cards = {name: each.make_key_card() for name, each in masks.items()}
    for each in masks.values():
        each.exchange_keys(cards)
    met = (time.perf_counter() - start) / count
    draw = torch.Generator().manual_seed(0)
    own = {name: torch.randn(values, generator=draw) for name in names}
    node, server = [], []
    for number in range(ROUNDS):
        call, added = SumRequest(number, tuple(names), recover), []
        start = time.perf_counter()
        for name in names:
            mask = masks[name].mask_function(masks[name].admit("q", call), "q", ("content",))
            added.append({"x": mask(to_ring(own[name]), 0)})
        node.append((time.perf_counter() - start) / count)
        start = time.perf_counter()
        ring = add_contributions(added)["x"]
        if recover:
            words = {name: masks[name].confirm_survivors(number, names) for name in names}
            for name in names:
                agreements = {other: words[other][name] for other in names if other != name}
                ring -= mask_tensor(
                    bytes.fromhex(masks[name].reveal_mask_keys(number, agreements)[name]), 0, ring.shape
                )
        server.append(time.perf_counter() - start)
        assert (from_ring(ring) - torch.stack(list(own.values())).double().sum(0)).abs().max() < 1e-6
    return {
        "nodes": count,
        "values": values,
        "recover": recover,
        "meet_ms": 1e3 * met,
        "node_ms": 1e3 * min(node),
        "server_ms": 1e3 * min(server),
        "bytes": 8 * values,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write results/masks-DATE.json")
    save_it = parser.parse_args().save
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in NODES:
            for values in VALUES:
                for recover in (False, True):
                    row = measured(count, values, recover, Path(folder))
                    rows.append(row)
                    print(json.dumps({key: round(value, 2) for key, value in row.items()}), flush=True)
    if save_it:
        about = {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        content = {"date": date.today().isoformat(), "machine": about, "rows": rows}
        path = Path(__file__).parent / "results" / f"masks-cpu-{content['date']}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
