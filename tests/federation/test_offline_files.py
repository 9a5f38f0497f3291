"""Files of queries and responses: signatures, content, and equality with a live run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core.compute import Compute
from fedstill.core.config_tables import to_table
from fedstill.core.dataset import TensorData
from fedstill.core.errors import NodeFault, QueryFileError, QueryMismatch
from fedstill.data.data_spec import DataSpec
from fedstill.data.public import PublicData
from fedstill.federation import offline_files, signed_files
from fedstill.federation.federation import SentQuery
from fedstill.federation.inprocess import InProcess
from fedstill.federation.link_config import LinkConfig
from fedstill.federation.offline_files import (
    FORMAT,
    NodeResponses,
    Queries,
    Replies,
    ResponseFiles,
    ResponsesHeader,
    pack_responses,
    read_queries,
    read_responses,
    write_queries,
)
from fedstill.federation.remote import Remote
from fedstill.methods import fedkd
from fedstill.methods._public_data import StudentTraining
from fedstill.methods._server import Server
from fedstill.methods.fedkd import FedKD
from fedstill.models import build
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.node import Node
from fedstill.node.policy import PolicyConfig
from fedstill.privacy.statement import PrivacyStatement
from fedstill.protocol.digests import digest
from fedstill.protocol.local_config import LocalConfig
from fedstill.protocol.node_side import NodeSetting
from fedstill.protocol.run_plan import PROTOCOL, RunPlan, public_fingerprint
from fedstill.protocol.wire_format import pack, unpack
from fedstill.runs.simulation import group_nodes
from fedstill.tasks.classification import Classification, ClassificationConfig

pytest.importorskip("cryptography")

SHAPE, CLASSES, SEED, N = (1, 8, 8), 3, 4, 23
TASK, LOCAL, COMPUTE = Classification(CLASSES), LocalConfig(), Compute()
CONFIG = FedKD(student=StudentTraining(epochs=3, batch=6), predictions=2, z_max=4.0)
SPEC = DataSpec(ClassificationConfig(), ("a", "b", "c"), SHAPE, (0.5,), (0.5,))
NAMES = ("node-0", "node-1", "node-2")


def public_data() -> PublicData:
    return PublicData(
        "made", torch.randn(N, *SHAPE, generator=torch.Generator().manual_seed(99)), note="by hand"
    )


def live() -> InProcess:
    nodes = []
    for index, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(6 + index, *SHAPE, generator=generator)
        targets = torch.randint(CLASSES, (6 + index,), generator=generator)
        gate = Gate(name, PolicyConfig(), AuditLog())
        model = build("small-cnn:4", SHAPE, CLASSES, 0, index).eval()
        nodes.append(Node(name, TensorData(inputs, targets), model, gate, SEED))
    side = CONFIG.node_side(NodeSetting(TASK, LOCAL, COMPUTE, public_data()))
    return InProcess(nodes, group_nodes(nodes, False), side, COMPUTE)


def planned_queries_file() -> Queries:
    table = to_table(CONFIG)
    plan = RunPlan(
        "queries", table, SPEC, public=public_fingerprint(public_data()), public_note=("made", "by hand")
    )
    return Queries(plan, public_data(), tuple(CONFIG.planned_queries(public_data(), SEED)))


def queries_with_levels(levels: int) -> Queries:
    mine = planned_queries_file()
    return replace(mine, plan=replace(mine.plan, method={**mine.plan.method, "levels": levels}))


@dataclass
class World:
    """A folder with queries and each node's responses, and the keys of all parties."""

    folder: Path
    queries: Queries

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def key(self, name: str) -> Any:
        return signed_files.load_or_create_key(self.folder / f"{name}.key")

    def print(self, name: str) -> str:
        return signed_files.fingerprint(signed_files.public_key_bytes(self.key(name)))

    def keys(self) -> dict[str, str]:
        return {name: self.print(name) for name in NAMES}

    def read(self, name: str = "node-0", keys: Mapping[str, str] | None = None) -> NodeResponses:
        return read_responses(self.path(name), self.queries, keys)

    def files(self) -> ResponseFiles:
        return ResponseFiles(self.queries, [self.read(name) for name in NAMES])

    def federation(self) -> Remote:
        plan, declared = self.queries.plan, self.queries.query_declarations()
        remote = Remote(self.files(), plan, declared, LinkConfig(), AuditLog(), COMPUTE)
        remote.join()
        return remote

    def forge(
        self, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None], name: str = "node-0"
    ) -> None:
        """Change a node's responses and sign them, as a malicious node with a valid key could."""
        header, tensors = unpack(self.path(name).read_bytes())
        change(header, tensors)
        signed_files.write(self.path(name), pack(header, tensors), self.key(name))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    world = World(folder, planned_queries_file())
    write_queries(world.path("queries"), world.queries, world.key("server"))
    world.queries = read_queries(world.path("queries"))
    federation, given = live(), world.queries
    responses = {
        number: federation.collect_responses(NAMES, SentQuery(call.query, number, call.tensors, False))
        for number, call in enumerate(given.calls)
    }
    for name in NAMES:
        mine = {number: response[name] for number, response in responses.items()}
        signed_files.write(
            world.path(name), pack_responses(header(given, name), replies(name, mine)), world.key(name)
        )
    return folder


