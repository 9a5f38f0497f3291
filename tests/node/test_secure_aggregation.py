"""Masks cancel in the full sum only, reveal nothing to malicious servers, and need known nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian

from fedstill.core.compute import Compute
from fedstill.core.errors import QueryMismatch, QueryRefused, RunFolderError
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.kit_identity import KitIdentity
from fedstill.node.policy import PolicyConfig
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.request_handler import RequestHandler
from fedstill.node.secure_aggregation import (
    SUM_HISTORY_FILE,
    UNMASKED,
    MaskedReleases,
    SumEncoder,
    SumHistory,
    SumMasks,
)
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import CRITIC, INPUTS, LABEL_COUNTS, LOGITS, PayloadKind
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import (
    FRACTION_BITS,
    GRADIENT_FRACTION_BITS,
    SumRequest,
    add_contributions,
    from_ring,
    mask_sign,
    mask_tensor,
    to_ring,
)
from tests.support.kits import LOSSES, NAMES, Deployed, Party
from tests.support.privacy import free_directions
from tests.support.small_world import SETTING


def made(home: Path, name: str, run: str = "one", policy: PolicyConfig = LOSSES) -> SumMasks:
    return SumMasks(
        {"run": run}, name, KitIdentity(home / "kit"), policy, SumHistory(home / SUM_HISTORY_FILE)
    )


@pytest.fixture
def party(tmp_path: Path) -> Party:
    return Party(tmp_path)


@pytest.fixture(scope="module")
def shared_party(tmp_path_factory: pytest.TempPathFactory) -> Party:
    return Party(tmp_path_factory.mktemp("shared"))


def read(each: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    return from_ring(add_contributions(each)["z"])


def refused(rule: str) -> pytest.RaisesExc[QueryRefused]:
    return pytest.raises(QueryRefused, match=rule)


# --- the full sum ------------------------------------------------------------------------------------


def test_masks_cancel_only_in_full_sum(party: Party) -> None:
    call = SumRequest(1, NAMES)
    added = {name: party.added(name, call) for name in NAMES}

    assert torch.equal(read(list(added.values())), party.true(NAMES))
    for count in range(1, len(NAMES)):
        for some in itertools.combinations(NAMES, count):
            assert (read([added[name] for name in some]) - party.true(some)).abs().min() > 1


def test_mask_is_random_and_never_repeats(party: Party) -> None:
    party.values["n0"] = torch.zeros(1, 20_000)
    one, other = (party.added("n0", SumRequest(number, NAMES))["z"] for number in (1, 2))

    for mask in (one, other, one - other):
        ones = torch.stack([(mask >> bit) & 1 for bit in range(64)]).double().mean()
        assert abs(ones - 0.5) < 0.002
        assert len(mask.unique()) == mask.numel()


@pytest.mark.parametrize("lie", ["content", "members", "number"])
def test_different_inputs_break_sum(party: Party, lie: str) -> None:
    """A server sends one node the real query, and all others one with a known response."""
    received = {
        "content": [(SumRequest(1, NAMES), "x"), *[(SumRequest(1, NAMES), "y")] * 3],
        "members": [
            (SumRequest(1, NAMES), "x"),
            *[(SumRequest(1, NAMES[:3]), "x")] * 2,
            (SumRequest(1, NAMES), "x"),
        ],
        "number": [(SumRequest(2, NAMES), "x"), *[(SumRequest(1, NAMES), "x")] * 3],
    }[lie]

    added = [party.added(name, *each) for name, each in zip(NAMES, received, strict=True)]

    assert (read(added) - party.true(NAMES)).abs().min() > 1


# --- sums without failed nodes ------------------------------------------------------------------------


def test_survivors_sum_is_read_and_late_response_stays_masked(party: Party) -> None:
    call, remaining = SumRequest(1, NAMES, recover=True), NAMES[:3]
    added = {name: party.added(name, call) for name in NAMES}
    words = {name: party.masks[name].confirm_survivors(1, remaining) for name in remaining}
    keys = {
        name: party.masks[name].reveal_mask_keys(
            1, {other: words[other][name] for other in remaining if other != name}
        )
        for name in remaining
    }

    assert all(set(keys[name]) == {name, "n3"} for name in remaining)
    ring = add_contributions([added[name] for name in remaining])["z"].clone()
    for name in remaining:
        ring -= mask_tensor(bytes.fromhex(keys[name][name]), 0, ring.shape)
        ring -= mask_sign(name, "n3") * mask_tensor(bytes.fromhex(keys[name]["n3"]), 0, ring.shape)
    assert torch.equal(from_ring(ring), party.true(remaining))

    late = added["n3"]["z"].clone()  # without all masks that the survivors revealed
    for name in remaining:
        late -= mask_sign("n3", name) * mask_tensor(bytes.fromhex(keys[name]["n3"]), 0, late.shape)
    assert (from_ring(late) - party.values["n3"]).abs().min() > 1
    with refused("not all survivors"):  # and the node does not reveal the mask that remains
        party.masks["n3"].reveal_mask_keys(1, {})
    party.masks["n3"].confirm_survivors(1, NAMES)
    with refused("not all survivors"):
        party.masks["n3"].reveal_mask_keys(
            1, {name: words[name].get("n3", words["n0"]["n1"]) for name in remaining}
        )


def test_node_agrees_once_on_enough_survivors(party: Party) -> None:
    masks = party.masks["n0"]
    party.added("n0", SumRequest(1, NAMES, recover=True))
    party.added("n0", SumRequest(2, NAMES))

    for survivors, rule in (
        (NAMES[:2], "2 survivors"),
        (NAMES[1:], "including this node"),
        ((*NAMES[:3], "n9"), "must be members"),
        (("n0", "n1", "n1"), "must be members"),
    ):
        with refused(rule):
            masks.confirm_survivors(1, survivors)
    with refused("read from all its members"):
        masks.confirm_survivors(2, NAMES[:3])
    with refused("is unknown"):
        masks.confirm_survivors(7, NAMES)
    masks.admit("predict", SumRequest(3, NAMES, recover=True))
    with refused("has not added to it"):
        masks.confirm_survivors(3, NAMES)
    assert masks.confirm_survivors(1, NAMES[:3]) == masks.confirm_survivors(1, NAMES[:3])
    with refused("agreed on other survivors"):
        masks.confirm_survivors(1, NAMES)


def test_agreement_code_is_for_one_receiver_and_sum(party: Party) -> None:
    for number in (1, 2):
        for name in NAMES:
            party.added(name, SumRequest(number, NAMES, recover=True))
    words = {
        number: {name: party.masks[name].confirm_survivors(number, NAMES) for name in NAMES}
        for number in (1, 2)
    }
    others = NAMES[1:]
    right = {name: words[1][name]["n0"] for name in others}

    for wrong in (
        {name: words[2][name]["n0"] for name in others},
        {name: words[1]["n0"][name] for name in others},
        dict(zip(others, ("", *list(right.values())[1:]), strict=True)),
        {name: right[name] for name in others[1:]},
    ):
        with refused("not all survivors"):
            party.masks["n0"].reveal_mask_keys(1, wrong)
    assert set(party.masks["n0"].reveal_mask_keys(1, right)) == {"n0"}


# --- repeated requests -----------------------------------------------------------------------------------


def test_numbers_and_masks_are_used_once(party: Party) -> None:
    """The difference of two responses under one mask is not masked."""
    call = SumRequest(5, NAMES)
    first = party.added("n0", call)

    assert torch.equal(party.masked("n0", call)["z"], first["z"])  # as after a full disk
    with refused("another sum"):
        party.masked("n0", call, "other content")
    for again in (call, SumRequest(4, NAMES), SumRequest(5, NAMES[:3])):
        with refused("not above 5"):
            party.added("n0", again)


def deploy(party: Party) -> list[Deployed]:
    return [Deployed(party.masks[name], torch.tensor([[1.0, 2.0]])) for name in NAMES]


def test_repeated_query_gets_the_same_bytes_or_a_refusal(party: Party) -> None:
    """The difference of two payloads under one mask reveals their difference."""
    node, call, other = deploy(party)[0], SumRequest(1, NAMES), SumRequest(2, NAMES)
    first = node.respond(0, 0.0, call)

    assert torch.equal(node.respond(0, 0.0, call), first)
    assert node.calls == 1
    # the same query for another sum would release the same response under two masks
    with pytest.raises(QueryMismatch):
        node.respond(0, 0.0, other)
    with pytest.raises(QueryMismatch):
        node.respond(0, 0.5, call)
    for again in (call, None):
        with refused("sums:"):
            node.respond(1, 0.0, again)
    gradient = node.backward(0, 0.5, other)
    assert torch.equal(node.backward(0, 0.5, other), gradient)
    for different, request in ((0.5, SumRequest(3, NAMES)), (0.75, other), (0.5, None)):
        with pytest.raises(QueryMismatch):
            node.backward(0, different, request)


def test_response_without_a_sum_is_refused_before_it_is_computed(party: Party) -> None:
    """A server's method may declare no sums in a run with secure aggregation."""
    node = Deployed(party.masks["n0"], torch.tensor([[1.0, 2.0]]), weighting=None)

    assert node.sums.rules_by_refused_query() == {"predict": UNMASKED}
    for call in (None, SumRequest(1, NAMES)):
        with refused("under masks only"):
            node.respond(0, 0.0, call)
    assert node.calls == 0


