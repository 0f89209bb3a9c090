"""Activation offload: what the forward pass saves for the backward pass waits in the host's pinned memory, and comes back ahead of its use.

The unit is the block. When a block begins, the results that the block before it has saved start to leave, on a stream of their own, and the
memory of the block before that one is given back. In the backward pass a block's first use of a saved tensor starts the return of the
block before it. So at most two blocks' activations are on the device at once, besides those of the last block, which backward needs first.
The host never waits: streams wait for streams.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from engine.config.kinds import Offload
from engine.distributed.group import Group
from engine.transforms.blocks import blocks_of, user_module
from engine.utils import accelerator
from engine.utils.device_copies import empty_host_cache, side_stream
from engine.utils.log import logger
from engine.utils.torch_private import around_calls, is_wrapper

SMALLEST_BYTES = 2**20
"""Storages with fewer bytes stay on the device: a copy takes some microseconds to start, in which a link moves about so much."""
LEAST_SHARE = 16
"""A storage leaves if a saved tensor has at least one ``LEAST_SHARE``-th of it: a small view of a large buffer does not move the buffer."""


def check_offload(setting: Offload, strategy: str, obstacle: str | None) -> None:
    """Raise ``ValueError`` if activations are to leave the device and the strategy does not allow it, for the reason ``obstacle``."""
    if setting is not False and obstacle is not None:
        raise ValueError(
            f"activation_offload={setting!r} under {strategy}: {obstacle}; leave it out (activation_checkpointing saves memory there, too)"
        )


def offload_for(setting: Offload, group: Group) -> ActivationOffload | None:
    """Create the offload that the setting means for the devices of ``group``; ``None``: there is nothing to move.

    Raises:
        ValueError: the accelerator cannot copy beside its computation.
    """
    if setting is False:
        return None
    device = group.device
    if not group.kind.is_accelerator:
        if group.is_main:
            logger.info(
                "activation_offload=%r: on a CPU activations are in the host's memory already, so nothing is moved",
                setting,
            )
        return None
    # A plan's tensors are on the CPU, whatever device it plans.
    if device.type != "cpu" and not (accelerator.has_streams(device) and accelerator.defers(device)):
        raise ValueError(
            f"activation_offload={setting!r}: {accelerator.name(device)} has no pinned host memory, or no streams beside the one that computes, in "
            f"torch {torch.__version__}, so a copy would hold up each block: use activation_checkpointing there"
        )
    return ActivationOffload(setting, HostCopies(device))


class Crossing:
    """Copies between device and host that were started together.

    Args:
        event: the point at which they are done; ``None`` in a plan, which copies nothing.
        stream: the stream that copies.
    """

    __slots__ = ("event", "is_awaited", "stream")

    def __init__(self, event: torch.Event | None = None, stream: torch.Stream | None = None) -> None:
        self.event, self.stream = event, stream
        self.is_awaited = False
        """Whether the computing stream has been told to wait for them."""


class SavedStorage:
    """A storage that autograd needs in the backward pass: on the device, on the host, or back on the device.

    It is created from the first saved tensor that lies in the storage; the other ones share it. It dies with the last node that needs it.
    """

    __slots__ = (
        "__weakref__", "alive", "arrival", "copies", "departure", "dtype", "elements", "host", "origin", "restored", "source", "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, copies: HostCopies) -> None:
        self.copies = copies
        self.dtype = tensor.dtype
        self.elements = storage.nbytes() // tensor.element_size()
        self.source: Tensor | None = tensor.detach().as_strided((self.elements,), (1,), 0)
        """The storage's whole content on the device; ``None``: its memory was given back."""
        self.version = tensor._version
        self.alive: ReferenceType[torch.UntypedStorage] = ref(storage)
        """The storage itself, which other code may keep alive."""
        self.host: Tensor | None = None
        self.departure: Crossing | None = None
        self.restored: Tensor | None = None
        self.arrival: Crossing | None = None
        self.origin: torch.Stream | None = None
        """The stream in whose memory :attr:`restored` lies."""

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.elements * self.dtype.itemsize

    @property
    def is_unchanged(self) -> bool:
        """Whether the source is as it was when autograd saved it: nothing has changed it in place, and it was not emptied, as FSDP does."""
        source = self.source
        return (
            source is not None and source._version == self.version and source.untyped_storage().nbytes() >= self.nbytes
        )

    def content(self) -> Tensor:
        """The storage's content on the device, in one dimension, for the computing stream.

        Raises:
            RuntimeError: it was changed in place, as torch's own error says.
        """
        now = self.copies.current_stream()
        if self.source is not None:
            if self.source._version != self.version:
                raise changed_in_place(self.source, self.version)
            if self.departure is not None:
                self.copies.wait(now, self.departure)  # its memory may be used again as soon as it is freed
            return self.source
        if self.restored is None:
            self.copies.bring_back([self])
        assert self.restored is not None
        assert self.arrival is not None
        self.copies.wait(now, self.arrival)
        if now is not None and now != self.origin:
            self.restored.record_stream(now)
        return self.restored

    def __del__(self) -> None:
        self.copies.forget(self)


