"""Compiles the library so that each part of a function notes that it was executed: see ``sitecustomize.py``."""

from __future__ import annotations

import ast
import marshal
from pathlib import Path

PACKAGES = ("engine", "callbacks")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.Match)


class Marks:
    """Gives numbers to the parts of functions, one module after the other."""

    def __init__(self) -> None:
        self.count = 0

    def compile(self, source: str, path: str) -> tuple[object, int]:
        """The module's code with marks, and how many it has."""
        before, tree = self.count, ast.parse(source)
        self._inside(tree, in_function=False)
        return compile(tree, path, "exec", dont_inherit=True), self.count - before

    def _inside(self, node: ast.AST, in_function: bool) -> None:
        """Mark the statements below a node."""
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, field, None), list):
                setattr(node, field, self._marked(statements, in_function))
        for branch in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self._inside(branch, in_function)

    def _marked(self, statements: list[ast.stmt], in_function: bool) -> list[ast.stmt]:
        """A mark stands in front of the first statement, and after each that may have left the function or the loop."""
        result: list[ast.stmt] = []
        is_start = in_function
        for statement in statements:
            if is_start and not _is_text(statement):
                result.append(self._mark(statement))
                is_start = False
            result.append(statement)
            if isinstance(statement, FUNCTIONS):
                self._inside(statement, in_function=True)
            elif isinstance(statement, ast.ClassDef):
                self._inside(statement, in_function=False)
            elif isinstance(statement, COMPOUND):
                self._inside(statement, in_function)
                is_start = in_function
        return result

    def _mark(self, statement: ast.stmt) -> ast.stmt:
        (mark,) = ast.parse(f"__executed__[{self.count}] = 1").body
        self.count += 1
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
        return mark


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def write(root: Path, folder: Path) -> dict[str, range]:
    """Compile all modules of a checkout into a folder.

    Returns:
        The numbers of each module's marks, by its path.
    """
    marks, numbers = Marks(), {}
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        place = path.relative_to(root)
        code, count = marks.compile(path.read_text(), str(path))
        parts = place.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        (folder / name).write_bytes(marshal.dumps(code))
        numbers[place.as_posix()] = range(marks.count - count, marks.count)
    (folder / ".empty").write_bytes(bytes(marks.count))
    return numbers
