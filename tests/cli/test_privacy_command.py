"""``fedstill privacy``: plans equal the charges of runs, and compute noise, steps or epsilon."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from scipy.special import ndtr
from sklearn.datasets import load_digits

from fedstill.attacks.mechanism_audits import AUDITS
from fedstill.cli import privacy_plan
from fedstill.cli.main import main
from fedstill.cli.privacy_plan import (
    NodePlan,
    PlannedNode,
    _planned_owner_node,
    _planned_simulated_nodes,
    _solve_for_missing_option,
)
from fedstill.core.config_tables import parse_toml
from fedstill.core.errors import ArgumentError
from fedstill.node import folder_log, owner_folder
from fedstill.node.audit_entries import NODE_DATA, Entry
from fedstill.node.audit_log import FILE, AuditLog
from fedstill.node.privacy_forecast import find_run_length, forecast, round_noise_up
from fedstill.privacy.accounting import compute_epsilon
from fedstill.privacy.budget import epsilon_text_rounded_up
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.events import Event, PrivacyCost, cost_from_dict, cost_to_dict
from fedstill.runs.simulation import Simulation, build_simulation
from fedstill.runs.spec import from_dict, load_toml
from tests.support.golden import Golden
from tests.support.node_services import FEDIOD as FEDIOD_OPTIONS
from tests.support.node_services import Clinic

TINY = """
name = "tiny"
[split]
nodes = 2
[nodes]
models = ["mlp:8"]
local = { epochs = 0.3, batch = 64 }
[nodes.policy]
outputs_only = false
[student]
model = "mlp:8"
[engine]
batching = "one-by-one"
[evaluation]
centralized = false
every = 0
"""
FEDIOD = '[method]\nname = "fediod"\nsteps = 2\nbatch = 8\nstudent.memory = 16\ncritic.width = 4\n'
PUBLIC = '[public]\nname = "held-out"\nshare = 0.1\n'
FEDKD = PUBLIC + '[method]\nname = "fedkd"\nstudent.epochs = 1\nz_max = 5.0\n'
FEDMD = PUBLIC + '[method]\nname = "fedmd"\nrounds = 3\nsubset = 20\n'
FEATURES = '[features]\nbackbone = "random-conv:4"\ncache_gib = 0.0\n'
FEDPFT = '[method]\nname = "fedpft"\nclip = 1.0\nstudent.epochs = 1\n'
FEDAVG = '[method]\nname = "fedavg"\nrounds = 3\n'


def privacy(mechanism: str, limit: str = "8.0", more: str = "") -> str:
    return f'[nodes.privacy]\nmechanism = "{mechanism}"\nepsilon = {limit}\n{more}'


def write(folder: Path, *sections: str) -> Path:
    path = folder / "run.toml"
    path.write_text(TINY + "".join(sections))
    return path


def stdout_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return the output of a command; with ``code``, check that it ends with a one-line error."""
    with pytest.raises(SystemExit) as exit_info:
        main(["privacy", *words])
    output = capsys.readouterr()
    assert exit_info.value.code == code
    if code:
        assert output.err.count("\n") == 1
        assert output.err.startswith("fedstill: ")
        return output.out + output.err
    return output.out


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


# --- plans equal charges --------------------------------------------------------------------------------


CASES = {
    "fediod dp-sgd": FEDIOD + privacy("dp-sgd"),
    "fediod pate": FEDIOD + privacy("pate"),
    "fediod noisy": FEDIOD + privacy("noisy-outputs", more="outputs = { bound = 5.0 }\n"),
    "fedkd pate": FEDKD + privacy("pate"),
    "fedkd dp-sgd": FEDKD + privacy("dp-sgd"),
    "fedmd dp-sgd": FEDMD + privacy("dp-sgd"),
    "fedavg dp-sgd": FEDAVG + privacy("dp-sgd"),
    "features dp-sgd": FEATURES + 'normalize = "public"\n' + FEDKD + privacy("dp-sgd"),
    "components dp-sgd": FEATURES + 'normalize = "public"\ncomponents = 5\n' + FEDKD + privacy("dp-sgd"),
    "sums of features": FEATURES + FEDPFT + privacy("dp-sgd"),
    "features gaussian pate": FEATURES + FEDKD.replace("held-out", "gaussian") + privacy("pate"),
}