class SavedView:
    """A tensor that autograd has saved, as a view of a :class:`SavedStorage`."""

    __slots__ = ("dtype", "offset", "shape", "storage", "stretch", "strides")

    def __init__(self, stretch: Stretch, storage: SavedStorage, tensor: Tensor) -> None:
        self.stretch, self.storage, self.dtype = stretch, storage, tensor.dtype
        self.shape, self.strides, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def restore(self) -> Tensor:
        """The tensor as it was saved."""
        content = self.storage.content()
        if content.dtype != self.dtype:
            content = content.view(self.dtype)
        return content.as_strided(self.shape, self.strides, self.offset)


class KeptTensor:
    """A saved tensor that stays on the device."""

    __slots__ = ("stretch", "tensor", "version")

    def __init__(self, stretch: Stretch, tensor: Tensor) -> None:
        # A result that keeps its own node would never be freed. A parameter stays itself, so that it is read where it is then.
        self.stretch, self.tensor = stretch, tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        self.version = tensor._version

    def restore(self) -> Tensor:
        """The tensor itself.

        Raises:
            RuntimeError: it was changed in place, as torch's own error says, which torch leaves out where tensors are packed.
        """
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor, self.version)
        return self.tensor


class SavedShard:
    """A ``DTensor`` that autograd has saved: its local tensor, and how to make the ``DTensor`` of it again."""

    __slots__ = ("kind", "local", "mesh", "placements", "shape", "strides")

    def __init__(self, tensor: Any, local: SavedView) -> None:
        self.kind, self.mesh, self.placements = type(tensor), tensor.device_mesh, tensor.placements
        self.local, self.shape, self.strides = local, tensor.shape, tensor.stride()

    @property
    def stretch(self) -> Stretch:
        """The stretch in which it was saved."""
        return self.local.stretch

    def restore(self) -> Tensor:
        """The ``DTensor`` as it was saved."""
        with torch.no_grad():
            restored: Tensor = self.kind.from_local(
                self.local.restore(), self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.strides
            )
        return restored


