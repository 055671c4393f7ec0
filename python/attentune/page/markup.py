"""HTML and SVG from Python: whatever is not markup already is escaped."""

from __future__ import annotations

import html


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(element: str, /, *children: str | None, **attributes: str | float | bool | None) -> Markup:
    """Return an element.

    Parameters
    ----------
    element : str
        Its name.
    *children : str or None
        Its content; text is escaped, None is nothing.
    **attributes : str, float, bool or None
        A trailing underscore is dropped and others become hyphens; None and False leave the
        attribute out.
    """
    pairs = "".join(_attribute(key, value) for key, value in attributes.items())
    if element in ("input", "meta"):
        return Markup(f"<{element}{pairs}>")
    return Markup(f"<{element}{pairs}>{join(children)}</{element}>")


def join(children: tuple[str | None, ...] | list[Markup]) -> Markup:
    """Return children as markup, one after the other."""
    return Markup("".join(_escaped(child) for child in children if child is not None))


def _escaped(child: str) -> str:
    return child if isinstance(child, Markup) else html.escape(child)


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f' {name}="{html.escape(text)}"'