def charged(path: Path) -> tuple[Simulation, dict[str, NodePlan], list[PlannedNode]]:
    """Run a plan and check that the audit log has the planned events; return the run, plans and nodes."""
    run, sites = _planned_simulated_nodes("tiny", load_toml(path))
    plans = {site.name: _solve_for_missing_option(run, site) for site in sites}
    experiment, _ = build_simulation(load_toml(path))
    out = path.parent / "out"
    out.mkdir()
    experiment.run(out)
    with closing(AuditLog(out / FILE, read_only=True)) as audit:
        for name, plan in plans.items():
            assert plan.cost.cost is not None
            assert dict(audit.spending(name, "run").run_events) == cost_to_dict(plan.cost.cost)
    return experiment, plans, sites


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_audit_log_of_simulation_has_planned_events(tmp_path: Path, case: str) -> None:
    _, plans, _ = charged(write(tmp_path, CASES[case]))
    for plan in plans.values():
        assert plan.cost.cost
        together: PrivacyCost = PrivacyCost()
        for line in plan.cost.lines:
            for event, count in (line.cost or {}).items():
                together[event] += count * line.times
        assert together == plan.cost.cost
        assert plan.cost.pld is not None
        assert 0.9 * 8 < plan.cost.pld <= 8


def test_plan_of_simulation_uses_limited_groups(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (48, 8, 8), dtype=np.uint8)
    masks, patient = (images > 127).astype(np.uint8), np.arange(48) // 6
    np.savez(tmp_path / "slices.npz", images=images, masks=masks, patient=patient)
    path = write(tmp_path, FEDAVG, privacy("dp-sgd", more="group_size = 2\n"))
    text = (
        path.read_text()
        .replace("mlp:8", "unet:4")
        .replace("nodes = 2", 'nodes = 2\nname = "iid"\nminimum = 4')
    )
    extra = f'data.name = "{tmp_path / "slices.npz"}"\ntask.name = "segmentation"\n'
    path.write_text(extra + text)
    experiment, plans, sites = charged(path)
    assert all(plan.cost.cost for plan in plans.values())
    assert [site.examples for site in sites] == [len(node.data) for node in experiment.nodes]
    assert all(
        len(node.data) == 3 * site.examples
        for node, site in zip(experiment.setting.nodes, sites, strict=True)
    )


def test_audit_log_of_node_has_planned_events(tmp_path: Path) -> None:
    """The plan needs the folder of the node only; the node charges the same for each query."""
    policy = '[privacy]\nmechanism = "pate"\nepsilon = 20.0\npate = { teachers = 2 }\n'
    clinic = Clinic(tmp_path / "clinic", policy)
    method = tomli_w.dumps({"method": FEDIOD_OPTIONS})
    run, (site,) = _planned_owner_node(clinic.folder, "tiny", load_toml(write(tmp_path, method)))
    plan = _solve_for_missing_option(run, site)
    clinic.ready()
    assert isinstance(
        clinic.say("answer_query", {}, query="count_labels", number=0, differentiable=False), tuple
    )
    for number in range(1, 7):
        assert isinstance(clinic.query(number), tuple)
        assert isinstance(clinic.pull(number), tuple)
    assert clinic.query(7)["kind"] == "QueryRefused"  # the seventh query is not planned
    clinic.session.close()
    assert plan.cost.cost
    output = folder_log.read_total_spent(owner_folder.read_node_file(clinic.folder), clinic.folder)
    assert output == folder_log.TotalSpent(cost_to_dict(plan.cost.cost), units=frozenset({"a record"}))


