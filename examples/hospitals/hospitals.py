"""Three hospitals and a university in a federation on one machine, with the steps for four machines.

    python examples/hospitals/hospitals.py [FOLDER [PORT]]

Each party has its own working folder under FOLDER and follows docs/deploy.md there; this script runs the
commands of all parties. The hospitals store the same kind of images in different forms (an .npz, a folder of
images, a table) and use different networks. No hospital accesses another's folder. The university has test
images, and public images without use of their labels. The result is a student of all hospitals, and a report.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tomli_w
from PIL import Image
from sklearn.datasets import load_digits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOSPITALS = ("north", "east", "west")
MODELS = {"north": "small-cnn:16", "east": "lenet5", "west": "mlp:64"}
PATIENCE = 60.0  # seconds until all nodes must have joined


def main() -> None:
    """Set up the federation, run FedKD, and stop all processes."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", nargs="?", default="runs/hospitals")
    parser.add_argument("port", nargs="?", default="8002")
    given = parser.parse_args()
    home, port = Path(given.folder).resolve(), given.port
    if home.exists():
        sys.exit(f"{home} exists: choose another folder")
    university = home / "university"
    for party in ("university", *HOSPITALS):
        (home / party).mkdir(parents=True)
    bring_data(home)

    say("The university creates a federation and gives each hospital its startup kit.")
    parties = ["--host", "localhost", "--port", port, "--nodes", *HOSPITALS]
    fedstill(university, "server", "init", "federation", *parties)
    (university / "federation" / "server.toml").write_text('data = [".."]\n')  # where runs may read test data
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.append(start(university, "server", "start", "federation"))
        for hospital in HOSPITALS:
            say(f"At {hospital}: a node, its data, its model.")
            own = home / hospital
            fedstill(own, "node", "init", "node", "--name", hospital)
            shutil.move(str(university / "federation" / "nodes" / hospital), own / "node" / "kit")
            configure(own / "node" / "node.toml", hospital)
            fedstill(own, "node", "check", "node")
            processes.append(start(own, "node", "start", "node"))
        wait_for_nodes(university)
        say("The university runs FedKD: it queries the nodes about public images, and trains the student.")
        run = [
            "run",
            "fedkd.toml",
            "--engine",
            "flare",
            "--startup-kit",
            "federation/admin",
            "--out",
            "result",
        ]
        fedstill(university, *run)
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)
    say(f"The report: {university / 'result' / 'report.html'}")
    say(f"All releases of a hospital: fedstill audit show {home / 'north' / 'node'}")


def bring_data(home: Path) -> None:
    """Write each hospital's part of the digits, the public images, and the university's fifth for testing."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 8, 8) / 16 * 255).round().astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(labels))
    test, public, rest = order[:360], order[360:660], order[660:]
    np.savez(
        home / "university" / "test.npz",
        images=pixels[test],
        labels=labels[test],
        split=np.ones(len(test), dtype=int),
        classes=np.array([str(digit) for digit in range(10)]),
    )
    np.savez(home / "university" / "public.npz", images=pixels[public], labels=labels[public])
    north = rest[labels[rest] < 4]  # the hospitals have different classes
    east = rest[(labels[rest] >= 3) & (labels[rest] < 8)]
    west = rest[(labels[rest] >= 6) | (labels[rest] < 1)]

    np.savez(home / "north" / "scans.npz", images=pixels[north], labels=labels[north])

    for row in east:
        folder = home / "east" / "pictures" / str(labels[row])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[row]).save(folder / f"{row}.png")

    with (home / "west" / "table.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["digit", *(f"p{index}" for index in range(64))])
        for row in west:
            table.writerow([labels[row], *pixels[row].ravel()])

    run = {
        "name": "hospitals",
        "data": {"name": "test.npz"},
        "public": {"name": "public.npz"},
        "method": {"name": "fedkd"},
        "student": {"model": "small-cnn:16"},
        "link": {"wait": 60.0},
    }
    (home / "university" / "fedkd.toml").write_text(tomli_w.dumps(run), encoding="utf-8")


def configure(path: Path, hospital: str) -> None:
    """Set data and model in node.toml, as the owner would with an editor."""
    settings = tomllib.loads(path.read_text(encoding="utf-8"))
    settings["data"] |= {
        "north": {"source": "npz", "path": "../scans.npz"},
        "east": {"source": "folder", "path": "../pictures"},
        "west": {"source": "csv", "path": "../table.csv", "label": "digit"},
    }[hospital]
    settings["model"]["name"] = MODELS[hospital]
    settings["local"]["epochs"] = 15.0
    settings["compute"]["threads"] = 1  # four parties share this machine
    path.write_text(tomli_w.dumps(settings), encoding="utf-8")


def wait_for_nodes(university: Path) -> None:
    """Wait until all three nodes have joined."""
    end = time.monotonic() + PATIENCE
    while True:
        status = command("server", "status", "federation")
        output = subprocess.run(status, cwd=university, capture_output=True, text=True, check=False).stdout
        if all(f"  {hospital}  seen" in output for hospital in HOSPITALS):
            print(output, end="", flush=True)
            return
        if time.monotonic() > end:
            sys.exit(f"the hospitals did not join within {PATIENCE:g} s:\n{output}")
        time.sleep(3.0)


def command(*words: str) -> list[str]:
    """Return a fedstill command as a list of words."""
    return [sys.executable, "-m", "fedstill", *words]


def fedstill(folder: Path, *words: str) -> None:
    """Run a command in a folder and show its output."""
    print(f"\n{folder.name}$ fedstill {shlex.join(words)}", flush=True)
    if subprocess.run(command(*words), cwd=folder, check=False).returncode:
        sys.exit(f"`fedstill {shlex.join(words)}` failed in {folder}")


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a command in the background; its output goes to a log file."""
    print(f"\n{folder.name}$ fedstill {shlex.join(words)} &", flush=True)
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    log = (folder / f"{words[0]}.out").open("wb")
    return subprocess.Popen(command(*words), cwd=folder, stdout=log, stderr=log, env=quiet)


def say(text: str) -> None:
    """Print a comment."""
    print(f"\n# {text}", flush=True)


if __name__ == "__main__":
    main()
