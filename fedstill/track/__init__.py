"""Who listens to a run's metrics as it goes on: trackers that people have already, and others' own.

``tracker`` says what one is and what is told to it; ``tensorboard``, ``mlflow`` and ``wandb`` are one each.
``listeners`` are those of one run: one that fails is let go, and the run goes on.

May import ``core`` alone. A newcomer adds a tracker: one class in one file, and its name in
``tracker.TRACKERS``; or in a package of their own.
"""

from __future__ import annotations

from fedstill.track.tracker import TRACKERS, Tracker, final_metrics, flatten_metrics

__all__ = ["TRACKERS", "Tracker", "flatten_metrics", "final_metrics"]
