"""Federation of simulated nodes in Ray actors, several nodes in each, on one machine or a cluster.

Each actor computes its nodes as :class:`~fedstill.federation.inprocess.InProcess` does. The server's process
has a copy of every node, in the state of the last checkpoint. An actor that dies is started again from these
copies, and repeats the calls since then: it reaches the same state, as the random streams of a node depend on
its name only.

Only bytes, texts and numbers cross between the processes: tensors and JSON values in the wire format
(:mod:`fedstill.protocol.wire_format`), as an array of bytes in Ray's object store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedstill.core.checkpoint import State, decode_state, encode_state
from fedstill.core.compute import Compute, EngineConfig
from fedstill.core.errors import ArgumentError, DeployError, FedstillError
from fedstill.federation.federation import SentQuery
from fedstill.federation.inprocess import InProcess
from fedstill.federation.link_config import LinkConfig
from fedstill.node.audit_entries import Entry
from fedstill.node.audit_log import AuditLog, Charge
from fedstill.node.node import Node
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.wire_format import Tensors, pack, unpack

Message = npt.NDArray[np.uint8]
Host = TypeVar("Host")
MAX_RESTARTS = 3  # of an actor during one call


def require_ray() -> None:
    """Check that Ray is installed.

    Raises:
        DeployError: it is not. The message says how to install it.
    """
    try:
        from ray import init  # noqa: F401 - a folder called ray can be imported, too
    except ImportError as error:
        raise DeployError("Ray is not installed: pip install 'fedstill[ray]'") from error


# --- messages -------------------------------------------------------------------------------------------


def to_message(state: State) -> Message:
    """Return nested dicts, lists and tuples of tensors and JSON values as bytes.

    >>> from_message(to_message({"node-0": {"step": 3, "sizes": (1.5, None)}}))
    {'node-0': {'step': 3, 'sizes': (1.5, None)}}
    """
    tensors: dict[str, Any] = {}
    return np.frombuffer(pack({"state": encode_state(state, tensors)}, tensors), np.uint8)


def from_message(message: Message) -> State:
    """Return the state of :func:`to_message`, with tensors on the CPU."""
    header, tensors = unpack(message.tobytes(), max_header=0)
    return decode_state(header["state"], tensors)


def replies_with_message(method: Callable[..., State]) -> Callable[..., Message]:
    """Have a method of an actor return a message, which also holds an error that a user can cause."""

    @wraps(method)
    def reply(*arguments: Any) -> Message:
        try:
            return to_message(method(*arguments))
        except FedstillError as error:
            return to_message({"error": str(error)})

    return reply


def raise_error(replies: Mapping[int, State]) -> None:
    """Raise the first error of some replies, if there is one, as FedstillError."""
    for reply in replies.values():
        if "error" in reply:
            raise FedstillError(reply["error"])


# --- actors ---------------------------------------------------------------------------------------------


def connect(address: str, cpus: int = 1) -> bool:
    """Connect to a Ray cluster, unless this process is connected already.

    Args:
        address: as ``engine.ray.address``; empty: start Ray on this machine.
        cpus: CPUs that Ray offers on this machine if it is started here, or more if there are more.

    Returns:
        True if the connection was made here.

    Raises:
        DeployError: there is no such cluster.
    """
    import ray

    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
    os.environ.setdefault("RAY_worker_niceness", "0")  # else other processes are preferred to the nodes
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address:
        options["address"] = address
    else:
        options |= {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, cpus),
            "include_dashboard": False,
        }
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address == "auto":
            raise DeployError("no Ray cluster on this machine: `ray start --head` starts one") from error
        where = address or "on this machine"
        raise DeployError(f"no Ray cluster {where}: {' '.join(str(error).split())[:200]}") from error
    return True


def actor_count(engine: EngineConfig, nodes: int) -> int:
    """Return the number of actors: as many as the options say, the cluster has and nodes need.

    Raises:
        ArgumentError: the cluster has too few CPUs or GPUs.
    """
    import ray

    resources, per_actor = ray.cluster_resources(), engine.ray.gpus_per_actor
    most = int(resources.get("CPU", 0.0)) // max(engine.threads, 1)
    if per_actor:
        most = min(most, int(resources.get("GPU", 0.0) / per_actor + 1e-9))
    wanted = min(engine.ray.actors or max(most, 1), nodes)
    if wanted > most:
        found = ", ".join(f"{resources.get(kind, 0.0):g} {kind}s" for kind in ("CPU", "GPU"))
        raise ArgumentError("engine.ray.actors", wanted, f"up to {most}, as the Ray cluster has {found}")
    return wanted


class _Actor:
    """One actor: names of its nodes, its handle, and the calls since its nodes were saved."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.handle: Any = None
        self.calls: list[tuple[str, tuple[Any, ...]]] = []


