"""Figures: plotted values, deterministic files, and the command that writes them."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from fedstill import figures
from fedstill.attacks.attack import ComparisonColumn
from fedstill.cli.main import main
from fedstill.core.errors import FedstillError
from fedstill.report import figures as drawings
from fedstill.report.comparison_records import MethodCurve
from fedstill.report.figures import Point
from fedstill.report.statistics import Spread
from tests.support.result_files import a_folder, a_result, a_result_in_rounds, measured

pytestmark = pytest.mark.all_widths

AUC = ComparisonColumn(name="auc", head="AUC", guess=50.0, axis="AUC of an attack")


def lines_of(figure: object) -> dict[str, list[tuple[float, float]]]:
    """Return the points of a figure's lines by label."""
    axes = figure.axes[0]  # type: ignore[attr-defined]
    return {line.get_label(): [tuple(map(float, at)) for at in line.get_xydata()] for line in axes.lines}


# --- of a run ---------------------------------------------------------------------------------------------


def test_accuracy_plots_values_of_the_run(tmp_path: Path) -> None:
    shown = lines_of(figures.accuracy(a_folder(tmp_path, a_result())))
    assert shown["student"] == [(2.0, 50.0), (4.0, 93.37)]  # metrics.jsonl has these two
    levels = {name: shown[name][0][1] for name in ("standalone mean", "teachers' ensemble", "centralized")}
    assert levels == {"standalone mean": 81.1, "teachers' ensemble": 92.5, "centralized": 96.9}


def test_accuracy_over_rounds_plots_local_models(tmp_path: Path) -> None:
    run = a_folder(tmp_path, a_result_in_rounds())
    lines = [
        {"phase": "distillation", "step": k, "losses": {}, "accuracy": 80.0 + k, "local_accuracy": 60.0 + k}
        for k in (1, 2)
    ]
    measured(run, lines)
    figure = figures.accuracy(str(run))
    shown = lines_of(figure)
    assert shown["average"] == [(1.0, 81.0), (2.0, 82.0)]
    assert shown["local models"] == [(1.0, 61.0), (2.0, 62.0)]
    assert "local models (mean)" not in shown  # a curve instead of a horizontal line
    assert figure.axes[0].get_xlabel() == "round"


def test_losses_plot_every_finite_step(tmp_path: Path) -> None:
    run = a_folder(tmp_path, a_result())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "distillation", "step": 5, "losses": {"gan": NaN, "student": 0.25}}\n')
        for node in ("ward-10", "ward-2"):  # in training order
            file.write(f'{{"phase": "local", "node": "{node}", "step": 50, "loss": 0.5}}\n')
    axes = figures.losses(run).axes
    shown = {each.get_title(loc="left"): each.lines[0].get_xydata().tolist() for each in axes}
    assert shown["gan"] == [[k, 0.7] for k in (1, 2, 3, 4)]  # non-finite values are omitted
    assert shown["student"] == [*([k, 1.5 / k] for k in (1, 2, 3, 4)), [5, 0.25]]
    local = figures.local_losses(run).axes
    names = ["north", "south", "ward-2", "ward-10", "centralized"]
    assert [axes.get_title(loc="left") for axes in local] == names
    assert {axes.get_ylim() for axes in local} == {(0.0, 2.0)}  # one scale


def test_run_without_metrics_raises_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(a_result()))
    for draw in (figures.accuracy, figures.losses, figures.local_losses):
        with pytest.raises(figures.NothingToDraw):
            draw(tmp_path)
    with pytest.raises(figures.NothingToDraw, match="no data"):
        figures.write(tmp_path)


@pytest.mark.parametrize("value", [0.0, 1e20, -3.0, 5e-324])
def test_constant_losses_and_single_points_are_plotted(value: float) -> None:
    for line in ([(1.0, value)], [(1.0, value), (2.0, value)]):
        low, high = drawings.plot_loss("a", line).axes[0].get_ylim()
        assert low < value < high


def test_percent_axis_spans_one_point_and_starts_at_zero() -> None:
    for value, ends in ((98.4, (97.4, 98.4)), (0.2, (0.0, 1.0))):
        figure = drawings.plot_learning_curve(drawings.LearningCurve([(1, value), (2, value)], "student"))
        low, high = figure.axes[0].get_ylim()
        assert low <= ends[0]
        assert high >= ends[1]
        assert low >= 0


