"""Work in several threads."""

from __future__ import annotations

import pytest
from support.threads import Planted, fails

from engine.checkpoint.files import SMALL, in_parallel


def test_work_in_threads_raises_their_error() -> None:
    assert in_parallel(str, range(20), size=SMALL + 1) == [str(number) for number in range(20)]
    with pytest.raises(Planted):
        in_parallel(fails, range(20), size=SMALL + 1)