@pytest.fixture
def world(first: Path, tmp_path: Path) -> World:
    for path in first.iterdir():
        copied = tmp_path / path.name
        copied.write_bytes(path.read_bytes())
        copied.chmod(path.stat().st_mode)
    return World(tmp_path, read_queries(tmp_path / "queries.safetensors"))


def header(given: Queries, name: str) -> ResponsesHeader:
    return ResponsesHeader(given.sha256, given.signer, False, name, PolicyConfig())


def replies(name: str, responses: Mapping[int, Any]) -> Replies:
    hello = {"name": name, "protocol": PROTOCOL, "versions": {"fedstill": "0"}}
    join = {
        "refused_queries": {},
        "max_queries": None,
        "is_trained": False,
        "last_query": -1,
        "checkpoints": [],
        "model": "SmallCNN",
        "parameters": 99,
        "privacy": asdict(PrivacyStatement()),
    }
    return Replies(hello, join, [{"mechanism": "none", "cost": None}] * len(responses), responses)


# --- queries planned in advance --------------------------------------------------------------------


def test_queries_file_has_planned_queries_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedkd, "CHUNK", 10)
    federation, calls = live(), []
    call = federation.query
    monkeypatch.setattr(
        federation, "query", lambda name, **sent: (calls.append((name, sent)), call(name, **sent))[1]
    )
    step(federation)
    expected = CONFIG.planned_queries(public_data(), SEED)
    assert [name for name, _ in calls] == ["count_labels"] + ["predict"] * 6
    assert len(calls) == len(expected)
    for (name, sent), planned in zip(calls, expected, strict=True):
        tensors = {key: value for key, value in sent.items() if isinstance(value, torch.Tensor)}
        assert digest(name, tensors) == digest(planned.query, planned.tensors)


# --- equal metrics -------------------------------------------------------------------------------


def step(federation: Any) -> Server:
    student = build("mlp:8", SHAPE, CLASSES, 0, "student")
    arguments = (federation, student, TASK, SHAPE, (0.5,), (0.5,), COMPUTE, SEED, LOCAL, public_data())
    server = Server(CONFIG, *arguments)
    for _ in range(server.total_steps):
        server.step()
    return server


def test_student_from_files_equals_live_run(world: World) -> None:
    by_file, by_wire = step(world.federation()), step(live())
    assert torch.equal(by_file.state.z_hat, by_wire.state.z_hat)
    for name, value in by_wire.student.state_dict().items():
        assert torch.equal(by_file.student.state_dict()[name], value), name


