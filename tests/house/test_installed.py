"""The installation that tests run in is one of this tree."""

from __future__ import annotations

from configparser import ConfigParser
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_entry_points_are_those_of_setup_cfg() -> None:
    """The command ``fit`` is found by the installed metadata."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    declared = {
        (group, *(part.strip() for part in line.split("=")))
        for group, lines in parser["options.entry_points"].items()
        for line in lines.strip().splitlines()
    }
    installed = {(point.group, point.name, point.value) for point in distribution("fit-trainer").entry_points}
    assert installed == declared, "run pip install -e . again"
