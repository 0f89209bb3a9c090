"""Who writes what: each part once, the work shared."""

from __future__ import annotations

import torch

from engine.checkpoint import write_shares
from engine.checkpoint.write_shares import Part, deal, divide, parts_of, rows


def test_what_all_hold_is_shared_out() -> None:
    every = [[("a", (0,), 100, False), ("b", (0,), 60, False), ("c", (0,), 50, False)]] * 2
    # The largest first, each to whom has least: a | b, c.
    assert deal(every, 0) == {"a"}
    assert deal(every, 1) == {"b", "c"}


def test_parts_are_written_by_a_rank_that_holds_them() -> None:
    every = [
        [("a", (0, 0), 10, False)],
        [("a", (5, 0), 10, False)],
        [("a", (5, 0), 10, False), ("own", (0,), 1, False)],
    ]
    assert [deal(every, rank) for rank in range(3)] == [{"a"}, {"a"}, {"own"}]


def test_buffers_are_written_by_the_first_that_has_them() -> None:
    """Ranks may hold other statistics in them; those of one rank belong together."""
    every = [
        [("a", (0,), 100, False)],
        [("mean", (0,), 8, True), ("var", (0,), 8, True)],
        [("mean", (0,), 8, True), ("var", (0,), 8, True)],
    ]
    assert [deal(every, rank) for rank in range(3)] == [{"a"}, {"mean", "var"}, set()]


def test_whole_tensors_begin_at_nought_and_share_memory() -> None:
    tensors = {"a": torch.ones(2, 3), "scalar": torch.tensor(1.0), "empty": torch.ones(0, 2)}
    parts = parts_of(tensors)
    assert {name: part.offsets for name, part in parts.items()} == {"a": (0, 0), "scalar": (), "empty": (0, 0)}
    assert parts["a"].tensor.data_ptr() == tensors["a"].data_ptr()
    assert rows(parts) == [("a", (0, 0), 24), ("scalar", (), 4), ("empty", (0, 0), 0)]


def test_large_ranks_write_several_files(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(write_shares, "FILE", 16)
    parts = {name: Part(torch.zeros(count), (0,)) for name, count in (("a", 4), ("b", 3), ("c", 2), ("d", 1))}
    assert [sorted(file) for file in divide(parts)] == [["a", "d"], ["b", "c"]]  # 40 bytes in two files of 20
    assert divide({}) == []
    monkeypatch.setattr(write_shares, "FILE", 1)
    assert len(divide(parts)) == 4  # no empty files
