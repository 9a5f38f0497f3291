"""Column sums: where each column of a federation's tables lies, from one noisy answer of each node.

A schema's ranges are what is allowed, and may be wide: of a column that fills a hundredth of its range a
network sees next to nothing. Here nodes tell, once, how many rows they hold, and of each column of numbers
the sum and the sum of squares, of values that the range has brought to -1..1. Each row moves each of these
numbers by 1 at most, which is what the gate's Gaussian noise goes by (privacy.sums_noise). Nothing is
trained: what the run leaves is ``schema.toml``, the schema with a scale for each column, by which other runs
scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from fedstill.core.options import NonNegativeFloat, PositiveFloat
from fedstill.core.table_schema import Schema
from fedstill.data.tables import SCHEMA_FILE, schema_text
from fedstill.methods import (
    ArgumentError,
    Method,
    Needs,
    NodeGroup,
    NodeSetting,
    PublicData,
    QueryCall,
    Server,
    Tensors,
    payload_kinds,
    query,
)


@dataclass
class SumsState:
    """What nodes have told: their number, and all sums over all of them; empty until then."""

    nodes: int = 0
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


def _in_float32(method: Any, told: Tensors, sent: Tensors) -> Tensors:
    return {name: tensor.float() for name, tensor in told.items()}


@dataclass(frozen=True, kw_only=True)
class ColumnSums(Method):
    """Where columns lie, by noisy sums."""

    title: ClassVar[str] = "Column sums"
    paper: ClassVar[str] = "means and standard deviations by noisy sums"
    total_steps: ClassVar[int] = 1
    evaluated_model: ClassVar[Literal["nodes"]] = "nodes"
    initial_training: ClassVar[None] = None
    trains_models: ClassVar[bool] = False
    one_round: ClassVar[bool] = True
    server_only_options: ClassVar[tuple[str, ...]] = ("width", "noise")

    width: PositiveFloat = 3.0
    """A column's scale is its mean and so many standard deviations to both sides, within its range."""
    noise: NonNegativeFloat = 4.0
    """privacy.sums_noise of the nodes, as their owners have said it: a scale is wider by what such noise may
    have done to it, in the end the whole range."""

    def needs(self) -> Needs:
        return Needs(table_rows=True)

    def notes(self, setting: NodeSetting) -> tuple[str, ...]:
        return (
            f"no model learned here, whatever the figures are: {SCHEMA_FILE} in this folder has the scales",
        )

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        return (QueryCall("sum_columns"),)

    # --- at the nodes -----------------------------------------------------------------------------------

    @query(
        releases={"moments": payload_kinds.COLUMN_SUMS},
        times=1,
        depends_on_records=("moments",),
        postprocess=_in_float32,
        sealed=True,
        sums={"moments": "sum"},
    )
    def sum_columns(self, nodes: NodeGroup) -> Tensors:
        """``moments`` (K, M): of rows, then by column n (where some may be missing), sum x, sum x^2."""
        return {
            "moments": torch.stack([sums(node.data.inputs, nodes.setting.schema) for node in nodes.nodes])
        }

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> SumsState:
        """Refuses rows of which no schema says what the columns are."""
        if not server.schema:
            raise ArgumentError("schema", "", "a table's columns, of which numbers are summed")
        return SumsState()

    def step(self, server: Server, state: SumsState, t: int) -> Mapping[str, float]:
        told = server.query("sum_columns")
        state.nodes, state.sums = len(server.federation.present), told["moments"].double().sum(0).cpu()
        return {}

    def output_files(self, server: Server, state: SumsState) -> Mapping[str, str]:
        """The schema, with a scale for each column of which the noise leaves one."""
        # All nodes' noise on one sum: each has sqrt(M) noise, as NoisySums draws it.
        off = self.noise * (len(state.sums) * state.nodes) ** 0.5
        return {SCHEMA_FILE: schema_text(scaled(server.schema, state.sums.tolist(), off, self.width))}


def sums(inputs: torch.Tensor, schema: Schema) -> torch.Tensor:
    """Features ``(N, F)`` as sums ``(M,)`` float64, each row adding from -1 to 1 to each."""
    x = inputs.double().clamp(-1, 1)
    parts = [torch.ones_like(x[:, 0])]
    for column, place in schema.feature_slices():
        if column.type == "number":
            parts += [1 - x[:, place.stop - 1]] if column.missing else []
            parts += [x[:, place.start], x[:, place.start].square()]
    return torch.stack(parts, 1).sum(0)


def scaled(schema: Schema, told: Sequence[float], off: float, width: float) -> Schema:
    """The schema with scales by sums over all nodes, which noise of standard deviation ``off`` is on.

    >>> from fedstill.core.table_schema import SchemaColumn
    >>> age, ill = SchemaColumn(name="age", range=(0.0, 200.0)), SchemaColumn(name="ill", range=(0.0, 1.0))
    >>> scaled(Schema("ill", (age, ill)), [64.0, -32.0, 17.0], 0.0, 2.0).columns[0].scale
    (25.0, 75.0)
    """
    rest, columns = list(told), []
    count = rest.pop(0)
    for column in schema.columns:
        if column.type == "number" and column.name != schema.target:
            here = rest.pop(0) if column.missing else count
            column = replace(
                column, scale=_scale(column.scaled_range, here, rest.pop(0), rest.pop(0), off, width)
            )
        columns.append(column)
    return replace(schema, columns=tuple(columns))


def _scale(
    span: tuple[float, float], count: float, total: float, squares: float, off: float, width: float
) -> tuple[float, ...]:
    """From where to where a column lies; nothing where the noise does not let it be told."""
    if count <= 2 * off:
        return ()
    # Each of both means is off by this with one chance in twenty.
    wide = 2 * off / count
    mean = total / count
    deviation = max(squares / count - mean**2 + wide, 0.0) ** 0.5
    reach = width * deviation + wide
    low, high = max(mean - reach, -1.0), min(mean + reach, 1.0)
    if not low < high or (low, high) == (-1.0, 1.0):
        return ()
    first, last = span
    return tuple(first + (each + 1) / 2 * (last - first) for each in (low, high))
