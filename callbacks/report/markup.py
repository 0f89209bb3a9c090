"""HTML elements whose text is always escaped."""

from __future__ import annotations

import html

_VOID = ("br", "input", "meta")


class Html(str):
    """Text that is HTML already; any other text is escaped when it becomes part of an element."""


def element(tag: str, *children: object, **attributes: str | int | bool | None) -> Html:
    """``<tag attribute="...">children</tag>``.

    Args:
        children: :class:`Html`, text, or lists of them; ``None`` is left out.
        attributes: ``class_`` is ``class``, other underscores are hyphens; ``True`` has no value, ``False`` and ``None`` are left out.
    """
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    opening = "".join(
        f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
        for name, value in named.items()
        if value is not None and value is not False
    )
    return Html(f"<{tag}{opening}>" if tag in _VOID else f"<{tag}{opening}>{join(*children)}</{tag}>")


def join(*children: object) -> Html:
    """The children of an element."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, (list, tuple)):
            parts.append(join(*child))
        elif child is not None:
            parts.append(child if isinstance(child, Html) else html.escape(str(child)))
    return Html("".join(parts))


def table(caption: str, head: list[object], rows: list[list[object]], *, numbers_from: int | None = None) -> Html:
    """A table that scrolls sideways where it is too wide.

    Args:
        caption: its name, for everybody.
        head: the columns' names.
        rows: the first cell of each is the row's name.
        numbers_from: the column from which cells are numbers, which are aligned to the right.
    """

    def kind(index: int) -> str | None:
        return "number" if numbers_from is not None and index >= numbers_from else None

    columns = [element("th", cell, scope="col", class_=kind(index)) for index, cell in enumerate(head)]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            [element("td", cell, class_=kind(index)) for index, cell in enumerate(row) if index],
        )
        for row in rows
    ]
    inner = element(
        "table", element("caption", caption), element("thead", element("tr", columns)), element("tbody", body)
    )
    return element("div", inner, class_="scroll", role="region", aria_label=caption, tabindex=0)