def test_owner_plan_uses_features_of_node_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owned = '[features]\nbackbone = "random-conv:4"\n[privacy]\nmechanism = "dp-sgd"\nepsilon = 8.0\n'
    clinic = Clinic(tmp_path / "clinic", owned)
    path = write(tmp_path, FEATURES, FEDKD.replace("held-out", "gaussian"))
    run, (site,) = _planned_owner_node(clinic.folder, "tiny", load_toml(path))
    plan = _solve_for_missing_option(run, site)
    assert (run.spec.shape, len(run.public or ())) == ((64,), 8000)
    assert plan.cost.pld is not None
    assert 0.9 * 8 < plan.cost.pld <= 8
    path.write_text(path.read_text().replace("random-conv:4", "random-conv:8"))
    assert "features.backbone" in stdout_of(capsys, "plan", str(clinic.folder), str(path), code=2)


def test_plan_refuses_features_that_the_run_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = FEATURES + 'normalize = "public"\ncomponents = 50\n'
    path = write(tmp_path, features + FEDKD.replace("0.1", "0.01") + privacy("dp-sgd"))
    with pytest.raises(ArgumentError, match=r"features\.components"):
        build_simulation(load_toml(path))
    assert "features.components" in stdout_of(capsys, "plan", str(path), code=2)


def test_plan_names_noise_of_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, CASES["sums of features"])
    plan = json.loads(stdout_of(capsys, "plan", str(path), "--json"))
    (line,) = plan["queries"]
    (event,) = line["events"]
    noise = plan["nodes"][0]["noise"]["sums"]
    assert (line["query"], line["for"], event) == ("sum_features", "sums", f"gaussian({noise!r})")
    assert plan["noise to fix"] == {"sums": round_noise_up(noise)}
    plan = json.loads(stdout_of(capsys, "plan", str(path), "--noise", "2.5", "--json"))
    assert plan["nodes"][0]["noise"] == {"sums": 2.5}


def test_no_queries_cost_nothing(tmp_path: Path) -> None:
    _, plans, _ = charged(write(tmp_path, '[method]\nname = "standalone"\n', privacy("dp-sgd")))
    for plan in plans.values():
        assert (plan.cost.cost, plan.cost.lines, plan.cost.pld) == (PrivacyCost(), (), 0.0)


# --- noise, steps or epsilon from the other two -------------------------------------------------------


def test_computes_noise_from_epsilon_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, FEDAVG, privacy("dp-sgd", "2.0"))
    output = stdout_of(capsys, "plan", str(path))
    assert "found      noise chosen for epsilon <= 2" in output
    (noise,) = re.findall(r"\[nodes\.privacy\.training\]\n  noise = (\S+)", output)
    plan = json.loads(stdout_of(capsys, "plan", str(path), "--json"))
    assert plan["noise to fix"] == {"training": float(noise)}
    assert plan["facts"]["found"] == "noise chosen for epsilon <= 2"
    most = max(node["epsilon"]["pld"] for node in plan["nodes"])
    assert f"epsilon {epsilon_text_rounded_up(most)} (PLD)" in output
    assert (plan["delta"], plan["budgets"]["epsilon_pld"]) == (1e-5, most)
    assert plan["budgets"]["of_the_run"] == {
        "epsilon": 2.0,
        "delta": 1e-5,
        "epsilon_before": 0.0,
        "epsilon_after": most,
        "epsilon_left": 2.0 - most,
    }
    assert {node["refused"] for node in plan["nodes"]} == {None}
    for row in plan["queries"]:
        line = next(line for line in output.splitlines() if line.startswith(f"  {row['query']}  "))
        assert line.split()[-2:] == [f"{row['times']}", epsilon_text_rounded_up(row["epsilon"])]
        assert row["events"] or row["epsilon"] == 0
    path.write_text(path.read_text() + f"training = {{ noise = {noise} }}\n")
    again = stdout_of(capsys, "plan", str(path))
    assert "found      epsilon computed from noise and length" in again
    ((reached,),) = [re.findall(r"whole run    epsilon (\S+) \(PLD\)", again)]
    assert 1.9 < float(reached) <= 2.0
    assert "To fix" not in again


