"""Column sums: the range of each column in a federation's tables, from one noisy response of each node.

A schema's ranges are the allowed values, and may be wide: a network cannot use a column that fills a
hundredth of its range. Here each node releases once its number of rows and, for each numeric column, the sum
and the sum of squares of the values scaled to -1..1. Each row changes each of these numbers by 1 at most,
which is the sensitivity of the gate's Gaussian noise (privacy.sums.noise). Nothing is trained. The run writes
``schema.toml``, the schema with a scale for each column, which other runs use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from fedstill.core.options import NonNegativeFloat, PositiveFloat
from fedstill.core.table_schema import TableSchema
from fedstill.data.table_data import SCHEMA_FILE, schema_text
from fedstill.methods import (
    ArgumentError,
    Method,
    Needs,
    NodeSetting,
    NodeView,
    PublicData,
    Query,
    QueryCall,
    QueryDetails,
    Server,
    Tensors,
    payload_kinds,
)


@dataclass
class SumsState:
    """Server state: the number of nodes, and the sums over all of them; empty at first."""

    nodes: int = 0
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(frozen=True, kw_only=True)
class ColumnSums(Method):
    """Ranges of columns by noisy sums."""

    title: ClassVar[str] = "Column sums"
    paper: ClassVar[str] = "means and standard deviations by noisy sums"
    query_names: ClassVar[tuple[str, ...]] = ("sum_columns",)
    total_steps: ClassVar[int] = 1
    evaluated_model: ClassVar[Literal["nodes"]] = "nodes"
    initial_training: ClassVar[None] = None
    trains_models: ClassVar[bool] = False
    one_round: ClassVar[bool] = True
    server_only_options: ClassVar[tuple[str, ...]] = ("width", "noise")

    width: PositiveFloat = 3.0
    """A column's scale is its mean and so many standard deviations to both sides, within its range."""
    noise: NonNegativeFloat = 4.0
    """privacy.sums.noise of the nodes, as their owners state it. A scale is widened by the likely error of
    such noise, up to the whole range."""

    def needs(self) -> Needs:
        return Needs(table_rows=True)

    def notes(self, setting: NodeSetting) -> tuple[str, ...]:
        return (
            f"no model learned here, whatever the figures are: {SCHEMA_FILE} in this folder has the scales",
        )

    def planned_queries(self, public: PublicData | None, seed: int) -> Sequence[QueryCall]:
        return (QueryCall("sum_columns"),)

    def queries(self, setting: NodeSetting) -> Iterable[Query]:
        yield Query(
            sum_columns,
            releases={"moments": payload_kinds.COLUMN_SUMS},
            times=1,
            depends_on_records=("moments",),
            sums={"moments": "sum"},
            details=QueryDetails(postprocess=_in_float32, width=count_column_sums(setting.schema)),
        )

    # --- at the server ----------------------------------------------------------------------------------

    def init_state(self, server: Server) -> SumsState:
        """Return an empty state.

        Raises:
            ArgumentError: no schema for the rows.
        """
        if not server.schema:
            raise ArgumentError("schema", "", "a table's columns, of which numbers are summed")
        return SumsState()

    def step(self, server: Server, state: SumsState, t: int) -> Mapping[str, float]:
        responses = server.query("sum_columns")
        state.nodes, state.sums = len(server.federation.present), responses["moments"].double().sum(0).cpu()
        return {}

    def output_files(self, server: Server, state: SumsState) -> Mapping[str, str]:
        """Return the schema, with a scale for each column for which the noise permits one."""
        # All nodes' noise on one sum: each has sqrt(M) noise, as NoisySums draws it.
        off = self.noise * (len(state.sums) * state.nodes) ** 0.5
        return {
            SCHEMA_FILE: schema_text(schema_with_scales(server.schema, state.sums.tolist(), off, self.width))
        }


def sum_columns(node: NodeView) -> Tensors:
    """Return ``moments`` (M,): the number of rows, then for each column n (if values may be missing), sum x,
    sum x^2."""
    return {"moments": compute_column_sums(node.data.inputs, node.setting.schema)}


def _in_float32(response: Tensors, sent: Tensors) -> Tensors:
    return {name: tensor.float() for name, tensor in response.items()}


def compute_column_sums(inputs: torch.Tensor, schema: TableSchema) -> torch.Tensor:
    """Return the sums ``(M,)`` float64 of features ``(N, F)``; each row adds from -1 to 1 to each."""
    x = inputs.double().clamp(-1, 1)
    parts = [torch.ones_like(x[:, 0])]
    for column, place in schema.feature_slices():
        if column.type == "number":
            parts += [1 - x[:, place.stop - 1]] if column.missing else []
            parts += [x[:, place.start], x[:, place.start].square()]
    return torch.stack(parts, 1).sum(0)


def count_column_sums(schema: TableSchema) -> int:
    """Return the number of sums M; 0 without a schema."""
    numbers = [column for column in schema.input_columns if column.type == "number"]
    return 1 + sum(3 if column.missing else 2 for column in numbers) if schema else 0


def schema_with_scales(schema: TableSchema, totals: Sequence[float], off: float, width: float) -> TableSchema:
    """Return the schema with scales from the sums over all nodes, whose noise has standard deviation ``off``.

    >>> from fedstill.core.table_schema import SchemaColumn
    >>> age, ill = SchemaColumn(name="age", range=(0.0, 200.0)), SchemaColumn(name="ill", range=(0.0, 1.0))
    >>> schema_with_scales(TableSchema("ill", (age, ill)), [64.0, -32.0, 17.0], 0.0, 2.0).columns[0].scale
    (25.0, 75.0)
    """
    rest, columns = list(totals), []
    count = rest.pop(0)
    for column in schema.columns:
        if column.type == "number" and column.name != schema.target:
            here = rest.pop(0) if column.missing else count
            column = replace(
                column, scale=_column_range(column.scaled_range, here, rest.pop(0), rest.pop(0), off, width)
            )
        columns.append(column)
    return replace(schema, columns=tuple(columns))


def _column_range(
    span: tuple[float, float], count: float, total: float, squares: float, off: float, width: float
) -> tuple[float, ...]:
    """Return the range of a column, or nothing if the noise is too large."""
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
