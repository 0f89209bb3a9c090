"""Garbage is collected when it is said, and the caller's state comes back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones

from callbacks import EMA, CSVLogger, EarlyStopping, ModelCheckpoint
from engine import Callback
from engine.utils import garbage
from engine.utils.garbage import EVERYTHING_S, FULL, Collector


class Node:
    """Two of them that know each other are garbage that only the collector finds."""

    other: Node


def circle() -> weakref.ref[Node]:
    a, b = Node(), Node()
    a.other, b.other = b, a
    return weakref.ref(a)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "_unseen_s", 0.0)
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


def old_circle() -> weakref.ref[Node]:
    """Garbage that has survived a collection before it was garbage."""
    a, b = Node(), Node()
    a.other, b.other = b, a
    gc.collect()
    return weakref.ref(a)


def test_garbage_from_before_is_found_after_a_minute_of_training() -> None:
    collector = Collector()
    lost = old_circle()
    collector.begin(0.0)
    collector.collect(EVERYTHING_S / 3)
    assert lost() is not None  # it is among the objects that were old, which take 0.1 s
    collector.collect(EVERYTHING_S)
    assert lost() is None
    assert gc.get_freeze_count()
    collector.end(EVERYTHING_S)


def test_the_minute_may_be_that_of_several_trainings() -> None:
    lost = old_circle()
    for _ in range(3):
        collector = Collector()
        collector.begin(7.0)
        collector.collect(8.0)
        assert lost() is not None
        collector.end(7.0 + EVERYTHING_S / 3)
    collector = Collector()
    collector.begin(0.0)
    collector.collect(1.0)
    assert lost() is None
    collector.end(1.0)


def test_a_run_of_some_steps_never_looks_at_all_objects(tmp_path: Path) -> None:
    looked_at = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            looked_at.append(sum(len(gc.get_objects(i)) for i in range(info["generation"] + 1)))

    fit(tmp_path, max_epochs=1).run(Weight(), ones(2))  # what the first run in a process imports
    everything = len(gc.get_objects())
    gc.callbacks.append(count)
    try:
        fit(tmp_path, max_epochs=1, gc_every_n_steps=4).run(Weight(), ones(4 * (FULL + 2)))
    finally:
        gc.callbacks.remove(count)
    assert len(looked_at) == FULL + 2
    assert max(looked_at) < everything / 5


class WithAdam(Weight):
    adam: torch.optim.Optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.adam = torch.optim.Adam(self.parameters())
        return self.adam


def weights_and_momenta(folder: Path, kind: str) -> list[weakref.ref[torch.Tensor]]:
    """A training or an evaluation; references to what it kept on the device."""

    module = WithAdam()
    tensors: list[torch.Tensor] = [module.w]
    if kind == "run":
        watched = [ModelCheckpoint(monitor="val"), EarlyStopping(monitor="val"), EMA(), CSVLogger()]
        fit(folder, max_epochs=1, callbacks=watched).run(module, ones(3), ones(2))
        tensors.append(module.adam.state[module.w]["exp_avg"])
    else:
        getattr(fit(folder), kind)(module, ones(2))
    return [weakref.ref(tensor) for tensor in tensors]


@pytest.mark.parametrize("kind", ["run", "validate", "predict"])
def test_a_run_leaves_no_circle_that_keeps_weights(tmp_path: Path, kind: str) -> None:
    """Several runs in one process: what one has used is free before the next, whenever garbage is collected."""
    weights_and_momenta(tmp_path, kind)
    gc.disable()
    try:
        assert [ref() for ref in weights_and_momenta(tmp_path, kind)] in ([None], [None, None])
    finally:
        gc.enable()


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


EXITING = """
import os, sys
{begin}

class Cycle:
    def __init__(self):
        self.me, self.file = self, open("text", "w")
        self.file.write("flushed")

    def __del__(self, write=os.write):
        write(1, b"*** collected ***")

Cycle()
"""


@pytest.mark.parametrize(
    ("begin", "collected"),
    [
        ("", True),
        ("import atexit; from engine.utils import garbage; atexit.register(garbage.collect_none_at_exit)", False),
        ("from engine.cli.main import main; sys.argv = ['fit']; main()", False),
    ],
    ids=["python", "with it", "fit"],
)
def test_an_exit_without_a_collection(tmp_path: Path, begin: str, collected: bool) -> None:
    command = [sys.executable, "-c", EXITING.format(begin=begin)]
    environment = {**os.environ, "PYTHONPATH": str(Path(garbage.__file__).parents[2])}
    written = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert ("*** collected ***" in written.stdout) == collected
    assert (
        collected or (tmp_path / "text").read_text() == "flushed"
    )  # Python's own last collection may come too late for a text file


def test_a_postponed_collection_does_not_outlast_its_block_nor_a_fork() -> None:
    with garbage.postponed():
        assert not gc.isenabled()
        child = os.fork()
        if child == 0:  # where nothing ends the block's work
            with garbage.uncollected():  # would wait for the other thread, which is not in this process
                pass
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()


def test_a_collector_waits_for_a_thread_that_postpones_collections() -> None:
    collector, begins = Collector(), threading.Event()

    def begin() -> None:
        begins.set()
        collector.begin()

    with garbage.postponed():
        thread = threading.Thread(target=begin)
        thread.start()
        assert begins.wait(60)
        thread.join(0.1)
        assert thread.is_alive()
    thread.join()
    assert not gc.isenabled()  # it has seen that collection was automatic
    collector.end()
    assert gc.isenabled()
