from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.utils import scratch

KILLED = (
    "import os, signal; from engine.utils import scratch; "
    "print(scratch.make_directory('fit-x-'), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
)


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    ran = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False, timeout=300)
    left = Path(ran.stdout.strip())
    assert left.parent == tmp_path
    assert left.is_dir(), ran.stderr
    foreign = tmp_path / "fit-x-notes"  # nobody's that has our form
    foreign.mkdir()
    first = scratch.make_directory("fit-x-")
    assert not left.exists()
    second = scratch.make_directory("fit-x-")
    assert {*tmp_path.iterdir()} == {foreign, first, second}
    scratch.remove(first)
    scratch.remove(first)
    scratch.remove(second)
    assert {*tmp_path.iterdir()} == {foreign}
