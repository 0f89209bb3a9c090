"""Sources written into a folder, and what ``fit migrate`` reports about them."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from engine.compat.migrate.report import Report, migration

Line = tuple[int, str, str]


def report_of(folder: Path, **files: str) -> Report:
    """The report about files, given as ``package__module="..."``; packages get an ``__init__.py``."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != folder:
            (path.parent / "__init__.py").touch()
        path.write_text(dedent(text))
    return migration([folder])


def uses_of(folder: Path, text: str) -> list[Line]:
    """Line, name and verdict of each use in one file, by line."""
    return sorted((use.cell_and_line[1], use.name, use.verdict) for use in report_of(folder, net=text).uses)


def classes(report: Report) -> dict[str, tuple[str, str]]:
    """Kind and verdict of each class."""
    return {each.cls.name: (each.kind, each.verdict) for each in report.classes}


def changes(folder: Path, text: str) -> dict[str, str]:
    """What needs a change in one file, and what is said about it."""
    return {use.name: use.sentence for use in report_of(folder, net=text).uses if use.verdict == "change"}
