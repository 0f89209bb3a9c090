"""Garbage is collected when it is said, and the caller's state comes back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Weight, fit, ones

from engine import Callback
from engine.health.garbage import FULL, Collector


class Node:
    """Two of them that know each other are garbage that only the collector finds."""

    other: Node


def circle() -> weakref.ref[Node]:
    a, b = Node(), Node()
    a.other, b.other = b, a
    return weakref.ref(a)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    gc.unfreeze()  # what the tests' conftest has frozen: these look at whether anything is
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    yield
    assert (gc.isenabled(), gc.get_freeze_count() > 0) == (enabled, frozen)
    gc.freeze()


def test_only_when_told() -> None:
    collector = Collector()
    collector.begin()
    lost = circle()
    many = [[i] for i in range(50_000)]  # allocations that would start Python's own collections
    assert lost() is not None
    assert len(many) == 50_000
    collector.collect()
    assert lost() is None
    later = circle()
    collector.collect()
    assert later() is None
    collector.end()


def test_survivors_are_found_by_a_full_collection() -> None:
    collector = Collector()
    collector.begin()
    collector.collect()
    a, b = Node(), Node()
    a.other, b.other = b, a
    collector.collect()
    collector.collect()  # both are in the oldest generation now
    lost = weakref.ref(a)
    del a, b
    collector.collect()
    assert lost() is not None
    for _ in range(FULL):
        collector.collect()
    assert lost() is None
    collector.end()


def test_evaluation_collects_by_itself() -> None:
    collector = Collector()
    collector.begin()
    with collector.automatic():
        assert gc.isenabled()
    assert not gc.isenabled()
    collector.end()


def test_a_caller_who_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        collector = Collector()
        collector.begin()
        lost = circle()
        collector.collect()
        with collector.automatic():
            assert not gc.isenabled()
        collector.end()
        assert not gc.isenabled()
        assert lost() is not None
    finally:
        gc.enable()


def test_what_the_caller_has_frozen_stays_frozen() -> None:
    ours = Node()
    gc.collect()
    gc.freeze()
    try:
        collector = Collector()
        collector.begin()
        collector.collect()
        collector.end()
        # Not the count: other threads may drop something frozen meanwhile. A frozen object is not among those that the collector looks at.
        assert not any(thing is ours for thing in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(thing is ours for thing in gc.get_objects())


class Watch(Callback):
    def __init__(self) -> None:
        self.enabled: list[bool] = []
        self.refs: list[weakref.ref[Node]] = []
        self.alive: list[int] = []

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.enabled.append(gc.isenabled())
        self.alive.append(sum(ref() is not None for ref in self.refs))
        self.refs.append(circle())


@pytest.mark.parametrize("error", [False, True])
def test_in_a_run(tmp_path: Path, error: bool) -> None:
    class Failing(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if error and batch_idx == 5:
                raise OSError("no")
            return super().training_step(batch, batch_idx)

    watch = Watch()
    with pytest.raises(OSError, match="no") if error else torch.enable_grad():
        fit(tmp_path, max_epochs=1, gc_every_n_steps=4, callbacks=[watch]).run(Failing(), ones(12))
    assert not any(watch.enabled)
    # By hand: each batch leaves one circle; they are gone after steps 4 and 8.
    assert watch.alive == ([0, 1, 2, 3, 0, 1] if error else [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3])


def test_left_to_python(tmp_path: Path) -> None:
    watch = Watch()
    fit(tmp_path, max_epochs=1, gc_every_n_steps=0, callbacks=[watch]).run(Weight(), ones(3))
    assert all(watch.enabled)


class Asks(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample tells whether Python collects garbage where it was made."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(gc.isenabled()))


def test_workers_of_a_loader_collect_by_themselves(tmp_path: Path) -> None:
    seen = []

    class Net(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((gc.isenabled(), batch[0].tolist()))
            return super().training_step(batch, batch_idx)

    fit(tmp_path, max_epochs=1).run(Net(), torch.utils.data.DataLoader(Asks(), batch_size=1, num_workers=1))
    assert seen == [(False, [1.0, 1.0])] * 4
