"""HTML elements whose text is escaped unless it is markup already. Knows nothing of the report."""

from __future__ import annotations

import html
from typing import Final

_VOID: Final = ("img", "meta")


class Markup(str):
    """Text that is HTML already; any other string is escaped on its way in."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Markup:
    """One element.

    Args:
        tag: its name.
        children: markup, or text to escape.
        attributes: values are escaped; a trailing underscore (``class_``) is dropped, others are hyphens.
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items()
    )
    if tag in _VOID:
        return Markup(f"<{tag}{named}>")
    return Markup(f"<{tag}{named}>{join(*children)}</{tag}>")


def join(*children: str) -> Markup:
    """Several pieces in a row."""
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))