def test_release_is_masked_once_after_disk_error(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit log cannot be written; the server repeats its query, for this sum or another one."""
    nodes, call = deploy(party), SumRequest(1, NAMES)
    node, encoded = nodes[0], list[torch.Tensor]()
    encode = node.sums.encode

    def record(*given: Any) -> Any:
        encoded.append(encode(*given)["z"])
        return {"z": encoded[-1]}

    monkeypatch.setattr(node.sums, "encode", record)
    with monkeypatch.context() as full:
        audit = node.gate.ledger.audit
        full.setattr(audit, "charge_all", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            node.respond(0, 0.0, call)
    with pytest.raises(QueryMismatch):
        node.respond(0, 0.0, SumRequest(2, NAMES))
    released = node.respond(0, 0.0, call)

    assert node.calls == 1
    assert [torch.equal(released, each) for each in encoded] == [True, True]
    others = [each.respond(0, 0.0, call) for each in nodes[1:]]
    assert read([{"z": each} for each in (released, *others)]).tolist() == [[4.0, 8.0]]


def test_masks_depend_on_output_gradients(party: Party) -> None:
    """A server that sends one node other gradients cannot read the sum."""
    for first, is_read in ((0.5, True), (0.75, False)):
        number, nodes = (1 if is_read else 3), deploy(party)
        parts = []
        for index, node in enumerate(nodes):
            node.respond(0, 0.0, SumRequest(number, NAMES))
            gradient = node.backward(0, 0.5 if index else first, SumRequest(number + 1, NAMES))
            parts.append({"d/dx": gradient})
        sums = from_ring(add_contributions(parts)["d/dx"], GRADIENT_FRACTION_BITS)
        assert ((sums - (first + 1.5)).abs().min() < 1e-6) == is_read


def test_masks_depend_on_a_query_that_failed_at_one_node(party: Party) -> None:
    """Its networks may have changed, unlike the others'."""
    nodes = deploy(party)
    nodes[0].fails = True
    with pytest.raises(RuntimeError, match="half-way"):
        nodes[0].respond(0, 3.0, SumRequest(1, NAMES))
    nodes[0].fails = False

    sums = read([{"z": each.respond(1, 0.0, SumRequest(2, NAMES))} for each in nodes])

    assert (sums - torch.tensor([[4.0, 8.0]])).abs().min() > 1


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["respond", "backward", "restore"]),
            st.integers(0, 3),
            st.sampled_from([0.0, 0.5, 1.0]),
            st.one_of(st.none(), st.integers(1, 8)),
        ),
        min_size=2,
        max_size=16,
    )
)
def test_no_mask_serves_two_payloads(
    steps: list[tuple[str, int, float, int | None]], shared_party: Party
) -> None:
    """For any order of requests, two released tensors with the same mask are the same release."""
    masks = shared_party.start_node("n0")
    masks.exchange_keys({**shared_party.cards, "n0": masks.make_key_card()})
    node, payloads = Deployed(masks, torch.tensor([[1.0, 2.0]])), dict[bytes, bytes]()
    for what, number, value, call in steps:
        request = None if call is None else SumRequest(call, NAMES)
        if what == "restore":  # to a checkpoint before the first query
            node.gate.ledger.restart()
            node.handler = RequestHandler(node.handler.group, node.side, Compute())
            node.sums.restart()
            node.sums.query_history_hash = ""
            continue
        try:
            if what == "respond":
                masked, payload = node.respond(number, value, request), torch.tensor([[1.0, 2.0]]) + value
                fraction = FRACTION_BITS
            else:
                masked, payload = node.backward(number, value, request), torch.full((1, 2), value)
                fraction = GRADIENT_FRACTION_BITS
        except (QueryRefused, QueryMismatch):
            continue
        plain = to_ring(payload, fraction)
        mask = (masked - plain).numpy().tobytes()
        assert payloads.setdefault(mask, plain.numpy().tobytes()) == plain.numpy().tobytes()
        assert request is not None