@pytest.mark.slow
def test_computes_steps_from_epsilon_and_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, FEDIOD, privacy("dp-sgd")))
    noise = "--noise=training=2,critic=3"
    output = stdout_of(capsys, "plan", path, "--epsilon", "2", noise)
    steps = int(re.findall(r"length     method.steps (\d+)", output)[0])
    assert steps > 10
    rows = re.findall(r"node-\d .* (\d+) +(\S+) +\S+\n", output)
    assert len(rows) == 2
    assert min(int(row[0]) for row in rows) == steps
    enough = stdout_of(capsys, "plan", path, "--epsilon", "2", noise, "--steps", str(steps))
    assert "REFUSED" not in enough
    more = stdout_of(capsys, "plan", path, "--epsilon", "2", noise, "--steps", str(steps + 1), code=2)
    assert "REFUSED" in more
    assert "would refuse" in more
    assert "it costs more than the budget of a run, epsilon 2 at delta 1e-05" in more


def test_computes_epsilon_from_noise_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FedAvg makes 0.3 passes over 718 or 719 records in 4 steps of about 64, and releases data sizes."""
    path = str(write(tmp_path, FEDAVG, '[nodes.privacy]\nmechanism = "dp-sgd"\n'))
    output = stdout_of(capsys, "plan", path, "--noise", "1.5")
    (records,) = re.findall(r"privacy cost of node-\d, (\d+) records", output)
    spent = {Event("gaussian", 1.5, 64 / int(records)): 4, Event("laplace", 10.0): 1}
    for accountant, name in (("pld", "PLD"), ("rdp", "RDP")):
        (reached,) = re.findall(rf"(\S+) \({name}\)", output)
        cost = compute_epsilon(spent, 1e-5, accountant)  # type: ignore[arg-type]
        assert cost <= float(reached) <= cost + 0.001
    assert "of the run   no budget" in output


def test_fediod_gradient_cost_matches_paper_and_grows_with_queries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 20 teachers and 8 inputs, noise 10 is 10 * 20 / (2 * sqrt(8)) sensitivities (Balle and Wang)."""
    path = str(write(tmp_path, FEDIOD, privacy("pate", more="pate = { teachers = 20 }\n")))
    for steps in (4, 64):
        noise = "--noise=pate=40,critic=3,gradients=10"
        plan = json.loads(
            stdout_of(capsys, "plan", path, "--epsilon=inf", noise, f"--steps={steps}", "--json")
        )
        (alone,) = (row["epsilon"] for row in plan["queries"] if row["for"] == "gradients")
        mu = math.sqrt(steps) * 2 * math.sqrt(8) / (10 * 20)
        for at, reached in ((alone + 0.001, True), (alone - 0.001, False)):
            lost = ndtr(mu / 2 - at / mu) - math.exp(at) * ndtr(-mu / 2 - at / mu)
            assert bool(lost <= 1e-5) is reached
        assert max(node["epsilon"]["pld"] for node in plan["nodes"]) > 2 * alone, (
            "other releases are charged too"
        )


def test_run_length_option_depends_on_method(tmp_path: Path) -> None:
    def name(*sections: str) -> str:
        config = from_dict(parse_toml(TINY + "".join(sections)))
        run, sites = _planned_simulated_nodes("tiny", load_toml(write(tmp_path, *sections)))

        def price(method: Any, local: Any) -> PrivacyCost | None:
            mechanism = privacy_plan._build_mechanism(run, sites[0], config.nodes.privacy, method, local)
            return forecast(mechanism).cost

        return find_run_length(config.method, config.nodes.local, price).name

    given = "training = { noise = 2.0 }\ncritic = { noise = 2.0 }\n"
    assert name(FEDIOD, privacy("dp-sgd", "8.0", given)) == "method.steps"
    assert name(FEDKD, privacy("dp-sgd", "8.0", given)) == "local.epochs"
    assert name(FEDKD, privacy("pate", "8.0", "pate = { noise = 30.0 }\n")) == "method.predictions"
    assert name(FEDAVG.replace("3", "1"), privacy("dp-sgd", "8.0", given)) == "local.epochs"


