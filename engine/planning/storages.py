"""Follows what is in a rank's memory at each moment of a step: the storages that operations create, by what they are used for."""

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
_PRESENT_BEFORE_STEPS = (PARAMETERS, BUFFERS, COMMUNICATION, INPUTS)
"""Kinds of storages that exist when the first step begins; that step creates the rest."""
MOST_SHOWN = 20
"""The maximum number of modules in :attr:`engine.planning.plan.RankTrace.held_at_peak`."""


@dataclass(slots=True, eq=False)
class Storage:
    """A storage that a :class:`StorageLog` follows."""

    size: int
    phase: str
    module: str
    node: int = -1
    """The number of the backward pass's node that created the storage; -1: none did."""
    kind: str = TEMPORARIES
    """The most recent use of the storage. A result of the forward pass that the backward pass turns out to need has been an activation from the
    start."""
    alive: Any = None
    """A weak reference to torch's storage, whose end is the end of this one."""
    on_host: bool = False
    """Whether the storage is in the host's memory when the job has an accelerator."""
    stream: int = 0
    """The number of the stream on which the storage was created; 0 is the one that computes."""


class StorageLog:
    """Follows every storage from the operation that creates it until it is freed, with real tensors as with fake ones."""

    def __init__(self) -> None:
        self.phase, self.module = SET_UP, ""
        self._storages: dict[int, Storage] = {}
        self._log: list[tuple[Storage, int, str, str]] | None = None
        """The recorded changes: storage, change of its bytes, phase and module; ``None``: nothing is recorded."""
        self._at_start: list[tuple[Storage, int]] = []
        self._sum: tuple[int, int, int] | None = None
        """While a sum may turn out to be in place: the keys of the storage before and of the result, and the index of the result's event."""
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self.made_on_host = False
        """Whether new storages are in the host's memory: they are during the step of an offloaded optimizer."""

    # -- storages -----------------------------------------------------------------------------------------------------------------

    def follow(self, tensor: Tensor) -> Storage | None:
        """Follow the storage of ``tensor`` until it is freed, and return it; ``None``: the tensor has no memory."""
        try:
            untyped = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor has none; its parts do
            return None
        key = untyped._cdata
        storage = self._storages.get(key)
        if storage is None:
            if tensor.device.type == "meta":  # it stands for another rank's tensor, or only for a shape
                return None
            storage = self._storages[key] = Storage(
                untyped.nbytes(), self.phase, self.module, torch_private.node_number()
            )
            storage.on_host = self.made_on_host
            # Strategies select streams on a CPU too, where they have no effect.
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
        """Check whether one of ``tensors`` is marked as being in the host's memory."""
        storages = [part.untyped_storage()._cdata for tensor in tensors for part in local_parts(tensor)]
        return any(key in self._storages and self._storages[key].on_host for key in storages)

    def used_to_communicate(self, tensors: Iterable[Tensor]) -> None:
        """Label the storages of ``tensors``, which a collective reads or writes, as communication buffers."""
        for tensor in tensors:
            storage = self.follow(tensor)
            # Buffers that outlive a step, such as DDP's buckets, may have been labelled as activations by a backward pass before.
            if storage is not None and storage.kind in (TEMPORARIES, ACTIVATIONS):
                storage.kind = COMMUNICATION

    def summed_in_place(self, before: Tensor, result: Tensor) -> None:
        """Note that ``result`` is ``before`` plus another tensor in the backward pass, which may be autograd adding two gradients of one tensor.

        Without an observer autograd adds them in place, if nothing else refers to ``before``; while Python observes the operations it takes new
        memory. So if ``before`` is freed before the next operation, the sum is recorded as if it were in place.
        """
        old, new = self.follow(before), self.follow(result)
        if old is None or new is None or not self._log or self._log[-1][0] is not new:
            return
        if old.size == new.size and old.node != new.node:
            self._sum = before.untyped_storage()._cdata, result.untyped_storage()._cdata, len(self._log) - 1

    def next_operation(self) -> None:
        """Begin the next operation: an earlier sum whose first summand still exists was not in place."""
        self._sum = None

    def kept_for_backward(self) -> None:
        """Label what is left of the forward pass as activations, because the backward pass needs it."""
        for storage in self._storages.values():
            if storage.kind == TEMPORARIES and storage.phase == "forward":
                storage.kind = ACTIVATIONS

    def _freed(self, key: int) -> None:
        """Record that a storage was freed; if it is the first summand of the latest sum, record instead that the sum is in its place."""
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
        """Inside the block, record when a storage changes its size: FSDP empties and refills those of gathered parameters."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    # -- a recorded step ----------------------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Begin to record a step."""
        for storage in self._storages.values():
            if storage.kind == TEMPORARIES and storage.phase == SET_UP:  # numbers on the host: meshes, seeds
                storage.size = 0
        self._at_start = [(storage, storage.size) for storage in self._storages.values()]
        self._log = []

    def move_to_host(self, kinds: Collection[str]) -> dict[str, int]:
        """Remove the storages of ``kinds``, and those marked ``on_host``, from the record: they are in the host's memory. Return their bytes at the
        start of the step by kind."""

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
        """The moments of the recorded step: for each time that a module runs without interruption, the moment with the most memory."""
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
        """Bytes of parameters, gradients and activations by module at the peak of the recorded step, the largest first."""
        by_module: dict[str, int] = {}
        for storage, size in self._at_peak().items():
            if size and storage.kind in (PARAMETERS, GRADIENTS, ACTIVATIONS):
                by_module[storage.module] = by_module.get(storage.module, 0) + size
        return dict(sorted(by_module.items(), key=lambda item: -item[1])[:MOST_SHOWN])

    def allocations(self) -> Allocations:
        """The changes of storages in the first step, which creates the optimizer's state, and in each later step, which is like the recorded one."""
        sizes: dict[Storage, int] = {}
        numbers: dict[Storage, int] = {}
        steps = array("q"), array("q")
        not_yet_created = [
            (storage, size) for storage, size in self._at_start if storage.kind not in _PRESENT_BEFORE_STEPS
        ]
        at_start = dict(self._at_start)

        def change(events: array[int], storage: Storage, size: int) -> None:
            """Append the new size of a storage to ``events``, unless it has that size already."""
            if sizes.get(storage, 0) != size:
                sizes[storage] = size
                events.extend((numbers.setdefault(storage, len(numbers)), size))

        for storage, size in at_start.items():
            if storage.kind in _PRESENT_BEFORE_STEPS:
                change(steps[0], storage, size)
        for events in steps:
            for storage, difference, phase, _ in self._log or []:
                if not_yet_created and phase == "optimizer step":
                    for late, size in not_yet_created:
                        change(events, late, size)
                    not_yet_created = []
                change(events, storage, max(0, sizes.get(storage, 0) + difference))
            # The next step begins with the same storages as this one, so what was created in between is freed.
            for storage in sizes:
                if storage not in at_start:
                    change(events, storage, 0)
            for storage, size in at_start.items():
                change(events, storage, size)
        return Allocations(*steps, tuple(storage.stream for storage in numbers))

    def _at_peak(self) -> dict[Storage, int]:
        """The size of each storage at the moment of the recorded step with the most memory."""
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
        """Bytes at the start of the recorded step, by category."""
        amounts = dict.fromkeys(Memory.__dataclass_fields__, 0)
        for storage, size in self._at_start:
            amounts[storage.kind] += size
        return amounts

    def _memory(self, amounts: dict[str, int]) -> Memory:
        return Memory(**amounts)


def local_parts(tensor: Any) -> list[Tensor]:
    """The ordinary tensors in this rank's memory that make up ``tensor``: the local shard of a ``DTensor``, or the inner tensors of a tensor
    subclass."""
    if not isinstance(tensor, Tensor):
        return []
    if hasattr(tensor, "placements"):
        return [tensor._local_tensor]  # type: ignore[attr-defined]
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten(tensor)[0] for part in local_parts(getattr(tensor, name))]
