"""Files with a BOM, as written by Windows editors, are read like others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedstill.compare.comparison import read_comparison
from fedstill.core.config_tables import read_toml
from fedstill.core.errors import FedstillError
from fedstill.data.table_data import read_schema
from fedstill.federation import server_rules
from fedstill.models import model_config
from fedstill.node import owner_folder
from fedstill.runs.spec import load

SCHEMA = """\
target = "sick"

[[columns]]
name = "age"
range = [0, 100]

[[columns]]
name = "sick"
type = "category"
categories = ["no", "yes"]
"""
READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "a run": ("run.toml", 'extends = "demo"\nseed = 7\n', lambda path: load(str(path)).seed),
    "a comparison": (
        "study.toml",
        'methods = ["fedkd"]\n[base]\nextends = "demo"\n',
        read_comparison,
    ),
    "a schema": ("schema.toml", SCHEMA, read_schema),
    "a model": (
        "forest.toml",
        'name = "mlp"\n',
        lambda path: model_config.read_model_config(str(path), path.parent, "m"),
    ),
    "a node": (owner_folder.FILE, 'name = "clinic"\n', lambda path: read_toml(path)),
    "a server's rules": (
        server_rules.FILE,
        'modules = ["my_lab:Prox"]\n',
        lambda path: server_rules.read_server_rules(path.parent),
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_ignores_byte_order_prefix(kind: str, tmp_path: Path) -> None:
    name, text, read = READERS[kind]
    (tmp_path / name).write_text(text, encoding="utf-8")
    plain = read(tmp_path / name)
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read(tmp_path / name) == plain


def test_rejects_utf16_file_by_name(tmp_path: Path) -> None:
    """PowerShell redirects output in UTF-16."""
    (tmp_path / "run.toml").write_text("seed = 1\n", encoding="utf-16")
    with pytest.raises(FedstillError, match=r"run\.toml.*UTF-8"):
        read_toml(tmp_path / "run.toml")
