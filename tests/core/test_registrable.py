"""Classes that tables select by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from fedstill.core.config_tables import base_class_by_option, merge_tables, option_types, read_table, to_table
from fedstill.core.errors import ArgumentError, UnknownName
from fedstill.core.registry import Registrable, Registry
from tests.support.errors import raises_invalid


@dataclass(frozen=True)
class Shape(Registrable):
    key: ClassVar[str] = "how"
    default: ClassVar[str | None] = "round"
    color: str = "red"


@dataclass(frozen=True)
class Round(Shape):
    radius: float = 1.0


@dataclass(frozen=True)
class Square(Shape):
    side: int = 2


@dataclass(frozen=True)
class DrawingFile(Shape):
    """Class of all names that are not registered, which are file names."""

    how: str = ""
    side: int = 1


Shape.registry = Registry("shape", {"round": f"{__name__}:Round", "square": f"{__name__}:Square"}, base=Shape)


@dataclass(frozen=True)
class Picture:
    shape: Shape = field(default_factory=Round)
    title: str = ""


def test_name_key_selects_class_of_other_options() -> None:
    assert read_table(Picture, {}).shape == Round()
    assert read_table(Picture, {"shape": {"radius": 2}}).shape == Round(radius=2.0)
    assert read_table(Picture, {"shape": {"how": "square", "side": 3}}).shape == Square(side=3)


def test_table_round_trip_includes_name() -> None:
    picture = Picture(Square("blue", side=5))
    assert to_table(picture) == {"shape": {"how": "square", "color": "blue", "side": 5}, "title": ""}
    assert read_table(Picture, to_table(picture)) == picture


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        ({"how": "squar"}, "unknown shape 'squar': did you mean 'square'?"),
        ({"how": 3}, "invalid shape.how = 3 (expected a text"),
        (
            {"how": "square", "radius": 1.0},
            "invalid shape.radius = 1.0 (expected none: shape 'square' has no",
        ),
        ({"sides": 1}, "unknown key 'shape.sides'"),
        ({"how": "square", "side": "x"}, "invalid shape.side = 'x' (expected an integer"),
    ],
)
def test_rejects_invalid_tables_in_one_line(shape: dict[str, object], line: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read_table(Picture, {"shape": shape})
    assert str(caught.value).startswith(line)


def test_name_is_required_without_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "default", None)
    with raises_invalid("shape.how", "", "one of round, square"):
        read_table(Picture, {"shape": {"color": "blue"}})


def test_instance_lists_options_of_selected_class() -> None:
    assert list(option_types(Picture(Square()))) == ["shape.how", "shape.color", "shape.side", "title"]
    assert list(option_types(Picture)) == ["shape.how", "shape.color", "title"]
    assert base_class_by_option(Picture()) == {"shape.how": Shape}


def test_changing_class_keeps_shared_options() -> None:
    below = {"title": "a", "shape": {"how": "round", "color": "blue", "radius": 3.0}}
    assert merge_tables(Picture, below, {"shape": {"how": "square", "side": 4}}) == {
        "title": "a",
        "shape": {"how": "square", "color": "blue", "side": 4},
    }
    assert merge_tables(Picture, below, {"shape": {"radius": 5.0}})["shape"]["radius"] == 5.0
    # A table without a name selects the default class.
    assert (
        merge_tables(Picture, {"shape": {"radius": 3.0}}, {"shape": {"how": "round"}})["shape"]["radius"]
        == 3.0
    )
    with pytest.raises(UnknownName):
        read_table(Picture, merge_tables(Picture, below, {"shape": {"how": "triangle"}}))


@pytest.fixture
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret all other names as file names."""
    monkeypatch.setattr(Shape.registry, "fallback", ("a file", f"{__name__}:DrawingFile"))


@pytest.mark.usefixtures("_files")
def test_fallback_class_accepts_any_name() -> None:
    picture = read_table(Picture, {"shape": {"how": "a.svg", "side": 3}})
    assert picture.shape == DrawingFile(how="a.svg", side=3)
    assert picture.shape.registered_name == "a.svg"
    assert to_table(picture)["shape"] == {"how": "a.svg", "color": "red", "side": 3}
    assert read_table(Picture, to_table(picture)) == picture
    assert Shape.registry.choices_text == "round, square, or a file"
    with raises_invalid("shape.radius", 1, "shape 'a.svg'"):
        read_table(Picture, {"shape": {"how": "a.svg", "radius": 1}})


@pytest.mark.usefixtures("_files")
def test_changing_class_keeps_options_with_same_meaning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Shape, "same_meaning", True)
    below = {"shape": {"how": "square", "color": "blue", "side": 4}}
    for above, expected in (
        ({"how": "a.svg"}, {"how": "a.svg", "color": "blue", "side": 4}),
        ({"how": "round"}, {"how": "round", "color": "blue"}),
        ({"how": "a.svg", "side": 5}, {"how": "a.svg", "color": "blue", "side": 5}),
    ):
        assert merge_tables(Picture, below, {"shape": above})["shape"] == expected
