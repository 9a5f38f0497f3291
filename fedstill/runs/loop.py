"""The main loop of every run: local training, the centralized upper bound, the server's steps, evaluation.

A checkpoint is saved every few seconds, so that a run that was interrupted at any moment resumes and reaches
equal metrics. :class:`~fedstill.runs.base.Run` adds data and models.
:class:`~fedstill.runs.simulation.Simulation` has its nodes in this process,
:class:`~fedstill.runs.remote_run.RemoteRun` has remote nodes.

One round of a method, such as :mod:`fedstill.methods.fedavg`, in reading order:

1. ``Loop._run_steps`` here calls ``Server.step`` (:mod:`fedstill.methods._server`), which calls the method's
   ``step``.
2. ``server.query`` leads to ``Federation.query`` (:mod:`fedstill.federation.federation`): it sends the query,
   checks the responses and stacks them. :mod:`fedstill.federation.inprocess` reaches nodes in this process.
   Inputs that require gradients go through :mod:`fedstill.federation.autograd`.
3. At the nodes :mod:`fedstill.node.request_handler` has the query admitted and charged by each node's
   :mod:`fedstill.node.gate`, runs the method's function (:mod:`fedstill.node.query_functions`) and releases
   its outputs through the gates.
4. The function sees a node as a :class:`~fedstill.node.node_view.NodeView`, whose ``train`` is
   :mod:`fedstill.node.local_training`. For several nodes at once see :mod:`fedstill.node.stacked_calls`.
5. The method's ``step`` continues with the responses, and updates the student. If it backpropagates through
   them, a second release follows: the gradients of the inputs (:mod:`fedstill.node.input_gradients`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedstill.core.compute import Compute
from fedstill.core.errors import FedstillError
from fedstill.core.progress import ProgressBar
from fedstill.core.run_writer import RunWriter, lock_folder
from fedstill.core.timing import Clock
from fedstill.methods._server import Server
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.protocol.method import Method
from fedstill.runs.build import Setting
from fedstill.runs.spec import fingerprint_options
from fedstill.tasks import Task
from fedstill.track.trackers import TrackerGroup

UNITS = {"step": "distillation", "epoch": "distillation", "round": "rounds"}  # title of the progress bar


class Loop(ABC):
    """Main loop of a run.

    Args:
        setting: data, models and options of the server, and in a simulation of the nodes, too.

    Attributes:
        method: the method.
        audit: the log of the nodes' releases.
        clock: seconds of each phase and in total.
        records: writes the files of the run's folder, if there is one.
        listeners: trackers of metrics, if there is a folder.
    """

    task: Task
    compute: Compute
    shape: tuple[int, ...]

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.method: Method = setting.spec.method
        self.audit = AuditLog(durable=False)
        self.records, self.bars, self.clock = RunWriter(None), ProgressBar(False), Clock()
        self.listeners = TrackerGroup()
        self._created_server: Server | None = None

    def run(self, out: Path | None = None, *, bars: ProgressBar | None = None) -> dict[str, Any]:
        """Run from the start, or resume from the checkpoint in ``out``.

        Args:
            out: folder of the run, which must exist; None writes no files.
            bars: progress bars; None shows none.

        Returns:
            Metrics in their units, bytes, queries, seconds: the content of ``result.json``.

        Raises:
            FedstillError: a node cannot take part, refuses or fails; the run can be resumed.
        """
        self.clock.start()
        self.records = RunWriter(out, self.listeners.log, fingerprint_options(self.setting.spec))
        self.bars = bars or ProgressBar(False)
        with ExitStack() as at_last:
            at_last.enter_context(self.compute.limit_threads(self.shape, self.setting.student))
            if out is not None:
                at_last.enter_context(lock_folder(out, "run"))
                self.audit.open(out / FILE)
                at_last.callback(self.audit.close)
                self.audit.require_sound()
            at_last.callback(self._close)
            if out is not None:
                at_last.push(self._close_trackers_on_error)
                self.listeners.start(out, self.method.title)
            self.bars.set_run_info(self.progress_info())
            with self.bars:
                saved = self.records.load()  # the last checkpoint; empty at the start
                self.clock.load_state_dict(saved.get("clock"))
                # 1. Have all nodes take part, in the state of the checkpoint.
                self._prepare_nodes(saved)
                # 2. Train the nodes' models as far as the method needs it before its first query, and the
                #    upper bound.
                self._train_locally()
                self._train_centralized(saved)
                # 3. Run the server's steps: each queries the nodes and trains the student.
                with self.clock.phase("distillation"):
                    self._created_server = self._create_server(saved)
                    self._run_steps(self._created_server)
                # 4. Evaluate what the run has reached.
                return self._finish_results()

    def _run_steps(self, server: Server) -> None:
        """Run the server's remaining steps, with evaluations and checkpoints."""
        total = server.total_steps
        every = (
            max(total // 10, 1)
            if self.setting.spec.evaluation.every is None
            else self.setting.spec.evaluation.every
        )
        if server.completed_steps < total:
            self.bars.update(UNITS[server.unit], server.completed_steps, total)
        while server.completed_steps < total:
            # 1. One step of the method: query the nodes, train the student or average the parameters.
            losses = server.step()
            done = server.completed_steps
            self.bars.set_excluded(list(server.federation.excluded))
            line = {"phase": "distillation", "step": done, "losses": losses}
            line["seconds"] = round(self.clock.phase_seconds("distillation"), 3)
            # 2. Evaluate, every few steps and at the end.
            note = ""
            if done == total or (every and done % every == 0):
                metrics, metric = self.evaluate(), self.task.metric
                line.update(metrics)
                note = f"{metric} {metrics[metric]:.1f} %" if metric in metrics else ""
                self._save_samples(server)
            # 3. Log metrics and show progress.
            self.records.add_metrics(line)
            self.bars.update(UNITS[server.unit], done, total, note)
            # 4. Save a checkpoint, every few seconds.
            if self.records.is_save_due():
                self.save_state()

    def _finish_results(self) -> dict[str, Any]:
        self.bars.update("evaluation", 0, 1)
        results = self.results()
        self.bars.update("evaluation", 1, 1)
        return results

    def _close_trackers_on_error(self, kind: object, *_: object) -> None:
        """Close the trackers of a run that fails; others are closed with the result."""
        if kind is not None:
            self.listeners.close(None)

    def save_state(self) -> None:
        """Save a checkpoint: the state of nodes and server, and all metrics so far."""
        since = time.monotonic()
        nodes = self._node_state()  # first, as the server's state must include nodes that are lost meanwhile
        server = None if self._created_server is None else self._created_server.state_dict()
        self.records.save({**nodes, "clock": self.clock.state_dict(), "server": server}, since=since)

    @property
    def server(self) -> Server:
        """The server with the method's state.

        Raises:
            FedstillError: local training has not finished.
        """
        if self._created_server is None:
            raise FedstillError("the run has no server yet: it is created after local training")
        return self._created_server

    # --- implemented by simulations and remote runs ---------------------------------------------------

    @abstractmethod
    def _prepare_nodes(self, saved: Mapping[str, Any]) -> None:
        """Prepare the nodes, from a checkpoint unless it is empty."""

    @abstractmethod
    def _train_locally(self) -> None:
        """Train the nodes' models as far as the method needs it before its first query."""

    @abstractmethod
    def _train_centralized(self, saved: Mapping[str, Any]) -> None:
        """Train the centralized upper bound, if all nodes' data are here."""

    @abstractmethod
    def _create_server(self, saved: Mapping[str, Any]) -> Server:
        """Create the server, from a checkpoint unless it is empty."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, float]:
        """Evaluate the current models; return metrics by key, the main one under the task's metric."""

    @abstractmethod
    def _node_state(self) -> Mapping[str, Any]:
        """Return the nodes' part of a checkpoint; remote nodes save their own state."""

    @abstractmethod
    def _close(self) -> None:
        """Release the nodes."""

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """Return the metrics, bytes, queries and privacy costs for ``result.json``."""

    @abstractmethod
    def progress_info(self) -> dict[str, str]:
        """Return title and main metric of the run, for progress displays."""

    @abstractmethod
    def _save_samples(self, server: Server) -> None:
        """Save some inputs generated by the server, with the label maps that they were generated from."""
