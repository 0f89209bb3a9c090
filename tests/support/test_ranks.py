"""How ranks of tests end: after their exit handlers, and without Python's own shutdown."""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path

import pytest

from support.ranks import ranks_of, ranks_of_file


def end_late(mark: str) -> str:
    """Leave an exit handler, and a thread that Python's shutdown would wait for."""
    atexit.register(Path(mark).touch)
    threading.Thread(target=threading.Event().wait).start()
    return "reported"


def rank_ends_late() -> str:
    return end_late(f"{os.environ['TEST_PLACE']}/{os.environ['RANK']}")


@pytest.mark.parametrize("door", ["function", "file"])
def test_a_rank_ends_after_its_exit_handlers_and_waits_for_no_thread(door: str, tmp_path: Path) -> None:
    if door == "function":
        assert ranks_of(end_late, 1, tmp_path / "0", timeout=100) == ["reported"]
    else:
        values = ranks_of_file(__file__, 1, TEST_PLACE=str(tmp_path), timeout=100)
        assert values == {"ends_late": ["reported"]}
    assert (tmp_path / "0").exists()
