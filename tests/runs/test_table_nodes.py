"""Tables at deployed nodes: each reads its own csv and checks it against the server's schema."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedstill.cli.main import main as cli
from fedstill.cli.node_check import LIVE
from fedstill.core.errors import FedstillError
from fedstill.data.data_spec import DataSpec
from fedstill.data.loading import load
from fedstill.models.module_utils import to_vector
from fedstill.node.approvals import ApprovalRequest, describe_request
from fedstill.protocol.run_plan import describe
from fedstill.runs.remote_run import make_run_plan
from fedstill.runs.simulation import build_simulation
from fedstill.runs.spec import to_toml
from tests.support.links import NAMES, SCHEMA, RecordingLink, hosts, live, run_of


def test_owner_checks_table_by_run_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No rows have to be shared for this; the request for approval names the columns."""
    config = run_of(tmp_path, "fediod")
    here = hosts(config, tmp_path)[NAMES[0]].folder
    for path in (tmp_path / "hospitals").glob("*.csv"):
        path.unlink()
    owners = (here / "node.toml").read_text(encoding="utf-8")
    (here / "node.toml").write_text(owners.replace("online = true", "online = false"), encoding="utf-8")
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        cli(["node", "check", str(here), str(tmp_path / "run.toml")])
    assert not ended.value.code
    output = " ".join(capsys.readouterr().out.split())
    assert "30 examples, 5, from own.csv no: " in output
    assert "shape and classes are those of its schema" in output
    assert LIVE in output  # there is no other objection
    (here / "own.csv").write_text("age,ward,ill\n101,a,no\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        cli(["node", "check", str(here), str(tmp_path / "run.toml")])
    assert ended.value.code == 2
    assert "own.csv, line 2: column 'age' is 101 (expected 0 to 100, or nothing" in capsys.readouterr().err


def test_owner_checks_table_by_own_schema(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    config = run_of(tmp_path, "fediod")
    here = hosts(config, tmp_path)[NAMES[0]].folder
    owners = (here / "node.toml").read_text(encoding="utf-8").replace("online = true", "online = false")
    (here / "node.toml").write_text(owners, encoding="utf-8")
    run, schema = tmp_path / "run.toml", here / "ours.toml"
    run.write_text(to_toml(config), encoding="utf-8")
    _, result, _ = command("node", "check", here, run)
    assert "one range after another a server learns a column's least" in " ".join(result.split())

    (here / "node.toml").write_text(owners.replace('schema = ""', 'schema = "ours.toml"'))
    shutil.copy(tmp_path / "hospitals" / "schema.toml", schema)
    code, result, _ = command("node", "check", here)
    assert code == 0
    assert "30 examples, 5, from own.csv" in result
    assert "that of ours.toml alone" in result
    assert f"It cannot take part: {LIVE}." in command("node", "check", here, run)[1]

    schema.write_text(SCHEMA.replace("[0, 100]", "[0, 120]"), encoding="utf-8")
    _, result, _ = command("node", "check", here, run)
    assert "It cannot take part: its schema is not that of ours.toml: other column 'age'." in result


def test_approval_request_lists_columns(tmp_path: Path) -> None:
    config = run_of(tmp_path, "fediod")
    data = load(config.data, config.task)
    plan = make_run_plan(config, DataSpec.from_data(config.task, data), None, "one", 3)
    request = ApprovalRequest(describe(plan, None).text, "one", "", "")
    result = describe_request(request)
    assert result["columns"] == ["age: 0 to 100, or nothing", "ward: a, b, c", "ill: no, yes"]
    assert str(result["inputs"]).endswith("target ill")


@pytest.mark.parametrize("method", ["fediod", "fedavg"])
def test_csv_nodes_equal_simulation(tmp_path: Path, method: str) -> None:
    config = run_of(tmp_path, method)
    simulation, _ = build_simulation(config)
    simulation.run()
    server = live(config, RecordingLink(hosts(config, tmp_path)), tmp_path)
    server.run()
    assert torch.allclose(to_vector(server.student), to_vector(simulation.student), atol=1e-5)


def test_rows_outside_schema_refuse_join_without_values(tmp_path: Path) -> None:
    config = run_of(tmp_path, "fediod")
    node_hosts = hosts(config, tmp_path)
    own = tmp_path / "nodes" / NAMES[1] / "own.csv"
    own.write_text(own.read_text() + "\n163,a,no,train", encoding="utf-8")
    with pytest.raises(FedstillError) as refused:
        live(config, RecordingLink(node_hosts), tmp_path).run()
    assert NAMES[1] in str(refused.value)
    assert "163" not in str(refused.value)
