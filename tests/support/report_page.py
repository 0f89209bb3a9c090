"""Reads a report's page without a browser: its data, its text and its tables."""

from __future__ import annotations

import base64
import gzip
import json
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """``tables``: by caption, rows of cells; ``text``: what a person reads; ``series``: run and name -> steps, seconds (or ``None``) and values."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._within: list[str] = []
        self._scripts: dict[str | None, str] = {}
        self._caption = ""
        self._rows: list[list[str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not {"<", ">", "&"} & set(self._scripts["data"])  # nothing that could end the element, or begin another
        self.data = json.loads(self._scripts["data"])
        points = gzip.decompress(base64.b64decode(self._scripts["points"]))
        self.series: dict[tuple[str, str], tuple[list[float], list[float] | None, list[float]]] = {}
        for chart in self.data["charts"]:
            for one in chart["series"]:
                x, t, y = (None if one[key] is None else _array(points, *one[key]) for key in "xty")
                self.series[self.data["runs"][one["run"]], one["name"]] = (x or [], t, y or [])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self._within.append(tag)
        if tag == "table":
            self._caption, self._rows = "", []
        if tag == "tr":
            self._rows.append([])
        if tag in ("th", "td"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._within.pop() == tag
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if "script" in self._within:
            name = self.tags[-1][1].get("id")
            self._scripts[name] = self._scripts.get(name, "") + data
        elif "style" not in self._within:
            self.text += data
            if "caption" in self._within:
                self._caption += data
            elif {"th", "td"} & set(self._within):
                self._rows[-1][-1] += data


def _array(points: bytes, offset: int, count: int, size: int) -> list[float]:
    return list(struct.unpack_from(f"<{count}{'d' if size == 8 else 'f'}", points, offset))


def series(path: Path, name: str) -> tuple[list[float], list[Any]]:
    """Steps and values of the only run's curve of this name."""
    page = Page(path)
    (run,) = page.data["runs"]
    steps, _, values = page.series[run, name]
    return steps, values
