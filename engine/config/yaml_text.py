"""Reads and writes YAML. Untrusted text is read as plain values only, with the line of each key; nothing in the text is ever called."""

from __future__ import annotations

import copy
import functools
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1_000_000
"""The maximum size of a file of settings."""
MAX_NODES = 20_000
"""The maximum number of values in a document, with aliases expanded."""

Node = Any  # a yaml.Node, whose stub leaves out its fields, or None for an empty document
Entry = tuple[str, Node, str]

_CORE = "tag:yaml.org,2002:"
PLAIN_FORMS = tuple(
    (_CORE + tag, re.compile(f"(?:{pattern})$", re.IGNORECASE))
    for tag, pattern in (
        ("merge", "<<"),
        ("null", r"~|null|none"),
        ("bool", r"true|false|yes|no|on|off"),
        ("int", r"[-+]?[0-9][0-9_]*"),
        ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?\.inf|\.nan"),
    )
)
"""Tags, and patterns of the unquoted words that have these tags instead of being text."""
_ALLOWED_TAGS = frozenset(_CORE + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge"))


def read_file(path: Path) -> str:
    """The text of a file of settings; the null device counts as an empty file.

    Raises:
        ValueError: the file is not a regular file, is larger than :data:`MAX_BYTES`, or is not UTF-8.
        OSError: the file cannot be read.
    """
    if str(path) == os.devnull:
        return ""
    if path.is_dir():
        raise ValueError(f"file {path}: is a directory; name a YAML file in it")
    if path.exists() and not path.is_file():
        raise ValueError(f"file {path}: is not a regular file, but a device or a pipe")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"file {path}: has more than {MAX_BYTES:,} bytes, too many for settings; is it the right file?"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"file {path}:{line}: is not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8"
        ) from None


def compose(text: str, origin: str, *, lines: bool = False) -> Node:
    """Parse the document in ``text`` into nodes, which contain plain values only.

    Args:
        origin: where the text comes from, for errors.
        lines: whether errors state the line, as ``origin:line``.

    Raises:
        ValueError: the text is not valid YAML, or has a tag for objects, a duplicate key, or aliases that are circular or expand to too much.
    """
    import yaml

    try:
        node = yaml.compose(text, Loader=_loader())
    except RecursionError:
        raise ValueError(f"{origin}: is nested too deeply for settings") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{origin}:{mark.line + 1}" if lines and mark is not None else origin
        raise ValueError(f"{place}: is not valid YAML: {one_line(error)}") from None
    if node is not None:
        _check(node, origin, lines)
    return node


def items_with_lines(node: Node, origin: str, *, lines: bool = False) -> Iterator[Entry]:
    """Yield the key, the value and the line of each entry of a mapping: first its own entries, then those it merges, unless the mapping has the key
    already."""
    own_entries = (
        (str(key.value), value, _origin_of(origin, key, lines)) for key, value in node.value if not _is_merge(key)
    )
    seen = set()
    for name, value, line_origin in (
        *own_entries,
        *(entry for base in _merged_mappings(node) for entry in items_with_lines(base, origin, lines=lines)),
    ):
        if name not in seen:
            seen.add(name)
            yield name, value, line_origin


def construct(node: Node) -> Any:
    """The plain value of a node.

    Raises:
        ValueError: a value does not fit its tag, as in ``!!int abc``.
    """
    loader = _loader()("")
    try:
        return loader.construct_document(_without_merges(copy.deepcopy(node)))
    except Exception as error:
        raise ValueError(f"cannot be read: {one_line(error)}") from None
    finally:
        loader.dispose()


def origins_of_keys(node: Node, origin: str, *, lines: bool = False) -> dict[str, str]:
    """The line of each key in a mapping and in the mappings inside it, by the key's dotted path."""
    origins: dict[str, str] = {}
    if node is not None and node.id == "mapping":
        for name, value, line_origin in items_with_lines(node, origin, lines=lines):
            origins[name] = line_origin
            origins.update(
                {
                    f"{name}.{inner_key}": inner_origin
                    for inner_key, inner_origin in origins_of_keys(value, origin, lines=lines).items()
                }
            )
    return origins


def is_text(node: Node) -> bool:
    """Check whether a node is a scalar other than null."""
    return bool(node.id == "scalar" and node.tag != _CORE + "null")


def one_line(error: Exception) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())


