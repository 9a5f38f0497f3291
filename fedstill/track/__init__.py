"""Log metrics of a run to TensorBoard, MLflow, Weights & Biases or a custom tracker.

``trackers`` defines the interface :class:`Tracker`, the names of metrics, the built-in trackers, and the
trackers of one run. If a tracker fails, it is disabled and the run continues.

Track imports ``core`` only. To add a tracker, write a class and add its name to ``trackers.TRACKERS``, or
register it in a package of your own.
"""

from __future__ import annotations

from fedstill.track.trackers import TRACKERS, Tracker, final_metrics, flatten_metrics

__all__ = ["TRACKERS", "Tracker", "final_metrics", "flatten_metrics"]
