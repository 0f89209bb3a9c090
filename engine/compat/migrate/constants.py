"""Finds the values of names that a source assigns once: constants, defaults of arguments, and defaults of a command line's options."""

from __future__ import annotations

import ast
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping

from engine.compat.migrate.imports import ClassInfo, statements

_LONGEST_CHAIN = 10
"""The maximum number of names to follow from one name to its value: more than anybody writes, so that circular assignments end."""
_OPTIONS = ("args", "opt", "options", "hparams")
"""Names that a function's argument usually has if it holds the parsed command line."""


class Constants:
    """The names of one source with a single value, by scope. A name that is assigned twice, or changed in place, has none."""

    def __init__(self, tree: ast.Module) -> None:
        self._scopes: ChainMap[str, ast.expr | None] = ChainMap(_assigned_once(tree, tree.body))
        self._options = dict(_option_defaults(tree))
        self._tested: list[str] = []

    def enter(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Add the scope of a function: its arguments with their defaults, and what it assigns once."""
        arguments = function.args
        values = _assigned_once(function, function.body)
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        stored = {*values}
        values |= {argument.arg: None for argument in every if argument is not None}
        values |= {name: default for name, default in argument_defaults(function) if name not in stored}
        self._scopes = self._scopes.new_child(values)

    def leave(self) -> None:
        """Leave the scope of a function."""
        self._scopes = self._scopes.parents

    def enter_branch(self, test: ast.expr) -> int:
        """Ignore the values of the names in ``test`` from now on, since a branch depends on them; return the number of names."""
        names = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
        self._tested += names
        return len(names)

    def leave_branch(self, count: int) -> None:
        """Forget the last ``count`` names of :meth:`enter_branch`."""
        del self._tested[len(self._tested) - count :]

    def expression(self, node: ast.expr, cls: ClassInfo | None = None) -> ast.expr:
        """The expression that ``node`` has its value from: ``node`` itself, unless it is a name or an attribute that is assigned once.

        ``cls``: the class of the object whose attribute ``node`` is.
        """
        for _ in range(_LONGEST_CHAIN):
            value: ast.expr | None = None
            if isinstance(node, ast.Name) and node.id not in self._tested:
                value = self._scopes.get(node.id)
            elif isinstance(node, ast.Attribute):
                value = self._option(node) if cls is None else _attribute(cls, node.attr)
            if value is None:
                return node
            node = value
        return node

    def with_values(self, call: ast.Call, owners: Mapping[int, ClassInfo]) -> ast.Call:
        """The call with the literal values of its arguments in their place, and with the entries of ``**options``, where these are known.

        ``owners``: the ``id`` of an expression -> the class of the object that it is an attribute of.
        """
        keywords: list[ast.keyword] = []
        for keyword in call.keywords:
            value = self.expression(keyword.value, owners.get(id(keyword.value)))
            if keyword.arg is None and (entries := _entries(value)) is not None:
                keywords += [ast.keyword(name, self._literal(entry, owners)) for name, entry in entries]
            else:
                keywords.append(ast.keyword(keyword.arg, self._literal(keyword.value, owners)))
        arguments = [self._literal(argument, owners) for argument in call.args]
        return ast.copy_location(ast.Call(call.func, arguments, keywords), call)

    def _literal(self, node: ast.expr, owners: Mapping[int, ClassInfo]) -> ast.expr:
        """The literal that ``node`` has its value from, or ``node``. ``None`` does not count: it usually stands for a value to come."""
        value = self.expression(node, owners.get(id(node)))
        return value if _is_literal(value) else node

    def _option(self, node: ast.Attribute) -> ast.expr | None:
        """The default of the command line's option that ``args.name`` is, if ``node`` is one."""
        if not isinstance(node.value, ast.Name) or node.attr not in self._options:
            return None
        name = node.value.id
        parsed = self._scopes.get(name)
        is_parsed = isinstance(parsed, ast.Call) and getattr(parsed.func, "attr", "") == "parse_args"
        return self._options[node.attr] if is_parsed or (parsed is None and name in _OPTIONS) else None


def argument_defaults(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of a function that have a default, with the default."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = arguments.defaults
    pairs = zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    for argument, default in (*pairs, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)):
        if default is not None:
            yield argument.arg, default


def _assigned_once(scope: ast.AST, body: Iterable[ast.stmt]) -> dict[str, ast.expr | None]:
    """The names that ``body`` assigns -> their value; ``None`` for a name that is assigned anywhere else in ``scope``, or changed in place."""
    stores: Counter[str] = Counter()
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            stores[node.id] += 1
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            stores.update(dict.fromkeys(node.names, 2))
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.value, ast.Name):
            removes = isinstance(node.ctx, ast.Del) or getattr(node, "attr", "") == "pop"
            stores[node.value.id] += 2 * removes
    values: dict[str, ast.expr | None] = dict.fromkeys(stores)
    for statement in statements(body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(target, ast.Name) and value is not None and stores[target.id] == 1:
            values[target.id] = value
    return values


def _option_defaults(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the options that ``add_argument("--name", default=...)`` declares, with their literal defaults."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            texts = [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            long = next((text for text in texts if text.startswith("--")), texts[0] if texts else "")
            name = getattr(options.get("dest"), "value", None) or long.lstrip("-").replace("-", "_")
            if (default := options.get("default")) is not None:
                yield name, default


def _attribute(cls: ClassInfo, name: str) -> ast.expr | None:
    """The value of an attribute of instances of ``cls`` that the class sets once, in its body or in a method."""
    for ancestor in cls.family:
        method, value = ancestor.assigned_once.get(name, (None, None))
        if value is not None:
            if isinstance(value, ast.Name) and method is not None:
                return dict(argument_defaults(method)).get(value.id)
            return value
        if name in ancestor.set_on_self:
            return None
    return None


def _entries(value: ast.expr) -> list[tuple[str, ast.expr]] | None:
    """The entries of ``{"name": value}`` or ``dict(name=value)``; ``None`` for another expression."""
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        return [(str(key.value), entry) for key, entry in pairs if isinstance(key, ast.Constant)]
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict" and not value.args:
        return [(keyword.arg, keyword.value) for keyword in value.keywords if keyword.arg is not None]
    return None


def _is_literal(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is not None
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True
