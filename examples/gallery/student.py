"""
Using the student
=================

A run saves its student in a file that also describes its inputs. ``fedstill.load`` returns the student with
its preprocessing: it takes raw pixels, and refuses inputs that are already normalized. Here it predicts
rotated digits, which were in no training data: its confidence and its accuracy by angle.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from scipy.ndimage import rotate
from sklearn.datasets import load_digits

import fedstill
from fedstill.models import SmallCNN

# %%
# A run with a folder: three nodes, FedKD. The federation takes normalized inputs;

digits = load_digits()
pixels = torch.tensor(digits.images * 255 / 16).round().to(torch.uint8).unsqueeze(1)  # 0 to 255
y = torch.tensor(digits.target)
x = pixels / 127.5 - 1  # from -1 to 1
parts = y[:1000].argsort(stable=True).view(20, 50)  # blocks of equal digits
parts = [parts[node::3].flatten() for node in range(3)]

torch.manual_seed(0)
home = Path(tempfile.mkdtemp())
outcome = fedstill.distil(
    data=[(x[part], y[part]) for part in parts],
    models=[SmallCNN((1, 8, 8), 10, width=8) for _ in parts],
    student=SmallCNN((1, 8, 8), 10, width=8),
    test=(x[1300:], y[1300:]),
    classes=10,
    public=x[1000:1300],
    method=fedstill.FedKD(student=fedstill.StudentTraining(epochs=40)),
    local=fedstill.LocalConfig(epochs=10),
    every=0,
    out=home / "run",
)

# %%
# the loaded student takes pixels.

student = fedstill.load(home / "run")
angles, right, sure = range(0, 91, 10), [], []
for angle in angles:
    rotated = rotate(pixels[1300:].numpy(), angle, axes=(2, 3), reshape=False, order=1)
    probabilities = student.probabilities(torch.as_tensor(rotated))
    right.append(100 * (probabilities.argmax(1) == y[1300:]).float().mean().item())
    sure.append(100 * probabilities.amax(1).mean().item())

# %%
# The student learned from softened predictions, and is underconfident at small angles. From forty degrees on
# it is overconfident.

figure, axis = plt.subplots(figsize=(6, 3))
axis.plot(angles, sure, "--", color="C7", label="confidence")
axis.plot(angles, right, "o-", label="accuracy")
axis.set(xlabel="rotation, degrees", ylabel="percent", ylim=(0, 100))
axis.legend()
figure.tight_layout()
plt.show()
