"""Log metrics of a run to TensorBoard, MLflow, Weights & Biases or a custom tracker.

``tracker`` defines the interface :class:`Tracker`, the names of metrics, and the trackers of one run.
``trackers`` has the built-in ones. If a tracker fails, it is disabled and the run continues.

Track imports ``core`` only. To add a tracker, write one class in one file and add its name to
``tracker.TRACKERS``, or register it in a package of your own.
"""

from __future__ import annotations

from fedstill.track.tracker import TRACKERS, Tracker, final_metrics, flatten_metrics

__all__ = ["TRACKERS", "Tracker", "final_metrics", "flatten_metrics"]
