"""``fedstill data schema``: a first schema of a table, to be corrected by a person who knows its columns."""

from __future__ import annotations

from pathlib import Path

from fedstill.cli.arguments import ParsedArgs
from fedstill.core.errors import ArgumentError, DataError
from fedstill.core.text_format import format_count

SHOWN = 8  # categories of a column that are printed


def schema(args: ParsedArgs) -> None:
    """Draft it from the rows of one file, or of several of the same columns; write it next to the first."""
    files, target = [Path(place) for place in args.positionals], args.get("--target")
    if target is None:
        raise ArgumentError("--target", "", "the column that is to be learned")
    out = args.path("--out", files[0].parent / "schema.toml")
    if out.exists():
        raise ArgumentError("--out", str(out), "a file that does not exist")

    from fedstill.core.run_writer import write_text
    from fedstill.data.schema_draft import draft_schema, find_rare_categories, similar_category_notes
    from fedstill.data.table_data import TABLE_ENDINGS, read_cells, schema_text, table_ending

    for file in files:
        if not table_ending(file):
            raise ArgumentError("fedstill data schema", str(file), f"a {' or '.join(TABLE_ENDINGS)} file")
    read = [read_cells(file) for file in files]
    tables = [table for table, _ in read]
    for file, table in zip(files, tables, strict=True):
        if table.keys() != tables[0].keys():
            raise DataError(f"{file}: has other columns than {files[0]} (expected the same)")
    together = {name: [cell for table in tables for cell in table[name]] for name in tables[0]}
    places = [where(row) for (table, where) in read for row in range(len(next(iter(table.values()))))]
    made, left_out = draft_schema(together, target, args.get("--event") or "", places.__getitem__)
    write_text(out, schema_text(made))
    rows = format_count(len(together[target]), "row")
    print(f"{out}: {format_count(len(made.columns), 'column')}, from {rows}.")
    for column in made.columns:
        few = ", ".join(column.categories[:SHOWN]) + (", ..." if len(column.categories) > SHOWN else "")
        what = f"{column.range[0]:g} to {column.range[1]:g}" if column.range else few
        print(f"  {column.name}: {what}{', may be empty' if column.missing else ''}")
    for name, why in left_out.items():
        print(f"Left out: {name}, as {why}.")
    for name, once in find_rare_categories(made, together).items():
        print(f"Once only, perhaps misspelt: {', '.join(map(repr, once))} of {name}.")
    for note in similar_category_notes(made):
        print(f"{note[0].upper()}{note[1:]}.")
    if made.event:
        _, came = next(column.categories for column in made.columns if column.name == made.event)
        print(f"The event is {came!r} of {made.event}: swap its categories if it is the other.")
    print("Its ranges and categories are those of these rows: widen them to all that can be, at every node.")
    preset = "wine-fediod" if made.target_column.categories else "diabetes-fediod"
    task = " --task.name survival" if made.event else ""
    schema_option = "" if out == files[0].parent / "schema.toml" else f" --data.schema {out}"
    data, split = files[0], ""
    if len(files) > 1:
        data, split = files[0].parent, " --split.name column --split.column site --split.nodes 0"
    print(f"Try: fedstill run {preset}{task} --data {data}{schema_option}{split} --name mine")
