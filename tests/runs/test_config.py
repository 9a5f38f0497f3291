"""Reading and writing configurations: strict, exact, with clear errors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.core import config_tables
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.data.partitioners import Dirichlet
from fedstill.protocol.method import METHODS, Method
from fedstill.runs import presets, spec
from tests.support.errors import raises_invalid

FEDIOD: dict[str, Any] = {"method": {"name": "fediod"}}


@dataclass(frozen=True)
class Inner:
    rate: float = 1.0
    size: int | None = 3

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ArgumentError("inner.rate", self.rate, "0 or more")


@dataclass(frozen=True)
class Outer:
    """Options of every type that a configuration may have."""

    flag: bool = False
    count: int = 1
    text: str = ""
    choice: Literal["a", "b"] = "a"
    number: Literal["auto"] | int = "auto"
    words: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    maybe: str | None = "x"
    inner: Inner = field(default_factory=Inner)


INNER = st.builds(Inner, st.floats(0, math.inf), st.none() | st.integers())
WRITABLE = st.text(st.characters(exclude_categories=["Cs"]))  # all Unicode characters except lone surrogates
OUTER = st.builds(
    Outer,
    flag=st.booleans(),
    count=st.integers(),
    text=WRITABLE,
    choice=st.sampled_from(["a", "b"]),
    number=st.just("auto") | st.integers(),
    words=st.lists(WRITABLE).map(tuple),
    pair=st.tuples(st.integers(), st.floats(allow_nan=False)),
    maybe=st.none() | WRITABLE.filter(lambda text: text != "none"),
    inner=INNER,
)


@dataclass(frozen=True)
class Toy(Method):
    """A method whose options have values of every type."""

    outer: Outer = field(default_factory=Outer)


@pytest.fixture
def toy_method(monkeypatch: pytest.MonkeyPatch) -> None:
    offer_toy(monkeypatch)


def offer_toy(patch: pytest.MonkeyPatch) -> None:
    """Register the method, as an installed package would."""
    patch.setitem(METHODS.builtin, "toy", f"{Toy.__module__}:Toy")
    patch.setitem(METHODS._loaded, "toy", Toy)


@given(outer=OUTER)
def test_value_round_trips_through_toml(outer: Outer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        offer_toy(patch)
        run = spec.RunSpec(method=Toy(outer))
        again = spec.read_toml(spec.to_toml(run))
    assert again == run
    assert repr(again) == repr(run)  # the repr distinguishes 1, 1.0 and True, which are equal


@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True),
    seed=st.integers(0, 2**63),
    nodes=st.integers(1, 1000),
    alpha=st.floats(1e-12, 1e12),
    models=st.lists(st.sampled_from(["small-cnn", "resnet8:16", "my.module:net"]), min_size=1),
    tau=st.floats(1e-300, math.inf),
    every=st.integers(0, 10**9),
    centralized=st.booleans(),
)
def test_config_round_trips_through_toml(
    name: str,
    seed: int,
    nodes: int,
    alpha: float,
    models: list[str],
    tau: float,
    every: int,
    centralized: bool,
) -> None:
    run = spec.RunSpec(
        name=name,
        seed=seed,
        split=Dirichlet(nodes=nodes, alpha=alpha),
        nodes=spec.NodesConfig(models=tuple(models)),
        method=METHODS["fediod"](tau=tau),
        evaluation=spec.EvaluationConfig(every=every, centralized=centralized),
    )
    again = spec.read_toml(spec.to_toml(run))
    assert again == run
    assert repr(again) == repr(run)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_method_defaults_round_trip(method: str) -> None:
    run = spec.from_dict({"method": {"name": method}})
    assert type(run.method) is METHODS[method]
    assert spec.read_toml(spec.to_toml(run)) == run


def test_accepts_integers_and_infinity_as_floats() -> None:
    run = spec.read_toml('method = {name = "fediod", tau = inf}\nsplit.alpha = 1')
    assert run.method.tau == math.inf
    assert type(run.split.alpha) is float


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"splt": {}}, "unknown key 'splt': did you mean 'split'?"),
        ({"nodes": {"local": {"epoch": 3}}}, "unknown key 'nodes.local.epoch': did you mean "),
        ({"method": {"name": "fediod", "taus": 1}}, "unknown key 'method.taus': did you mean 'method.tau'?"),
        ({"method": {}}, r"invalid method.name = '' (expected one of standalone"),
        ({"method": "fediod"}, r"invalid method = 'fediod' (expected a table"),
        ({"seed": "1"}, r"invalid seed = '1' (expected an integer"),
        ({"seed": -1}, r"invalid seed = -1 (expected 0 or more"),
        ({"name": "a/b"}, r"invalid name = 'a/b' (expected letters, digits"),
        ({"task": {"name": "ranking"}}, r"unknown task 'ranking' (expected classification, text"),
        ({"split": {"alpha": "0.5"}}, r"invalid split.alpha = '0.5' (expected a number"),
        ({"split": {"alpha": math.nan}}, r"invalid split.alpha = nan (expected a number"),
        ({"split": {"alpha": 10**400}}, "invalid split.alpha = 1000"),
        ({"evaluation": {"centralized": 1}}, r"invalid evaluation.centralized = 1 (expected true or false"),
        ({"evaluation": {"every": -1}}, r"invalid evaluation.every = -1 (expected 0 or more"),
        ({"nodes": {"models": ["mlp", 3]}}, r"invalid nodes.models[1] = 3 (expected a text"),
        ({"nodes": {"models": []}}, r"invalid nodes.models = [] (expected a list of one model or more"),
        ({"plugins": 5}, r"invalid plugins = 5 (expected a list, each a text"),
        ({"plugins": "lab"}, r"invalid plugins = 'lab' (expected a list, each a text"),
        ({"student": {"model": ""}}, r"invalid student.model = '' (expected the name of a model"),
        ({"nodes": {"policy": {"max_bytes": -1}}}, r"invalid nodes.policy.max_bytes = -1 (expected "),
    ],
)
def test_errors_name_option_paths(table: dict[str, Any], line: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(line)}") as caught:
        spec.from_dict({**FEDIOD, **table})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"choice": "c"}, r"invalid x.choice = 'c' (expected one of 'a', 'b'"),
        ({"number": True}, r"invalid x.number = True (expected one of 'auto' or an integer"),
        ({"pair": [1]}, r"invalid x.pair = [1] (expected a list of an integer, a number"),
        ({"pair": [1.5, 2]}, r"invalid x.pair[0] = 1.5 (expected an integer"),
        ({"inner": {"size": 1.5}}, r"invalid x.inner.size = 1.5 (expected an integer or 'none'"),
        # A partial name is completed to the option's path, and never misnamed.
        ({"inner": {"rate": -1}}, r"invalid x.inner.rate = -1.0 (expected 0 or more"),
    ],
)
def test_checks_every_kind_of_value(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(line)}"):
        config_tables.read_table(Outer, values, "x.")


def test_error_of_other_table_keeps_its_name() -> None:
    error = ArgumentError("split.nodes", 0, "1 or more")
    assert config_tables.with_full_name(error, ["nodes", "split"]) is error
    assert config_tables.with_full_name(error, ["split.nodes", "a.split.nodes"]) is error
    assert config_tables.with_full_name(error, ["a.split.nodes", "b.split.nodes"]) is error


def test_rejects_writing_invalid_method() -> None:
    with raises_invalid("method", "fedavg", "one of Standalone"):
        spec.to_toml(spec.RunSpec(method="fedavg"))


def test_unregistered_method_is_written_by_path() -> None:
    assert spec.to_dict(spec.RunSpec(method=Toy()))["method"]["name"] == f"{Toy.__module__}:Toy"


@pytest.mark.usefixtures("toy_method")
def test_options_are_leaves_of_tables() -> None:
    known = config_tables.option_types(spec.RunSpec(method=Toy()))
    assert known["method.outer.inner.size"] == int | None
    assert known["nodes.models"] == tuple[str, ...]
    assert "method" not in known
    assert "split" not in known


def test_describes_every_option_type() -> None:
    for method in METHODS:
        for name, kind in config_tables.option_types(spec.from_dict({"method": {"name": method}})).items():
            assert config_tables.describe_type(kind), name


# --- files and presets ------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the package's folder of presets by one of the tests."""
    monkeypatch.setattr(presets, "FOLDER", tmp_path)
    method = '[method]\nname = "fediod"\ntau = 2.0\n'
    write = {
        "base": f"# What all share.\n# More.\nseed = 1\n{method}[split]\nnodes = 7\n",
        "child": 'extends = "base"\n# Fewer nodes.\n[split]\nalpha = 0.1\n[student]\nmodel = "mlp"\n',
        "grandchild": 'extends = "child"\nname = "third"\nseed = 3\nsplit.nodes = 2\nmethod.tau = 4.0\n',
        "bare": 'method.name = "fediod"\n',
    }
    for name, text in write.items():
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_presets_extend_tables() -> None:
    child = spec.load("child")
    assert (child.name, child.seed, child.method.tau) == ("child", 1, 2.0)
    assert (child.split.nodes, child.split.alpha, child.student.model) == (7, 0.1, "mlp")
    grandchild = spec.load("grandchild")
    assert (grandchild.name, grandchild.seed, grandchild.method.tau) == ("third", 3, 4.0)
    assert (grandchild.split.nodes, grandchild.split.alpha) == (2, 0.1)


