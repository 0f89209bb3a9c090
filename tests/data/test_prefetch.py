"""Reading ahead of the device, with a stand-in for the side stream that notes what happens when."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import new_share
from support.toys import fit
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from engine import Engine, TrainModule
from engine.data import loader as loaders
from engine.data.prefetch import SideStream, ahead, pinned
from engine.utils import accelerator


class Notes(SideStream):
    def __init__(self) -> None:
        self.events: list[str] = []

    def copy(self, batch: Any) -> Any:
        self.events.append(f"copy {batch}")
        return f"device {batch}"

    def join(self) -> None:
        self.events.append("join")

    def micros(self, count: int, window: int) -> Iterator[tuple[Any, Any]]:
        for i in range(count):
            self.events.append(f"read {i}")
            yield i, new_share(1, 1.0, 1.0, last=(i + 1) % window == 0 or i + 1 == count)


def run(count: int, window: int, across: bool) -> tuple[list[str], list[Any]]:
    notes = Notes()
    given = []
    for batch, share in ahead(notes.micros(count, window), notes, across):
        notes.events.append(f"compute {batch}")
        given.append((batch, share.last))
    return notes.events, given


def test_the_next_copy_starts_before_a_batch_is_computed() -> None:
    events, _ = run(3, 1, across=True)
    assert events == [
        *("read 0", "copy 0", "join"),
        *("read 1", "copy 1", "compute device 0", "join"),
        *("read 2", "copy 2", "compute device 1", "join"),
        "compute device 2",
    ]


def test_a_windows_end_can_be_a_barrier() -> None:
    events, _ = run(5, 2, across=False)
    assert events == [
        *("read 0", "copy 0", "join"),
        *("read 1", "copy 1", "compute device 0", "join", "compute device 1"),
        *("read 2", "copy 2", "join"),
        *("read 3", "copy 3", "compute device 2", "join", "compute device 3"),
        *("read 4", "copy 4", "join", "compute device 4"),
    ]


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_every_batch_comes_once_with_its_own_share(count: int, window: int, across: bool) -> None:
    _, given = run(count, window, across)
    assert given == [(f"device {i}", (i + 1) % window == 0 or i + 1 == count) for i in range(count)]


@pytest.mark.parametrize("across", [False, True])
def test_a_copy_is_joined_before_its_batch_is_given_out(across: bool) -> None:
    events, _ = run(7, 3, across)
    for i in range(7):
        copied, computed = events.index(f"copy {i}"), events.index(f"compute device {i}")
        assert "join" in events[copied:computed]


def test_without_a_device_nothing_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "ahead", None)  # would fail if it were called
    engine = Engine(accelerator="cpu", precision="bf16-true")
    assert [batch.dtype for batch in engine.prepare_data_loader([torch.ones(1)] * 2)] == [torch.bfloat16] * 2


class Stays(loaders.BatchTransfer):
    def move(self, batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
        return batch


def test_the_prepared_loader_reads_ahead_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, hooks and the place in the epoch stay those of the batch that is given out."""
    notes = Notes()
    monkeypatch.setattr(loaders, "SideStream", lambda device, dtype: notes)
    monkeypatch.setattr(accelerator, "has_streams", lambda device: device.type == "cuda")
    engine = Engine(accelerator="cpu", accumulate_grad_batches=2)
    monkeypatch.setattr(engine.group, "device", torch.device("cuda"))
    for data, across in (([3, 4, 5], True), (iter([3, 4, 5]), False)):
        notes.events.clear()
        loader = engine.prepare_data_loader(data)
        told = []
        for batch in loader:
            notes.events.append(f"compute {batch}")
            told.append((batch, engine.window.share.last, loader.state_dict()["position"]))
        assert told == [("device 3", False, 0), ("device 4", True, 2), ("device 5", True, 4)]
        assert (notes.events.index("copy 5") < notes.events.index("compute device 4")) is across
    notes.events.clear()
    loader = engine.prepare_data_loader([torch.ones(1)])
    loader.transfer = Stays()
    assert len(list(loader)) == 1
    assert notes.events == []


class Counting(TrainModule):
    """A linear layer whose steps return the batch, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.layer(batch).sum(), "batch": batch}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("val", self.layer(batch).sum())
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("window", [1, 2])
def test_a_run_has_two_batches_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    alive: list[weakref.ref[Any]] = []
    counts = []

    class Stand(Notes):
        def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
            super().__init__()
            self.dtype = dtype

        def copy(self, batch: Any) -> Any:
            found = batch.to(self.dtype)
            alive.append(weakref.ref(found))
            counts.append(sum(each() is not None for each in alive))
            return found

    monkeypatch.setattr(loaders, "SideStream", Stand)
    monkeypatch.setattr(accelerator, "has_streams", lambda device: True)
    run = fit(tmp_path, accumulate_grad_batches=window, precision="bf16-true")
    for data in ([torch.ones(3, 2)] * 6, iter([torch.ones(3, 2)] * 6)):
        counts.clear()
        run.run(Counting(), data, [torch.ones(3, 2)] * 4)
        assert len(counts) == 6 + 4
        assert max(counts) == 2


class Pinned(Tensor):
    """A subclass, whose ``pin_memory`` would give a plain tensor."""


def test_pinning_finds_every_cpu_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def pin(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise RuntimeError("cannot pin")
        done.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    x, sequence = torch.ones(2), pack_sequence([torch.ones(3), torch.ones(1)])
    encoding = BatchEncoding({"ids": x, "words": ["a"]})

    class Graph:
        def __init__(self, tensor: Tensor) -> None:
            self.x = tensor

        def __copy__(self) -> Graph:
            return Graph(self.x)

        def pin_memory(self) -> Graph:
            self.x = self.x.pin_memory()
            return self

    graph, away = Graph(x), Graph(torch.ones(1, device="meta"))
    found = pinned({"x": [x], "p": sequence, "e": encoding, "g": graph, "away": [away]})
    assert [id(t) for t in done] == [id(t) for t in (x, sequence.data, x, x)]
    assert found["p"].batch_sizes is sequence.batch_sizes
    assert (type(found["e"]), found["e"]["words"]) == (BatchEncoding, ["a"])
    assert (encoding["ids"], graph.x, found["away"][0]) == (x, x, away)  # the user's objects are as they were
    others = [torch.eye(2).to_sparse(), torch.ones(2).as_subclass(Pinned), torch.empty(1, device="meta"), Graph, None]
    assert all(a is b for a, b in zip(pinned(others), others, strict=True))


def test_pinning_leaves_what_is_no_cpu_tensor() -> None:
    class Text:
        def to(self, device: torch.device) -> Text:
            return self

    text, meta = Text(), torch.empty(1, device="meta")
    assert pinned(text) is text
    assert pinned([meta, "a", None]) == [meta, "a", None]

    class Pins(Text):
        def pin_memory(self) -> str:
            return "pinned"

    assert pinned(Pins()) == "pinned"
