"""Digests of the data of a run, which tell whether they have changed."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.core.dataset import TensorData
from fedstill.data.public import PublicData
from fedstill.protocol.digests import chain_digest, digest
from fedstill.protocol.run_plan import public_fingerprint


def digest_examples(parts: Sequence[TensorData]) -> str:
    """Return a digest of examples; equal digests mean equal bits."""
    named = {f"inputs {k}": part.inputs for k, part in enumerate(parts)}
    named |= {f"targets {k}": part.targets for k, part in enumerate(parts)}
    named |= {f"groups {k}": part.groups for k, part in enumerate(parts) if part.groups is not None}
    return digest("data", named)


def digest_run_data(parts: Sequence[TensorData], test: TensorData, public: PublicData | None) -> str:
    """Return a digest of the nodes' examples, test examples and public data."""
    return chain_digest(digest_examples([*parts, test]), public_fingerprint(public))
