"""Slices of data for each process."""

from __future__ import annotations

from typing import Any

import pytest

from engine.distributed.rank_work import part


def test_a_dataset_stays_a_dataset() -> None:
    datasets: Any = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"k": number} for number in range(5)])
    assert [part(data, rank, 2, False)["k"][:] for rank in range(2)] == [[0, 1, 2], [3, 4]]
    assert [part(data, rank, 2, True)["k"][:] for rank in range(2)] == [[0, 1, 2], [3, 4, 4]]