def test_response_file_rejects_other_queries(world: World) -> None:
    federation = world.federation()
    federation.query("count_labels")
    with pytest.raises(QueryMismatch):
        federation.query("predict", rows=torch.tensor([0, 5]), view=torch.tensor(0))
    with pytest.raises(QueryMismatch):
        federation.query("count_labels", number=99)


# --- files ---------------------------------------------------------------------------------------


def test_queries_file_round_trip(world: World) -> None:
    mine, again = planned_queries_file(), world.queries
    assert (again.plan, again.content_digests()) == (mine.plan, mine.content_digests())
    assert again.public is not None
    assert torch.equal(again.public.inputs, public_data().inputs)
    assert (again.public.name, again.public.note) == ("made", "by hand")
    for one, other in zip(again.calls, mine.calls, strict=True):
        assert digest(one.query, one.tensors) == digest(other.query, other.tensors)
    assert again.signer == world.print("server")
    assert not again.trusted
    assert read_queries(world.path("queries"), [world.print("server")]).trusted


def test_equal_queries_write_equal_file(world: World) -> None:
    path, key = world.path("queries"), world.key("server")
    before = path.read_bytes(), signed_files.signature_path(path).read_bytes()
    assert write_queries(path, planned_queries_file(), key) == world.queries.sha256
    assert (path.read_bytes(), signed_files.signature_path(path).read_bytes()) == before
    with pytest.raises(QueryFileError, match="other data"):
        write_queries(path, queries_with_levels(100), key)
    assert path.read_bytes() == before[0]


@pytest.mark.parametrize("which", ["queries", "node-1"])
@pytest.mark.parametrize("where", [0.001, 0.999])
def test_rejects_modified_file_before_parsing(
    world: World, which: str, where: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_files, "unpack", lambda blob: pytest.fail("parsed"))
    path = world.path(which)
    blob = bytearray(path.read_bytes())
    blob[int(where * len(blob))] ^= 1
    path.write_bytes(blob)
    with pytest.raises(QueryFileError, match="its signature"):
        read_queries(path) if which == "queries" else world.read(which)
    signed_files.signature_path(path).unlink()
    with pytest.raises(QueryFileError, match=r"\.sig is missing"):
        read_queries(path) if which == "queries" else world.read(which)


def test_rejects_swapped_queries_and_responses(world: World) -> None:
    with pytest.raises(QueryFileError, match=r"node-0\.safetensors .*responses .*queries"):
        read_queries(world.path("node-0"))
    with pytest.raises(QueryFileError, match=r"queries .*responses"):
        world.read("queries")
    signed_files.write(world.path("x"), b"nothing of the kind", world.key("server"))
    with pytest.raises(QueryFileError, match="no queries"):
        read_queries(world.path("x"))


def test_rejects_queries_with_unknown_option(world: World) -> None:
    for change, message in (
        ({"surprise": 1}, "no plan that this version of fedstill can follow: unknown key 'method.surprise'"),
        ({"name": "magic"}, "method.name = 'magic'"),
        ({"levels": -1}, "invalid method.levels = -1"),
    ):
        header, tensors = unpack(world.path("queries").read_bytes())
        header["plan"]["method"] |= change
        signed_files.write(world.path("x"), pack(header, tensors), world.key("server"))
        with pytest.raises(QueryFileError, match=re.escape(message)):
            read_queries(world.path("x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, t: h.update(format=1), f"is of format 1: this version of fedstill reads {FORMAT}"),
        (lambda h, t: h.pop("queries"), "queries"),
        (lambda h, t: h["queries"].pop(), "does not list the queries that it holds"),
        (lambda h, t: t.update(stray=torch.zeros(1)), "holds a tensor 'stray', which belongs to no query"),
        (
            lambda h, t: t["public.inputs"].fill_(float("nan")),
            "public data: 23 examples hold NaN or infinity",
        ),
        (
            lambda h, t: t.update({"public.inputs": torch.zeros(N, 3, 8, 8)}),
            r"public inputs are of shape (23, 3, 8, 8) (expected (N, 1, 8, 8)",
        ),
        (lambda h, t: h["plan"]["spec"].update(std=[0.0]), "spec.std ="),
        (
            lambda h, t: h["plan"]["spec"].update(task={"name": "antigravity:geohash"}),
            r"invalid task.name = 'antigravity:geohash' (expected a name that policy.plugins of the "
            "node allows",
        ),
        (lambda h, t: h["plan"].update(run="../.."), "invalid run = '../..'"),
        (
            lambda h, t: h["plan"].update(public="0" * 32),
            "are not those of the plan",
        ),
        (lambda h, t: h.update(plan=None), "has no plan"),
    ],
)
def test_rejects_inconsistent_queries(world: World, change: Any, message: str) -> None:
    header, tensors = unpack(world.path("queries").read_bytes())
    change(header, tensors)
    signed_files.write(world.path("x"), pack(header, tensors), world.key("server"))
    with pytest.raises(QueryFileError, match=re.escape(message)) as caught:
        read_queries(world.path("x"))
    assert "\n" not in str(caught.value)


