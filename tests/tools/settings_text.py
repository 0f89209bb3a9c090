"""The arguments of ``Fit.__init__`` and their documentation, from the fields of :class:`engine.Settings`.

    python tests/tools/settings_text.py            # exit status 1 if engine/fit.py differs
    python tests/tools/settings_text.py --write    # update it, and what fit migrate knows of Fit's arguments

``tests/config/test_settings_text.py`` fails when the file is out of date.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

from engine import Settings
from engine.config.settings_file import field_texts

ROOT = Path(__file__).resolve().parents[2]
FIT = ROOT / "engine" / "fit.py"
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


def updated(source: str) -> str:
    """The text of ``fit.py`` with the arguments and the documentation of the settings as they are now."""
    source = re.sub(r"(?<=        \*,\n)(?:        \w+: .*= UNSET,\n)+", lambda _: signature(), source, count=1)
    return re.sub(r"(?<=    Args:\n)(?:        .*\n)+(?=\n    Raises:)", lambda _: arguments(), source, count=1)


def main(write: bool) -> int:
    """Compare, or ``write``.

    Returns:
        1 if the file is out of date.
    """
    before = FIT.read_text()
    after = updated(before)
    if write:
        FIT.write_text(after)
        subprocess.run([sys.executable, STAND_INS], check=True)
    return int(after != before and not write)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