def _check(root: Node, origin: str, lines: bool) -> None:
    """Raise an error for a tag for objects, a circular alias, a duplicate key, or too many values, anywhere in a document."""
    sizes: dict[int, int] = {}

    def size(node: Node, ancestors: tuple[int, ...]) -> int:
        """The number of values in a node, with aliases expanded, once the node is checked."""
        if id(node) in ancestors:
            raise ValueError(f"{_origin_of(origin, node, lines)}: an alias is inside the value that it refers to")
        if node.tag not in _ALLOWED_TAGS:
            tag = str(node.tag).replace(_CORE, "!!")
            raise ValueError(
                f"{_origin_of(origin, node, lines)}: the tag {tag!r} is refused: settings are plain values"
            )
        if id(node) not in sizes:
            inner: list[Node] = []
            if node.id == "mapping":
                _check_keys(node, origin, lines)
                inner = [part for pair in node.value for part in pair]
            elif node.id == "sequence":
                inner = node.value
            sizes[id(node)] = 1 + sum(size(part, (*ancestors, id(node))) for part in inner)
        if sizes[id(node)] > MAX_NODES:
            raise ValueError(
                f"{_origin_of(origin, node, lines)}: has more than {MAX_NODES:,} values with aliases expanded, too many for settings"
            )
        return sizes[id(node)]

    try:
        size(root, ())
    except RecursionError:
        raise ValueError(f"{origin}: is nested too deeply for settings") from None


def _check_keys(node: Node, origin: str, lines: bool) -> None:
    """Raise an error for a key that is not a scalar or is given twice, and for a merge of something other than mappings."""
    seen: dict[str, str] = {}
    for key, value in node.value:
        place = _origin_of(origin, key, lines)
        if key.id != "scalar":
            raise ValueError(f"{place}: a {key.id} as a key; a key is a name or a number")
        if key.value in seen:
            raise ValueError(f"{place}: {key.value!r} was given already in {seen[key.value]}; keep one of them")
        seen[key.value] = place
        if _is_merge(key) and any(
            base.id != "mapping" for base in (value.value if value.id == "sequence" else [value])
        ):
            raise ValueError(f"{place}: '<<' merges mappings; give an alias of one")


def _merged_mappings(node: Node) -> list[Node]:
    """The mappings that a mapping merges with ``<<``."""
    merged = [value for key, value in node.value if _is_merge(key)]
    return [base for value in merged for base in (value.value if value.id == "sequence" else [value])]


def _without_merges(node: Node) -> Node:
    """Return the node with merged entries written out, changed in place: versions of PyYAML differ in which entry wins in a merge within a merge."""
    if node.id == "mapping":
        node.value = list(_entries_by_name(node).values())
        for _, value in node.value:
            _without_merges(value)
    elif node.id == "sequence":
        for value in node.value:
            _without_merges(value)
    return node


def _entries_by_name(node: Node) -> dict[str, tuple[Node, Node]]:
    """The key and value nodes of each entry by name, merged entries included; the mapping's own entries take precedence."""
    pairs: dict[str, tuple[Node, Node]] = {}
    for base in reversed(_merged_mappings(node)):
        pairs |= _entries_by_name(base)
    return pairs | {str(key.value): (key, value) for key, value in node.value if not _is_merge(key)}


def _is_merge(key: Node) -> bool:
    return bool(key.tag == _CORE + "merge")


def _origin_of(origin: str, node: Node, lines: bool) -> str:
    """The origin of a node, with its line if ``lines``."""
    return f"{origin}:{node.start_mark.line + 1}" if lines else origin


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    """PyYAML's safe loader with the numbers of YAML 1.2: 1e-3 is a number (text in 1.1), and 10:30 is text (630 in 1.1)."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[Any, Any] = {}

    for tag, pattern in PLAIN_FORMS:
        Loader.add_implicit_resolver(tag, pattern, None)
    Loader.add_constructor(_CORE + "int", lambda loader, node: int(node.value))
    return Loader


def flow(value: Any) -> str:
    """A plain value as one line of YAML."""
    import yaml

    text = yaml.dump(
        value, Dumper=_dumper(), default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: after a crash there is the old file or the whole new one. A new file gets the usual permissions.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _represent_text(dumper: Any, text: str) -> Any:
    # Quotes keep the text on one line, where other styles would fold it, and make an empty text a value.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, '"' if "\n" in text or not text else None)


@functools.cache
def _dumper() -> type[yaml.SafeDumper]:
    """PyYAML's safe dumper, changed to quote text that our reader would not read as text."""
    import yaml

    class Dumper(yaml.SafeDumper):
        yaml_implicit_resolvers: dict[Any, Any] = {}

        def ignore_aliases(self, data: Any) -> bool:
            return True

    for tag, pattern in PLAIN_FORMS:
        Dumper.add_implicit_resolver(tag, pattern, None)
    Dumper.add_representer(str, _represent_text)
    return Dumper
