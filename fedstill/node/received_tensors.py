"""Tensors that came with a query, or output gradients: checked and decompressed once for all readers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from fedstill.protocol.digests import digest
from fedstill.protocol.payload_kinds import GRADIENTS
from fedstill.protocol.queries import Query
from fedstill.protocol.tensor_forms import sent_tensor_fault
from fedstill.protocol.wire_format import SCALE, Tensors, bytes_by_kind, decompress, json_from_tensor


class ReceivedTensors:
    """Tensors of one message, and what follows from them alone.

    Properties are computed at the first use. The handlers of nodes in one process share the object, and with
    it the reasons of rules that depend on the message, the policy and the form of a node's data alone.

    Args:
        query: name of the query.
        sent: the tensors as they were sent.
        sends: declared payload kind of each tensor.
        json_values: names of the tensors that are JSON values.
    """

    def __init__(
        self, query: str, sent: Tensors, sends: Mapping[str, str], json_values: Collection[str] = ()
    ) -> None:
        self.query, self.sent, self.sends = query, sent, sends
        self._json_values = json_values
        self._form_faults: dict[tuple[Any, ...], str | None] = {}
        self.refusals: dict[tuple[Any, ...], str | None] = {}

    @classmethod
    def of_query(cls, query: Query, sent: Tensors) -> ReceivedTensors:
        """Return the tensors of a query."""
        return cls(query.name, sent, query.sends, query.details.json_values)

    @classmethod
    def of_gradients(cls, query: str, sent: Tensors) -> ReceivedTensors:
        """Return output gradients of a query's response, under the names that were sent."""
        names = (name for name in sent if not name.endswith(SCALE))
        return cls(query, sent, dict.fromkeys(names, GRADIENTS))

    @cached_property
    def decompressed(self) -> Tensors:
        """Tensors as numbers, without scales; DataError if scales do not fit."""
        return decompress(self.sent)

    def decode(self) -> dict[str, Any]:
        """Return the decompressed tensors, with JSON values decoded; DataError if one is invalid.

        Functions of queries may change JSON values, so each call gets its own.
        """
        return {
            name: json_from_tensor(tensor) if name in self._json_values else tensor
            for name, tensor in self.decompressed.items()
        }

    @cached_property
    def content_hash(self) -> str:
        """Digest of the query's name and the tensors as they were sent."""
        return digest(self.query, self.sent)

    @cached_property
    def byte_counts(self) -> Mapping[str, int]:
        """Bytes as they were sent, by payload kind."""
        return bytes_by_kind(self.sent, self.sends)

    def form_fault(
        self, input_shape: Sequence[int], output_shape: Sequence[int] | None, input_dtype: torch.dtype
    ) -> str | None:
        """Return the first fault in dtype or shape, or None; see
        :func:`~fedstill.protocol.tensor_forms.sent_tensor_fault`.
        """
        shapes = tuple(input_shape), output_shape, input_dtype
        if shapes not in self._form_faults:
            faults = (
                sent_tensor_fault(name, tensor, self.sends[name], *shapes)
                for name, tensor in self.decompressed.items()
                if name not in self._json_values
            )
            self._form_faults[shapes] = next((fault for fault in faults if fault is not None), None)
        return self._form_faults[shapes]

    def move_to(self, device: torch.device) -> None:
        """Move the decompressed tensors to a device, after all checks."""
        self.decompressed = {name: tensor.to(device) for name, tensor in self.decompressed.items()}