def respond(masks: SumMasks, call: SumRequest, z: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the masked response of a node with response z, released through its gate and encoder."""
    return {"z": Deployed(masks, z).respond(0, 0.0, call)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_response_that_cannot_be_added_corrupts_sum(party: Party, value: float) -> None:
    """Otherwise a server would learn the size of one node's response, or the sum of the others."""
    totals = []
    for call in (SumRequest(1, NAMES), SumRequest(2, NAMES)):
        z = {name: torch.tensor([[1.0, value if name == "n0" else 2.0]]) for name in NAMES}
        totals.append(read([respond(party.masks[name], call, z[name]) for name in NAMES]))
    for sums in totals:
        assert bool(sums.isfinite().all())
        assert abs(sums[0, 0] - 4.0) > 1.0, "valid entries are corrupted too"
        assert abs(sums[0, 1] - 6.0) > 1.0, "the sum of the other nodes is not revealed"
    assert bool((totals[0] != totals[1]).all())


def test_exhausted_node_corrupts_all_sums(
    party: Party,
) -> None:
    """Corrupted sums show a server how large responses to its inputs are; a refusal would name the node."""

    def sum_responses(number: int, large: bool = False) -> torch.Tensor:
        z = {name: torch.tensor([[1.0, 1e30 if large and name == "n0" else 2.0]]) for name in NAMES}
        call = SumRequest(number, NAMES)
        return read([respond(party.masks[name], call, z[name]) for name in NAMES])

    assert sum_responses(1).tolist() == [[4.0, 8.0]]
    sum_responses(2, large=True)
    assert party.masks["n0"].history.corrupted == 1
    assert abs(sum_responses(3)[0, 0] - 4.0) > 1.0, "although it could be added"
    party.masks["n0"] = party.start_node("n0")  # for another run
    party.cards["n0"] = party.masks["n0"].make_key_card()
    for masks in party.masks.values():
        masks.exchange_keys(party.cards)
    assert abs(sum_responses(4)[0, 0] - 4.0) > 1.0
    assert party.masks["n0"].history.corrupted == 1
    party.masks["n0"].policy = PolicyConfig(sums_may_differ=True, max_corrupted_sums=2)
    assert sum_responses(5).tolist() == [[4.0, 8.0]]


def test_members_must_be_enough_and_known(party: Party) -> None:
    with refused("2 members"):
        party.added("n0", SumRequest(1, NAMES[:2]))
    with refused("n9: no keys were exchanged"):
        party.added("n0", SumRequest(1, (*NAMES, "n9")))
    with refused("not a member"):
        party.added("n0", SumRequest(1, NAMES[1:]))
    with refused("under masks only"):
        party.masks["n0"].admit("predict", None)
    party.masks["n0"].policy = PolicyConfig(min_nodes=5, sums_may_differ=True)
    with refused(r"4 members \(expected 5"):
        party.added("n0", SumRequest(1, NAMES))
    party.masks["n0"].policy = PolicyConfig()
    with refused("without failed nodes"):
        party.added("n0", SumRequest(1, NAMES, recover=True))


def test_excluded_member_is_refused_across_processes(tmp_path: Path) -> None:
    party = Party(tmp_path, policy=PolicyConfig())
    party.added("n0", SumRequest(1, NAMES))

    with refused(r"without n3, .* unless its owner sets sums_may_differ"):
        party.added("n0", SumRequest(2, NAMES[:3]))
    party.masks["n0"] = party.start_node("n0")  # possibly for another run with the same model
    party.cards["n0"] = party.masks["n0"].make_key_card()
    party.masks["n0"].exchange_keys(party.cards)
    with refused("without n3"):
        party.added("n0", SumRequest(3, NAMES[:3]))


def test_allowed_member_sets_are_refused_after_withdrawal(party: Party) -> None:
    for number, members in enumerate((NAMES, NAMES[:3])):
        party.added("n0", SumRequest(number, members))
    party.masks["n0"] = party.start_node("n0")
    party.masks["n0"].policy = PolicyConfig()
    party.masks["n0"].exchange_keys({**party.cards, "n0": party.masks["n0"].make_key_card()})
    for members in (NAMES, NAMES[:3]):
        with refused("with and without n3"):
            party.added("n0", SumRequest(9, members))


@pytest.mark.parametrize(
    "text",
    [
        "[1",
        "[1]",
        '{"sets": []}',
        '{"sets": [1], "corrupted": 0}',
        '{"sets": [], "corrupted": -1}',
        '{"sets": [], "corrupted": 0, "weightings": ["z"]}',
        '{"sets": [], "corrupted": 0}',
        '{"sets": [], "corrupted": 0, "weightings": {}}',
        '{"sets": [], "corrupted": 0, "weightings": {}, "weights": {"size": 3}}',
        '[["n0", "n1"]]',
    ],
)
def test_damaged_sum_history_gives_error(text: str, tmp_path: Path) -> None:
    (tmp_path / SUM_HISTORY_FILE).write_text(text)
    with pytest.raises(RunFolderError, match="earlier sums"):
        SumHistory(tmp_path / SUM_HISTORY_FILE)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 8), min_size=3), min_size=1, max_size=6))
