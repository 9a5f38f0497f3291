"""Names of built-in objects, entry points, and ``module:Name``."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest.mock import ANY

import pytest

from fedstill.core import registry
from fedstill.core.errors import ArgumentError, FedstillError, UnknownName
from fedstill.core.registry import Registry
from tests.support.errors import raises_invalid

OWN = {"argument": "fedstill.core.errors:ArgumentError", "unknown": "fedstill.core.errors:UnknownName"}


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Registry[type[Exception]]:
    """Return a registry and install two entry points, one of them with a broken module."""
    (tmp_path / "lab_sound.py").write_text(
        "from fedstill.core.errors import FedstillError\nclass Odd(FedstillError): pass\nclass Other: pass\n"
    )
    (tmp_path / "lab_broken.py").write_text("import what_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    offered = {
        "odd": EntryPoint("odd", "lab_sound:Odd", "fedstill.errors"),
        "broken": EntryPoint("broken", "lab_broken:Odd", "fedstill.errors"),
        "argument": EntryPoint("argument", "lab_sound:Odd", "fedstill.errors"),
    }
    monkeypatch.setattr(registry, "_installed", lambda group: offered if group == "fedstill.errors" else {})
    yield Registry("error", OWN, FedstillError)  # type: ignore[misc]
    for name in ("lab_sound", "lab_broken"):
        sys.modules.pop(name, None)


def test_builtin_names_come_first_and_cannot_be_overridden(errors: Registry[type[Exception]]) -> None:
    assert list(errors) == ["argument", "unknown", "odd", "broken"]
    assert errors["argument"] is ArgumentError
    # Objects of the package that are not registered are not built in.
    assert not errors.is_allowed("fedstill.core.errors:FedstillError", [])


def test_entry_point_and_path_give_same_object(errors: Registry[type[Exception]]) -> None:
    assert errors["odd"] is errors["lab_sound:Odd"]
    assert errors["odd"].__name__ == "Odd"
    assert errors.name_of(ArgumentError) == "argument"
    assert errors.name_of(errors["odd"]) == "odd"
    assert errors.name_of(KeyError) == "builtins:KeyError"


def test_object_is_allowed_by_any_of_its_names(errors: Registry[type[Exception]]) -> None:
    assert errors.canonical_name("lab_sound:Odd") == errors.canonical_name("odd") == "odd"
    assert errors.canonical_name("fedstill.core.errors:ArgumentError") == "argument"
    assert errors.is_allowed("argument", [])
    assert not errors.is_allowed(
        "lab_sound:Odd", []
    )  # although its entry point has the name of a built-in object
    assert not errors.is_allowed("odd", ["argument"])
    assert not errors.is_allowed(None, [])
    assert errors.is_allowed("odd", ["lab_sound:Odd"])
    assert errors.is_allowed("lab_sound:Odd", ["odd"])
    assert not errors.is_allowed("broken", ["odd"])
    assert "lab_sound" not in sys.modules  # even allowed objects are not imported


def test_entry_point_to_reexport_gives_registered_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab_front").mkdir()
    (tmp_path / "lab_front" / "__init__.py").write_text("from lab_front.deep import Odd")
    (tmp_path / "lab_front" / "deep.py").write_text(
        "from fedstill.core.errors import FedstillError\nclass Odd(FedstillError): pass"
    )
    monkeypatch.syspath_prepend(tmp_path)
    offered = {"odd": EntryPoint("odd", "lab_front:Odd", "fedstill.errors")}
    monkeypatch.setattr(registry, "_installed", lambda group: offered)
    errors: Registry[type[Exception]] = Registry("error", OWN, FedstillError)
    for name in ("odd", "lab_front:Odd", "lab_front.deep:Odd"):
        assert errors.name_of(errors[name]) == "odd"
    for name in ("lab_front", "lab_front.deep"):
        sys.modules.pop(name, None)


def test_import_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab_odd.py").write_text("undefined")
    monkeypatch.syspath_prepend(tmp_path)
    offered = {"odd": EntryPoint("odd", "lab_odd:Odd", "fedstill.errors")}
    monkeypatch.setattr(registry, "_installed", lambda group: offered)
    errors: Registry[type[Exception]] = Registry("error", OWN, FedstillError)
    for name in ("odd", "lab_odd:Odd"):
        with raises_invalid("error", ANY, "'undefined'"):
            errors[name]
    assert "odd" not in errors.importable_objects()


def test_imports_nothing_before_lookup(errors: Registry[type[Exception]]) -> None:
    assert "odd" in errors
    assert len(errors) == 4
    assert not {"lab_sound", "lab_broken"} & set(sys.modules)


def test_broken_plugin_does_not_affect_others(errors: Registry[type[Exception]]) -> None:
    assert list(errors.importable_objects()) == ["argument", "unknown", "odd"]
    with raises_invalid("error", "broken", "lab_broken:Odd", "No module"):
        errors["broken"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("argumant", UnknownName, "did you mean 'argument'"),
        ("lab_sound:Missing", ArgumentError, "has no 'Missing'"),
        ("lab_sound:Other", ArgumentError, "a subclass of FedstillError; this is"),
        ("nowhere.at_all:Thing", ArgumentError, "or an installed one"),
    ],
)
def test_rejects_objects_of_wrong_type(
    errors: Registry[type[Exception]], name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        errors[name]