def changed_in_place(tensor: Tensor, version: int) -> RuntimeError:
    """The error for a saved tensor that something has changed since, as torch words it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead. "
        "Hint: the backtrace of the operation is shown without activation_offload, with torch.autograd.set_detect_anomaly(True)"
    )


class Stretch:
    """The storages that forward passes save from the start of one block to the start of the next.

    Args:
        index: its place among the stretches whose tensors are still needed.
        leaves: whether its tensors go to the host.
        stream: the stream that computes it.
    """

    __slots__ = ("__weakref__", "departure", "index", "is_used", "leaves", "storages", "stream")

    def __init__(self, index: int, leaves: bool, stream: torch.Stream | None) -> None:
        self.index, self.leaves, self.stream = index, leaves, stream
        self.storages: list[ReferenceType[SavedStorage]] = []
        self.departure: Crossing | None = None
        self.is_used = False
        """Whether a backward pass has begun to use it."""

    def living(self) -> list[SavedStorage]:
        """The storages that a node still needs, each once."""
        return list(dict.fromkeys(storage for reference in self.storages if (storage := reference()) is not None))


class HostCopies:
    """Copies of storages in the host's pinned memory, and the two streams that move them. Buffers come round again from step to step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host_bytes = 0
        """Pinned memory that was taken so far (bytes)."""
        self.sent_bytes = self.returned_bytes = 0
        """Bytes that were copied to the host and back."""
        self._free: dict[int, list[Tensor]] = {}
        """Buffers that nothing needs, by their sizes."""

    def __reduce__(self) -> Any:
        return type(self), (self.device,)  # a pickle needs none of the memory

    def current_stream(self) -> torch.Stream | None:
        """The stream that computes; ``None`` in a plan."""
        return accelerator.current_stream(self.device)

    def send(self, leaving: list[SavedStorage]) -> Crossing:
        """Begin to copy storages to the host, once all that was computed so far is done."""
        out, back = self._streams()
        out.wait_stream(accelerator.current_stream(self.device))
        out.wait_stream(back)  # what a buffer held before has left it
        with out:
            for storage in leaving:
                storage.host = self.buffer(storage)
                assert storage.source is not None
                storage.host.view(storage.dtype)[: storage.elements].copy_(storage.source, non_blocking=True)
        self.sent_bytes += sum(storage.nbytes for storage in leaving)
        return Crossing(out.record_event(), out)

    def wait(self, stream: torch.Stream | None, crossing: Crossing) -> None:
        """Let the computing stream wait for copies."""
        assert stream is not None
        assert crossing.event is not None
        stream.wait_event(crossing.event)
        crossing.is_awaited = True

    def bring_back(self, returning: list[SavedStorage]) -> None:
        """Begin to copy storages back, into memory of the computing stream: it is freed in that stream's order, sooner than by ``record_stream``."""
        now, (_, back) = accelerator.current_stream(self.device), self._streams()
        for storage in returning:
            storage.restored = torch.empty(storage.elements, dtype=storage.dtype, device=self.device)
            storage.origin = now
            assert storage.departure is not None
            assert storage.departure.event is not None
            back.wait_event(storage.departure.event)
        back.wait_stream(now)  # until then that memory may be in use
        with back:
            for storage in returning:
                assert storage.restored is not None
                assert storage.host is not None
                storage.restored.copy_(storage.host.view(storage.dtype)[: storage.elements], non_blocking=True)
        arrival = Crossing(back.record_event(), back)
        for storage in returning:
            storage.arrival = arrival
            self.returned_bytes += storage.nbytes

    def forget(self, storage: SavedStorage) -> None:
        """A storage is needed no longer. Copies that the computing stream does not wait for keep its memory until they are done."""
        for tensor, crossing in ((storage.source, storage.departure), (storage.restored, storage.arrival)):
            if tensor is not None and crossing is not None and not crossing.is_awaited and crossing.stream is not None:
                tensor.record_stream(crossing.stream)
        if storage.host is not None:
            self._free.setdefault(storage.host.nbytes, []).append(storage.host)

    def buffer(self, storage: SavedStorage) -> Tensor:
        """Pinned memory for a storage: a power of two, as torch's allocator takes it."""
        size = 1 << (storage.nbytes - 1).bit_length()
        free = self._free.get(size)
        if free:
            return free.pop()
        self.host_bytes += size
        return self.allocate(size)

    def allocate(self, size: int) -> Tensor:
        """New pinned memory of ``size`` bytes."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def release(self) -> None:
        """Give back the memory that nothing needs."""
        self.host_bytes -= sum(size * len(free) for size, free in self._free.items())
        self._free.clear()
        if self.device.type != "cpu":
            empty_host_cache(self.device)

    def _streams(self) -> tuple[torch.Stream, torch.Stream]:
        """The streams of copies to the host, and of those back."""
        return side_stream(self.device, "activations out"), side_stream(self.device, "activations back")


class ActivationOffload:
    """Moves what models save for the backward pass to the host, by hooks on the models and on their blocks. One for an engine.

    Parameters and buffers, whatever lies in their memory, storages below :data:`SMALLEST_BYTES`, sparse tensors, those of subclasses other than
    ``DTensor``, and what another stream computes stay on the device; so do activations of the last block and of what follows it. Numbers are
    the same to the bit.

    Args:
        setting: ``True``, ``"blocks"`` or the number of first blocks, as the setting ``activation_offload`` has it.
        copies: moves storages; a plan puts its own in the place.
    """

    def __init__(self, setting: Offload, copies: HostCopies) -> None:
        self.setting, self.copies = setting, copies
        self._open: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._blocks_open = 0
        self._begun: nn.Module | None = None
        """The block that has begun, until its parameters are in :attr:`_owned`."""
        self._stretches: list[ReferenceType[Stretch]] = []
        self._current, self._previous = Stretch(0, False, None), Stretch(0, False, None)
        self._storages: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        """Saved storages by the address of torch's object, which is another's once that storage is freed."""
        self._owned: set[int] = set()
        """Addresses of the storages of parameters and buffers."""
        self._handles: list[Any] = []

    def __deepcopy__(self, memo: Any) -> ActivationOffload:
        return self  # a copy of the model (such as an average of weights) belongs to the same engine

    def __reduce__(self) -> Any:
        return ActivationOffload, (self.setting, self.copies)

    def attach(self, model: nn.Module) -> None:
        """Attach hooks to a model and its blocks, after all other transforms and its sharding, so that one that an earlier run has sharded gets them.

        Args:
            model: the model, inside of a strategy's wrapper.

        Raises:
            ValueError: the model has too few blocks.
        """
        name, blocks = type(user_module(model)).__name__, list(reversed(blocks_of(model, [], 0)))
        if not blocks:
            raise ValueError(
                f"activation_offload={self.setting!r}: {name} has no repeated blocks; define blocks(self) that returns the modules whose activations "
                "leave the device one after another"
            )
        maximum = len(blocks) - 1
        first = maximum if isinstance(self.setting, (bool, str)) else self.setting
        if not 1 <= first <= maximum:
            raise ValueError(
                f"activation_offload={self.setting!r}: {name} has {len(blocks)} block{'s' * (maximum != 0)}, and the last one's activations stay, "
                f"as the backward pass needs them first: {f'give at most {maximum}' if maximum else 'define blocks(self) with more blocks'}"
            )
        self._handles += [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]
        for number, block in enumerate(blocks):
            self._handles += around_calls(block, partial(self._begin_block, number < first), self._end_block)

    def release(self) -> None:
        """Remove the hooks, and give the pinned memory back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._begun = None
        self._current, self._previous = Stretch(0, False, None), Stretch(0, False, None)
        self.copies.release()

    # -- the forward pass -------------------------------------------------------------------------------------------------------------------

    def _enter(self, model: nn.Module, args: Any) -> None:
        if not self._open and torch.is_grad_enabled():
            self._blocks_open = 0
            self._owned.clear()
            self._note_parameters(model)
            self._next_stretch(leaves=self.setting is True)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__()

    def _begin_block(self, leaves: bool, block: nn.Module, args: Any) -> None:
        if self._open and torch.is_grad_enabled():
            self._blocks_open += 1
            self._begun = block
            self._next_stretch(leaves)

    def _end_block(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._blocks_open and torch.is_grad_enabled():
            self._blocks_open -= 1

    def _note_parameters(self, module: nn.Module) -> None:
        """Remember where the values of parameters and buffers are."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._owned.add(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)

    def _next_stretch(self, leaves: bool) -> None:
        """End the current stretch, whose storages begin to leave, and give back the memory of the one before it."""
        before, ended, now = self._previous, self._current, self.copies.current_stream()
        if before.departure is not None:
            self._give_back(before, now)
        if ended.leaves:
            staying = [s for s in ended.living() if s.source is not None and s.departure is None and s.is_unchanged]
            if staying:
                ended.departure = departure = self.copies.send(staying)
                for storage in staying:
                    storage.departure = departure
        while self._stretches and self._stretches[-1]() is None:
            self._stretches.pop()
        self._previous, self._current = ended, Stretch(len(self._stretches), leaves, now)
        self._stretches.append(ref(self._current))

    def _give_back(self, stretch: Stretch, now: torch.Stream | None) -> None:
        """Free the device's memory of a stretch whose storages are on the host by now, or soon: the computing stream waits for them."""
        departure, stretch.departure = stretch.departure, None
        assert departure is not None
        leaving = [s for s in stretch.living() if s.departure is departure and s.source is not None]
        if leaving:
            self.copies.wait(now, departure)
            for storage in leaving:
                if storage.is_unchanged:  # else its copy may have changed on the way
                    storage.source = None

    # -- saved tensors ----------------------------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> SavedView | KeptTensor | SavedShard:
        stretch = self._current
        if not stretch.leaves or (self.setting is not True and not self._blocks_open) or _is_parameter(tensor):
            return KeptTensor(stretch, tensor)
        if hasattr(tensor, "placements"):
            local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
            storage = self._storage_of(local, stretch)
            return (
                KeptTensor(stretch, tensor)
                if storage is None
                else SavedShard(tensor, SavedView(stretch, storage, local))
            )
        storage = self._storage_of(tensor, stretch)
        return KeptTensor(stretch, tensor) if storage is None else SavedView(stretch, storage, tensor)

    def _storage_of(self, tensor: Tensor, stretch: Stretch) -> SavedStorage | None:
        """The storage of a saved tensor, if it may leave the device."""
        if tensor.device != self.copies.device or tensor.layout is not torch.strided or is_wrapper(tensor):
            return None
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if self._begun is not None:  # FSDP has gathered its parameters by now
            self._note_parameters(self._begun)
            self._begun = None
        if size < SMALLEST_BYTES or key in self._owned or tensor.is_conj() or tensor.is_neg():
            return None
        earlier = self._storages.get(key)
        if (
            earlier is not None
            and earlier.alive() is storage
            and earlier.version == tensor._version
            and earlier.nbytes == size
        ):
            stretch.storages.append(ref(earlier))
            return earlier
        is_small_part = tensor.numel() * tensor.element_size() * LEAST_SHARE < size
        if is_small_part or size % tensor.element_size() or self.copies.current_stream() != stretch.stream:
            return None
        saved = self._storages[key] = SavedStorage(tensor, storage, self.copies)
        stretch.storages.append(ref(saved))
        return saved

    def _unpack(self, saved: SavedView | KeptTensor | SavedShard) -> Tensor:
        stretch = saved.stretch
        if not stretch.is_used:
            stretch.is_used = True
            self._bring_back(stretch)
            if (earlier := self._before(stretch)) is not None:
                self._bring_back(earlier)
        return saved.restore()

    def _bring_back(self, stretch: Stretch) -> None:
        """Begin to copy a stretch's storages back, unless they are on the device."""
        away = [s for s in stretch.living() if s.source is None and s.restored is None]
        if away:
            self.copies.bring_back(away)

    def _before(self, stretch: Stretch) -> Stretch | None:
        """The stretch before ``stretch``, of those that are still needed: the backward pass comes to it next."""
        for reference in reversed(self._stretches[: stretch.index]):
            if (earlier := reference()) is not None:
                return earlier
        return None


def _is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one, as the transposed weight of a linear layer."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
