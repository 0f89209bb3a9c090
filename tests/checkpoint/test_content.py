"""What is written, and by whom: each part once, the work shared."""

from __future__ import annotations

import torch

from engine.checkpoint import content
from engine.checkpoint.content import Part, assign, into_files, parts_of, rows_of, split


def test_what_all_hold_is_shared_out() -> None:
    every = [[("a", (0,), 100, False), ("b", (0,), 60, False), ("c", (0,), 50, False)]] * 2
    # The largest first, each to whom has least: a | b, c.
    assert assign(every, 0) == {"a"}
    assert assign(every, 1) == {"b", "c"}


def test_parts_are_written_by_a_rank_that_holds_them() -> None:
    every = [
        [("a", (0, 0), 10, False)],
        [("a", (5, 0), 10, False)],
        [("a", (5, 0), 10, False), ("own", (0,), 1, False)],
    ]
    assert [assign(every, rank) for rank in range(3)] == [{"a"}, {"a"}, {"own"}]


def test_buffers_are_written_by_the_first_that_has_them() -> None:
    """Ranks may hold other statistics in them; those of one rank belong together."""
    every = [
        [("a", (0,), 100, False)],
        [("mean", (0,), 8, True), ("var", (0,), 8, True)],
        [("mean", (0,), 8, True), ("var", (0,), 8, True)],
    ]
    assert [assign(every, rank) for rank in range(3)] == [{"a"}, {"mean", "var"}, set()]


def test_whole_tensors_begin_at_nought_and_share_memory() -> None:
    tensors = {"a": torch.ones(2, 3), "scalar": torch.tensor(1.0), "empty": torch.ones(0, 2)}
    parts = parts_of(tensors)
    assert {name: part.offsets for name, part in parts.items()} == {"a": (0, 0), "scalar": (), "empty": (0, 0)}
    assert parts["a"].tensor.data_ptr() == tensors["a"].data_ptr()
    assert rows_of(parts, {"scalar"}) == [
        ("a", (0, 0), 24, False),
        ("scalar", (), 4, True),
        ("empty", (0, 0), 0, False),
    ]


def test_large_ranks_write_several_files(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(content, "FILE", 16)
    parts = {name: Part(torch.zeros(count), (0,)) for name, count in (("a", 4), ("b", 3), ("c", 2), ("d", 1))}
    assert [sorted(file) for file in into_files(parts)] == [["a", "d"], ["b", "c"]]  # 40 bytes in two files of 20
    assert into_files({}) == []
    monkeypatch.setattr(content, "FILE", 1)
    assert len(into_files(parts)) == 4  # no empty files


def test_tied_tensors_are_kept_once() -> None:
    tied = torch.ones(2)
    tensors, rest = split({"a": tied, "b": tied, "c": torch.ones(2), "state": {"n": (1, 2)}})
    assert sorted(tensors) == ["a", "c"]
    assert rest["aliases"] == {"b": "a"}
    assert list(rest["extra"]) == ["state"]
