from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from kvtuner.report.markup import Markup, element, join


class Recorder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


# The parser turns NUL into U+FFFD and line ends into one kind, as HTML asks; neither is about escaping.
outside_text = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]))


@given(outside_text, outside_text)
def test_a_parser_reads_back_the_very_text_and_attribute_and_no_other_tag(text: str, attribute: str) -> None:
    recorder = Recorder()
    recorder.feed(element("p", text, title=attribute))
    recorder.close()
    assert recorder.tags == [("p", {"title": attribute})]
    assert recorder.text == text


def test_markup_passes_and_plain_text_beside_it_is_escaped() -> None:
    assert join(Markup("<b>x</b>"), "<b>") == "<b>x</b>&lt;b&gt;"
    assert isinstance(join("a"), Markup)


def test_python_names_become_html_attributes_and_void_elements_have_no_end() -> None:
    assert element("meta", http_equiv="a", class_='"') == '<meta http-equiv="a" class="&quot;">'
