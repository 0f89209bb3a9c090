"""Python files and notebooks as syntax trees, each under the name by which the others import it."""

from __future__ import annotations

import ast
import json
import re
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

SKIPPED = ("__pycache__", "node_modules", "site-packages")
_SHELL = re.compile(r"^(\s*)(?:[%!?]|\w+\s*=\s*[%!]|\w[\w.]*\?+\s*$).*$", re.MULTILINE)
"""Lines of a notebook that are IPython's, not Python's."""


@dataclass(frozen=True)
class Source:
    """One file. ``cells``: for a notebook, the number of each code cell and the line of ``tree`` where it starts."""

    path: Path
    module: str
    is_package: bool
    tree: ast.Module
    cells: tuple[tuple[int, int], ...] = ()

    def place(self, line: int) -> tuple[int | None, int]:
        """The cell, counted from 1 over all cells (``None`` in a ``.py`` file), and the line in it."""
        if not self.cells:
            return None, line
        number, first = self.cells[max(0, bisect_right([start for _, start in self.cells], line) - 1)]
        return number, line - first + 1


@dataclass(frozen=True)
class Unread:
    """A file, or a cell of a notebook, that could not be read. ``line``: 0 when no line is to blame."""

    path: Path
    line: int
    message: str


def read(paths: Sequence[Path], exclude: Iterable[str] = ()) -> tuple[list[Source], list[Unread]]:
    """The files under ``paths`` (files or folders), without those whose path below them, or a folder in it, matches a pattern of ``exclude``."""
    sources: dict[Path, Source] = {}
    unread: list[Unread] = []
    for top in paths:
        for path in _files(top, tuple(exclude)):
            real = path.resolve()
            if real not in sources:
                name, is_package = _module_name(path, top)
                try:
                    tree, cells = _parsed(path, unread)
                except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
                    unread.append(Unread(path, getattr(error, "lineno", None) or 0, _message(error)))
                else:
                    sources[real] = Source(path, name, is_package, tree, cells)
    return list(sources.values()), unread


def _files(top: Path, exclude: Sequence[str]) -> Iterator[Path]:
    if not top.is_dir():
        yield top
        return
    for path in sorted(top.iterdir()):
        if path.name.startswith(".") or path.name in SKIPPED or any(fnmatch(path.name, each) for each in exclude):
            continue
        if path.is_dir() and not path.is_symlink():
            if not (path / "pyvenv.cfg").exists():
                yield from _files(path, exclude)
        elif path.suffix in (".py", ".ipynb") and path.is_file():
            yield path


def _module_name(path: Path, top: Path) -> tuple[str, bool]:
    """The dotted name, and whether it is a package's own file.

    Packages start at the outermost folder with an ``__init__.py``; other files are named from ``top`` on.
    """
    path, top = path.resolve(), top.resolve()
    is_package = path.name == "__init__.py"
    parts = [] if is_package else [path.stem]
    folder = path.parent
    regular = (folder / "__init__.py").exists()
    while (folder / "__init__.py").exists() or (not regular and folder != top and top in folder.parents):
        parts.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(parts)) or path.parent.name, is_package


def _parsed(path: Path, unread: list[Unread]) -> tuple[ast.Module, tuple[tuple[int, int], ...]]:
    if path.suffix == ".ipynb":
        return _notebook(path, unread)
    with tokenize.open(path) as file:  # heeds the file's own encoding
        return _tree(file.read()), ()


def _tree(text: str, flags: int = 0) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes, `is` with a literal: of no concern here
        tree = compile(text, "<source>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def _notebook(path: Path, unread: list[Unread]) -> tuple[ast.Module, tuple[tuple[int, int], ...]]:
    """All code cells as one module, since they share their names; a cell that is not Python is reported and left out."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise ValueError("not a notebook of format 4: it has no list of cells")
    lines: list[str] = []
    cells = []
    for number, cell in enumerate(content["cells"], 1):
        text = "".join(cell.get("source", ()))
        if cell.get("cell_type") != "code" or text.lstrip().startswith("%%"):
            continue
        text = _SHELL.sub(r"\1pass", text)
        try:
            _tree(text, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except (SyntaxError, ValueError) as error:
            unread.append(Unread(path, 0, f"cell {number}: {_message(error)}"))
            continue
        cells.append((number, len(lines) + 1))
        lines += text.splitlines() or [""]
    return _tree("\n".join(lines) + "\n", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), tuple(cells)


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"not valid Python: {error.msg}"
    return f"{type(error).__name__}: {error}"
