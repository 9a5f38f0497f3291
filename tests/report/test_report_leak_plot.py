"""Accuracy against leakage as a drawing: where marks stand, how large they are, how labels keep apart."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from fedstill.attacks.rows import Column
from fedstill.report.leak_plot import DOT, HEIGHT, LARGEST, WIDE, Spot, area, leak_plot

AUC = Column(name="auc", head="AUC", guess=50.0, axis="AUC of an attack")


def plot(spots: list[Spot], width: int = WIDE) -> str:
    return leak_plot(spots, AUC, width=width)


def spots_at(drawing: str) -> list[tuple[float, float]]:
    """Places of the marks' numbers and tags: (percent, pixels)."""
    found = re.findall(r'<svg class="c\d(?: again)?" x="([0-9.]+)%" y="([0-9.]+)"', drawing)
    return [(float(x), float(y)) for x, y in found]


def test_marks_stand_at_their_figures_and_areas_are_bytes() -> None:
    drawing = plot(
        [Spot(1, "a", 50.0, 60.0, 1e6), Spot(2, "b", 60.0, 80.0, 0.25e6), Spot(3, "c", 70.0, 100.0, 0)]
    )
    (left, low), (middle, half), (right, top) = spots_at(drawing)
    assert (low, half, top) == (HEIGHT, HEIGHT / 2, 0.0)
    assert middle - left == pytest.approx(right - middle)
    guess = re.search(r'class="guess" x1="([0-9.]+)%"', drawing)
    assert guess is not None
    assert float(guess[1]) == left
    radii = [float(r) for r in re.findall(r'class="bubble" r="([0-9.]+)"', drawing)]
    assert radii == [LARGEST, LARGEST / 2]  # a quarter of the bytes: a quarter of the area
    assert drawing.count('class="ring"') == 1  # nothing sent
    assert ">guessing</text>" in drawing


def test_deviations_go_both_ways() -> None:
    spot = Spot(1, "a", 60.0, 80.0, 10.0, leak_spread=2.5, spread=5.0)
    whiskers = re.findall(r'class="whisker" x1="([0-9.%]+)" x2="([0-9.%]+)"', plot([spot]))
    assert len(whiskers) == 2
    (left, right) = next(pair for pair in whiskers if "%" in pair[0])
    [(x, _)] = spots_at(plot([spot]))
    assert float(right[:-1]) - x == pytest.approx(x - float(left[:-1]), abs=0.02)
    assert "whisker" not in plot([Spot(1, "a", 60.0, 80.0, 10.0)])


@pytest.mark.parametrize("leak", [0.0, 50.0, 51.0, 100.0])
def test_guessing_is_always_in_it_and_the_axis_is_never_narrow(leak: float) -> None:
    drawing = plot([Spot(1, "a", leak, 50.0, 0)])
    assert "nan" not in drawing
    ticks = [float(tick) for tick in re.findall(r'class="tick middle"[^>]*>([0-9.]+)%<', drawing)]
    assert ticks[0] <= min(leak, 50.0)
    assert ticks[-1] >= max(leak, 50.0)
    assert ticks[-1] - ticks[0] >= 10


def boxes(drawing: str, width: int) -> list[tuple[float, float, float, float]]:
    """Middles and half sizes of numbers and tags, in pixels, at a width."""
    found = []
    for x, y, inside in re.findall(
        r'<svg class="c\d(?: again)?" x="([0-9.]+)%" y="([0-9.]+)" overflow="visible">(.*?)</svg>', drawing
    ):
        for dx, dy in re.findall(r'class="disc" cx="(-?[0-9.]+)" cy="(-?[0-9.]+)"', inside):
            found.append((float(x) * width / 100 + float(dx), float(y) + float(dy), 9.0, 9.0))
        for dx, dy, told in re.findall(r'class="tag" x="(-?[0-9.]+)" y="(-?[0-9.]+)">([^<]*)<', inside):
            half = 3.0 * len(told)
            found.append((float(x) * width / 100 + float(dx), float(y) + float(dy) - 4, half, 6.0))
    return found


@pytest.mark.parametrize("width", [250, 960])
def test_numbers_and_tags_keep_apart_on_a_screen_and_on_a_phone(width: int) -> None:
    close = [
        Spot(place, f"m{place}", 52 + place * 0.8 + step, 80 + place % 3 + 2 * step, 10.0**place, f"e {step}")
        for place in range(1, 7)
        for step in (1, 5)
    ]
    found = boxes(plot(close, width=width), width)
    assert len(found) == 2 * len(close)
    for (x, y, wide, high), (other_x, other_y, other_wide, other_high) in itertools.combinations(found, 2):
        assert abs(x - other_x) >= wide + other_wide or abs(y - other_y) >= high + other_high
    assert all(0 <= x <= width and 0 <= y <= HEIGHT for x, y, _, _ in found)


def test_a_line_joins_a_method_with_itself_only() -> None:
    spots = [
        Spot(1, "a", 52.0, 70.0, 10, "one"),
        Spot(1, "a", 60.0, 80.0, 10, joined=True),
        Spot(2, "b", 55.0, 75.0, 10),
    ]
    drawing = plot(spots)
    (ends,) = re.findall(r'class="way" x1="([0-9.]+)%" y1="[^"]*" x2="([0-9.]+)%"', drawing)
    places = [x for x, _ in spots_at(drawing)]
    assert [float(end) for end in ends] == places[:2]
    assert re.findall(r'class="inside"[^>]*>(\d)<', drawing) == ["1", "2"]  # the line's end has its number


def test_names_and_tags_are_escaped() -> None:
    drawing = plot([Spot(1, "<b>", 55.0, 70.0, 10, tag="<i>", where="<u>")])
    assert not re.search("<[biu]>", drawing)
    assert "<title>&lt;b&gt;, &lt;u&gt;: 70.0%, AUC 55.0%, 10 B</title>" in drawing


def test_an_area_of_the_legend_is_as_large_as_in_the_drawing() -> None:
    assert f'class="bubble" r="{round(LARGEST * math.sqrt(0.1), 2)}"' in area(1e5, 1e6)
    assert 'class="ring"' in area(0, 1e6)
    assert f'class="bubble" r="{DOT}"' in area(1, 1e6)  # never less than its point