def test_no_combination_of_sums_reveals_two_nodes(sets: list[set[int]]) -> None:
    """No linear combination of the allowed sums is a sum over only one or two nodes."""
    histories = {node: SumHistory(Path("none.json")) for node in range(9)}
    let = []
    for members in sets:
        named = [str(member) for member in members]
        if all(histories[member].member_conflict(named) is None for member in members):
            let.append([float(node in members) for node in range(9)])
            for member in members:
                histories[member].member_sets = [frozenset(named)]
    rows = np.array(let)
    for few in itertools.chain(itertools.combinations(range(9), 1), itertools.combinations(range(9), 2)):
        others = np.delete(rows, few, axis=1)
        assert np.linalg.matrix_rank(rows) == np.linalg.matrix_rank(others)


# --- key cards -------------------------------------------------------------------------------------------


def test_forged_cards_are_refused(party: Party, tmp_path: Path) -> None:
    masks = party.masks["n0"]
    other_party = Party(tmp_path / "elsewhere")
    party.authority.write(tmp_path / "old", "n1", days=-1)
    expired = made(tmp_path / "old", "n1")
    for card, rule in (
        (other_party.cards["n1"], "not issued by this federation's authority"),
        (party.cards["n2"], "its certificate names"),
        (expired.make_key_card(), "has expired"),
        (b"{}", "it is not a card"),
        (party.cards["n1"].replace(b'"value": "', b'"value": "00', 1), "signature"),
    ):
        with refused(rule):
            masks.exchange_keys({**party.cards, "n1": card})
    other = made(tmp_path / "n1", "n1", "two")
    with refused("signature"):  # a card of another run
        masks.exchange_keys({**party.cards, "n1": other.make_key_card()})
    for name, role in (("server", ""), ("n1", "admin")):  # kits of the server's own, from the same authority
        party.authority.write(tmp_path / f"own-{name}", name, role=role)
        own = made(tmp_path / f"own-{name}", name)
        with refused("not a node's"):
            masks.exchange_keys({**party.cards, name: own.make_key_card()})
    copied = party.masks["n1"]._identity.sign(
        party.masks["n1"]._key_claim("n1", party.masks["n2"]._private_key.public_key().public_bytes_raw()),
        party.masks["n2"]._private_key.public_key().public_bytes_raw(),
    )
    with refused("has another node's key"):
        masks.exchange_keys({**party.cards, "n1": copied})
    with refused("own card is missing"):
        masks.exchange_keys({name: card for name, card in party.cards.items() if name != "n0"})
    with refused("another key for this node"):
        masks.exchange_keys({**party.cards, "n0": party.start_node("n0").make_key_card()})