@pytest.mark.usefixtures("folder", "toy_method")
def test_other_method_drops_options() -> None:
    run = spec.read_toml('extends = "base"\nmethod.name = "toy"')
    assert run.method == Toy()
    assert run.split.nodes == 7


@pytest.mark.usefixtures("folder")
def test_file_extends_preset_under_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('extends = "base"\nseed = 9', encoding="utf-8")
    assert spec.load(str(file)) == spec.load_toml(file)
    assert (spec.load(str(file)).name, spec.load(str(file)).seed) == ("mine", 9)
    assert spec.read_toml(file.read_text(encoding="utf-8")).name == "custom"


@pytest.mark.usefixtures("folder")
def test_lists_and_describes_presets() -> None:
    assert presets.names() == ["bare", "base", "child", "grandchild"]
    assert presets.describe("base") == "What all share."
    assert presets.describe("bare") == ""
    assert presets.path("base").name == "base.toml"


def test_rejects_unknown_presets(folder: Path) -> None:
    for name in ("bass", "../base", "bases"):
        with pytest.raises(UnknownName, match=f"^unknown preset '{re.escape(name)}': did you mean 'base'"):
            presets.path(name)
    with pytest.raises(UnknownName, match="did you mean 'base'"):
        spec.read_toml('extends = "bases"')
    with raises_invalid("extends", 3, "a preset", ".toml file"):
        spec.read_toml("extends = 3")


