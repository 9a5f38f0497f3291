"""
Images recovered by gradient inversion
======================================

Releasing only parameters is no protection by itself. An update depends on the images that the node trained
on, and a curious server can search for images that produce the observed update. This is the easiest case for
the attack: a node with one image that takes one step.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.torch import load_file

# %%
# A short run of FedAvg on the command line, and the attack on it. The attack repeats the run with a few more
# nodes, which have one image each, and attacks their releases.

folder = Path(tempfile.mkdtemp()) / "run"
run = f"run digits-fedavg --nodes.models sigmoid-lenet --student.model sigmoid-lenet --out {folder} --quiet"
short = "--method.rounds 1 --split.nodes 2 --nodes.local.epochs 0.1 --nodes.local.augment none"
plain = "--nodes.local.optimizer sgd --evaluation.centralized false --data.train_limit 200"
attack = f"attack {folder} --attacks inversion --inversion.attacks idlg --quiet"
for words in (f"{run} {short} {plain}", attack):
    subprocess.run([sys.executable, "-m", "fedstill", *words.split()], check=True, capture_output=True)

# %%
# Private images (bottom), and the images that the server recovered from one update each (top).

pictures = load_file(folder / "leakage.safetensors")
rows = [name for name in pictures if pictures[name].ndim == 4]
figure, axes = plt.subplots(len(rows), 4, figsize=(5, 1.3 * len(rows)))
for row, name in zip(axes, rows, strict=True):
    for axis, image in zip(row, pictures[name], strict=False):
        axis.imshow(image[0], cmap="gray", vmin=0, vmax=255)
        axis.set_axis_off()
    row[0].set_title(
        {"inversion.idlg": "recovered (iDLG)", "inversion.original": "private"}[name], loc="left"
    )
figure.tight_layout()
plt.show()
