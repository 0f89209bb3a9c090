"""The arguments of ``Fit.__init__``, their documentation and the table in ``engine/config/README.md``, from the fields of :class:`engine.Settings`.

    python tests/tools/settings_text.py            # exit status 1 if a file differs
    python tests/tools/settings_text.py --write    # update them, and what fit migrate knows of Fit's arguments

``tests/config/test_settings_text.py`` fails when a file is out of date.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

from engine import Duration, Settings
from engine.config.settings_file import field_texts

ROOT = Path(__file__).resolve().parents[2]
FIT = ROOT / "engine" / "fit.py"
CHAPTER = ROOT / "engine" / "config" / "README.md"
STAND_INS = ROOT / "tests" / "compat" / "migrate" / "write_stand_ins.py"
WIDTH = 140


def signature() -> str:
    """A line for each setting: ``max_epochs: int | None = UNSET,``."""
    return "".join(f"        {field.name}: {field.metadata['kind'].accepts} = UNSET,\n" for field in fields(Settings))


def arguments() -> str:
    """A paragraph for each setting, for the docstring of ``Fit``."""
    lines = (
        textwrap.fill(
            f"{name}: {text}",
            WIDTH,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in field_texts().items()
    )
    return "".join(f"{line}\n" for line in lines)


def rows() -> str:
    """A row of the chapter's table for each setting."""
    lines = []
    for field in fields(Settings):
        text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", field_texts()[field.name].replace("``", "`"))
        default = str(field.default) if isinstance(field.default, (Duration, Path)) else field.default
        lines.append(f"| `{field.name}` | `{default!r}` | {text} |\n")
    return "".join(lines)


def updated() -> dict[Path, str]:
    """The text of each file with the settings as they are now."""
    code = FIT.read_text()
    code = re.sub(r"(?<=        \*,\n)(?:        \w+: .*= UNSET,\n)+", lambda _: signature(), code, count=1)
    code = re.sub(r"(?<=    Args:\n)(?:        .*\n)+(?=\n    Raises:)", lambda _: arguments(), code, count=1)
    table = r"(?<=\| setting \| default \| \|\n\|---\|---\|---\|\n)(?:\| .*\n)*"
    return {FIT: code, CHAPTER: re.sub(table, lambda _: rows(), CHAPTER.read_text(), count=1)}


def main(write: bool) -> int:
    """Compare, or ``write``.

    Returns:
        1 if a file is out of date.
    """
    texts = updated()
    if write:
        for path, text in texts.items():
            path.write_text(text)
        subprocess.run([sys.executable, STAND_INS], check=True)
    return int(any(path.read_text() != text for path, text in texts.items()))


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
