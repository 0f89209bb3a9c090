"""The contents of a rank's memory in each moment of a step: the storages that operations make, by what they are for."""

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
"""Kinds of storages that exist when the first step begins; that step makes the rest."""
MOST_SHOWN = 20
"""Modules in :attr:`engine.planning.plan.RankTrace.held_at_peak`."""


@dataclass(slots=True, eq=False)
class Storage:
    """A storage that a :class:`StorageLog` follows."""

    size: int
    phase: str
    module: str
    node: int = -1
    """The node of the backward pass that has made the storage; -1: none."""
    kind: str = TEMPORARIES
    """The last use: a result of the forward pass that the backward pass needs was an activation from the start."""
    alive: Any = None
    on_host: bool = False
    """Whether the storage is in the host's memory when the job has an accelerator."""
    stream: int = 0
    """The device's stream that has made the storage; 0 computes."""


class StorageLog:
    """Follows every storage from the operation that makes it to its end. With real tensors it works as with fake ones."""

    def __init__(self) -> None:
        self.phase, self.module = SET_UP, ""
        self._storages: dict[int, Storage] = {}
        self._log: list[tuple[Storage, int, str, str]] | None = None
        self._at_start: list[tuple[Storage, int]] = []
        self._sum: tuple[int, int, int] | None = None
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self.made_on_host = False
        """Whether new storages are in the host's memory: the step of an offloaded optimizer makes them."""

    # -- storages -----------------------------------------------------------------------------------------------------------------

    def follow(self, tensor: Tensor) -> Storage | None:
        """Follow the storage of ``tensor`` from now on, and return it; ``None`` for a tensor without memory."""
        try:
            untyped = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor has none; its parts do
            return None
        key = untyped._cdata
        storage = self._storages.get(key)
        if storage is None:
            if tensor.device.type == "meta":  # what another rank has, or an example of a shape
                return None
            storage = self._storages[key] = Storage(
                untyped.nbytes(), self.phase, self.module, torch_private.node_number()
            )
            storage.on_host = self.made_on_host
            # Strategies choose streams on a CPU, too, where they mean nothing.
            storage.stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
            storage.alive = weakref.ref(untyped, lambda _: self._freed(key))
            self._event(storage, storage.size)
        return storage

    def set_kind(
        self, tensors: Iterable[Any], kind: str, module: str | None = None, on_host: bool | None = None
    ) -> None:
        """Set the kind of the storages of ``tensors``; with ``module`` and ``on_host`` also their module and whether they are on the host."""
        for tensor in tensors:
            for part in local_parts(tensor):
                if (storage := self.follow(part)) is not None:
                    storage.kind = kind
                    storage.module = storage.module if module is None else module
                    storage.on_host = storage.on_host if on_host is None else on_host

    def offloaded(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of ``tensors`` was marked to be in the host's memory."""
        storages = [part.untyped_storage()._cdata for tensor in tensors for part in local_parts(tensor)]
        return any(key in self._storages and self._storages[key].on_host for key in storages)

    def used_to_communicate(self, tensors: Iterable[Tensor]) -> None:
        """Note that a collective reads or writes ``tensors``."""
        for tensor in tensors:
            storage = self.follow(tensor)
            # What is used again in later steps, such as DDP's buckets, was there in a backward pass before.
            if storage is not None and storage.kind in (TEMPORARIES, ACTIVATIONS):
                storage.kind = COMMUNICATION

    def summed_in_place(self, before: Tensor, result: Tensor) -> None:
        """Note a sum in the backward pass. If it is autograd's own, of two gradients of one tensor, real tensors are added in place, unless
        something else refers to ``before``; those that Python sees are not. A node's own sums do not release at once what another node has made."""
        old, new = self.follow(before), self.follow(result)
        if old is None or new is None or not self._log or self._log[-1][0] is not new:
            return
        if old.size == new.size and old.node != new.node:
            self._sum = before.untyped_storage()._cdata, result.untyped_storage()._cdata, len(self._log) - 1

    def next_operation(self) -> None:
        """Begin the next operation."""
        self._sum = None

    def kept_for_backward(self) -> None:
        """Mark what is left of the forward pass as activations: the backward pass needs it."""
        for storage in self._storages.values():
            if storage.kind == TEMPORARIES and storage.phase == "forward":
                storage.kind = ACTIVATIONS

    def _freed(self, key: int) -> None:
        storage = self._storages.pop(key, None)
        if storage is not None and self._sum is not None and key == self._sum[0] and self._sum[1] in self._storages:
            assert self._log is not None
            _, result, event = self._sum
            del self._log[event]
            storage.alive = self._storages[result].alive  # its reference's end is that of the sum
            self._storages[result], self._sum = storage, None
        elif storage is not None:
            self._event(storage, -storage.size)
            storage.size = 0

    def _resized(self, untyped: Any) -> None:
        storage = self._storages.get(untyped._cdata)
        if storage is not None and (change := untyped.nbytes() - storage.size):
            storage.size += change
            if storage.kind in (TEMPORARIES, ACTIVATIONS):
                storage.kind = COMMUNICATION  # FSDP's whole parameters, gathered or copied
            self._event(storage, change)

    def _event(self, storage: Storage, change: int) -> None:
        if self._log is not None:
            self._log.append((storage, change, self.phase, self.module))

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
        """Begin the recorded step."""
        for storage in self._storages.values():
            if storage.kind == TEMPORARIES and storage.phase == SET_UP:  # numbers on the host: meshes, seeds
                storage.size = 0
        self._at_start = [(storage, storage.size) for storage in self._storages.values()]
        self._log = []

    def move_to_host(self, kinds: Collection[str]) -> dict[str, int]:
        """Move storages of ``kinds``, and storages marked ``on_host``, to the host's memory; returns their bytes at the start by kind."""

        def stays(storage: Storage) -> bool:
            return storage.kind not in kinds and not storage.on_host

        moved: dict[str, int] = {}
        for storage, size in self._at_start:
            if not stays(storage) and size:
                moved[storage.kind] = moved.get(storage.kind, 0) + size
        self._at_start = [(storage, size) for storage, size in self._at_start if stays(storage)]
        self._log = [event for event in self._log or [] if stays(event[0])]
        return moved

    def timeline(self) -> tuple[Moment, ...]:
        """The recorded step: for each stretch in one module the moment with the most memory."""
        moments: list[Moment] = [Moment("start", "", self._memory(self._amounts()))]
        amounts, stretch, highest_amounts, total = self._amounts(), None, None, sum(self._amounts().values())
        highest = -1
        for storage, change, phase, module in self._log or []:
            if stretch != (phase, module):
                if stretch is not None and highest_amounts is not None:
                    moments.append(Moment(*stretch, self._memory(highest_amounts)))
                stretch, highest, highest_amounts = (phase, module), -1, None
            amounts[storage.kind] += change
            total += change
            if total > highest:
                highest, highest_amounts = total, dict(amounts)
        if stretch is not None and highest_amounts is not None:
            moments.append(Moment(*stretch, self._memory(highest_amounts)))
        moments.append(Moment("end", "", self._memory(amounts)))
        return tuple(moments)

    def held_at_peak(self) -> dict[str, int]:
        """Bytes of parameters, gradients and activations by module when the recorded step needed the most, the largest first."""
        by_module: dict[str, int] = {}
        for storage, size in self._at_peak().items():
            if size and storage.kind in (PARAMETERS, GRADIENTS, ACTIVATIONS):
                by_module[storage.module] = by_module.get(storage.module, 0) + size
        return dict(sorted(by_module.items(), key=lambda item: -item[1])[:MOST_SHOWN])

    def allocations(self) -> Allocations:
        """The allocations of the first step, which makes the optimizer's state, and of the steps after it, each like the recorded step."""
        sizes: dict[Storage, int] = {}
        numbers: dict[Storage, int] = {}
        steps = array("q"), array("q")
        waiting = [(storage, size) for storage, size in self._at_start if storage.kind not in _BEFORE_STEPS]
        at_start = dict(self._at_start)

        def change(events: array[int], storage: Storage, size: int) -> None:
            if sizes.get(storage, 0) != size:
                sizes[storage] = size
                events.extend((numbers.setdefault(storage, len(numbers)), size))

        for storage, size in at_start.items():
            if storage.kind in _BEFORE_STEPS:
                change(steps[0], storage, size)
        for events in steps:
            for storage, difference, phase, _ in self._log or []:
                if waiting and phase == "optimizer step":
                    for late, size in waiting:
                        change(events, late, size)
                    waiting = []
                change(events, storage, max(0, sizes.get(storage, 0) + difference))
            # The next step begins with what this one began with, in other storages.
            for storage in sizes:
                if storage not in at_start:
                    change(events, storage, 0)
            for storage, size in at_start.items():
                change(events, storage, size)
        return Allocations(*steps, tuple(storage.stream for storage in numbers))

    def _at_peak(self) -> dict[Storage, int]:
        sizes = dict(self._at_start)
        total = highest = sum(sizes.values())
        peak_end = 0
        changes = self._log or []
        for index, (_, change, _, _) in enumerate(changes, 1):
            total += change
            if total > highest:
                highest, peak_end = total, index
        for storage, change, _, _ in changes[:peak_end]:
            sizes[storage] = sizes.get(storage, 0) + change
        return sizes

    def _amounts(self) -> dict[str, int]:
        amounts = dict.fromkeys(Memory.__dataclass_fields__, 0)
        for storage, size in self._at_start:
            amounts[storage.kind] += size
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