def test_weights_are_first_released_counts() -> None:
    """With noise, one node alone could have examples of a class, and the sum would be its response."""
    count = Query(lambda node, **_: {}, releases={"n": LABEL_COUNTS}, sums={"n": "sum"}, name="count")
    for protects, expected in ((False, [0.0, 7.0]), (True, [1.0, 7.0])):
        gate = Gate("n0", PolicyConfig(), AuditLog(), "one")
        gate.ledger.budgets = SimpleNamespace(  # type: ignore[assignment]
            mechanism=SimpleNamespace(protects=protects)
        )
        encoder = SumEncoder(gate)
        encoder.record(count, {"n": torch.tensor([0.0, 7.0])})
        encoder.record(count, {"n": torch.tensor([3.0, 4.0])})
        assert encoder.counts["counts"].tolist() == expected


def test_counts_are_equal_in_all_runs(tmp_path: Path) -> None:
    """If data grew in between, the difference of two sums of one form would be one node's response."""
    party, home = Party(tmp_path, policy=PolicyConfig()), tmp_path / "n0"
    counts = torch.tensor([3.0, 5.0])
    for _ in range(2):
        party.masks["n0"].check_weights("counts", counts)
    other = made(home, "n0", "two", PolicyConfig())  # another process and another run
    other.check_weights("counts", counts)
    other.check_weights("size", counts.sum())
    for changed in (counts + 1, counts.flip(0)):
        with refused("counts differ from those of its earlier sums"):
            other.check_weights("counts", changed)
    made(home, "n0").check_weights("counts", counts + 1)  # this owner allows it


