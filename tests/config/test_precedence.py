"""Command line > code > environment > file > default, for every kind of setting, whoever has started the process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import precedence_table as table
import pytest
from support.ranks import clean_environment

from engine import Settings

RANKS = 2
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)],
    "fit launch": [sys.executable, "-m", "engine.cli.main", "launch", "--nproc", str(RANKS)],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each process of each launcher has resolved. Each launcher is started once."""
    found = {}
    for launcher, command in LAUNCHERS.items():
        folder = tmp_path_factory.mktemp(launcher.replace(" ", "_"))
        environ = clean_environment(**table.prepare(folder))
        words = [*command, table.__file__, str(folder)]
        done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        ranks = [0] if launcher == "python" else range(RANKS)
        found[launcher] = [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("label", [*table.KINDS, "fields"])
def test_the_stronger_source_wins(reports: dict[str, list[dict[str, Any]]], launcher: str, label: str) -> None:
    kind = table.FIELDS if label == "fields" else table.KINDS[label]
    for report in reports[launcher]:
        for chosen in table.combinations():
            value, origin = report["table"][f"{label}: {'+'.join(chosen)}"]
            last = ("default", *table.SOURCES).index(chosen[-1] if chosen else "default")
            assert (value, type(value)) == (kind.expected[last], type(kind.expected[last])), chosen
            assert origin == table.origin(kind, chosen, f"{label}.yaml"), chosen


def test_every_kind_of_setting_is_in_the_table() -> None:
    kinds = {field.name: field.metadata["kind"] for field in fields(Settings)}
    assert {type(kinds[row.name]) for row in table.KINDS.values()} == {
        type(kind) for kind in kinds.values() if not kind.code_only
    }


def test_the_whole_table_was_filled(reports: dict[str, list[dict[str, Any]]]) -> None:
    assert [len(reports[launcher]) for launcher in LAUNCHERS] == [1, RANKS, RANKS]
    for launcher in LAUNCHERS:
        for report in reports[launcher]:
            assert len(report["table"]) == (len(table.KINDS) + 1) * 2 ** len(table.SOURCES)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_whole_fit(reports: dict[str, list[dict[str, Any]]], launcher: str) -> None:
    """The environment as it was inherited: no launcher has added a setting, or taken one away."""
    for report in reports[launcher]:
        whole = report["fit"]
        assert whole["seed"] == {"value": 7, "origin": "code"}
        assert whole["gc_every_n_steps"] == {"value": 9, "origin": "file fit.yaml:2"}
        assert whole["num_nodes"] == {"value": 1, "origin": "default"}
        for kind in table.KINDS.values():
            assert whole[kind.name] == {"value": kind.expected[2], "origin": f"environment FIT_{kind.name.upper()}"}
