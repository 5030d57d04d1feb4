from __future__ import annotations

import pytest
from page_reader import Page

from kvtuner.report.html_page import environment
from kvtuner.report.plots.drawing import Drawing, LogAxis, drawn, shortened


def test_a_logarithmic_scale_puts_equal_ratios_at_equal_distances_and_the_rest_at_its_ends() -> None:
    axis = LogAxis(0.001, 10, 100, 500)
    assert [axis.at(value) for value in (0.001, 0.01, 0.1, 10)] == pytest.approx([100, 200, 300, 500])
    assert [axis.at(value) for value in (-1, 0, 1e-9, 1e9)] == pytest.approx([100, 100, 100, 500])
    assert axis.holds(0.001) and not axis.holds(11) and not axis.holds(0)


@pytest.mark.parametrize("low", [1e-9, 0.0021, 0.9])
@pytest.mark.parametrize("span", [2.5, 10, 1e3, 1e8])
@pytest.mark.parametrize("length", [150, 400])
def test_ticks_are_round_and_never_too_dense(low: float, span: float, length: float) -> None:
    ticks = list(LogAxis(low, low * span, 0, length).ticks())
    places = [place for place, _ in ticks]
    assert ticks and all(0 <= place <= length for place in places)
    assert all(float(text) * 10 ** (-len(text)) >= 0 and len(text) <= 6 for _, text in ticks)
    assert len(ticks) <= max(1, length / 46)


def test_text_that_is_too_long_ends_in_dots() -> None:
    assert shortened("K4V2", 100) == "K4V2"
    assert shortened("an-organization/a-long-name", 100) == "an-organiza..."


def test_marks_come_out_in_order_with_their_titles_and_nothing_else_can() -> None:
    def layout(width: float) -> Drawing:
        drawing = Drawing(width, 'a "quoted" description', 20)
        drawing.rect(0, 1.26, width / 2, -3, "cell", "<script>")
        drawing.write(3, 10, "<b>&", "soft", anchor="end")
        return drawing

    template = environment().from_string('{% from "drawing.html" import drawing %}{{ drawing(drawn) }}')
    page = Page(template.render(drawn=drawn(layout)))
    assert page.names() == ["svg", "rect", "title", "text"] * 2
    (_, wide), (_, rect), _, (_, text) = page.tags[:4]
    assert wide["aria-label"] == 'a "quoted" description' and wide["viewbox"] == "0 0 580.0 20"
    assert rect == {"class": "cell", "x": "0", "y": "1.3", "width": "290", "height": "0"}
    assert text["text-anchor"] == "end" and "<script>" in page.text and "<b>&" in page.text
