"""Milliseconds per charge to the audit log, by the number of existing entries.

    python benchmarks/audit_log.py                   # durable, in a file; 0, 10 000 and 100 000 entries
    python benchmarks/audit_log.py --folder /data    # on the disk that will hold the log
    python benchmarks/audit_log.py --save

A gate charges a release before it returns it: it looks up the spent budget, writes the entry with its
hash, waits until the entry is on disk, and writes the head. The arithmetic of the budget is not included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

from fedstill.node.audit_entries import Entry
from fedstill.node.audit_log import AuditLog

RUNS, EVENTS = 10, 20  # of the existing rows: different runs, different costs


def entry(number: int) -> Entry:
    """Return an entry like that of FedIOD's query."""
    return Entry(
        run=f"run-{number % RUNS}",
        payer="these data",
        node="clinic",
        number=number,
        query="predict_logits",
        part="response",
        content_hash=f"{number:032x}",
        history_hash=f"{number + 1:032x}",
        up={"logits": 2560, "critic": 256},
        rule="logits: votes of 10 teachers, Gaussian noise of 20 votes; critic: learned with DP-SGD",
        cost={f"gaussian({14.1 + number % EVENTS})": 1, "gaussian(1.1, rate=0.0123)": 5},
    )


def measured(path: Path, rows: int, charges: int, durable: bool) -> dict[str, Any]:
    """Time charges on top of some existing rows, then time opening the file again."""
    with closing(AuditLog(path, durable=False)) as audit, audit._database.write_transaction():
        for number in range(rows):  # one transaction; only the charges after it are timed
            audit._insert_entry(entry(number))
    times = []
    with closing(AuditLog(path, durable=durable)) as audit:
        busy = time.process_time()
        for number in range(rows, rows + charges):
            start = time.perf_counter()
            audit.charge(entry(number))
            times.append(1000 * (time.perf_counter() - start))
        busy = time.process_time() - busy
    start = time.perf_counter()
    AuditLog(path).close()
    opening = time.perf_counter() - start
    cuts = statistics.quantiles(times, n=100)
    return {
        "rows": rows,
        "p50_ms": cuts[49],
        "p99_ms": cuts[98],
        "mean_ms": statistics.fmean(times),
        "processor_ms": 1000 * busy / charges,  # the rest is waiting for the disk and for the processor
        "opening_s": opening,
        "file_mb": path.stat().st_size / 1e6,
    }


def synced(folder: Path, times: int) -> float:
    """Return the median milliseconds that the disk takes to sync 4 kB appended to a file."""
    each = []
    with (folder / "synced").open("wb", buffering=0) as file:
        for _ in range(times):
            start = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            each.append(1000 * (time.perf_counter() - start))
    return statistics.median(each)


def main() -> None:
    """Measure, print a Markdown table and optionally save it."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 10_000, 100_000])
    parser.add_argument("--charges", type=int, default=2000, help="timed, at each size")
    parser.add_argument("--folder", type=Path, help="where; else where temporary files are")
    parser.add_argument(
        "--not-durable", action="store_true", help="as simulations do: no sync at each charge"
    )
    parser.add_argument("--save", action="store_true", help="write results/audit_log-DEVICE-DATE.json")
    options = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sync = synced(Path(folder), 500)
        for rows in options.rows:
            path = Path(folder) / f"{rows}.sqlite"
            table.append(measured(path, rows, options.charges, not options.not_durable))
            print(table[-1], flush=True)
    about = {
        "durable": not options.not_durable,
        "charges": options.charges,
        "sync_ms": sync,
        "load": os.getloadavg()[0],  # other work on the machine makes each wait longer
        "nice": os.nice(0),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, SQLite {sqlite3.sqlite_version}",
        "date": date.today().isoformat(),
    }
    print(f"\n{about}\n")
    print("| rows before | ms per charge, p50 | p99 | processor time | s to open and verify |")
    print("|---|---|---|---|---|")
    for row in table:
        charge = f"{row['p50_ms']:.2f} | {row['p99_ms']:.2f} | {row['processor_ms']:.2f}"
        print(f"| {row['rows']:,} | {charge} | {row['opening_s']:.2f} |")
    if options.save:
        folder_of_results = Path(__file__).parent / "results"
        file = folder_of_results / f"audit_log-cpu-{about['date']}.json"
        file.write_text(json.dumps({**about, "rows": table}, indent=2) + "\n", encoding="utf-8")
        print(f"\nSaved as {file}.")


if __name__ == "__main__":
    main()
