"""Elements of HTML and SVG, put together so that nothing has to be escaped by hand."""

from __future__ import annotations

import html

_EMPTY_ELEMENTS = frozenset({"meta", "br", "hr", "path", "line", "rect", "circle", "use"})


class Html(str):
    """Text that is markup already; all other text is escaped where it is put in."""

    __slots__ = ()


def element(tag: str, *children: str | None, **attributes: object) -> Html:
    """One element.

    Args:
        tag: Its name.
        children: Markup (`Html`), or text, which is escaped; None is left out.
        attributes: By name; `_` stands for `-`, and a `_` at the end is dropped, as in `class_`. None and False are
            left out, True is an attribute without a value.
    """
    told = "".join(
        _attribute(name, value) for name, value in attributes.items() if value is not None and value is not False
    )
    if tag in _EMPTY_ELEMENTS and not children:
        return Html(f"<{tag}{told}/>")
    return Html(f"<{tag}{told}>{joined(*children)}</{tag}>")


def joined(*children: str | None) -> Html:
    """Markup and text, one after the other."""
    return Html("".join(c if isinstance(c, Html) else html.escape(c, quote=False) for c in children if c is not None))


def _attribute(name: str, value: object) -> str:
    name = name.removesuffix("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {name}="{html.escape(text)}"'