class RayActors:
    """Actors that hold the nodes of a run; those that die are restarted.

    Args:
        host: class of the actors. Its method ``start`` gets the first message.
        parts: names of each actor's nodes.
        make_plan: returns the content of the first message for some nodes, in their saved state.
        engine: options.
        wait: seconds that a node has for one call; an actor has as many for each of its nodes.

    Attributes:
        restarts: number of actors that have been restarted.
    """

    def __init__(
        self,
        host: type[Host],
        parts: Sequence[Sequence[str]],
        make_plan: Callable[[Sequence[str]], State],
        engine: EngineConfig,
        wait: float,
    ) -> None:
        import ray

        self._actors = [_Actor(names) for names in parts]
        self._make_plan, self._wait, self.restarts = make_plan, wait, 0
        resources = {"num_cpus": max(engine.threads, 1), "num_gpus": engine.ray.gpus_per_actor}
        self._create: Any = ray.remote(host).options(**resources)
        plans = {index: (self._start(actor),) for index, actor in enumerate(self._actors)}
        raise_error(self.call("start", plans, is_repeated=False))

    def __len__(self) -> int:
        return len(self._actors)

    def _start(self, actor: _Actor) -> Any:
        """Create an actor and return the first message for it."""
        import ray

        actor.handle = self._create.remote()
        return ray.put(to_message(self._make_plan(actor.names)))

    @property
    def parts(self) -> list[Sequence[str]]:
        """Names of each actor's nodes."""
        return [actor.names for actor in self._actors]

    @property
    def is_changed(self) -> bool:
        """True if calls have changed nodes since they were saved."""
        return any(actor.calls for actor in self._actors)

    def set_saved(self) -> None:
        """Note that ``make_plan`` returns the nodes' present state."""
        for actor in self._actors:
            actor.calls.clear()

    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], *, is_repeated: bool = True
    ) -> dict[int, State]:
        """Call a method of some actors at once and return their replies.

        Args:
            method: its name.
            arguments: by index of the actor: messages, objects of Ray's store, texts and numbers.
            is_repeated: repeat the call if the actor is restarted before its nodes are saved again.

        Raises:
            DeployError: an actor has not replied in time, or died several times.
        """
        sent = {
            index: getattr(self._actors[index].handle, method).remote(*given)
            for index, given in arguments.items()
        }
        replies = {}
        for index, given in arguments.items():
            replies[index] = self._receive(self._actors[index], sent[index], method, given)
            if is_repeated:
                self._actors[index].calls.append((method, given))
        return replies

    def call_all(self, method: str, *arguments: Any, is_repeated: bool = True) -> list[State]:
        """Call a method of all actors with equal arguments; raise an error that a reply holds."""
        replies = self.call(method, dict.fromkeys(range(len(self)), arguments), is_repeated=is_repeated)
        raise_error(replies)
        return list(replies.values())

    def _receive(self, actor: _Actor, sent: Any, method: str, given: tuple[Any, ...]) -> State:
        """Return the reply to a call; restart the actor if it has died."""
        import ray

        whose = f"the Ray actor of {actor.names[0]}"
        if len(actor.names) > 1:
            whose += f" to {actor.names[-1]}"
        for attempt in range(MAX_RESTARTS + 1):
            try:
                if attempt:
                    sent = self._restart(actor, method, given)
                return from_message(ray.get(sent, timeout=self._timeout(actor)))
            except ray.exceptions.GetTimeoutError as error:
                seconds = f"{self._timeout(actor):g} s (link.wait for each of its nodes)"
                raise DeployError(f"{whose} has not replied to {method} within {seconds}") from error
            except ray.exceptions.RayActorError as error:
                last = error
        reason = " ".join(str(last).split())[:300]
        raise DeployError(f"{whose} died {MAX_RESTARTS + 1} times during {method}: {reason}") from last

    def _timeout(self, actor: _Actor) -> float | None:
        return None if np.isinf(self._wait) else self._wait * len(actor.names)

    def _restart(self, actor: _Actor, method: str, given: tuple[Any, ...]) -> Any:
        """Start an actor again in the saved state of its nodes, and repeat its calls since then."""
        import ray

        ray.kill(actor.handle)  # it may only be unreachable
        self.restarts += 1
        plan = self._start(actor)
        calls = actor.calls if method == "start" else [("start", (plan,)), *actor.calls]
        for earlier, arguments in calls:
            reply = getattr(actor.handle, earlier).remote(*arguments)
            raise_error({0: from_message(ray.get(reply, timeout=self._timeout(actor)))})
        return getattr(actor.handle, method).remote(*given)

    def close(self) -> None:
        """Stop the actors."""
        import ray

        for actor in self._actors:
            ray.kill(actor.handle)