# --- folder of a node ---------------------------------------------------------------------------------


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    folder = tmp_path / "clinic"
    folder.mkdir()
    digits = load_digits()
    np.savez(
        folder / "data.npz", images=(digits.images[:200] / 16).astype("float32"), labels=digits.target[:200]
    )
    (folder / "node.toml").write_text(
        'name = "clinic"\nonline = false\n[local]\nepochs = 2\n[privacy]\nmechanism = "dp-sgd"\n'
        "epsilon = 3.0\ntotal_epsilon = 5.0\n"
    )
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text("rehearsal 7\n")
    return folder


def charge(folder: Path, cost: PrivacyCost, number: int = 0, *, guarantee: bool = True) -> None:
    audit = AuditLog(folder / "audit.sqlite")
    no_guarantee = int(not guarantee)
    audit.charge(
        Entry(
            "old",
            NODE_DATA,
            "clinic",
            number,
            "q",
            "response",
            cost=cost_to_dict(cost),
            no_guarantee=no_guarantee,
        )
    )
    audit.close()


@pytest.mark.slow
def test_plan_for_one_record_mentions_groups(clinic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(clinic / "data.npz") as arrays:
        np.savez(clinic / "data.npz", **arrays, patient=np.arange(200) // 4)
    path = clinic / "node.toml"
    first = path.read_text()
    assert "a patient or slide" not in stdout_of(capsys, "plan", str(clinic), "digits-fedkd")
    path.write_text(f'{first}[data]\ngroup = "patient"\n')
    output = " ".join(stdout_of(capsys, "plan", str(clinic), "digits-fedkd").split())
    assert "epsilon holds for one record: a patient or slide has up to 4 at one node" in output
    assert "privacy.group_size = 4 protects all records of a group together" in output
    path.write_text(f'{first}group_size = 4\n[data]\ngroup = "patient"\n')
    assert "a patient or slide" not in stdout_of(
        capsys, "plan", str(clinic), "digits-fedkd", "--epsilon", "8"
    )


def test_plan_of_node_uses_its_training_records_and_audit_log(
    clinic: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = stdout_of(capsys, "plan", str(clinic), "digits-fedkd")
    assert "privacy cost of clinic, 200 records" in output
    assert re.search(r"local training +training +gaussian\(\S+ rate=0.16\) +13 ", output)  # 2 * 200 / 32
    assert re.search(r"predict +- +free \(covered by training\) +1 +0\n", output)
    assert re.search(r"of the data  budget 5 at delta 1e-05: (\S+) after it, \S+ left", output)
    assert "[privacy.training]" in output
    assert max(map(len, output.splitlines())) <= 80
    before = PrivacyCost({Event("gaussian", 2.0): 1})
    charge(clinic, before)
    output = stdout_of(capsys, "plan", str(clinic / "node.toml"), "digits-fedkd")
    budgets = re.findall(r"of the data +budget 5 at delta 1e-05: (\S+) spent before, (\S+) after it", output)
    assert float(budgets[0][0]) == pytest.approx(compute_epsilon(before, 1e-5), abs=1e-3)
    assert 3 < float(budgets[0][1]) < 5
    charge(clinic, PrivacyCost({Event("gaussian", 1.0): 1}), 1)
    output = " ".join(stdout_of(capsys, "plan", str(clinic), "digits-fedkd", code=2).split())
    assert "so it is REFUSED" in output
    assert "To fix this noise" not in output
    assert "clinic would refuse digits-fedkd: it costs more than is left of the data's budget" in output


def test_no_budget_is_left_after_release_without_guarantee(
    clinic: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    charge(clinic, PrivacyCost(), guarantee=False)
    assert "nothing is left of the budget, as earlier releases" in stdout_of(
        capsys, "plan", str(clinic), "digits-fedkd", code=2
    )


def test_plan_prints_audit_log_faults(clinic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    charge(clinic, PrivacyCost({Event("gaussian", 2.0): 1}))
    (clinic / "audit.sqlite").unlink()
    assert "nothing can be charged" in stdout_of(capsys, "plan", str(clinic), "digits-fedkd", code=2)
    (clinic / "audit.sqlite.head").unlink()
    assert "nothing can be charged" not in stdout_of(capsys, "plan", str(clinic), "digits-fedkd")
    (clinic / "runs" / "spring").mkdir(parents=True)
    (clinic / "runs" / "spring" / "plan.json").touch()
    output = " ".join(stdout_of(capsys, "plan", str(clinic), "digits-fedkd", code=2).split())
    assert "its node's runs exist" in output


def test_plan_warns_of_votes_below_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, FEDIOD, privacy("pate", "inf", "pate = { teachers = 20 }\n"))
    for noise, drowns in (("9.9", False), ("10", True)):
        output = " ".join(stdout_of(capsys, "plan", str(path), "--noise", f"pate={noise}").split())
        assert f"votes noise {noise} on the votes of 20 teachers" in output
        assert ("the votes are almost all noise" in output) == drowns
    output = stdout_of(capsys, "plan", str(write(tmp_path, FEDIOD, privacy("dp-sgd"))))
    assert "teachers" not in output


def test_plan_accepts_run_of_minimum_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = FEDKD, privacy("dp-sgd")
    local = "local = { epochs = 0.3, min_steps = 30, batch = 4096 }"
    path = write(tmp_path, *sections)
    path.write_text(path.read_text().replace("local = { epochs = 0.3, batch = 64 }", local))
    output = stdout_of(capsys, "plan", str(path), "--epsilon", "1", "--steps", "50")
    assert "length     local.min_steps 50" in output
    assert re.search(r"training +training +gaussian\(\S+\) +50 ", output)
    output = stdout_of(capsys, "plan", str(path), "--epsilon", "2", "--noise", "20")
    (steps,) = re.findall(r"length     local.min_steps (\d+)", output)
    assert int(steps) > 30


@pytest.mark.parametrize("node", [False, True])
def test_plan_uses_options_of_the_run(
    tmp_path: Path, clinic: Path, capsys: pytest.CaptureFixture[str], node: bool
) -> None:
    path = write(tmp_path, FEDAVG, privacy("dp-sgd"))
    names = [str(clinic), str(path)] if node else [str(path)]
    output = stdout_of(capsys, "plan", *names, "--method.rounds", "7", "--epsilon", "2.5")
    assert re.search(r"train .* 7 ", output)
    assert "<= 2.5" in output


def test_plan_rejects_steps_if_no_option_changes_the_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = stdout_of(capsys, "plan", "digits-fedkd", "--steps", "100", code=2)
    assert (
        "this run costs the same for all values of method.predictions, local.epochs, local.min_steps"
        in output
    )
    assert "invalid --steps = " not in output


def test_queries_of_unknown_count_need_given_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path, '[method]\nname = "ensemble"\n', privacy("pate")))
    output = " ".join(stdout_of(capsys, "plan", path, code=2).split())
    assert "REFUSED: privacy.pate.noise is none, and the number of queries predict is not known" in output
    output = " ".join(stdout_of(capsys, "plan", path, "--noise", "20").split())
    assert re.search(r"predict pate gaussian\(14.14\) any 0\.2\d+ each", output)
    assert "and the charge of predict each time" in output


def test_no_guarantee_without_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    output = stdout_of(capsys, "plan", "digits-fediod")
    assert "mechanism  none: releases leave as they are, without any guarantee" in output
    assert "whole run  no guarantee" in output


# --- invalid plans --------------------------------------------------------------------------------------


MISTAKES = (
    "plan",
    "plan digits-fediod --epsilon much",
    "plan digits-fediod --epsilon 0",
    "plan digits-fediod --method.rounds 3",
    "plan digits-fediod --steps 0",
    "plan digits-fedkd-private --noise critics=3",
    "plan digits-fediod --noise 3",
    "plan digits-fediod --noise critic=3",
    "cost gaussian(0)",
    "cost gaussian(1) 0",
    "nothing",
)


def test_invalid_option_is_one_line(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    lines = [f"$ fedstill privacy {words}\n{stdout_of(capsys, *words.split(), code=2)}" for words in MISTAKES]
    golden("errors-of-privacy", "".join(lines))


def test_refused_run_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, FEDKD, "labeled = true\n", privacy("dp-sgd")))
    assert "none if public data are added to its own" in stdout_of(capsys, "plan", path, code=2)
    path = str(write(tmp_path, FEDKD, privacy("dp-sgd")))
    output = stdout_of(capsys, "plan", path, "--epsilon", "inf", "--noise", "2", code=2)
    assert "invalid --epsilon = inf (expected finite" in output


def test_two_unknown_noise_values_need_two_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, FEDIOD, privacy("dp-sgd")))
    assert "PART=N for training, critic" in stdout_of(capsys, "plan", path, "--noise", "3", code=2)
    output = stdout_of(capsys, "plan", path, "--noise", "training=3", "--epsilon", "2", code=2)
    assert "invalid --noise = 'critic' (expected noise for them too" in output


