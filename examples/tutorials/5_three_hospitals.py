"""
Three hospitals on one machine
==============================

Three hospitals, which allow no connection to their data, train one model with a university. Each hospital has
its own folder, its own data, network and policy, and its own audit log. Everything is done with the command
``fedstill``, in processes that read only their party's folder, as four people at four machines would do it;
the files are carried from one to the other. The university writes **queries**, each hospital releases
**responses**, and the university distills a **student** from them.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

home = Path(tempfile.mkdtemp())
hospitals = ["north", "east", "west"]
for party in ("university", *hospitals):
    (home / party).mkdir()


def fedstill(party: str, words: str, show: bool = True) -> str:
    """Run a command in the folder of a party, and return what it prints."""
    command = [sys.executable, "-m", "fedstill", *words.split()]
    done = subprocess.run(command, cwd=home / party, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    if show:
        print(f"{party}$ fedstill {words}\n{done.stdout}")
    return done.stdout


# %%
# Who has what
# ------------
#
# The hospitals have different digits, the university has public images, and others to test the student.

digits = load_digits()
images = (digits.images * 255 / 16).round().astype(np.uint8)
order = np.random.default_rng(0).permutation(len(images))
test, public, rest = order[:360], order[360:660], order[660:]
known = {"north": range(4), "east": range(3, 8), "west": (6, 7, 8, 9, 0)}

for hospital in hospitals:
    rows = rest[np.isin(digits.target[rest], list(known[hospital]))]
    np.savez(home / hospital / "data.npz", images=images[rows], labels=digits.target[rows])
    print(f"{hospital}: {len(rows)} images of the digits {sorted(known[hospital])}")
np.savez(home / "university" / "public.npz", images=images[public], labels=digits.target[public])
both = np.concatenate([public, test])  # split 1: test images
study = {"images": images[both], "labels": digits.target[both], "split": np.repeat([0, 1], [300, 360])}
np.savez(home / "university" / "study.npz", **study, classes=np.array([str(digit) for digit in range(10)]))

# %%
# The university writes queries
# -----------------------------
#
# A run file has the method and the student, and nothing of any hospital. FedKD queries each node once, so all
# its queries fit into one file, which is signed. Each hospital gets a copy of it.

(home / "university" / "run.toml").write_text("""
name = "hospitals"
data.name = "study.npz"
public.name = "public.npz"
method = { name = "fedkd", z_max = 20.0, student.epochs = 60 }
student.model = "small-cnn:16"
""")
fedstill("university", "offline make run.toml")
for hospital in hospitals:
    for name in ("queries.safetensors", "queries.safetensors.sig"):
        shutil.copy(home / "university" / name, home / hospital)

# %%
# Each hospital answers
# ---------------------
#
# ``fedstill node init`` writes ``node.toml``, in which an owner sets data, model and policy; here the script
# does it for them. The networks differ. West takes no run while it has fewer than 100 records, and answers
# only the two queries of FedKD. An owner reads what the queries ask for before anything is computed;
# ``fedstill node check`` would list what the node releases to each method.

choices = {
    "north": {'name = "small-cnn"': 'name = "lenet5"'},
    "east": {'name = "small-cnn"': 'name = "mlp:64"'},
    "west": {
        "min_records = 0": "min_records = 100",
        'queries = ["*"]': 'queries = ["count_labels", "predict"]',
    },
}
for hospital in hospitals:
    fedstill(hospital, f"node init node --name {hospital}", show=False)
    path = home / hospital / "node" / "node.toml"
    text = path.read_text()
    common = {"online = true": "online = false", 'path = "data.npz"': 'path = "../data.npz"'}
    for old, new in {**common, **choices[hospital]}.items():
        assert text.count(f"\n{old}\n") == 1, old
        text = text.replace(f"\n{old}\n", f"\n{new}\n")
    path.write_text(text)
fedstill("north", "offline show queries.safetensors")

# %%
# Only ``offline answer`` reads the records: it trains the network, computes the responses, and lets them pass
# the node's gate, which checks the policy and writes each release to the audit log. What the hospital hands
# back is one file with a signature. (At a real hospital, ``--server-key`` verifies who wrote the queries.)

for hospital in hospitals:
    fedstill(hospital, "offline answer node queries.safetensors", show=hospital == "north")
    for path in (home / hospital).glob("responses-*"):
        shutil.copy(path, home / "university")

# %%
# The university distills
# -----------------------

responses = " ".join(f"responses-{hospital}.safetensors" for hospital in hospitals)
fedstill("university", f"offline combine {responses} --queries queries.safetensors --out student")

# %%
# An owner reads the audit log
# ----------------------------
#
# The owner need not believe the university, or this page: the log at north lists each release of north, with
# its bytes and its privacy cost. No mechanism is set, so the log states no guarantee. There is no record
# among the university's files.

fedstill("north", "audit show node")
print(sorted(path.name for path in (home / "university").iterdir()))

# %%
# No hospital has seen more than five digits. The student, which the university alone has, was tested on all
# ten.

result = json.loads((home / "university" / "student" / "result.json").read_text())
figure, axis = plt.subplots(figsize=(6, 2.2))
best = {name: 100 * np.isin(digits.target[test], list(known[name])).mean() for name in hospitals}
bars = axis.barh([*best, "student"], [*best.values(), result["accuracy"]], color=["C7"] * 3 + ["C0"])
axis.bar_label(
    bars, [f"at most {value:.0f}" for value in best.values()] + [f"{result['accuracy']:.1f}"], padding=3
)
axis.set(xlabel="accuracy on all digits, percent", xlim=(0, 115))
axis.invert_yaxis()
figure.tight_layout()
plt.show()

# %%
# What differs in a deployed federation
# -------------------------------------
#
# The steps above are those of a real exchange, but for the keys, which people compare by phone: `federation
# by files <../../docs/offline.md>`_. Where nodes may connect, they run on NVIDIA FLARE: each hospital starts
# ``fedstill node start``, which connects to the server with mutual TLS, waits for runs and answers them live.
# Then methods with many rounds work as well, such as FedIOD and FedAvg, and secure aggregation. Data, model,
# policy, gate and audit log are the same: `a federation across machines <../../docs/deploy.md>`_.
# ``examples/hospitals/hospitals.py`` does this on one machine. The options of an owner are in `policy and
# options of node.toml <../../docs/node-policy.md>`_.
