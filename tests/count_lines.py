"""Lines of code without blank lines, comments and docstrings: ``python tests/count_lines.py`` prints those of the core and of the whole package.

The core is what every run uses: the files at the top, these folders, and the strategies single, ddp and fsdp with the files of their folder that
they import.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "engine"
CORE = ("loop", "step", "prepared", "data", "metrics", "checkpoint", "transforms", "utils")
STRATEGIES = ("base", "ddp", "fsdp")
"""The single strategy is in ``base``."""
MOST_CORE, MOST = 7200, 15_000
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Lines of ``text`` that hold code; a string that stands alone is a docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - documented)


def core_strategies() -> set[Path]:
    """The files of single, ddp and fsdp: themselves, and what they import from their folder."""
    folder = PACKAGE / "strategies"
    found, open_ = {folder / "__init__.py"}, [folder / f"{name}.py" for name in STRATEGIES]
    while open_:
        path = open_.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("engine.strategies"):
                names = (
                    [str(node.module)]
                    if node.module != "engine.strategies"
                    else [f"{node.module}.{each.name}" for each in node.names]
                )
                open_ += [folder.parent.parent / f"{name.replace('.', '/')}.py" for name in names]
    return found


def counted() -> tuple[int, int]:
    """Of the core, and of the whole package."""
    lines = {path: code_lines(path.read_text()) for path in PACKAGE.rglob("*.py")}
    strategies = core_strategies()
    core = [
        path
        for path in lines
        if path.parent == PACKAGE or path.relative_to(PACKAGE).parts[0] in CORE or path in strategies
    ]
    return sum(lines[path] for path in core), sum(lines.values())


if __name__ == "__main__":
    core, whole = counted()
    print(f"core {core} (at most {MOST_CORE}), engine {whole} (at most {MOST})")
