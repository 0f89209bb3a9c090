"""The report of ``fit migrate``: uses and classes with their verdicts, as text and as JSON."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.compat.migrate.counterparts import AS_IS, CHANGE, INTEROP
from engine.compat.migrate.expressions import Use, Walker
from engine.compat.migrate.imports import ClassInfo, Names
from engine.compat.migrate.known_objects import kind_of
from engine.compat.migrate.sources import Source, Unread, read

VERDICTS = (AS_IS, INTEROP, CHANGE)
INHERITED = "inherited"
"""The count of classes that need no change themselves, but inherit from one that does."""
KINDS = {
    "module": "LightningModules",
    "data": "LightningDataModules",
    "callback": "callbacks",
    "other": "other classes",
}


@dataclass(frozen=True)
class ClassReport:
    """A user's class with a library base. ``verdict``: the worst verdict among its own and its inherited uses."""

    cls: ClassInfo
    kind: str
    verdict: str
    uses: list[Use]
    inherited: list[Use]
    """The uses in the class's bases and mixins in the sources."""
    is_cause: bool
    """Whether a change that the class needs is counted with it: it is in its own body, or in a mixin that it is the first to combine."""

    @property
    def package(self) -> str:
        """The top-level package of the class's module."""
        return self.cls.source.module.split(".")[0]


@dataclass(frozen=True)
class Report:
    """The result of ``fit migrate``. ``files``: the number of files that were read; ``unread``: files and cells that could not be."""

    uses: list[Use]
    classes: list[ClassReport]
    unread: list[Unread]
    files: int
    imported: dict[str, tuple[Source, ast.stmt]]
    """The packages of the libraries that the sources import -> the first place."""

    @property
    def works(self) -> bool:
        """Whether no use needs a change and everything could be read."""
        return not self.unread and all(use.verdict != CHANGE for use in self.uses)

    def counts(self, kind: str, package: str | None = None) -> dict[str, int]:
        """The number of classes of a kind (in ``package``, or in all) per verdict.

        A class that needs a change only because of its base counts under :data:`INHERITED`: once the base is changed it works.
        """
        counter = Counter(
            INHERITED if report.verdict == CHANGE and not report.is_cause else report.verdict
            for report in self.classes
            if report.kind == kind and package in (None, report.package)
        )
        return {verdict: counter[verdict] for verdict in (*VERDICTS, INHERITED)}


def migration(paths: Sequence[Path], exclude: Iterable[str] = ()) -> Report:
    """Parse the sources under ``paths`` and judge each use of Lightning and Accelerate.

    ``exclude``: patterns of the names of files and folders to skip.
    """
    sources, unread = read(paths, exclude)
    names = Names(sources)
    users = _first_users(names.classes)
    uses: list[Use] = []
    imported: dict[str, tuple[Source, ast.stmt]] = {}
    for source in sources:
        walker = Walker(source, names, users)
        try:
            walker.visit(source.tree)
        except RecursionError:
            unread.append(Unread(source.path, 0, "an expression in it is nested too deeply"))
            continue
        uses += walker.uses
        imported |= {name: (source, node) for name, node in walker.imported.items() if name not in imported}
    by_class: dict[ClassInfo, list[Use]] = {}
    for use in uses:
        if use.owner is not None:
            by_class.setdefault(use.owner, []).append(use)
    classes = [_class_report(cls, by_class, users) for cls in names.classes if kind_of(cls)]
    return Report(uses, classes, unread, len(sources), imported)


def _first_users(classes: Sequence[ClassInfo]) -> dict[ClassInfo, ClassInfo]:
    """Map each base class and mixin in the sources to the first class with a library base that inherits from it."""
    users: dict[ClassInfo, ClassInfo] = {}
    for cls in classes:
        bases = [cls] if kind_of(cls) else []
        for (
            base_class
        ) in bases:  # grows while it is walked; a base that has an entry is skipped, as its own bases have one too
            new_bases = [base for base in base_class.bases if isinstance(base, ClassInfo) and base not in users]
            users.update(dict.fromkeys(new_bases, cls))
            bases += dict.fromkeys(new_bases)
    return users


def _class_report(cls: ClassInfo, uses: dict[ClassInfo, list[Use]], users: dict[ClassInfo, ClassInfo]) -> ClassReport:
    uses_of_class = uses.get(cls, [])
    inherited = [use for base in cls.family[1:] for use in uses.get(base, ())]
    verdicts = {use.verdict for use in (*uses_of_class, *inherited)}
    causes = (cls, *(base for base in cls.family[1:] if not kind_of(base) and users.get(base) is cls))
    is_cause = any(use.verdict == CHANGE for cause in causes for use in uses.get(cause, ()))
    verdict = max({AS_IS, *verdicts}, key=VERDICTS.index)
    return ClassReport(cls, kind_of(cls), verdict, uses_of_class, inherited, is_cause)


def as_json(report: Report) -> dict[str, Any]:
    """The report as a dict for JSON: files, unread, summary, classes and uses."""
    packages = sorted({item.package for item in report.classes})
    return {
        "files": report.files,
        "unread": [{"path": str(item.path), "line": item.line, "message": item.message} for item in report.unread],
        "summary": {
            package: {
                kind: report.counts(kind, package) for kind in KINDS if any(report.counts(kind, package).values())
            }
            for package in packages
        },
        "classes": [
            {
                "name": item.cls.name,
                "kind": item.kind,
                "package": item.package,
                "path": str(item.cls.source.path),
                **_location(*item.cls.source.cell_and_line(item.cls.node.lineno)),
                "verdict": item.verdict,
                "changes": [_use_entry(use) for use in (*item.uses, *item.inherited) if use.verdict == CHANGE],
            }
            for item in report.classes
        ],
        "uses": [_use_entry(use) for use in report.uses],
    }


def _location(cell: int | None, line: int) -> dict[str, int]:
    return {"line": line} if cell is None else {"cell": cell, "line": line}


def _use_entry(use: Use) -> dict[str, Any]:
    return {
        "path": str(use.source.path),
        **_location(*use.cell_and_line),
        "class": None if use.owner is None else use.owner.name,
        "library": use.library,
        "name": use.name,
        "verdict": use.verdict,
        "what": use.sentence,
    }
