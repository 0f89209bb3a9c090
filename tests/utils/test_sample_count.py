"""How many samples a batch shows."""

from __future__ import annotations

import pytest
import torch

from engine.utils.sample_count import counted


class Rows:
    """A batch of a class of the user's."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


@pytest.mark.parametrize("features", [2, 3])
def test_a_batch_without_rows_is_empty_however_many_columns_it_has(features: int) -> None:
    for batch in (torch.zeros(0, features), [torch.zeros(0, features), torch.zeros(0)], Rows(torch.zeros(0, features))):
        assert counted(batch, 3) == (0, "")


def test_attributes_of_an_object_are_looked_at() -> None:
    graph = Rows(torch.zeros(57, 3))
    assert counted(graph, 57) == (57, "")
    size, why = counted(graph)
    assert (size, why) == (57, "only attributes of an object show it")
    graph.edges = torch.zeros(2, 80)  # type: ignore[attr-defined]
    size, why = counted(graph, 12)
    assert size == 12
    assert "may have been left out" in why
    graph.labels = torch.zeros(12)  # type: ignore[attr-defined]
    assert counted(graph, 12) == (12, "")
