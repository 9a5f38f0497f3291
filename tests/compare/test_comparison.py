"""Comparison plans: files, short forms, options and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedstill.attacks.attack_runner import LeakageConfig
from fedstill.compare.comparison import (
    ComparisonRun,
    _build_comparison,
    at_scale,
    expand_short_forms,
    plan_comparison,
    read_comparison,
    released_kinds,
)
from fedstill.compare.method_forms import MethodForm, read_forms
from fedstill.core.config_tables import option_types, parse_toml
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.methods.fedavg import FedAvg
from fedstill.privacy.config import DPTrainingConfig
from fedstill.privacy.dpsgd import DPSGD
from fedstill.privacy.pate import PATE, PateConfig
from fedstill.protocol.method import METHODS
from fedstill.protocol.payload_kinds import PayloadKind
from fedstill.report.comparison_records import summarize
from fedstill.runs import spec
from fedstill.runs.spec import PaperMetric, RunSpec
from tests.support.errors import raises_invalid

QUICK: Mapping[str, Any] = {
    "split.nodes": 2,
    "data.train_limit": 200,
    "nodes.local.epochs": 1.0,
    "engine.threads": 1,
    "evaluation.every": 1,
}

PRESETS = Path(__file__).parents[2] / "experiments" / "presets"


def no_outputs(kinds: Sequence[PayloadKind]) -> set[PayloadKind]:
    """Return the kinds that only a policy without ``outputs_only`` releases."""
    return {kind for kind in kinds if not (kind.is_output or kind.must_be_named or kind.from_label_maps)}


def write_file(folder: Path, text: str, name: str = "mine.toml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


FILE = """\
# One line on it.
seeds = [3, 5]
methods = ["standalone", "fedavg", "fedavg-short"]

[base]
extends = "digits-fediod"
split = { nodes = 4 }

[options.fedavg-short]
name = "fedavg"
rounds = 2

[runs.fedavg-short]
evaluation = { every = 1 }

[[settings]]
name = "alpha 0.1"
split = { alpha = 0.1 }

[[settings]]
name = "wide"
student = { model = "small-cnn:64" }