def test_rejects_circular_extends(folder: Path) -> None:
    (folder / "base.toml").write_text('extends = "grandchild"', encoding="utf-8")
    with pytest.raises(FedstillError, match="child -> base -> grandchild -> child"):
        spec.read_toml('extends = "child"')


def test_rejects_unreadable_files(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    with pytest.raises(FedstillError, match=r"no\.toml'"):
        spec.load_toml(missing)
    broken = tmp_path / "broken.toml"
    broken.write_text("[split\nnodes = 3", encoding="utf-8")
    with pytest.raises(FedstillError, match=r"broken\.toml .*TOML: .*line 1"):
        spec.load_toml(broken)
    broken.write_bytes(b"name = '\xff'")
    with pytest.raises(FedstillError, match="UTF-8"):
        spec.load_toml(broken)


@pytest.mark.parametrize("name", presets.names())
def test_presets_are_valid(name: str) -> None:
    run = spec.load(name)
    assert run.name == name
    assert presets.describe(name)
    assert spec.read_toml(spec.to_toml(run)) == run


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("printed", {"lambda2": 1.0, "ramp": 0.0, "temperature": 1.0, "kl_first": "student"}),
        (
            "published",
            {"lambda2": 0.1, "ramp": 3.0, "temperature": 10.0, "kl_first": "teacher", "rounds": 100},
        ),
    ],
)
def test_fedmd_cg_has_printed_and_published_presets(preset: str, options: dict[str, Any]) -> None:
    run = spec.load(f"fashion-fedmd-cg-{preset}")
    assert {name: getattr(run.method, name) for name in options} == options
    assert run.nodes.local.smoothing == 0.0
    assert (
        run.nodes.models == (run.student.model,) == ({"printed": "lenet5", "published": "bn-lenet"}[preset],)
    )
    ours = spec.load("fashion-fedmd-cg")
    assert ours.method != run.method
    assert (ours.data, ours.split.nodes, ours.split.alpha) == (run.data, run.split.nodes, run.split.alpha)