# --- of a comparison --------------------------------------------------------------------------------------


def test_comparison_figures_plot_means_over_seeds(folder: Path) -> None:
    curves = lines_of(figures.curves(folder))
    assert curves["FedAvg"] == [(0.5, 41.0), (1.0, 84.0)]  # 40, 41, 42 and 80, 84, 88
    assert curves["FedIOD"] == [(0.25, 50.0), (1.0, 91.0)]
    figure = figures.traffic(folder)
    dots = {tuple(at) for line in figure.axes[0].lines for at in line.get_xydata().tolist()}
    assert {(2500.0, 84.0), (40_000.0, 91.0), (0.0, 62.0)} <= dots
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["1 Standalone", "2 FedAvg", "3 FedIOD"]
    with pytest.raises(figures.NothingToDraw):
        figures.traffic(folder, 1)
    with pytest.raises(FedstillError, match="from 0 to 1"):
        figures.traffic(folder, 2)
    for draw in (figures.against_epsilon, figures.against_malicious_nodes, figures.against_leakage):
        with pytest.raises(figures.NothingToDraw):
            draw(folder)


def test_runs_without_budget_are_right_of_largest_epsilon() -> None:
    values = {1.0: Spread(70.0, 2.0), 8.0: Spread(80.0), math.inf: Spread(90.0)}
    figure = drawings.plot_against_epsilon([MethodCurve(1, "one", values), MethodCurve(2, "none", {})])
    assert lines_of(figure)["one"] == [(1.0, 70.0), (8.0, 80.0)]
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "8", "\u221e"]
    *_, last = axes.get_xticks()
    assert last > 8
    assert [last, 90.0] in [line.get_xydata()[0].tolist() for line in axes.lines]
    (whisker,) = axes.collections
    assert whisker.get_segments()[0].tolist() == [[1.0, 68.0], [1.0, 72.0]]


def test_number_of_malicious_nodes_is_the_horizontal_axis() -> None:
    curves = [
        MethodCurve(1, "one", {0.0: Spread(90.0), 3.0: Spread(60.0, 5.0)}),
        MethodCurve(2, "few", {1.0: Spread(9.0)}),
    ]
    figure = drawings.plot_against_malicious_nodes(curves)
    assert lines_of(figure)["one"] == [(0.0, 90.0), (3.0, 60.0)]
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "3"]
    (whisker,) = axes.collections
    assert whisker.get_segments()[0].tolist() == [[3.0, 55.0], [3.0, 65.0]]


@pytest.mark.parametrize("leak", [0.0, 50.0, 51.0, 100.0])
def test_leakage_axis_includes_guessing_and_ten_points(leak: float) -> None:
    axes = drawings.plot_against_leakage([Point(1, "a", Spread(50.0), 0, Spread(leak))], AUC).axes[0]
    low, high = axes.get_xlim()
    assert low <= min(leak, 50.0)
    assert high >= max(leak, 50.0)
    assert high - low >= 10


def test_areas_are_bytes_and_lines_connect_one_method() -> None:
    points = [
        Point(1, "a", Spread(60), 1e6, Spread(50)),
        Point(2, "b", Spread(80), 0.25e6, Spread(60)),
        Point(1, "a", Spread(90), 0, Spread(70), connected=True),
    ]
    lines = drawings.plot_against_leakage(points, AUC).axes[0].lines
    sizes = {tuple(line.get_xydata()[0]): 0.0 for line in lines if len(line.get_xydata()) == 1}
    for line in lines:
        at = tuple(line.get_xydata()[0])
        sizes[at] = max(sizes.get(at, 0.0), line.get_markersize())
    assert sizes[60, 80] == sizes[50, 60] / 2  # a quarter of the bytes has a quarter of the area
    assert sizes[70, 90] < sizes[60, 80]
    joined = [line.get_xydata().tolist() for line in lines if len(line.get_xydata()) == 2]
    assert [[50, 60], [70, 90]] in joined
    assert not [pair for pair in joined if [60, 80] in pair]


