"""What a rank's memory holds in each moment of a step: the storages that operations make, by what they are for."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine.planning import torch_private
from engine.planning.plan import Memory, Moment
from engine.planning.rank_trace import Allocations, Phase

PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER = "parameters", "buffers", "gradients", "optimizer_state"
ACTIVATIONS, TEMPORARIES, COMMUNICATION, INPUTS = "activations", "temporaries", "communication", "inputs"
SET_UP: Phase = "set-up"
"""The phase before the first step."""
_BEFORE_STEPS = (PARAMETERS, BUFFERS, COMMUNICATION, INPUTS)
"""What is there when the first step begins; that step makes the rest."""
MOST_SHOWN = 20
"""Modules in :attr:`engine.planning.plan.RankTrace.held_at_peak`."""


@dataclass(slots=True, eq=False)
class Storage:
    """A storage."""

    size: int
    phase: str
    module: str
    node: int = -1
    """Which node of the backward pass has made it."""
    kind: str = TEMPORARIES
    """Its last use: a result of the forward pass that the backward pass needs was an activation from the start."""
    alive: Any = None
    on_host: bool = False
    """It is in the host's memory when the job has an accelerator."""
    stream: int = 0
    """Of the device: the one that has made it; 0 computes."""


class StorageLog:
    """Follows every storage from the operation that makes it to its end. With real tensors it works as with fake ones."""

    def __init__(self) -> None:
        self.phase, self.module = SET_UP, ""
        self._held: dict[int, Storage] = {}
        self._log: list[tuple[Storage, int, str, str]] | None = None
        self._at_start: list[tuple[Storage, int]] = []
        self._sum: tuple[int, int, int] | None = None
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self.made_on_host = False
        """What is made now is in the host's memory: by the step of an offloaded optimizer."""

    # -- storages -----------------------------------------------------------------------------------------------------------------

    def follow(self, tensor: Tensor) -> Storage | None:
        """The storage of ``tensor``, known from now on; ``None`` for a tensor without memory."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor has none; its parts do
            return None
        key = storage._cdata
        found = self._held.get(key)
        if found is None:
            if tensor.device.type == "meta":  # what another rank has, or an example of a shape
                return None
            found = self._held[key] = Storage(storage.nbytes(), self.phase, self.module, torch_private.node_number())
            found.on_host = self.made_on_host
            # Strategies choose streams on a CPU, too, where they mean nothing.
            found.stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
            found.alive = weakref.ref(storage, lambda _: self._freed(key))
            self._event(found, found.size)
        return found

    def set_kind(
        self, tensors: Iterable[Any], kind: str, module: str | None = None, on_host: bool | None = None
    ) -> None:
        """These tensors' storages are of this kind, and belong to this module; ``None``: to the same as before, also of ``on_host``."""
        for tensor in tensors:
            for part in local_parts(tensor):
                if (held := self.follow(part)) is not None:
                    held.kind = kind
                    held.module = held.module if module is None else module
                    held.on_host = held.on_host if on_host is None else on_host

    def offloaded(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of these tensors was marked to be in the host's memory."""
        storages = [part.untyped_storage()._cdata for tensor in tensors for part in local_parts(tensor)]
        return any(key in self._held and self._held[key].on_host for key in storages)

    def used_to_communicate(self, tensors: Iterable[Tensor]) -> None:
        """A collective reads or writes these tensors."""
        for tensor in tensors:
            held = self.follow(tensor)
            # What is used again in later steps, such as DDP's buckets, was there in a backward pass before.
            if held is not None and held.kind in (TEMPORARIES, ACTIVATIONS):
                held.kind = COMMUNICATION

    def summed_in_place(self, before: Tensor, result: Tensor) -> None:
        """A sum in the backward pass. If it is autograd's own, of two gradients of one tensor, real tensors are added in place, unless something
        else refers to ``before``; those that Python sees are not. A node's own sums do not release at once what another node has made."""
        old, new = self.follow(before), self.follow(result)
        if old is None or new is None or not self._log or self._log[-1][0] is not new:
            return
        if old.size == new.size and old.node != new.node:
            self._sum = before.untyped_storage()._cdata, result.untyped_storage()._cdata, len(self._log) - 1

    def next_operation(self) -> None:
        """The next operation begins."""
        self._sum = None

    def kept_for_backward(self) -> None:
        """The forward pass is over: what is left of it is there for the backward pass."""
        for held in self._held.values():
            if held.kind == TEMPORARIES and held.phase == "forward":
                held.kind = ACTIVATIONS

    def _freed(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None and self._sum is not None and key == self._sum[0] and self._sum[1] in self._held:
            assert self._log is not None
            _, result, event = self._sum
            del self._log[event]
            held.alive = self._held[result].alive  # its reference's end is that of the sum
            self._held[result], self._sum = held, None
        elif held is not None:
            self._event(held, -held.size)
            held.size = 0

    def _resized(self, storage: Any) -> None:
        held = self._held.get(storage._cdata)
        if held is not None and (change := storage.nbytes() - held.size):
            held.size += change
            if held.kind in (TEMPORARIES, ACTIVATIONS):
                held.kind = COMMUNICATION  # FSDP's whole parameters, gathered or copied
            self._event(held, change)

    def _event(self, held: Storage, change: int) -> None:
        if self._log is not None:
            self._log.append((held, change, self.phase, self.module))

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Inside the block, storages that change their size are noticed: FSDP empties and fills those of gathered parameters."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    # -- a recorded step ----------------------------------------------------------------------------------------------------------

    def record(self) -> None:
        """The recorded step begins."""
        for held in self._held.values():
            if held.kind == TEMPORARIES and held.phase == SET_UP:  # numbers on the host: meshes, seeds
                held.size = 0
        self._at_start = [(held, held.size) for held in self._held.values()]
        self._log = []

    def move_to_host(self, kinds: Collection[str]) -> dict[str, int]:
        """What is of these kinds, and what was marked so, is in the host's memory; returns its bytes at the start by kind."""

        def left(held: Storage) -> bool:
            return held.kind not in kinds and not held.on_host

        away: dict[str, int] = {}
        for held, size in self._at_start:
            if not left(held) and size:
                away[held.kind] = away.get(held.kind, 0) + size
        self._at_start = [(held, size) for held, size in self._at_start if left(held)]
        self._log = [event for event in self._log or [] if left(event[0])]
        return away

    def timeline(self) -> tuple[Moment, ...]:
        """The recorded step: for each stretch in one module the moment with the most memory."""
        found: list[Moment] = [Moment("start", "", self._memory(self._amounts()))]
        amounts, where, most, total = self._amounts(), None, None, sum(self._amounts().values())
        highest = -1
        for held, change, phase, module in self._log or []:
            if where != (phase, module):
                if where is not None and most is not None:
                    found.append(Moment(*where, self._memory(most)))
                where, highest, most = (phase, module), -1, None
            amounts[held.kind] += change
            total += change
            if total > highest:
                highest, most = total, dict(amounts)
        if where is not None and most is not None:
            found.append(Moment(*where, self._memory(most)))
        found.append(Moment("end", "", self._memory(amounts)))
        return tuple(found)

    def held_at_peak(self) -> dict[str, int]:
        """Bytes of parameters, gradients and activations by module when the recorded step needed the most, the largest first."""
        by_module: dict[str, int] = {}
        for held, size in self._at_peak().items():
            if size and held.kind in (PARAMETERS, GRADIENTS, ACTIVATIONS):
                by_module[held.module] = by_module.get(held.module, 0) + size
        return dict(sorted(by_module.items(), key=lambda item: -item[1])[:MOST_SHOWN])

    def allocations(self) -> Allocations:
        """The first step, which makes the optimizer's state, and those after it: each is taken to be like the recorded one."""
        sizes: dict[Storage, int] = {}
        numbers: dict[Storage, int] = {}
        steps = array("q"), array("q")
        waiting = [(held, size) for held, size in self._at_start if held.kind not in _BEFORE_STEPS]
        there = dict(self._at_start)

        def change(events: array[int], held: Storage, size: int) -> None:
            if sizes.get(held, 0) != size:
                sizes[held] = size
                events.extend((numbers.setdefault(held, len(numbers)), size))

        for held, size in there.items():
            if held.kind in _BEFORE_STEPS:
                change(steps[0], held, size)
        for events in steps:
            for held, by, phase, _ in self._log or []:
                if waiting and phase == "optimizer step":
                    for made, size in waiting:
                        change(events, made, size)
                    waiting = []
                change(events, held, max(0, sizes.get(held, 0) + by))
            # The next step begins with what this one began with, in other storages.
            for held in sizes:
                if held not in there:
                    change(events, held, 0)
            for held, size in there.items():
                change(events, held, size)
        return Allocations(*steps, tuple(held.stream for held in numbers))

    def _at_peak(self) -> dict[Storage, int]:
        sizes = dict(self._at_start)
        total = highest = sum(sizes.values())
        at = 0
        log = self._log or []
        for index, (_, change, _, _) in enumerate(log, 1):
            total += change
            if total > highest:
                highest, at = total, index
        for held, change, _, _ in log[:at]:
            sizes[held] = sizes.get(held, 0) + change
        return sizes

    def _amounts(self) -> dict[str, int]:
        amounts = dict.fromkeys(Memory.__dataclass_fields__, 0)
        for held, size in self._at_start:
            amounts[held.kind] += size
        return amounts

    def _memory(self, amounts: dict[str, int]) -> Memory:
        return Memory(**amounts)


def local_parts(tensor: Any) -> list[Tensor]:
    """The plain tensors in this rank's memory that hold ``tensor``: a shard of a ``DTensor``, the parts of a tensor class."""
    if not isinstance(tensor, Tensor):
        return []
    if hasattr(tensor, "placements"):
        return [tensor._local_tensor]  # type: ignore[attr-defined]
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten(tensor)[0] for part in local_parts(getattr(tensor, name))]
