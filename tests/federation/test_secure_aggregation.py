"""Secure aggregation over real messages: sums, the server's view, and failing nodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.checkpoint import load_state
from fedstill.core.errors import ArgumentError, FedstillError, NodeFault, QueryRefused
from fedstill.federation import secure_aggregation
from fedstill.federation.transport import LinkError
from fedstill.models.module_utils import to_vector
from fedstill.node import network_view
from fedstill.node.node_service import NodeService
from fedstill.node.run_folder import RunFolder
from fedstill.node.secure_aggregation import MaskedReleases
from fedstill.protocol.method import SECURE_AGGREGATION_NOTE
from fedstill.protocol.secure_aggregation import add_contributions, from_ring
from fedstill.protocol.wire_format import pack, unpack
from fedstill.runs import deployment
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import RunSpec, to_toml
from tests.support.kits import Authority
from tests.support.links import Live, Loopback, here, tiny

NAMES = ("node-0", "node-1", "node-2", "node-3")
METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {"rounds": 2},
    "fedkd": {"levels": 0},
    "fediod": {"ensemble": "logits", "gan": 0.0, "conf": 0.0, "unique": 0.0},
    "fedper": {"rounds": 2},
}
Serve = Callable[[bytes], bytes]
Change = Callable[[str, dict[str, Any], Serve, bytes], bytes]


def summed(method: str, **link: Any) -> RunSpec:
    config = tiny(method, METHOD_OPTIONS[method], **{"secure_aggregation": True, **link})
    local = replace(config.nodes.local, optimizer="sgd")
    split, nodes = replace(config.split, nodes=len(NAMES)), replace(config.nodes, local=local)
    return replace(config, split=split, nodes=nodes)


class Four:
    """Four nodes with kits whose owners require secure aggregation, and a server that records responses.

    ``change`` may change each message. It gets the node's name, the message's header, the node's ``serve``
    and the message.
    """

    def __init__(self, config: RunSpec, folder: Path, change: Change | None = None, **policy: bool) -> None:
        self.config, self.folder, self.responses = config, folder, list[tuple[str, str, dict[str, Any]]]()
        folder.mkdir()
        authority = Authority()
        deployment.write_nodes(config, build_simulation(config)[0], folder / "nodes")
        self.hosts = {name: NodeService(folder / "nodes" / name) for name in NAMES}
        for name, host in self.hosts.items():
            authority.write(host.folder, name)
            own = replace(host.file.policy, **{"sums_only": True, **policy})
            host.file = replace(host.file, policy=own)
        self._change = change or (lambda node, header, serve, message: serve(message))
        (folder / "server").mkdir()

    def live(self) -> Live:
        serve = {name: self._recorded(name, host.serve) for name, host in self.hosts.items()}
        return Live(self.config, Loopback(serve), "one", self.folder / "server")

    def _recorded(self, node: str, serve: Serve) -> Serve:
        def reply(message: bytes) -> bytes:
            header, _ = unpack(message)
            response = self._change(node, header, serve, message)
            self.responses.append((node, header["operation"], unpack(response)[1]))
            return response

        return reply


def masked_releases(host: NodeService) -> MaskedReleases:
    """Return the secure aggregation of a node that has joined a run."""
    assert host.session is not None
    assert isinstance(host.session.releases, MaskedReleases)
    return host.session.releases


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["fedavg", "fedkd", "fediod"])
def test_masks_change_no_bit_and_hide_responses(method: str, tmp_path: Path) -> None:
    config = summed(method)
    experiment, metrics = here(config)

    four = Four(config, tmp_path / "away")
    live = four.live()
    result = live.run()

    assert torch.equal(to_vector(live.student), to_vector(experiment.student))
    assert (result["accuracy"], result["bytes"]) == (metrics["accuracy"], metrics["bytes"])
    assert result["notes"][0] == metrics["notes"][0] == SECURE_AGGREGATION_NOTE
    for _, do, tensors in four.responses:
        for tensor in tensors.values() if do in ("answer_query", "compute_gradients") else ():
            # Unmasked numbers are below a thousand; a masked one is, once in two million times.
            assert from_ring(tensor).abs().median() > 1e3


def test_reads_sum_without_failed_and_late_nodes(tmp_path: Path) -> None:
    """The node fails while its response is on the way; the server notices only afterwards."""
    late: list[bytes] = []
    models: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}

    def dies(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if node == "node-3" and (late or header.get("number") == 2):
            late.append(serve(message))
            raise LinkError("it is gone")
        if header["operation"] == "reveal_masks":
            session = four.hosts[node].session
            assert session is not None
            models[node], sizes[node] = to_vector(session.node.model).double(), len(session.node.data)
        return serve(message)

    four = Four(summed("fedavg", quorum=0.7, wait=0.6), tmp_path / "away", dies, sums_may_differ=True)
    live = four.live()
    live.run()

    assert list(live.federation.excluded) == ["node-3"]
    remaining = NAMES[:3]
    mean = torch.stack([sizes[name] * models[name] for name in remaining]).sum(0) / sum(
        sizes[name] for name in remaining
    )
    torch.testing.assert_close(to_vector(live.student).double(), mean, rtol=0, atol=1e-6)
    assert from_ring(unpack(late[0])[1]["parameters"]).abs().median() > 1e6


def test_run_stops_at_lost_node_without_permission(tmp_path: Path) -> None:
    def dies(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if node == "node-3" and header.get("number", 0) >= 2:
            raise LinkError("it is gone")
        return serve(message)

    with pytest.raises(NodeFault, match="node-3"):
        Four(summed("fedavg", wait=0.6), tmp_path / "strict", dies).live().run()
    with pytest.raises(FedstillError, match="sums_may_differ"):
        Four(summed("fedavg", quorum=0.7), tmp_path / "refused").live().run()


@pytest.mark.parametrize("when", ["confirm_survivors", "reveal_masks"])
def test_unreadable_sum_stops_run(when: str, tmp_path: Path) -> None:
    def dies(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if node == "node-1" and header["operation"] == when:
            raise LinkError("it is gone")
        return serve(message)

    four = Four(summed("fedavg", quorum=0.7, wait=0.6), tmp_path / "away", dies, sums_may_differ=True)
    with pytest.raises(NodeFault, match=r"node-1.*cannot be read"):
        four.live().run()


def test_masks_are_not_revealed_outside_hours(tmp_path: Path) -> None:
    def closes(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if header["operation"] == "reveal_masks":
            host, now = four.hosts[node], datetime.now()
            hours = "-".join(f"{now + timedelta(hours=later):%H:%M}" for later in (2, 4))
            host.file = replace(host.file, policy=replace(host.file.policy, hours=hours))
        return serve(message)

    four = Four(summed("fedavg", quorum=0.7), tmp_path / "away", closes, sums_may_differ=True)
    with pytest.raises(NodeFault, match=r"'reveal_masks' .*hours"):
        four.live().run()


def test_policy_refuses_unmasked_responses(tmp_path: Path) -> None:
    with pytest.raises(QueryRefused, match="sums_only"):
        Four(summed("fedavg", secure_aggregation=False), tmp_path / "away").live().run()


def test_node_refuses_sum_of_itself(tmp_path: Path) -> None:
    """The server omits the sum from a query, or asks for a sum of this node alone."""
    refusals: list[str] = []

    def calls(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if node == "node-0" and header["operation"] == "answer_query":
            result, tensors = unpack(message)
            alone = {**result["sum"], "members": ["node-0"]}
            for bent in ({**result, "sum": alone}, {name: result[name] for name in result if name != "sum"}):
                response, released = unpack(serve(pack(bent, tensors)))
                assert not released
                refusals.append(response["error"]["rule"])
        return serve(message)

    Four(summed("fedavg"), tmp_path / "away", calls).live().run()

    assert "sums: 1 members (expected 3 or more)" in refusals
    assert "sums: responses of this run are released under masks only" in refusals


def test_keys_are_exchanged_once(tmp_path: Path) -> None:
    config = summed("fedavg", quorum=0.7)
    experiment, _ = here(replace(config, link=replace(config.link, quorum=1.0)))
    cards: list[str] = []

    def record_keys(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if header["operation"] in ("send_keys", "receive_keys"):
            cards.append(f"{header['operation']} {node}")
        return serve(message)

    four = Four(config, tmp_path / "away", record_keys, sums_may_differ=True)
    live = four.live()
    live.run()

    assert cards.count("receive_keys node-0") == 1  # once, as no node was restarted
    assert torch.equal(to_vector(live.student), to_vector(experiment.student))


def test_keys_depend_on_plan(tmp_path: Path) -> None:
    """For example, one node would train for one round, and the others for so many that they hardly change."""

    def bent(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if node == "node-0" and header["operation"] == "join":
            result, tensors = unpack(message)
            result["plan"]["method"]["rounds"] = 1
            return serve(pack(result, tensors))
        return serve(message)

    with pytest.raises(QueryRefused, match="signature"):
        Four(summed("fedavg"), tmp_path / "away", bent).live().run()


def laid_otherwise(x: torch.Tensor) -> torch.Tensor:
    """Return equal values in another memory format, for which other kernels round differently."""
    last = torch.empty(x.shape, memory_format=torch.channels_last)
    return (torch.empty(x.shape) if x.stride() == last.stride() else last).copy_(x)


@pytest.mark.parametrize(
    ("when", "change"),
    [
        ("initialize_nodes", lambda x: x + 0.5),
        ("predict_logits", lambda x: x + 0.5),
        ("predict_logits", laid_otherwise),
    ],
)
def test_inconsistent_queries_make_sums_unreadable(
    when: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One node gets other weights, or other inputs before gradients are requested."""
    # continues in spite of the corrupted sum
    monkeypatch.setattr(secure_aggregation, "is_corrupted", lambda ring: False)
    method = {"initialize_nodes": "fedper", "predict_logits": "fediod"}[when]

    def bent(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        result, tensors = unpack(message)
        if node == "node-0" and result.get("query") == when:
            name = {"initialize_nodes": "parameters", "predict_logits": "x"}[when]
            return serve(pack(result, {**tensors, name: change(tensors[name])}))
        return serve(message)

    four = Four(summed(method), tmp_path / "away", bent)
    with suppress(FedstillError):  # the unmasked values may be invalid
        four.live().run()
    part = {"initialize_nodes": "parameters", "predict_logits": "d/dx"}[when]
    later = [tensors for node, _, tensors in four.responses if part in tensors]
    sums = from_ring(add_contributions(later[: len(NAMES)])[part])
    assert sums.abs().median() > 1e3


def test_corrupted_sum_stops_run(tmp_path: Path) -> None:
    """A refusal would reveal the faulty node, and no run may continue with random numbers."""

    def ill(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        session = four.hosts[node].session
        if node == "node-0" and header["operation"] == "answer_query" and session is not None:
            for parameter in session.node.model.parameters():
                torch.nn.init.constant_(parameter, float("nan"))
        return serve(message)

    four = Four(summed("fedkd"), tmp_path / "away", ill)
    with pytest.raises(NodeFault, match="corrupted"):
        four.live().run()


def test_weights_use_first_released_counts(tmp_path: Path) -> None:
    """With new noise, a server would get sums of the same responses with other weights and separate them."""
    privacy = {"mechanism": "dp-sgd", "epsilon": 1000.0, "training": {"noise": 0.6}, "accountant": "rdp"}
    config = tiny("fedkd", METHOD_OPTIONS["fedkd"], privacy=privacy, secure_aggregation=True)
    joining: list[bytes] = []
    result: list[torch.Tensor] = []

    def stopped(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if header["operation"] == "join" and node == "node-0":
            joining.append(message)
        if header.get("query") == "predict":
            result.append(masked_releases(four.hosts["node-0"]).counts["counts"])
            raise RuntimeError("the server stops here")
        return serve(message)

    four = Four(replace(config, split=replace(config.split, nodes=len(NAMES))), tmp_path / "away", stopped)
    with pytest.raises(RuntimeError, match="the server stops here"):
        four.live().run()
    (header, public), file = unpack(joining[-1]), four.hosts["node-0"].file
    assert load_state(four.hosts["node-0"].folder / "runs/one/released_counts.safetensors").keys() == {
        "counts",
        "size",
    }
    four.hosts["node-0"].leave()
    host = NodeService(four.hosts["node-0"].folder)  # a new process that has received no query yet
    host.file = file
    back = {
        "operation": "load_checkpoint",
        "run": "one",
        "server": header["server"],
        "message": 9,
        "checkpoint": 0,
    }
    for message, tensors in ((header, public), (back, {})):
        assert "error" not in unpack(host.serve(pack(message, tensors)))[0]
        assert torch.equal(masked_releases(host).counts["counts"], result[0])


def test_unsaved_counts_are_not_released(tmp_path: Path) -> None:
    """The disk is full when the counts are saved; the server repeats the same message."""

    def full(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if node != "node-0" or header.get("query") != "count_labels":
            return serve(message)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunFolder, "save_state", lambda *given: (_ for _ in ()).throw(OSError(28, "full")))
            for _ in range(2):
                assert "error" in unpack(serve(message))[0]
        raise RuntimeError("seen")

    four = Four(summed("fedkd"), tmp_path / "away", full)
    with pytest.raises(RuntimeError, match="seen"):
        four.live().run()


def test_rejects_gradients_at_other_scale(tmp_path: Path) -> None:
    """Gradients are linear in the scale: by increasing it to an overflow, a server would find their size."""

    def scaled(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if header["operation"] != "compute_gradients":
            return serve(message)
        result, tensors = unpack(message)
        return serve(pack(result, {name: 4.0 * tensor for name, tensor in tensors.items()}))

    with pytest.raises(FedstillError, match="scale of 1"):
        Four(summed("fediod"), tmp_path / "away", scaled).live().run()


def between(
    serve: Serve, message: bytes, name: str, extra: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> bytes:
    """Serve a message as for a server that skips numbers and sends an extra query before ``name``."""
    result, sent = unpack(message)
    if result["operation"] != "answer_query":
        return serve(message)
    numbers = [result, *([result["sum"]] if "sum" in result else [])]
    for each in numbers:
        each["number"] = 2 * each["number"] + 1
    if result["query"] == name:
        earlier = {**result, "number": result["number"] - 1}
        if "sum" in result:
            earlier["sum"] = {**result["sum"], "number": result["sum"]["number"] - 1}
        serve(pack({**earlier, **extra}, {**sent, **tensors}))
    return serve(pack(result, sent))


def test_unsummed_query_keeps_exchange(tmp_path: Path) -> None:
    """One node gets other weights; then all get a query that falsely claims to be a sum with recovery."""

    def bent(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        result, sent = unpack(message)
        other = {"parameters": sent["parameters"] + 0.5} if header.get("query") == "initialize_nodes" else {}
        if other and node != "node-0":
            other = sent
        if other:
            result["sum"] = {"number": 0, "members": [], "recover": True}
            message = pack(result, sent)
        return between(serve, message, "initialize_nodes", {}, other)

    four = Four(summed("fedper"), tmp_path / "away", bent)
    with suppress(FedstillError):  # the unmasked values may be invalid
        four.live().run()
    later = [tensors["parameters"] for _, _, tensors in four.responses if "parameters" in tensors]
    assert from_ring(torch.stack(later[: len(NAMES)]).sum(0)).abs().median() > 1e3


def test_failed_query_keeps_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node trains on other weights for a query that then fails."""
    failing, plain = [False], network_view.integer_mask

    def integer_mask(module: torch.nn.Module) -> torch.Tensor:
        if failing[0]:
            failing[0] = False
            raise RuntimeError("half way")
        return plain(module)

    monkeypatch.setattr(network_view, "integer_mask", integer_mask)

    def bent(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if node != "node-0" or header.get("query") != "train":
            return between(serve, message, "", {}, {})
        sent = unpack(message)[1]
        failing[0] = True
        return between(serve, message, "train", {}, {"parameters": sent["parameters"] + 5})

    four = Four(summed("fedavg"), tmp_path / "away", bent)
    with suppress(FedstillError):
        four.live().run()
    sent = [
        tensors["parameters"]
        for _, do, tensors in four.responses
        if do == "answer_query" and "parameters" in tensors
    ]
    assert len(sent) == len(NAMES)
    assert from_ring(torch.stack(sent).sum(0)).abs().median() > 1e3


@pytest.mark.parametrize(
    ("after", "rule"),
    [
        (
            {"weights": "equal"},
            "has added logits by counts, and would add logits by mean",
        ),
        ({"epochs": 2}, ""),
    ],
)
def test_rejects_other_weighting_of_equal_responses(
    tmp_path: Path, after: dict[str, Any], rule: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    four = Four(summed("fedkd"), tmp_path / "away")
    four.live().run()
    for host in four.hosts.values():
        host.leave()
    config = tiny("fedkd", {**METHOD_OPTIONS["fedkd"], **after}, secure_aggregation=True)
    (tmp_path / "again").mkdir()
    again = replace(config, split=replace(config.split, nodes=len(NAMES)))
    (run := tmp_path / "again.toml").write_text(to_toml(again), encoding="utf-8")
    result = " ".join(command("node", "check", four.hosts[NAMES[0]].folder, run)[1].split())
    assert (f"sums: it {rule}" in result) is bool(rule)  # the owner's check reports this in advance
    operations: list[str] = []

    def recorded(serve: Serve) -> Serve:
        return lambda message: operations.append(unpack(message)[0]["operation"]) or serve(message)  # type: ignore[func-returns-value]

    serve = {name: recorded(host.serve) for name, host in four.hosts.items()}
    live = Live(again, Loopback(serve), "two", tmp_path / "again")
    if rule:
        with pytest.raises(FedstillError, match=rule):
            live.run()
        assert "train_locally" not in operations  # no node trains for a refused run
    else:
        live.run()
        assert "train_locally" in operations


def test_rejects_sums_of_parameters_that_adam_trained(tmp_path: Path) -> None:
    """Adam's first step is the sign of each gradient: sums of one step per round show the nodes' signs."""
    config = summed("fedavg")
    adam = replace(config.nodes.local, optimizer="adam")
    with pytest.raises(ArgumentError, match=r"local\.optimizer"):
        here(replace(config, nodes=replace(config.nodes, local=adam)))
    four = Four(config, tmp_path / "away")
    for host in four.hosts.values():
        host.file = replace(host.file, local=adam)
    with pytest.raises(QueryRefused, match=r"local\.optimizer"):
        four.live().run()


def test_rejects_second_run_with_labels_of_the_server(tmp_path: Path) -> None:
    """Adding the server's labels to the weights is a second weighting of the same responses."""
    four = Four(summed("fedkd"), tmp_path / "away")
    four.live().run()
    for host in four.hosts.values():
        host.leave()
    config = summed("fedkd")
    again = replace(config, method=replace(config.method, labeled=True))
    (tmp_path / "again").mkdir()
    live = Live(
        again, Loopback({name: host.serve for name, host in four.hosts.items()}), "two", tmp_path / "again"
    )
    with pytest.raises(FedstillError, match="earlier sums"):
        live.run()


@pytest.mark.parametrize("bent", [torch.zeros(9, dtype=torch.bfloat16), torch.zeros(3, 3, dtype=torch.uint8)])
def test_rejects_key_card_of_other_dtype(bent: torch.Tensor, tmp_path: Path) -> None:
    errors: list[dict[str, Any]] = []

    def shows(node: str, header: dict[str, Any], serve: Serve, message: bytes) -> bytes:
        if header["operation"] == "receive_keys" and node == "node-0":
            result, cards = unpack(message)
            errors.append(unpack(serve(pack(result, {**cards, "node-1": bent})))[0]["error"])
        return serve(message)

    Four(summed("fedkd"), tmp_path / "away", shows).live().run()
    assert errors
    assert "card of node-1" in str(errors[0])
