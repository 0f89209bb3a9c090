"""Facts about a user's loader that it, or its dataset, declares."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DataLoader, IterableDataset

from engine.data.user_loaders import presharded


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Declared(Numbers):
    presharded = True


class Split(Numbers):
    _distributed = (0, 2)  # as split_dataset_by_node of Hugging Face's datasets leaves it


def test_data_that_is_divided_already() -> None:
    assert presharded(DataLoader(Split()))
    assert presharded(DataLoader(Declared()))
    assert presharded(Declared())
    assert not presharded(DataLoader(Numbers()))
    assert not presharded(range(3))
