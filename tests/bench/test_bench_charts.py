"""Drawings: round axes, nothing outside the picture, the HTML page complete in itself."""

import re
from xml.etree import ElementTree

import pytest

from specdeft.bench import latency_charts, plots
from specdeft.bench.charts import (
    BarChart,
    Chart,
    HeatMap,
    LineChart,
    TreeChart,
    cumulative,
    log_ticks,
    ticks,
)
from specdeft.bench.html_report import as_html
from specdeft.bench.report import Report, Table
from specdeft.bench.run_folder import RunFolder
from specdeft.bench.svg import WIDE_WIDTH, WIDTH, draw, is_wide, shorten, text_width
from specdeft.trees.drawing import tree_places
from specdeft.trees.named import named_tree

DEFT = named_tree("deft-64")
LONG = "a name that is much too long for a drawing of this width, by far, really far too long"
CHARTS: list[Chart] = [
    LineChart("Lines", "depth", "share", {"one": [(1, 0.5), (4, 0.1)], LONG: [(1, 0.2), (2, 0.9)]}),
    LineChart("Logarithmic", "nodes", "tokens/s", {"a": [(1, 20), (64, 33)]}, is_log_x=True),
    LineChart("One point", "x", "y", {"a": [(3, 0)]}),
    BarChart("Bars", "ms", ("draft", "verify"), {"plain": (0.0, 40.0), LONG: (6.0, 55.5)}),
    HeatMap("Ranks", "rank", "depth", ("0", "1"), ("1", "2"), ((0.5, 0.1), (0.2, 0.0))),
    TreeChart("Tree", DEFT, tuple(0.9**depth for depth in DEFT.depths)),
    TreeChart("Few leaves", named_tree("deft-32"), (0.5,) * 32),
    LineChart("Nine", "x", "y", {f"row {n} mmm": [(1, n), (2, n)] for n in range(9)}),
    TreeChart("Root", named_tree("chain-4").prune(0), (1.0,)),
    LineChart("Many", "ms", "share", {"a": [(0.9 + n, n / 50) for n in range(50)]}, is_log_x=True),
]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_a_drawing_is_well_formed_and_stays_inside(chart):
    root = ElementTree.fromstring(draw(chart))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert width == (WIDE_WIDTH if is_wide(chart) else WIDTH)
    for element in root.iter():
        for name, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            if name in element.attrib:
                assert 0 <= float(element.attrib[name]) <= limit, element.attrib
        if element.tag == "rect":
            assert float(element.attrib["x"]) + float(element.attrib["width"]) <= width + 0.5
        for pair in element.attrib.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert all(len(text.text or "") * 5 < width for text in root.iter("text"))


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 0.55, [0.0, 0.2, 0.4]),
        (0.0, 37.0, [0.0, 10.0, 20.0, 30.0]),
        (0.0, 1900.0, [0.0, 500.0, 1000.0, 1500.0]),
        (5.0, 5.0, [5.0]),
    ],
)
def test_ticks_are_round(low, high, marks):
    assert ticks(low, high) == pytest.approx(marks)


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.9, 540.0, [1, 2, 5, 10, 20, 50, 100, 200, 500]),
        (0.03, 0.2, [0.05, 0.1, 0.2]),
        (3.0, 4.0, []),
    ],
)
def test_logarithmic_ticks_are_round(low, high, marks):
    assert log_ticks(low, high) == pytest.approx(marks)


@pytest.mark.parametrize("most", [0.9, 90.0, 2290.0, 123456.0])
def test_the_numbers_of_an_axis_do_not_touch_what_they_are(most):
    line = [(1.0 + n, most * n / 20) for n in range(21)]
    root = ElementTree.fromstring(draw(LineChart("t", "x", "tokens/s", {"a": line}, is_log_x=True)))
    numbers = [t for t in root.iter("text") if t.attrib.get("text-anchor") == "end"]
    assert len(numbers) > 2
    for number in numbers:
        # The label stands upright with its middle at 11 and is as high as a line of text.
        assert float(number.attrib["x"]) - text_width(number.text or "") >= 11 + 5


def test_the_distribution_of_values():
    assert cumulative([3.0, 1.0]) == [(1.0, 0.5), (3.0, 1.0)]
    assert cumulative([]) == []
    many = cumulative([float(i) for i in range(10_000)])
    assert len(many) <= 201
    assert many[-1] == (9999.0, 1.0)


def test_parents_stand_above_the_middle_of_their_children():
    #     0
    #   1   2
    #      3 4
    places = tree_places([-1, 0, 0, 2, 2], [0, 1, 1, 2, 2])
    xs = [x for x, _ in places]
    assert xs[3] < xs[2] < xs[4]
    assert xs[2] == pytest.approx((xs[3] + xs[4]) / 2)
    assert xs[0] == pytest.approx((xs[1] + xs[2]) / 2)


def test_a_tree_of_many_leaves_gets_the_room_of_two():
    assert [chart.title for chart in CHARTS if is_wide(chart)] == ["Tree"]
    page = as_html(Report("T", (), (Table("t", ("a",), ()),), (), {}, (CHARTS[0], CHARTS[5])))
    assert page.count("<figure class=wide>") == 1
    assert page.count("<figure>") == 1


def test_names_of_a_legend_do_not_touch_and_a_second_round_of_colours_is_told_apart():
    root = ElementTree.fromstring(draw(CHARTS[7]))
    marks = list(root.iter("rect"))
    names = [element for element in root.iter("text") if "row" in (element.text or "")]
    assert len(marks) == len(names) == 9
    for name, following in zip(names, marks[1:], strict=False):
        if name.attrib["y"] == str(float(following.attrib["y"]) + 8):
            end = float(name.attrib["x"]) + text_width(name.text or "")
            assert end <= float(following.attrib["x"])
    kinds = [mark.attrib["class"] for mark in marks]
    assert len(set(kinds)) == 9
    assert kinds[6] == "hollow line0"


def test_as_many_lines_as_can_be_told_apart():
    names = [f"row {number}" for number in range(9)] + [f"random({n})" for n in range(9)]
    kept = latency_charts._fewer({name: [(1.0, 1.0)] for name in names} | {"silent": []})
    assert list(kept) == [*names[:9], "random(0)", "random(1)", "random(2)"]
    assert len(latency_charts._fewer({f"{n}": [(1.0, 1.0)] for n in range(20)})) == 12


def test_what_is_cut_is_marked():
    assert shorten("short", 100) == "short"
    assert shorten("a" * 50, 62) == "a" * 9 + "…"


def test_png_files(tmp_path):
    pytest.importorskip("matplotlib", reason="PNG files need the extra bench")
    paths = plots.save_plots(CHARTS, tmp_path / "plots")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(
        path.name for path in paths
    )
    assert paths[0].name == "01-lines.png"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_without_matplotlib_plots_are_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"pip install 'specdeft\[bench\]'"):
        RunFolder(tmp_path, plots=True)
    RunFolder(tmp_path)


def test_the_page_needs_nothing_else_and_escapes_what_it_shows():
    table = Table("<b>", ("row", "ms"), (("<script>", 1.5),))
    page = as_html(
        Report("T & T", ("note",), (table,), ("x < y",), {"manifest": {"a": 1}}, (CHARTS[0],))
    )
    assert "<script>" not in page
    assert "T &amp; T" in page
    assert "x &lt; y" in page
    assert 'data-name="ms"' in page
    assert not re.search(r"(src|href)=|url\(|@import|https?://(?!www\.w3)", page)