# --- federation -----------------------------------------------------------------------------------------


class RayFederation(InProcess):
    """Federation of nodes in Ray actors.

    The actors' replies hold the entries of their audit logs. They are written to the run's log before a
    response is handed to the server.

    Args:
        nodes: copies of the nodes, by whose policies queries are refused before training.
        actors: the actors.
        side, compute, link: as of :class:`~fedstill.federation.inprocess.InProcess`.
        audit: the run's log.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        actors: RayActors,
        side: NodeSide,
        compute: Compute,
        link: LinkConfig,
        audit: AuditLog,
    ) -> None:
        super().__init__(nodes, (), side, compute, link)
        self._actors, self._audit = actors, audit

    def collect_responses(self, queried: tuple[str, ...], sent: SentQuery) -> Mapping[str, Tensors]:
        import ray

        content = {"query": sent.query, "number": sent.number, "differentiable": sent.differentiable}
        message = ray.put(to_message({**content, "tensors": dict(sent.tensors)}))
        asked, arguments = set(queried), {}
        for index, names in enumerate(self._actors.parts):
            present = [name for name in names if name in asked]
            if present:
                arguments[index] = (message, None if len(present) == len(names) else present)
        return self._released("respond", arguments, queried)

    def collect_gradients(
        self, number: int, query: str, output_gradients: Mapping[str, Tensors], encoding: Any = None
    ) -> Mapping[str, Tensors]:
        import ray

        arguments = {}
        for index, names in enumerate(self._actors.parts):
            gradients = {name: dict(output_gradients[name]) for name in names if name in output_gradients}
            if gradients:
                content = {"query": query, "number": number, "gradients": gradients}
                arguments[index] = (ray.put(to_message(content)),)
        return self._released("backpropagate", arguments, tuple(output_gradients))

    def _released(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], names: Sequence[str]
    ) -> dict[str, Tensors]:
        """Call actors and return what their nodes release, once it is in the run's audit log."""
        replies = self._actors.call(method, arguments)
        released: dict[str, Tensors] = {}
        for reply in replies.values():
            self._audit.charge_all([Charge(Entry(**fields)) for fields in reply["entries"]])
            released |= reply["released"]
        raise_error(replies)
        return {name: self.to_device(released[name]) for name in names}
