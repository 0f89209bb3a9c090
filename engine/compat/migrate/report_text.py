"""The report of ``fit migrate`` as text: file by file, class by class, and a summary of each package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.compat.migrate.counterparts import AS_IS, CHANGE, INTEROP
from engine.compat.migrate.expressions import Use
from engine.compat.migrate.imports import TRANSFORMERS, ClassInfo
from engine.compat.migrate.report import INHERITED, KINDS, ClassReport, Report
from engine.compat.migrate.sources import Source

_PHRASES = {AS_IS: "works as is", INTEROP: "works through engine.interop", CHANGE: "needs a change"}

_LEGEND = {
    AS_IS: "trains under Fit and Engine without a change",
    INTEROP: "works once it is imported from there: `import engine.interop.lightning as L`, `from engine.interop.accelerate import Accelerator`",
    CHANGE: "the sentence beside the line says what to use instead",
}


def lines(report: Report, *, changes_only: bool = False) -> Iterator[str]:
    """Yield the lines of the report. ``changes_only``: leave out the uses that work."""
    by_file: dict[Source, list[Use]] = {}
    for use in report.uses:
        if use.verdict == CHANGE or not changes_only:
            by_file.setdefault(use.source, []).append(use)
    classes = {item.cls: item for item in report.classes}
    for source, uses in by_file.items():
        yield f"{source.path}"
        by_owner: dict[ClassInfo | None, list[Use]] = {}
        for use in uses:
            by_owner.setdefault(use.owner, []).append(use)
        for owner, uses_of_owner in by_owner.items():
            if owner is None:
                yield "  outside classes"
            elif owner in classes:
                yield f"  class {owner.name} ({_bases(classes[owner])}): {_PHRASES[classes[owner].verdict]}{_inherited_from(classes[owner])}"
            else:
                yield f"  class {owner.name}"
            yield from _use_lines(uses_of_owner)
        yield ""
    for item in report.unread:
        yield f"not read: {item.path}{f':{item.line}' if item.line else ''}: {item.message}"
    yield from _summary(report)
    yield ""
    verdicts = {use.verdict for use in report.uses}
    if not verdicts and not report.imported:
        yield "No use of Lightning, Accelerate or transformers.Trainer was found: there is nothing to change."
    elif not verdicts:
        yield "No use of Lightning, Accelerate or transformers.Trainer was found, but the sources import"
        yield from (_import_line(name, source, node.lineno) for name, (source, node) in report.imported.items())
    yield from (f"'{verdict}': {meaning}" for verdict, meaning in _LEGEND.items() if verdict in verdicts)


def _import_line(name: str, source: Source, line: int) -> str:
    """Say where a package is imported, and what becomes of the import."""
    cell, line = source.cell_and_line(line)
    place = f"{source.path}:{line}" if cell is None else f"{source.path}, cell {cell}:{line}"
    door = "engine.interop.accelerate" if name == "accelerate" else "engine.interop.lightning"
    is_kept = name == TRANSFORMERS
    advice = "its models, tokenizers and data work as they are" if is_kept else f"{door} takes its place"
    return f"  {name} ({place}): {advice}"


def _bases(report: ClassReport) -> str:
    return ", ".join(base.name for base in report.cls.library_bases)


def _inherited_from(report: ClassReport) -> str:
    """`` (inherited from Base)`` if a class has its verdict from its base classes; else an empty string."""
    if report.verdict in {use.verdict for use in report.uses}:
        return ""
    owners = dict.fromkeys(use.owner.name for use in report.inherited if use.verdict == report.verdict and use.owner)
    return f" (inherited from {', '.join(owners)})" if owners else ""


def _use_lines(uses: Sequence[Use]) -> Iterator[str]:
    """The lines for the uses of one class: one line for all names that work, then a line for each use that needs a change."""
    for verdict in (AS_IS, INTEROP):
        names: dict[str, list[str]] = {}
        for use in uses:
            if use.verdict == verdict:
                names.setdefault(use.name, []).append(_cell_and_line(use))
        if names:
            yield f"    {verdict + ':':<9}{'; '.join(f'{name} {_joined(places)}' for name, places in names.items())}"
    for use in uses:
        if use.verdict == CHANGE:
            yield f"    {CHANGE + ':':<9}line {_cell_and_line(use)}: {use.name}: {use.sentence}"


def _cell_and_line(use: Use) -> str:
    cell, line = use.cell_and_line
    return f"{line}" if cell is None else f"{cell}:{line}"


def _joined(places: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(places))


def _summary(report: Report) -> Iterator[str]:
    """Yield a table of the numbers of classes: a row for each kind in each package, and a last row for all uses.

    The last column has the classes that only inherit from one that needs a change; the column is left out if there are none.
    """
    has_heirs = any(report.counts(kind)[INHERITED] for kind in KINDS)
    heading = f"{INHERITED:>11}" if has_heirs else ""
    yield f"{'package':<24}{'classes':<24}{'count':>6}{'as is':>8}{'interop':>9}{'change':>8}{heading}"
    for package in sorted({class_report.package for class_report in report.classes}):
        for kind, name in KINDS.items():
            counts = report.counts(kind, package)
            if any(counts.values()):
                yield (
                    f"{package:<24}{name:<24}{sum(counts.values()):>6}{counts[AS_IS]:>8}{counts[INTEROP]:>9}{counts[CHANGE]:>8}"
                    + (f"{counts[INHERITED]:>11}" if has_heirs else "")
                )
    totals = [sum(use.verdict == verdict for use in report.uses) for verdict in (AS_IS, INTEROP, CHANGE)]
    yield f"{'all files':<24}{'uses':<24}{sum(totals):>6}{totals[0]:>8}{totals[1]:>9}{totals[2]:>8}"
