"""Figures of a page: SVG without references to what was removed from it."""

from __future__ import annotations

from fedstill.report import figures


def test_svg_refers_to_no_removed_clip_path() -> None:
    with figures.plot_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2, 2))
        figure.set_label("a line")
        figure.subplots().plot([0.0, 1.0], [1.0, 0.0])
        svg = figures.to_svg(figure, "line")
    assert "clip" not in svg
    assert "<path" in svg, "the line is drawn"
