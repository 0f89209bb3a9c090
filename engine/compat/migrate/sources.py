"""Parses Python files and notebooks, and finds the module name by which other files import each."""

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
"""The maximum size of a Python file, and of a notebook's code, in bytes. The syntax tree usually takes a hundred times the memory of the text, and
900 times for ``a;a;a;`` (0.94 GB)."""
LARGEST_NOTEBOOK = 32 << 20
"""The maximum size of a notebook, which may hold pictures, in bytes. Its parsed JSON takes at most 30 times the memory of the text (1 GB)."""
_SHELL = re.compile(r"^([^\S\n]*)(?:[%!?]|\w+[^\S\n]*=[^\S\n]*[%!]|\w[\w.]*\?+[^\S\n]*$).*$", re.MULTILINE)
"""Lines of a notebook in IPython's syntax. No match spans lines, so that the search takes linear time."""
_LINE_END = re.compile(r"\r\n|\r|\n")
"""Line ends as Python's parser counts them; ``str.splitlines`` splits at more characters."""


@dataclass(frozen=True, eq=False)  # a key of mappings: the hash of all cells for each use is quadratic
class Source:
    """One source file or notebook, parsed.

    ``module``: its dotted name, from its outermost package on. ``above``: the folders between the given path and that package; they belong
    to the name too if they are namespace packages. ``cells``: for a notebook, the number of each code cell and its first line in ``tree``.
    """

    path: Path
    module: str
    is_package: bool
    tree: ast.Module
    cells: tuple[tuple[int, int], ...] = ()
    above: tuple[str, ...] = ()

    def cell_and_line(self, line: int) -> tuple[int | None, int]:
        """Translate a line of ``tree`` to the number of the cell, counted from 1 over all cells (``None`` in a ``.py`` file), and the line in it."""
        if not self.cells:
            return None, line
        number, first = self.cells[max(0, bisect_right(self.cells, line, key=itemgetter(1)) - 1)]
        return number, line - first + 1


@dataclass(frozen=True)
class Unread:
    """A file, or a cell of a notebook, that could not be read. ``line``: where the error is; 0 if it has no line."""

    path: Path
    line: int
    message: str


def read(paths: Sequence[Path], exclude: Iterable[str] = ()) -> tuple[list[Source], list[Unread]]:
    """Parse the files under ``paths`` (files or folders); skip files and folders whose names match a pattern of ``exclude``."""
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
    """Yield ``top`` itself, or the Python files and notebooks in that folder, without skipped folders and virtual environments."""
    if not os.path.isdir(top):
        yield top
        return
    pending = [(top, True)]  # no recursion: folders may be nested a thousand deep
    while pending:
        path, is_folder = pending.pop()
        if is_folder:
            try:
                with os.scandir(path) as folder:
                    entries = {entry.name: entry.is_dir(follow_symlinks=False) for entry in folder}
            except OSError as error:
                unread.append(Unread(path, 0, _message(error)))
                continue
            if path == top or "pyvenv.cfg" not in entries:
                names = sorted((name for name in entries if not _is_skipped(name, exclude)), reverse=True)
                pending += [(path / name, entries[name]) for name in names]
        elif path.suffix in (".py", ".ipynb") and path.is_file():
            yield path


def _is_skipped(name: str, exclude: Sequence[str]) -> bool:
    return name.startswith(".") or name in SKIPPED or any(fnmatch(name, pattern) for pattern in exclude)


def _module_name(path: Path, top: Path) -> tuple[str, bool, tuple[str, ...]]:
    """The dotted module name of a file, whether it is an ``__init__.py``, and the folders from ``top`` to its outermost package.

    A package starts at the outermost folder with an ``__init__.py``; a file outside packages is named relative to ``top``.
    """
    path, top = path.resolve(), top.resolve()
    is_package = path.name == "__init__.py"
    parts = [] if is_package else [path.stem]
    folder = path.parent
    in_package = (folder / "__init__.py").exists()
    if not in_package and folder.is_relative_to(top):
        parts += reversed(folder.relative_to(top).parts)
        folder = top
    while (folder / "__init__.py").exists():
        parts.append(folder.name)
        folder = folder.parent
    above = folder.relative_to(top).parts if in_package and folder.is_relative_to(top) else ()
    return ".".join(reversed(parts)) or path.parent.name, is_package, above


def _parsed(path: Path, unread: list[Unread]) -> tuple[ast.Module, tuple[tuple[int, int], ...]]:
    """The syntax tree of a file, and the cells of a notebook as in :attr:`Source.cells`.

    Raises:
        ValueError: it is not a regular file, or too large.
    """
    if not path.is_file():  # a FIFO would wait for a writer
        raise ValueError("not a regular file")
    limit, parsed_form = (LARGEST_NOTEBOOK, "JSON") if path.suffix == ".ipynb" else (LARGEST, "syntax tree")
    with os.fdopen(open_file(path), "rb") as file:  # does not block on files such as /proc/kmsg
        content = file.read(limit + 1)
    if content is None:
        raise ValueError("not a regular file")
    if len(content) > limit:
        raise ValueError(f"larger than {limit >> 20} MiB: its {parsed_form} can take more than 1 GB of memory")
    if path.suffix == ".ipynb":
        return _notebook(path, content, unread)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)  # as the file declares it
    return _tree(io.TextIOWrapper(io.BytesIO(content), encoding).read()), ()


def _tree(text: str, flags: int = 0) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes or `is` with a literal, for example
        tree = compile(text, "<source>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def _notebook(path: Path, content: bytes, unread: list[Unread]) -> tuple[ast.Module, tuple[tuple[int, int], ...]]:
    """Parse all code cells as one module, because they share their names; report a cell that is not Python in ``unread`` and leave it out."""
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
    """The Python code of a notebook cell; ``None`` for a text cell or an IPython cell magic.

    Raises:
        ValueError: ``cell`` is not a valid cell.
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
    if isinstance(error, MemoryError):  # Python's parser raises it without a message
        return "MemoryError: an expression is nested too deeply, or memory is short"
    return f"{type(error).__name__}: {error}"
