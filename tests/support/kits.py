"""Startup kits that authenticate nodes, and parties of secure aggregation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from torch import nn

from fedstill.core.compute import Compute
from fedstill.core.dataset import TensorData
from fedstill.node.audit_log import AuditLog
from fedstill.node.gate import Gate
from fedstill.node.kit_identity import KitIdentity
from fedstill.node.node import Node
from fedstill.node.node_group import NodeGroup
from fedstill.node.node_view import NodeView
from fedstill.node.policy import PolicyConfig
from fedstill.node.received_tensors import ReceivedTensors
from fedstill.node.request_handler import RequestHandler
from fedstill.node.secure_aggregation import (
    SUM_HISTORY_FILE,
    MaskedReleases,
    SumHistory,
    SumMasks,
)
from fedstill.protocol.node_side import NodeSide
from fedstill.protocol.payload_kinds import INPUTS, LOGITS
from fedstill.protocol.queries import Query
from fedstill.protocol.secure_aggregation import (
    SumRequest,
    SumWeighting,
    to_ring,
)
from tests.support.small_world import SETTING

NOW = datetime.now(timezone.utc)


class Authority:
    """Certificate authority that writes kits."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign("root", self._key.public_key(), "root", 1)

    def write(
        self, folder: Path, name: str, days: int = 1, *, with_rsa: bool = False, role: str = ""
    ) -> None:
        """Write a kit with a certificate for ``name`` into a node's folder."""
        startup = folder / "kit" / "startup"
        startup.mkdir(parents=True, exist_ok=True)
        key = rsa.generate_private_key(65537, 2048) if with_rsa else ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key.public_key(), "root", days, role)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (startup / "client.key").write_bytes(private)
        (startup / "client.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
        (startup / "rootCA.pem").write_bytes(self._certificate.public_bytes(Encoding.PEM))
        (startup / "fed_client.json").write_text(json.dumps({"servers": [{"identity": "server"}]}))

    def _sign(
        self,
        name: str,
        public: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
        issuer: str,
        days: int,
        role: str = "",
    ) -> x509.Certificate:
        named = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, issuer)]
        if role:
            named[0] = x509.Name([*named[0], x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)])
        builder = x509.CertificateBuilder().subject_name(named[0]).issuer_name(named[1]).public_key(public)
        until = NOW + timedelta(days=days)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(
            until - timedelta(days=9)
        )
        return builder.not_valid_after(until).sign(self._key, SHA256())


NAMES = ("n0", "n1", "n2", "n3")
LOSSES = PolicyConfig(sums_may_differ=True)


class Party:
    """Nodes that have exchanged keys, each with values to add."""

    def __init__(
        self, folder: Path, names: Sequence[str] = NAMES, policy: PolicyConfig = LOSSES, run: str = "one"
    ) -> None:
        self.folder, self.policy, self.names, self.run = folder, policy, names, run
        self.authority = Authority()
        for index, name in enumerate(names):
            self.authority.write(folder / name, name, with_rsa=index == 0)
        self.masks = {name: self.start_node(name) for name in names}
        self.cards = {name: each.make_key_card() for name, each in self.masks.items()}
        for each in self.masks.values():
            each.exchange_keys(self.cards)
        self.values = {name: torch.tensor([[1.5, -2.0, index]]) for index, name in enumerate(names)}

    def start_node(self, name: str) -> SumMasks:
        """Return the masks of a new process of a node."""
        home = self.folder / name
        return SumMasks(
            {"run": self.run},
            name,
            KitIdentity(home / "kit"),
            self.policy,
            SumHistory(home / SUM_HISTORY_FILE),
        )

    def added(self, name: str, call: SumRequest, content: str = "x") -> dict[str, torch.Tensor]:
        """Return a node's masked contribution."""
        call = self.masks[name].admit("predict", call)
        return self.masked(name, call, content)

    def masked(self, name: str, call: SumRequest, content: str = "x") -> dict[str, torch.Tensor]:
        mask = self.masks[name].mask_function(call, "predict", (content,))
        return {"z": mask(to_ring(self.values[name]), 0)}

    def true(self, names: Sequence[str]) -> torch.Tensor:
        return torch.stack([self.values[name] for name in names]).sum(0).double()


class Deployed:
    """A node whose response is z + x, or z x, with its gate, handler and masks."""

    def __init__(
        self,
        masks: SumMasks,
        z: torch.Tensor,
        weighting: SumWeighting | None = "sum",
        multiplies: bool = False,
    ) -> None:
        def predict(node: NodeView, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.calls += 1
            if self.fails:
                raise RuntimeError("it fails half-way")
            return {"z": z * x if multiplies else z + x}

        self.calls, self.fails = 0, False
        query = Query(
            predict,
            sends={"x": INPUTS},
            releases={"z": LOGITS},
            sums={} if weighting is None else {"z": weighting},
            differentiable=("x",),
        )
        self.side = NodeSide({"predict": query}, setting=SETTING)
        self.gate = Gate(masks.name, masks.policy, AuditLog(), "one")
        data = TensorData(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
        node = Node(masks.name, data, nn.Linear(2, 2), self.gate, 0)
        self.sums = MaskedReleases(masks, self.gate, self.side)
        self.handler = RequestHandler(NodeGroup([node]), self.side, Compute())

    def respond(self, number: int, x: float, call: SumRequest | None) -> torch.Tensor:
        inputs = ReceivedTensors.of_query(self.side.queries["predict"], {"x": torch.full((1, 2), x)})
        return self.sums.respond(self.handler, number, inputs, True, call)["z"]

    def backward(self, number: int, gradient: float, call: SumRequest | None) -> torch.Tensor:
        gradients = ReceivedTensors.of_gradients("predict", {"z": torch.full((1, 2), gradient)})
        return self.sums.backward(self.handler, number, gradients, call)["d/dx"]