@pytest.mark.parametrize("width", drawings.WIDTHS)
def test_labels_do_not_overlap_at_any_width(width: int) -> None:
    points = []
    for number, step in itertools.product(range(1, 7), (1, 5)):
        reached, leaked = Spread(80 + number % 3 + 2 * step), Spread(52 + number * 0.8 + step)
        points.append(Point(number, f"m{number}", reached, 10.0**number, leaked, f"e {step}"))
    axes = drawings.plot_against_leakage(points, AUC, width=width).axes[0]
    boxes = []
    for text in axes.texts:
        if text.get_text() != "random guessing":
            x, y = drawings.to_pixels(axes, text.xy)
            half = (3.0 * len(text.get_text()), 9.0)
            boxes.append((x + text.xyann[0], y + text.xyann[1], *half))
    assert len(boxes) == len(points)
    for (x, y, wide, high), (other_x, other_y, other_wide, other_high) in itertools.combinations(boxes, 2):
        assert abs(x - other_x) >= wide + other_wide or abs(y - other_y) >= high + other_high


# --- as files and in pages --------------------------------------------------------------------------------


def test_names_are_escaped_and_svg_is_deterministic() -> None:
    hostile = '"><script>$x^2$</script> \u6771'
    curves = [MethodCurve(1, hostile, {0.5: Spread(10.0), 1.0: Spread(20.0)})]  # two equal markers

    def render() -> str:
        with drawings.plot_style():
            return drawings.to_svg(drawings.plot_learning_curves(curves, hostile), "a")

    first = render()
    assert first == render()
    assert first.count("<use ") == 2
    assert "<script>" not in first
    assert first.count("&lt;script&gt;$x^2$") == 4  # twice in the label, and at each of two points
    assert "font-family" not in first
    assert "<style" not in first


def test_svg_colors_are_variables_of_style_sheet() -> None:
    points = [Point(number, f"m{number}", Spread(50.0 + number), 10.0**number) for number in range(1, 10)]
    with drawings.plot_style():
        svg = drawings.to_svg(drawings.plot_traffic(points), "a")
    style = (Path(drawings.__file__).parent / "style.css.j2").read_text()
    style += (Path(drawings.__file__).parent / "compare.html.j2").read_text()
    assert svg.count("<use ") == len(points)
    for color, variable in drawings.CSS_VARIABLES.items():
        assert color not in svg
        assert f"--{variable}: {color};" in style


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", drawings.FORMATS)
def test_report_command_writes_figures_of_a_run(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_folder(tmp_path / "run", a_result())
    for out in ("once", "twice"):
        with pytest.raises(SystemExit) as end:
            main(["report", str(run), "--figures", kind, "--out", str(tmp_path / out)])
        assert end.value.code == 0
    names = [f"{name}.{kind}" for name in ("accuracy", "losses", "local_losses")]
    assert capsys.readouterr().out.splitlines()[:3] == [str(tmp_path / "once" / name) for name in names]
    for name in names:
        written = (tmp_path / "once" / name).read_bytes()
        assert written == (tmp_path / "twice" / name).read_bytes()
        assert written[:5] == {"pdf": b"%PDF-", "svg": b"<?xml", "png": b"\x89PNG\r"}[kind]


def test_comparison_writes_figures_per_setting(folder: Path) -> None:
    made = figures.write(folder, kind="svg")
    assert [path.name for path in made] == ["traffic_1.svg", "curves_1.svg"]
    assert {path.parent for path in made} == {folder / "figures"}


@pytest.mark.parametrize("arguments", [[], ["--figures", "pdf"], ["nowhere"], [".", "--figures", "gif"]])
def test_invalid_arguments_print_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", *arguments])
    assert end.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_import_loads_no_matplotlib_and_never_pyplot(tmp_path: Path) -> None:
    run = a_folder(tmp_path, a_result())
    code = (
        "import sys, fedstill.figures; assert 'matplotlib' not in sys.modules; "
        f"fedstill.figures.accuracy({str(run)!r}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- figures of a page -------------------------------------------------------------------------------


def test_svg_refers_to_no_removed_clip_path() -> None:
    with drawings.plot_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2, 2))
        figure.set_label("a line")
        figure.subplots().plot([0.0, 1.0], [1.0, 0.0])
        svg = drawings.to_svg(figure, "line")
    assert "clip" not in svg
    assert "<path" in svg, "the line is drawn"
