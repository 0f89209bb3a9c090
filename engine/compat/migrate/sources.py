"""Python files and notebooks as syntax trees, each under the name by which another file imports it."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import itemgetter
from pathlib import Path

from engine.checkpoint.files import open_file

SKIPPED = ("__pycache__", "node_modules", "site-packages")
LARGEST = 1 << 20
"""Bytes of a file, and of a notebook's code. Its syntax tree takes a hundred times the memory of the text, and of ``a;a;a;`` 900 times (0.94 GB)."""
LARGEST_NOTEBOOK = 32 << 20
"""Bytes of a notebook, which may hold pictures. Its JSON takes at most 30 times the memory of the text (1 GB)."""
_SHELL = re.compile(r"^([^\S\n]*)(?:[%!?]|\w+[^\S\n]*=[^\S\n]*[%!]|\w[\w.]*\?+[^\S\n]*$).*$", re.MULTILINE)
"""Lines of a notebook that are IPython's, not Python's. Each is matched alone: the time grows with the text, not with its square."""
_LINE_END = re.compile(r"\r\n|\r|\n")
"""Python's own line ends; ``str.splitlines`` knows more."""


@dataclass(frozen=True, eq=False)  # a key of mappings: the hash of all cells for each use is quadratic
class Source:
    """One file.

    ``module``: its name from its outermost package on; ``above``: the folders between the path that was given and that package, which belong to
    the name if they are a namespace package. ``cells``: for a notebook, the number of each code cell and the line of ``tree`` where it starts.
    """

    path: Path
    module: str
    is_package: bool
    tree: ast.Module
    cells: tuple[tuple[int, int], ...] = ()
    above: tuple[str, ...] = ()

    def place(self, line: int) -> tuple[int | None, int]:
        """The cell, counted from 1 over all cells (``None`` in a ``.py`` file), and the line in it."""
        if not self.cells:
            return None, line
        number, first = self.cells[max(0, bisect_right(self.cells, line, key=itemgetter(1)) - 1)]
        return number, line - first + 1


@dataclass(frozen=True)
class Unread:
    """A file, or a cell of a notebook, that could not be read. ``line``: 0 when no line is to blame."""

    path: Path
    line: int
    message: str


def read(paths: Sequence[Path], exclude: Iterable[str] = ()) -> tuple[list[Source], list[Unread]]:
    """The files under ``paths`` (files or folders), except files whose path below them, or a folder in it, matches a pattern of ``exclude``."""
    sources: dict[Path, Source] = {}
    unread: list[Unread] = []
    for top in paths:
        for path in _files(top, tuple(exclude), unread):
            try:
                real = path.resolve()
                if real not in sources:
                    name, is_package, above = _module_name(path, top)
                    tree, cells = _parsed(path, unread)
                    sources[real] = Source(path, name, is_package, tree, cells, above)
            except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
                unread.append(Unread(path, getattr(error, "lineno", None) or 0, _message(error)))
    return list(sources.values()), unread


def _files(top: Path, exclude: Sequence[str], unread: list[Unread]) -> Iterator[Path]:
    if not os.path.isdir(top):
        yield top
        return
    waiting = [(top, True)]  # no recursion: folders may be nested a thousand deep
    while waiting:
        path, is_folder = waiting.pop()
        if is_folder:
            try:
                with os.scandir(path) as folder:
                    inner = {entry.name: entry.is_dir(follow_symlinks=False) for entry in folder}
            except OSError as error:
                unread.append(Unread(path, 0, _message(error)))
                continue
            if path == top or "pyvenv.cfg" not in inner:
                names = sorted((name for name in inner if not _is_skipped(name, exclude)), reverse=True)
                waiting += [(path / name, inner[name]) for name in names]
        elif path.suffix in (".py", ".ipynb") and path.is_file():
            yield path


def _is_skipped(name: str, exclude: Sequence[str]) -> bool:
    return name.startswith(".") or name in SKIPPED or any(fnmatch(name, pattern) for pattern in exclude)


def _module_name(path: Path, top: Path) -> tuple[str, bool, tuple[str, ...]]:
    """The dotted name, whether it is a package's own file, and the folders from ``top`` to the package.

    Packages start at the outermost folder with an ``__init__.py``; other files are named from ``top`` on.
    """
    path, top = path.resolve(), top.resolve()
    is_package = path.name == "__init__.py"
    parts = [] if is_package else [path.stem]
    folder = path.parent
    regular = (folder / "__init__.py").exists()
    if not regular and folder.is_relative_to(top):
        parts += reversed(folder.relative_to(top).parts)
        folder = top
    while (folder / "__init__.py").exists():
        parts.append(folder.name)
        folder = folder.parent
    above = folder.relative_to(top).parts if regular and folder.is_relative_to(top) else ()
    return ".".join(reversed(parts)) or path.parent.name, is_package, above


def _parsed(path: Path, unread: list[Unread]) -> tuple[ast.Module, tuple[tuple[int, int], ...]]:
    if not path.is_file():  # a FIFO would wait for a writer
        raise ValueError("not a regular file")
    limit, what = (LARGEST_NOTEBOOK, "JSON") if path.suffix == ".ipynb" else (LARGEST, "syntax tree")
    with os.fdopen(open_file(path), "rb") as file:  # never waits, as /proc/kmsg would
        content = file.read(limit + 1)
    if content is None:
        raise ValueError("not a regular file")
    if len(content) > limit:
        raise ValueError(f"larger than {limit >> 20} MiB: its {what} can take more than 1 GB of memory")
    if path.suffix == ".ipynb":
        return _notebook(path, content, unread)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)  # the file's own
    return _tree(io.TextIOWrapper(io.BytesIO(content), encoding).read()), ()


def _tree(text: str, flags: int = 0) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes, `is` with a literal: of no concern here
        tree = compile(text, "<source>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def _notebook(path: Path, content: bytes, unread: list[Unread]) -> tuple[ast.Module, tuple[tuple[int, int], ...]]:
    """All code cells as one module, since they share their names; a cell that is not Python is reported and left out."""
    notebook = json.loads(content.decode())
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ValueError("not a notebook of format 4: it has no list of cells")
    lines: list[str] = []
    cells, size = [], 0
    for number, cell in enumerate(notebook["cells"], 1):
        try:
            text = _code(cell)
            if text is None:
                continue
            size += len(text)
            if size > LARGEST:
                raise ValueError(
                    f"more than {LARGEST >> 20} MiB of code: its syntax tree can take more than 1 GB of memory"
                )
            _tree(text, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            unread.append(Unread(path, 0, f"cell {number}: {_message(error)}"))
            continue
        cells.append((number, len(lines) + 1))
        lines += _LINE_END.split(text)
    return _tree("\n".join(lines) + "\n", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), tuple(cells)


def _code(cell: object) -> str | None:
    """The Python of a cell; ``None``: it is text, or a cell magic of IPython.

    Raises:
        ValueError: it is not a cell.
    """
    if not isinstance(cell, dict):
        raise ValueError(f"it is of type {type(cell).__name__}, not a mapping")
    if cell.get("cell_type") != "code":
        return None
    source = cell.get("source", "")
    parts = source if isinstance(source, list) else [source]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("its source is not text")
    text = "".join(parts)
    return None if text.lstrip().startswith("%%") else _SHELL.sub(r"\1pass", text)


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"not valid Python: {error.msg}"
    if isinstance(error, MemoryError):  # what Python's parser raises, without a text
        return "MemoryError: an expression is nested too deeply, or memory is short"
    return f"{type(error).__name__}: {error}"