def test_rejects_epsilon_below_cost_of_label_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The label counts alone, with noise of scale 10, cost 0.1."""
    path = str(write(tmp_path, FEDIOD, privacy("dp-sgd", "0.05")))
    assert "invalid privacy.epsilon = 0.05 (expected a larger one" in stdout_of(capsys, "plan", path, code=2)
    output = stdout_of(capsys, "plan", path, "--epsilon", "0.5", "--noise", "training=1,critic=1", code=2)
    assert "invalid --epsilon = 0.5 (expected more, or more noise: even method.steps = 1 costs more" in output


def test_rejects_mechanism_that_cannot_protect_the_method(
    clinic: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "it does not declare depends_on_records" in stdout_of(
        capsys, "plan", str(clinic), "digits-fedproto", code=2
    )
    assert "the run is missing" in stdout_of(capsys, "plan", str(clinic), code=2)


# --- cost and help --------------------------------------------------------------------------------------


def test_published_epsilons_of_dp_sgd(capsys: pytest.CaptureFixture[str]) -> None:
    output = stdout_of(capsys, "cost", "gaussian(1.0, rate=0.01)", "1000", "--delta", "1e-5")
    assert output == ("gaussian(1.0, rate=0.01) x 1000\nepsilon 1.829 (PLD), 2.102 (RDP) at delta 1e-05\n")
    several = stdout_of(capsys, "cost", "laplace(2.0)", "laplace(4.0)", "3", "--delta", "0")
    assert several == "laplace(2.0) x 1\nlaplace(4.0) x 3\nepsilon 1.25 (PLD), 1.25 (RDP) at delta 0\n"


def test_help_names_every_audited_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    output = stdout_of(capsys, "audit", "--mechanism", "pate", "--help")
    assert all(mechanism in output for mechanism in AUDITS)
    assert "[NODE] RUN" in stdout_of(capsys, "plan", "--help")


def test_noise_is_rounded_up_and_never_down() -> None:
    for noise in (0.1 + 0.2, 9.99951, 1e-3, 123456.7, 2.0, 4.08140305736463):
        up = round_noise_up(noise)
        assert noise <= up <= noise * 1.001 or up == pytest.approx(noise, rel=1e-9)
    assert cost_from_dict({"laplace(10.0)": 1}) == PrivacyCost({Event("laplace", 10.0): 1})
    with pytest.raises(ArgumentError):
        privacy_plan._noise_by_part(1.0, DPSGD(), ["training", "critic"], [])


def test_plan_explains_each_column(command: Callable[..., tuple[int, str, str]]) -> None:
    words = ("digits-fedkd-private", "--epsilon", "3")
    lines = command("privacy", "plan", *words)[1].splitlines()
    explained = {line.split(":")[0].strip() for line in lines if re.match(r"  \w[\w, ]*: ", line)}
    for first in ("node ", "query "):
        heads = next(line for line in lines if line.strip().startswith(first)).split()
        columns = set(heads) - {"node", "records", "query"}
        assert columns <= {name for names in explained for name in names.split(", ")}