[[paper]]
method = "fedavg"
value = 80.5
source = "Someone 2020, Table 1"
setting = "alpha 0.1"
"""


# --- plans ------------------------------------------------------------------------------------------


def test_file_with_all_keys(tmp_path: Path) -> None:
    plan = read_comparison(write_file(tmp_path, FILE))
    assert (plan.name, plan.about, plan.seeds) == ("mine", "One line on it.", (3, 5))
    assert [planned_run.folder for planned_run in plan.planned_runs()][:4] == [
        "alpha-0.1/standalone-seed3",
        "alpha-0.1/fedavg-seed3",
        "alpha-0.1/fedavg-short-seed3",
        "alpha-0.1/standalone-seed5",
    ]
    assert len(plan.planned_runs()) == 2 * 2 * 3
    first = plan.run_config(ComparisonRun("alpha 0.1", "fedavg-short", 5))
    assert (first.split.nodes, first.split.alpha, first.seed) == (4, 0.1, 5)
    assert (first.method, first.evaluation.every) == (METHODS["fedavg"](rounds=2), 1)
    other = plan.run_config(ComparisonRun("wide", "fedavg", 3))
    assert (other.split.alpha, other.student.model) == (0.5, "small-cnn:64")
    assert other.method == METHODS["fedavg"]()
    assert other.evaluation.every != 1


def test_same_class_name_in_two_modules_gives_two_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("lab_a", "lab_b"):
        (tmp_path / f"{module}.py").write_text(
            "from dataclasses import dataclass\n"
            "from fedstill.methods.standalone import Standalone\n"
            "@dataclass(frozen=True, kw_only=True)\nclass Own(Standalone):\n    pass\n"
        )
    monkeypatch.chdir(tmp_path)
    plan = plan_comparison(["lab_a:Own", "fedavg", "lab_b:Own"])
    assert [planned_run.folder for planned_run in plan.planned_runs()] == [
        "lab_a.Own-seed0",
        "fedavg-seed0",
        "lab_b.Own-seed0",
    ]
    assert [plan.run_config(planned_run).method.registered_name for planned_run in plan.planned_runs()] == [
        "lab_a:Own",
        "fedavg",
        "lab_b:Own",
    ]
    assert read_comparison(write_file(tmp_path, plan.to_toml(), "compare.toml")) == plan
    with raises_invalid("methods", "lab_a:Own, lab_a:Own", "each once"):
        plan_comparison(["lab_a:Own", "lab_a:Own"])


def test_selects_methods_or_settings(tmp_path: Path) -> None:
    plan = read_comparison(write_file(tmp_path, FILE))
    (method, *_), (_, setting, *_) = plan.methods, plan.settings
    assert [planned_run.folder for planned_run in plan.planned_runs([method, setting])] == [
        ComparisonRun(setting, method, seed).folder for seed in plan.seeds
    ]
    assert plan.planned_runs([setting]) == [
        planned_run for planned_run in plan.planned_runs() if planned_run.setting == setting
    ]
    with raises_invalid("method or setting", "fedov"):
        plan.planned_runs(["fedov"])


def test_complete_file_round_trips(tmp_path: Path) -> None:
    for plan in (
        read_comparison(write_file(tmp_path, FILE), seeds=2, changes={"split.nodes": 6}),
        plan_comparison(["fediod", "fedavg"], seeds=[4], base="digits-fedavg", changes=QUICK),
        plan_comparison(["digits-fediod-printed", "standalone"]),
    ):
        again = read_comparison(write_file(tmp_path, plan.to_toml(), "compare.toml"))
        assert again == plan
        assert again.to_toml() == plan.to_toml()
        assert [again.run_config(planned_run) for planned_run in again.planned_runs()] == [
            plan.run_config(planned_run) for planned_run in plan.planned_runs()
        ]


PRIVATE = """\
methods = ["fedkd-votes", "fedkd-steps"]
[base]
public = { name = "held-out" }
[base.nodes.privacy]
mechanism = "pate"
pate = { teachers = 7 }
[options.fedkd-votes]
name = "fedkd"
[options.fedkd-steps]
name = "fedkd"
[runs.fedkd-steps.nodes.privacy]
mechanism = "dp-sgd"
training = { clip = 0.5 }
[[settings]]
name = "epsilon 2"
nodes = { privacy = { epsilon = 2.0 } }
[[settings]]
name = "no budget"
nodes = { privacy = { epsilon = inf } }
"""


def test_settings_may_vary_budget_and_methods_mechanism(tmp_path: Path) -> None:
    plan = read_comparison(write_file(tmp_path, PRIVATE))
    assert read_comparison(write_file(tmp_path, plan.to_toml(), "compare.toml")) == plan
    policies = {
        (planned_run.setting, planned_run.label): plan.run_config(planned_run).nodes.privacy
        for planned_run in plan.planned_runs()
    }
    assert policies == {
        ("epsilon 2", "fedkd-votes"): PATE(epsilon=2.0, pate=PateConfig(teachers=7)),
        ("epsilon 2", "fedkd-steps"): DPSGD(epsilon=2.0, training=DPTrainingConfig(clip=0.5)),
        ("no budget", "fedkd-votes"): PATE(pate=PateConfig(teachers=7)),
        ("no budget", "fedkd-steps"): DPSGD(training=DPTrainingConfig(clip=0.5)),
    }
    (note,) = (note for note in summarize(tmp_path, plan).notes if "fedkd-steps" in note)
    assert note.startswith("fedkd-steps has its own run options: nodes.privacy.mechanism = dp-sgd, ")


def test_methods_share_all_but_their_options() -> None:
    plan = plan_comparison(list(METHODS), seeds=2, base="fashion-fediod-skewed")
    tables = [spec.to_dict(plan.run_config(ComparisonRun("", label, 1))) for label in plan.methods]
    for table in tables:
        for own in ("method", "name"):
            del table[own]
        for lifted in ("outputs_only", "label_maps", "kinds"):
            del table["nodes"]["policy"][lifted]
    assert all(table == tables[0] for table in tables)
    assert tables[0]["data"]["name"] == "fashion-mnist"
    assert tables[0]["split"]["alpha"] == 0.1


def test_preset_contributes_only_method_options() -> None:
    plan = plan_comparison(["digits-fediod-printed", "fediod"], changes={"split.nodes": 3})
    preset, plain = (plan.run_config(ComparisonRun("", label, 0)) for label in plan.methods)
    assert preset.method == spec.load("digits-fediod-printed").method
    assert plain.method == METHODS["fediod"]()
    assert preset.nodes.local == plain.nodes.local
    assert preset.nodes.local.smoothing != spec.load("digits-fediod-printed").nodes.local.smoothing


def test_command_line_options_override_base_and_settings(tmp_path: Path) -> None:
    plan = read_comparison(
        write_file(tmp_path, FILE), changes={"split.alpha": 7.0, "nodes.local.epochs": 2.0}
    )
    for setting in plan.settings:
        planned = plan.run_config(ComparisonRun(setting, "fedavg", 3))
        assert (planned.split.alpha, planned.nodes.local.epochs) == (7.0, 2.0)
    assert plan.changed == ("nodes.local.epochs", "split.alpha")


def test_changing_split_keeps_skew_of_setting(tmp_path: Path) -> None:
    text = 'methods = ["fedavg"]\n[[settings]]\nname = "skewed"\nsplit = { alpha = 0.1 }\n'
    plan = read_comparison(write_file(tmp_path, text), changes={"split.name": "balanced-dirichlet"})
    split = plan.run_config(ComparisonRun("skewed", "fedavg", 0)).split
    assert (split.registered_name, split.specific_options) == ("balanced-dirichlet", {"alpha": 0.1})


def test_setting_may_override_method_options(tmp_path: Path) -> None:
    text = FILE.replace('name = "wide"', 'name = "wide"\noptions = { fedavg = { rounds = 7 } }')
    plan = read_comparison(write_file(tmp_path, text), changes={"split.nodes": 3})

    def rounds(setting: str, label: str) -> int:
        planned = plan.run_config(ComparisonRun(setting, label, 3))
        assert planned.split.nodes == 3
        method = planned.method
        assert isinstance(method, FedAvg)
        return method.rounds

    assert [rounds("wide", "fedavg"), rounds("alpha 0.1", "fedavg")] == [7, FedAvg().rounds]
    assert [rounds(setting, "fedavg-short") for setting in plan.settings] == [2, 2]
    (tmp_path / "again.toml").write_text(plan.to_toml())
    assert read_comparison(tmp_path / "again.toml") == plan


def test_outputs_only_is_lifted_for_methods_that_need_it() -> None:
    plan = plan_comparison(list(METHODS))
    for label in plan.methods:
        planned = plan.run_config(ComparisonRun("", label, 0))
        lifted = bool(no_outputs(released_kinds(planned)))
        assert planned.nodes.policy.outputs_only is not lifted, label
    lifted_for = [
        label
        for label in plan.methods
        if not plan.run_config(ComparisonRun("", label, 0)).nodes.policy.outputs_only
    ]
    assert {"fedavg", "fedproto", "centralized"} <= set(lifted_for)
    assert not {"fediod", "standalone", "ensemble"} & set(lifted_for)


def test_label_maps_are_released_only_by_methods_that_need_them() -> None:
    """The base is a preset of one of the methods."""
    names = [
        f"{PRESETS}/mri-segmentation-{name}.toml" for name in ("fediod", "fediod-drawn", "asyndgan", "fedavg")
    ]
    plan = plan_comparison([*names, "standalone"], base=names[0])
    assert plan.base["nodes"]["policy"]["label_maps"] is True
    out = [
        label
        for label in plan.methods
        if plan.run_config(ComparisonRun("", label, 0)).nodes.policy.label_maps
    ]
    assert out == ["mri-segmentation-fediod", "mri-segmentation-asyndgan"]


@pytest.mark.parametrize("value", [True, False])
def test_outputs_only_keeps_user_value(tmp_path: Path, value: bool) -> None:
    plan = plan_comparison(["fedavg", "fediod"], changes={"nodes.policy.outputs_only": value})
    again = read_comparison(write_file(tmp_path, plan.to_toml()))
    for planned in (plan, again):
        assert {
            planned.run_config(planned_run).nodes.policy.outputs_only
            for planned_run in planned.planned_runs()
        } == {value}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("methods = []", "invalid methods = [] (expected a list of methods"),
        ('methods = ["fedavg", "fedavg"]', "invalid methods = 'fedavg, fedavg' (expected each once"),
        ('methods = ["fedavgg"]', "unknown method or preset 'fedavgg': did you mean 'fedavg'?"),
        ('methods = ["a b"]', "invalid methods = 'a b' (expected letters"),
        ('methods = ["fedavg"]\nseed = 3', "unknown key 'seed': did you mean 'seeds'?"),
        ('methods = ["fedavg"]\nseeds = 0', "invalid seeds = 0 (expected a number of seeds"),
        (
            'methods = ["fedavg"]\nseeds = true',
            "invalid seeds = True (expected an integer or a list, each an integer",
        ),
        ('methods = ["fedavg"]\nseeds = [1, 1]', "invalid seeds = [1, 1] (expected a number of seeds"),
        ('methods = ["fedavg"]\n[base]\nseed = 3', "invalid seed of base = 3 (expected none"),
        ('methods = ["fedavg"]\n[base.splt]', "unknown key 'splt': did you mean 'split'?"),
        ('methods = ["fedavg"]\n[base]\nextends = "digit"', "unknown preset 'digit'"),
        (
            'methods = ["fedavg"]\n[options.fedprox]',
            "invalid options = 'fedprox' (expected options of listed methods",
        ),
        (
            'methods = ["fedavg"]\n[options.fedavg]\nroundz = 3',
            "fedavg: unknown key 'method.roundz': did you",
        ),
        (
            'methods = ["fedavg"]\n[options.fedavg]\nrounds = 0',
            "fedavg: invalid method.rounds = 0 (expected 1 or",
        ),
        (
            'methods = ["fedavg"]\n[runs.fedavg.method]\nrounds = 2',
            "invalid method of fedavg = {'rounds': 2} (expected none",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nsplit.nodes = 2',
            "invalid settings = [None] (expected a list of tab",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "a b"\n[[settings]]\nname = "a-b"',
            "invalid settings = ['a b', 'a-b'] (expected a list of tables with different names",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "\u03b1 B"\n[[settings]]\nname = "\u03b1 b"',
            "invalid settings = ['\u03b1 B', '\u03b1 b'] (expected a list of tables with different names",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "few"\nnodes.local.batch = 0',
            "fedavg, few: invalid nodes.local.batch = 0",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "few"\noptions.fedprox.rounds = 2',
            "invalid options = 'fedprox' (expected options of listed methods",
        ),
        (
            'methods = ["fedavg"]\n[[settings]]\nname = "few"\noptions.fedavg.rounds = 0',
            "fedavg, few: invalid method.rounds = 0",
        ),
        (
            'methods = ["fedavg"]\n[[paper]]\nmethod = "fedavg"\nvalue = 3.0',
            "invalid paper[0].source = '' (expected a text",
        ),
        (
            'methods = ["fedavg"]\npaper = [{method = "fedavg", value = 101, source = "x"}]',
            "invalid paper.value = 101.0 (expected from 0 to 100",
        ),
        (
            'methods = ["fedavg"]\npaper = [{method = "fedavg", value = 1, source = "x", setting = "y"}]',
            "unknown setting of a published metric 'y'",
        ),
    ],
)
def test_invalid_plan_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(FedstillError) as refused:
        read_comparison(write_file(tmp_path, text))
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(line)


def test_rejects_method_options_as_shared_options() -> None:
    for name in ("method.rounds", "seed", "name", "split.node"):
        with pytest.raises(UnknownName):
            plan_comparison(["fedavg"], changes={name: 3})


# --- published metrics ------------------------------------------------------------------------------


def test_published_metrics_round_trip_and_are_not_options() -> None:
    metrics = (
        PaperMetric(method="fedavg", value=61.25, std=0.5, source='"A", Table 2', setting="alpha 1"),
        PaperMetric(method="fedkd", metric="local accuracy", value=70.0, source="B"),
    )
    planned = RunSpec(method=METHODS["fedavg"](), paper=metrics)
    again = spec.read_toml(spec.to_toml(planned))
    assert again == planned
    assert again.paper == metrics
    assert not [name for name in option_types(spec.RunSpec) if "paper" in name]


def test_rejects_invalid_published_metric(tmp_path: Path) -> None:
    for bad in ({"value": -1.0}, {"std": -0.1}, {"metric": "loss"}, {"source": ""}):
        with pytest.raises(ArgumentError, match=r"paper|published metric"):
            spec.from_dict(
                {"method": {"name": "fedavg"}, "paper": [{"method": "m", "value": 1.0, "source": "s", **bad}]}
            )
    text = 'methods = ["fedavg"]\npaper = [{ method = "m", metric = "los", value = 1.0, source = "s" }]'
    with raises_invalid("published metric", "los"):
        read_comparison(write_file(tmp_path, text))
    with pytest.raises(UnknownName, match=r"paper\[0\]\.valu"):
        spec.from_dict({"method": {"name": "fedavg"}, "paper": [{"valu": 3}]})


def test_base_contributes_published_metrics(tmp_path: Path) -> None:
    text = '[method]\nname = "fedavg"\n[[paper]]\nmethod = "fedavg"\nvalue = 70\nsource = "A, Table 1"\n'
    file = str(write_file(tmp_path, text, "base.toml"))
    options = {"fedavg-long": {"name": "fedavg", "rounds": 40}}
    plan = _build_comparison({"methods": ["fedavg", "fedavg-long"], "options": options, "base": {}}, "x", {})
    assert plan.published("", "fedavg", "accuracy") is None
    plan = plan_comparison(["fedavg", "fediod"], base=file)
    metric = plan.published("", "fedavg", "accuracy")
    assert metric is not None
    assert (metric.value, metric.source) == (70.0, "A, Table 1")
    assert plan.published("", "fedavg", "local accuracy") is None
    assert plan.published("", "fediod", "accuracy") is None


def test_published_metric_does_not_apply_to_variants() -> None:
    paper = [{"method": "fedavg", "value": 70, "source": "A"}]
    options = {"long": {"name": "fedavg", "rounds": 40}}
    both = _build_comparison({"methods": ["fedavg", "long"], "options": options, "paper": paper}, "x", {})
    assert both.published("", "fedavg", "accuracy") is not None
    assert both.published("", "long", "accuracy") is None
    # If no label equals the method name, the metric applies to the only variant.
    alone = _build_comparison({"methods": ["long"], "options": options, "paper": paper}, "x", {})
    assert alone.published("", "long", "accuracy") is not None


def test_xray_upper_bound_has_all_findings_and_public_images() -> None:
    """The upper bound is "Centralized" in Table 4 of FedKD; the others see only the findings of a node."""
    plan = read_comparison(PRESETS.parent / "fedkd_table4.toml")
    for planned_run in plan.planned_runs():
        one = plan.run_config(planned_run)
        ceiling = planned_run.label == "centralized"
        assert one.split.findings == (0 if ceiling else 8)
        assert one.split.registered_name == ("iid" if planned_run.setting == "homogeneous" else "positives")
        assert getattr(one.method, "public", False) == ceiling
    assert plan.published("homogeneous", "centralized", "auc") is not None
    own = spec.load(f"{PRESETS}/xray-centralized.toml")
    assert (own.split.findings, own.method.public) == (0, True)


def test_names_unknown_key_of_setting(tmp_path: Path) -> None:
    text = 'methods = ["fedkd"]\n[base]\nextends = "demo"\n[[settings]]\nlabel = "a"\n'
    with pytest.raises(UnknownName, match="label"):
        read_comparison(write_file(tmp_path, text))


def test_attack_options_are_part_of_plan(tmp_path: Path) -> None:
    text = f"{FILE}\n[leakage]\nseed = 4\nmembership = {{ shadows = 8 }}\n"
    plan = read_comparison(write_file(tmp_path, text))
    whole = LeakageConfig.from_table({"seed": 4, "membership": {"shadows": 8}}).to_table()
    assert plan.leakage == whole
    assert plan.leakage is not None
    assert set(plan.leakage) == set(LeakageConfig().to_table())  # including all defaults
    assert read_comparison(write_file(tmp_path, plan.to_toml(), "compare.toml")) == plan
    # The flag requests the attacks of the file, or the default ones if the file has none.
    assert read_comparison(write_file(tmp_path, text), leakage=True).leakage == whole
    assert read_comparison(write_file(tmp_path, FILE), leakage=True).leakage == LeakageConfig().to_table()
    assert plan_comparison(["fedavg"], leakage=True).leakage == LeakageConfig().to_table()
    for without in (
        plan_comparison(["fedavg"]),
        read_comparison(write_file(tmp_path, FILE)),
    ):
        assert without.leakage is None
        assert "leakage" not in without.to_toml()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("leakage = true", "invalid leakage = True (expected a table"),
        ("[leakage]\nseeds = 3", "unknown key 'leakage.seeds': did you mean 'leakage.seed'?"),
        ("[leakage]\nsettings = [{}]", "invalid leakage.settings = [{}]"),
        ("[leakage]\nsettings = ['other']", "unknown setting of leakage.settings 'other'"),
        ("[leakage.membership]\nshadows = -2", "invalid leakage.membership.shadows = -2 (expected "),
        ("[leakage]\nmembership = 3", "invalid leakage.membership = 3 (expected a table"),
    ],
)
def test_invalid_attack_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(FedstillError) as refused:
        read_comparison(write_file(tmp_path, f'methods = ["fedavg"]\n{text}'))
    assert str(refused.value).startswith(line)


# --- short forms in comparison files -----------------------------------------------------------------


SHORT_FORMS = """
seeds = 1
[reproduces]
paper = "FedKD"
what = "Table 2"
[base]
data = { name = "digits", train_limit = 100 }
[method]
name = "fedkd"
gamma = 1.0
[options]
plain = {}
other = { name = "fedavg" }
[vary]
tau = [3.0, inf]
[[settings]]
name = "even"
[published]
metrics = ["accuracy", "local accuracy"]
[published.even]
plain = [80.0, ""]
tau-3 = [[81.0, 0.5], 70]
[scale.paper]
seeds = 3
methods = ["plain", "tau-inf"]
[scale.paper.base]
data = { train_limit = 0 }
[scale.paper.method]
gamma = 0.5
"""


def test_expands_shared_and_varied_options() -> None:
    table = expand_short_forms(parse_toml(SHORT_FORMS))
    assert table["methods"] == ["plain", "other", "tau-3", "tau-inf"]
    assert table["options"]["plain"] == {"name": "fedkd", "gamma": 1.0}
    assert table["options"]["other"] == {"name": "fedavg"}  # options are not shared with another method
    assert table["options"]["tau-3"] == {"name": "fedkd", "gamma": 1.0, "tau": 3.0}
    assert {"method", "vary", "published", "reproduces", "scale"}.isdisjoint(table)


def test_published_table_names_source_and_skips_empty_cells() -> None:
    about = {"source": "FedKD, Table 2", "setting": "even"}
    assert expand_short_forms(parse_toml(SHORT_FORMS))["paper"] == [
        {"method": "plain", "metric": "accuracy", "value": 80.0, **about},
        {"method": "tau-3", "metric": "accuracy", "value": 81.0, "std": 0.5, **about},
        {"method": "tau-3", "metric": "local accuracy", "value": 70.0, **about},
    ]


def test_scale_overrides_file() -> None:
    paper = at_scale(parse_toml(SHORT_FORMS), "paper")
    assert (paper["seeds"], paper["method"]) == (3, {"name": "fedkd", "gamma": 0.5})
    assert paper["base"] == {"data": {"name": "digits", "train_limit": 0}}
    assert list(paper["options"]) == ["plain"]  # the scale omits the other method
    assert at_scale({"base": {"seed": 1}, "scale": {"paper": {"base": {"extends": "paper"}}}}, "paper") == {
        "base": {"extends": "paper"}  # another preset replaces the base
    }


def test_another_base_of_a_scale_drops_the_runs_of_the_file() -> None:
    table = {"base": {}, "runs": {"a": {"split": {"nodes": 2}}}, "scale": {"paper": {}, "features": {}}}
    table["scale"]["features"] = {"base": {"extends": "x"}, "runs": {"b": {"split": {"nodes": 3}}}}
    assert at_scale(table, "paper")["runs"] == table["runs"]
    assert at_scale(table, "features")["runs"] == {"b": {"split": {"nodes": 3}}}


def test_scale_without_settings_drops_what_is_published_of_them() -> None:
    published = {"metrics": ["accuracy"], "even": {"a": 1.0}, "skewed": {"a": 2.0}}
    scale = {"settings": [{"name": "skewed"}], "published": {"skewed": {"b": 3.0}}}
    table = {"published": published, "scale": {"features": scale}}
    assert at_scale(table, "features")["published"] == {
        "metrics": ["accuracy"],
        "skewed": {"a": 2.0, "b": 3.0},
    }


def test_scale_without_methods_drops_their_settings() -> None:
    setting = {"name": "few", "split": {"nodes": 2}, "options": {"a": {"tau": 1.0}, "b": {"tau": 2.0}}}
    table = {"methods": ["a", "b"], "settings": [setting], "scale": {"paper": {"methods": ["a"]}}}
    (reduced,) = at_scale(table, "paper")["settings"]
    assert reduced == {"name": "few", "split": {"nodes": 2}, "options": {"a": {"tau": 1.0}}}
    assert list(setting["options"]) == ["a", "b"]  # the original table is not changed


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"vary": {"tau": []}}, "invalid vary.tau = .*a list of values"),
        ({"published": {"metrics": ["a", "b"], "x": [1.0]}}, "invalid published.x = .*2 cells"),
        ({"published": {"x": "much"}}, "invalid published.x = 'much'"),
        ({"method": 3}, r"invalid method = 3 \(expected a table"),
    ],
)
def test_rejects_empty_short_forms(table: dict[str, Any], message: str) -> None:
    with pytest.raises(FedstillError, match=message):
        expand_short_forms(table)


def test_form_of_all_methods_is_overridden_by_that_of_one() -> None:
    forms = read_forms({"*": {"form": "printed"}, "b": {"form": "fedstill", "differs": "x"}}, ["a", "b"])
    assert forms == {"a": MethodForm(form="printed"), "b": MethodForm(form="fedstill", differs="x")}
    scaled = at_scale(
        {"methods": ["a"], "forms": {"*": {"form": "fedstill", "differs": "x"}}, "scale": {"paper": {
            "methods": ["a"], "forms": {"*": {"form": "printed", "differs": ""}}}}}, "paper"
    )  # fmt: skip
    assert read_forms(scaled["forms"], ["a"]) == {"a": MethodForm(form="printed")}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"c": {"form": "printed"}}, "invalid forms = 'c' .*forms of listed methods: a, b"),
        ({"a": {"form": "own"}}, "invalid forms.a.form = 'own'"),
        ({"a": "printed"}, "invalid forms.a = 'printed' .*a table"),
    ],
)
def test_rejects_unknown_forms(table: dict[str, Any], message: str) -> None:
    with pytest.raises(FedstillError, match=message):
        read_forms(table, ["a", "b"])


def test_rejects_unknown_scale() -> None:
    with pytest.raises(FedstillError, match="unknown scale 'papers': did you mean 'paper'"):
        expand_short_forms(parse_toml(SHORT_FORMS), "papers")