def test_fediod_and_fedkd_presets_match_their_names() -> None:
    printed, published = (spec.load(f"cifar10-fediod-{form}") for form in ("printed", "published"))
    weights = ("gan", "conf", "unique", "mimic", "balance")
    assert [getattr(published.method, name) for name in weights] == [1.0, 1.0, -5.0, 0.2, 10.0]
    assert (published.method.importance, published.method.student_inputs) == ("counts", "fresh")
    assert (published.method.steps, published.method.student.steps) == (37_500, 5)
    assert (published.data, published.split, published.nodes) == (printed.data, printed.split, printed.nodes)
    fedkd = spec.load("cifar10-fedkd-printed")
    assert (fedkd.method.gamma, fedkd.method.levels, fedkd.method.predictions) == (1.0, 200, 1)
    assert (fedkd.nodes.local.momentum, fedkd.method.student.batch) == (0.0, 512)
    assert spec.load("digits-fedkd-printed").method.gamma == 1.0


def test_printed_preset_has_widths_and_weights_of_the_paper() -> None:
    run = spec.load("cifar10-fediod-printed")
    assert (run.data.registered_name, run.split.nodes, run.split.alpha) == ("cifar10", 20, 1.0)
    assert (run.nodes.models, run.student.model) == (("resnet8",), "resnet8")  # of width 128, the default
    method = run.method
    assert (method.generator.width, method.critic.width, method.generator.noise, method.batch) == (
        128,
        128,
        100,
        64,
    )
    assert (method.gan, method.conf, method.unique, method.balance) == (1.0, 1.0, 1.0, 0.0)
    # Eq. 10 sums over classes; the infinite limit has half their mean: 2 C = 20.
    assert (method.mimic, method.tau) == (20.0, math.inf)
    assert (method.critic.loss, method.gan_weights) == ("eq2", "size")
    assert (method.importance, method.ensemble) == ("fakeness", "logits")
    # One student step per query, on the inputs of that query.
    assert (method.student.steps, method.student.memory, method.student.batch) == (1, 64, 64)
    local = run.nodes.local
    assert (local.optimizer, local.lr, local.batch, local.epochs) == ("sgd", 0.0025, 16, 500)
    assert (local.smoothing, local.augment) == (0.0, "shift-flip")
    hundred = spec.load("cifar100-fediod-printed")
    assert (hundred.data.registered_name, hundred.method.generator.noise, hundred.method.mimic) == (
        "cifar100",
        256,
        200.0,
    )
    digits = spec.load("digits-fediod-printed").method
    same = ("gan", "conf", "unique", "mimic", "balance", "importance", "ensemble", "tau")
    assert all(getattr(digits, name) == getattr(method, name) for name in same)
    assert digits.critic.loss == method.critic.loss