# --- responses that are refused ---------------------------------------------------------------------


def test_trusts_responses_with_node_key_only(world: World) -> None:
    assert not world.read().trusted
    assert world.read(keys=world.keys()).trusted
    with pytest.raises(QueryFileError, match="not expected"):
        world.read(keys={name: key for name, key in world.keys().items() if name != "node-0"})
    swapped = world.keys() | {"node-0": world.keys()["node-1"], "node-1": world.keys()["node-0"]}
    with pytest.raises(QueryFileError, match=r"'node-0', .*a key"):
        world.read(keys=swapped)


def test_rejects_two_files_of_one_node(world: World) -> None:
    for name in (world.path("node-0"), signed_files.signature_path(world.path("node-0"))):
        copy = name.with_name(name.name.replace("node-0", "again"))
        copy.write_bytes(name.read_bytes())
    with pytest.raises(QueryFileError, match=r"node-0\.safetensors and .*again\.safetensors "):
        ResponseFiles(world.queries, [world.read(), world.read("again")])
    with pytest.raises(QueryFileError, match="no responses"):
        ResponseFiles(world.queries, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, t: t.pop("1.logits"), "does not hold one response to each of the 3 queries"),
        (lambda h, t: h["replies"]["privacy"].pop(), "does not hold one response to each of the 3 queries"),
        (lambda h, t: h.pop("replies"), "its node's replies are malformed"),
        (lambda h, t: h["replies"]["join"].update(checkpoints=3), "checkpoints"),
        (lambda h, t: h["replies"]["privacy"][1].clear(), "mechanism of a response is missing"),
        (lambda h, t: h["policy"].update(queries=3), "policy.queries = 3"),
        (lambda h, t: h.pop("node"), "node"),
    ],
)
def test_rejects_inconsistent_responses(world: World, change: Any, message: str) -> None:
    world.forge(change)
    with pytest.raises(QueryFileError, match=re.escape(message)) as caught:
        world.read()
    assert str(world.path("node-0")) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["0.counts"].fill_(float("nan")), "query 'count_labels': counts hold NaN"),
        (lambda t: t.update({"1.logits": t["1.logits"][:-1]}), "'predict': logits are .* of shape .22, 3."),
        (lambda t: t.update({"1.logits": t["1.logits"][:, :2]}), "'predict': logits are .23, 2., for 3 cl"),
        (lambda t: t.update({"0.weights": torch.zeros(2)}), "responded .*'weights'"),
    ],
)
def test_invalid_offline_responses_name_node(
    world: World, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    """Responses in files are validated like those of a live run."""
    world.forge(lambda header, tensors: change(tensors), "node-1")
    with pytest.raises(NodeFault, match=f"node 'node-1'.*{message}"):
        step(world.federation())
