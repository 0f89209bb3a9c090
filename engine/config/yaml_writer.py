"""Writing YAML that :mod:`engine.config.yaml_reader` reads back as the same values."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.yaml_reader import PLAIN_FORMS

if TYPE_CHECKING:
    import yaml


def flow(value: Any) -> str:
    """A plain value as one line of YAML."""
    import yaml

    text = yaml.dump(
        value, Dumper=_dumper(), default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def as_yaml(config: Mapping[str, Mapping[str, Any]]) -> str:
    """The result of :func:`engine.config.masked.readable` as a file of settings: ``name: value  # origin``.

    Callbacks created in code are in a comment.
    """
    lines = []
    for name, entry in config.items():
        line = f"{name}: {flow(entry['value'])}  # {' '.join(entry['origin'].split())}"
        made = name == "callbacks" and not all(isinstance(each, Mapping) for each in entry["value"])
        lines.append(f"# {line}" if made else line)
    return "\n".join([*lines, ""])


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: a crash leaves the old one or the whole new one; a new file gets the usual permissions.

    Raises:
        OSError: it cannot be written.
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


def _text(dumper: Any, text: str) -> Any:
    # On one line, and never empty: other styles fold, and an empty text is not a value.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, '"' if "\n" in text or not text else None)


@functools.cache
def _dumper() -> type[yaml.SafeDumper]:
    """PyYAML's safe dumper, which quotes text that our reader would not read as text."""
    import yaml

    class Dumper(yaml.SafeDumper):
        yaml_implicit_resolvers: dict[Any, Any] = {}

        def ignore_aliases(self, data: Any) -> bool:
            return True

    for tag, pattern in PLAIN_FORMS:
        Dumper.add_implicit_resolver(tag, pattern, None)
    Dumper.add_representer(str, _text)
    return Dumper