def test_responses_are_added_as_one_statistic_with_one_weighting(tmp_path: Path) -> None:
    """Logits of three nodes, weighted equally, by size and by counts, are three equations for them."""
    party = Party(tmp_path, policy=PolicyConfig())
    equally, by_size = {"outputs": "logits by mean"}, {"outputs": "logits by size"}

    def add(number: int, forms: dict[str, str]) -> None:
        call = party.masks["n0"].admit("predict", SumRequest(number, NAMES), forms)
        party.masked("n0", call)

    add(1, by_size)
    with refused("has added logits by size, and would add logits by mean: .* sums_may_differ = true"):
        add(2, equally)
    for number, forms in enumerate((by_size, {}, {"parameters": "parameters by size"}), 3):
        add(number, forms)
    party.masks["n0"] = party.start_node("n0")  # another process
    party.masks["n0"].exchange_keys({**party.cards, "n0": party.masks["n0"].make_key_card()})
    with refused("has added logits by size, and would add logits by mean"):
        add(8, equally)
    with refused("would add parameters by mean"):
        add(9, {"parameters": "parameters by mean"})
    party.masks["n0"] = made(tmp_path / "n0", "n0")  # this owner allows other forms
    party.masks["n0"].exchange_keys({**party.cards, "n0": party.masks["n0"].make_key_card()})
    add(10, equally)
    party.masks["n0"].policy = PolicyConfig()  # and withdraws the permission
    for number, forms in enumerate((by_size, equally), 11):
        with refused("both could reveal single responses"):
            add(number, forms)


TRAPS = [  # statistics of one response that a server could request
    ("logits", "log_probs", "size"),
    ("logits", "log_probs", "mean"),
    ("logits", "log_probs", "counts"),
    ("logits", "logits", "size"),
    ("logits", "probs", "size"),
    ("critic", "log_probs", "size"),
    ("my_lab: entropies", "my_lab", "size"),
    ("my_lab: records", "my_lab", "size"),
]
Trap = tuple[str, str, str]


def statistic(trap: Trap, z: torch.Tensor) -> torch.Tensor:
    """Return the sum over nodes with 37, 58, 80, ... records of a statistic of their responses (K, C)."""
    kind, adds, how = trap
    log_p = z.log_softmax(1)
    if kind != "logits":
        each = -(log_p.exp() * log_p).sum(1, keepdim=True) if kind != "critic" else z.square().sum(1, True)
    else:
        each = {"logits": z, "log_probs": log_p, "probs": log_p.exp()}[adds]
    sizes = torch.tensor([37.0, 58, 80, 41, 63], dtype=z.dtype)[: len(z), None]
    shares = torch.tensor([[3.0, 5, 2], [1, 7, 4], [6, 1, 5], [2, 2, 9], [4, 3, 1]], dtype=z.dtype)
    weight = {"size": sizes, "mean": torch.ones_like(sizes), "counts": shares[: len(z), : each.shape[1]]}[how]
    return (weight * each).sum(0)


def build_node_side(trap: Trap, name: str) -> NodeSide:
    kind, adds, how = trap
    _, _, plain = kind.rpartition(": ")
    of: Any = "records" if plain == "records" else "scores"
    made = {"logits": LOGITS, "critic": CRITIC}.get(kind) or PayloadKind(plain, category=of)
    handler: Any = lambda node, **inputs: {}  # noqa: E731
    query = Query(handler, sends={"x": INPUTS}, releases={"z": made}, sums={"z": how}, name=name)  # type: ignore[dict-item]
    return NodeSide({name: query}, SETTING, sum_source=adds)


@given(requests=st.lists(st.tuples(st.sampled_from(TRAPS), st.sampled_from("ab"), st.booleans()), max_size=8))
@settings(max_examples=60)
def test_no_sequence_of_queries_determines_a_nodes_response(
    requests: list[tuple[Trap, str, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any queries of one input, in any order and number, and across restarts of the node."""
    home, members = tmp_path_factory.mktemp("node"), NAMES[:3]
    cohort, added = SumHistory(home / SUM_HISTORY_FILE), list[Trap]()
    for trap, name, restarted in requests:
        cohort = SumHistory(home / SUM_HISTORY_FILE) if restarted else cohort
        side = build_node_side(trap, name)
        if not cohort.weighting_conflicts(side):
            cohort.record_sum(members, side.weightings(name))
            added.append(trap)

    assert len({*added}) == bool(requests)
    z = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if added:
        J = jacobian(lambda z: torch.cat([statistic(trap, z) for trap in added]), z)
        assert all(free_directions(J.flatten(1), k, 3, 3) == 2 for k in range(3))


def test_two_statistics_of_three_responses_determine_them() -> None:
    """The reason for the rule: with two classes, such sums determine the responses of three nodes."""
    z = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one, other = ("logits", "log_probs", "size"), ("my_lab: entropies", "my_lab", "size")
    for traps, free in (([one], 1), ([one, other], 0)):
        J = jacobian(lambda z, traps=traps: torch.cat([statistic(trap, z) for trap in traps]), z)  # type: ignore[misc]
        assert [free_directions(J.flatten(1), k, 3, 2) for k in range(3)] == [free] * 3


# --- failed writes, and sums without admission --------------------------------------------------------


@pytest.fixture
def admitted(tmp_path: Path) -> tuple[SumMasks, SumRequest]:
    """Masks of node a with an admitted sum of a, b and c, which is not recorded yet."""
    home = tmp_path / "home"
    home.mkdir()
    identity: Any = None  # no keys are signed
    masks = SumMasks({}, "a", identity, LOSSES, SumHistory(home / SUM_HISTORY_FILE))
    masks._shared_keys = {name: name.encode() * 32 for name in "bcd"}
    request = SumRequest(5, ("a", "b", "c"))
    masks.admit("q", request, {"outputs": "logits by size"})
    return masks, request


def test_repeated_request_records_entry_lost_to_full_disk(
    admitted: tuple[SumMasks, SumRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, request = admitted
    path = masks.history._path

    def full(*given: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    steps = [
        lambda: masks.mask_function(request, "q", ("hash", "")),
        lambda: masks.check_weights("counts", torch.ones(3)),
        lambda: masks.random_replacement_function(request)((2,), 0),
    ]
    with monkeypatch.context() as disk:
        disk.setattr("fedstill.core.private_files.replace_file", full)
        for step in steps:
            with pytest.raises(OSError, match="No space"):
                step()
    assert not path.exists()
    for step in steps:
        step()
    after_restart = SumHistory(path)
    assert after_restart.member_sets == [frozenset("abc")]
    assert after_restart.weightings == {"outputs": frozenset({"logits by size"})}
    assert after_restart.weight_digests.keys() == {"counts"}
    assert after_restart.corrupted == 1


def test_masks_are_for_admitted_members_only(admitted: tuple[SumMasks, SumRequest]) -> None:
    masks, request = admitted
    for members in (("a",), ("a", "b", "d")):
        with pytest.raises(QueryRefused):
            masks.mask_function(SumRequest(request.number, members), "q", ("hash", ""))
    masks.mask_function(request, "q", ("hash", ""))


def test_stored_response_without_its_sum_is_refused(admitted: tuple[SumMasks, SumRequest]) -> None:
    """A computation that fails after its response was cached has no sum that a repeated query could name."""
    masks, request = admitted
    releases = MaskedReleases(masks, Gate("a", LOSSES, AuditLog()), NodeSide({}, setting=SETTING))
    kept: Any = SimpleNamespace(has_responded=lambda number: number == 3)
    with pytest.raises(QueryMismatch):
        releases.respond(kept, 3, ReceivedTensors("q", {}, {}), False, request)
