"""Records how the parameters of a model get their values while it is built without memory for them, and repeats that for one of them at a time.

:class:`Recording` sees every operation of torch inside its block. Tensors that no parameter has yet are ordinary ones. A parameter moves to the
meta device when a module registers it (:func:`engine.strategies.deferred_init.values_recorded`); from then on its operations give it no values,
and are only noted. :func:`recorded_value` repeats what one parameter's values depend on, with the random numbers of the recording.

So values are those of one process that builds the whole model: random numbers are drawn in the order of the user's program, one tensor at a time;
the state of the generator before each draw is noted, so that any tensor's draws can be repeated on their own. What needs a value at once, such as
``.item()``, gets it in the same way. Draws happen twice on the rank that repeats them, and once on the others.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from engine.utils import accelerator, torch_private
from engine.utils.checksums import checksum
from engine.utils.host_memory import ReturnOfFreed
from engine.utils.torch_private import DispatchMode, TensorBase, flatten, is_wrapper, map_only

_SMALL = 1 << 20
"""Bytes up to which a tensor from outside the recording is copied, in case it changes before the operation is repeated."""

_META = torch.device("meta")

_OVERWRITES = frozenset(
    (
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "cauchy_",
        "log_normal_",
        "geometric_",
        "fill_",
        "zero_",
        "copy_",
    )
)
"""Operations in place whose result does not depend on the values before."""

_CHANGES_RUNNING_STATISTICS = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))
"""Operations that change their arguments ``running_mean`` and ``running_var``, though their schema does not say so."""


class Memory:
    """The bytes of one storage of the recorded program: who writes them, in which order, and whether this process has them now."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.writers: list[Operation] = []
        self.real: weakref.ref[torch.UntypedStorage] | None = None
        """The storage with the current values; ``None``: there never was one."""

    def storage(self) -> torch.UntypedStorage | None:
        """The storage with the current values, if something still refers to it."""
        return None if self.real is None else self.real()


@dataclass(eq=False)
class Constant:
    """A tensor from outside the recording, as an operation has read it."""

    tensor: Tensor
    version: int | None = None
    checksum: int | None = None

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Constant:
        """The ``tensor`` as it is now: a copy of a small one."""
        tensor = tensor.detach()
        if tensor.numel() * tensor.element_size() <= _SMALL:
            return cls(tensor.clone())
        return cls(tensor, tensor._version, checksum(tensor) if tensor.device.type == "cpu" else None)

    def value(self) -> Tensor:
        """The tensor.

        Raises:
            ValueError: its values have changed since.
        """
        is_changed = self.version is not None and self.tensor._version != self.version
        if is_changed or (self.checksum is not None and checksum(self.tensor) != self.checksum):
            raise ValueError(
                f"configure_model gave a parameter the values of a tensor of shape {list(self.tensor.shape)} that has changed since, before the "
                "parameter got its memory: leave that tensor as it is, or give the parameter its values in init_weights(self, module)"
            )
        return self.tensor


@dataclass(frozen=True, eq=False)
class View:
    """A tensor of the recorded program: a part of a :class:`Memory`."""

    memory: Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    flags: tuple[bool, bool]
    """Whether the tensor is a conjugate, and a negative, of what is in memory."""

    @classmethod
    def from_tensor(cls, tensor: Tensor, memory: Memory) -> View:
        flags = (tensor.is_conj(), tensor.is_neg())
        return cls(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), flags)

    def tensor_on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor on a ``storage`` that stands for the memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.flags[0]:
            tensor = torch_private.conjugate_view(tensor)
        return torch_private.negative_view(tensor) if self.flags[1] else tensor

    def covers_memory(self) -> bool:
        """Whether every byte of the memory is in this tensor, once."""
        dense = sorted(zip(self.stride, self.size, strict=True))
        expected = 1
        for stride, size in dense:
            if size != 1 and stride != expected:
                return False
            expected *= size
        return not self.offset and self.size.numel() * self.dtype.itemsize == self.memory.nbytes


@dataclass(eq=False)
class Operation:
    """One operation of the recorded program, with a :class:`View` or :class:`Constant` in place of each tensor."""

    index: int
    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    reads: list[Memory] = field(default_factory=list)
    """The memories whose values the result depends on."""
    outputs: list[View | None] = field(default_factory=list)
    """By leaf of the result, the new tensor; ``None`` for other values, and for a part of an argument."""
    generator: torch.Generator | None = None
    state: Tensor | None = None
    """The state of ``generator`` before the operation, if it draws random numbers."""
    overwrites: list[Memory] = field(default_factory=list)
    """The memories whose earlier values do not matter after this operation."""

    def run(self, storages: dict[Memory, torch.UntypedStorage]) -> None:
        """Repeat the operation on ``storages``, which get an entry for each new memory."""
        args, kwargs = _with_tensors((self.args, self.kwargs), storages)
        if self.generator is None or self.state is None:
            result = self.function(*args, **kwargs)
        else:
            before = self.generator.get_state()
            self.generator.set_state(self.state)
            try:
                result = self.function(*args, **kwargs)
            finally:
                self.generator.set_state(before)
        for view, value in zip(self.outputs, flatten(result)[0], strict=True):
            if view is not None:
                storages[view.memory] = _laid_out(view, value)


_RECORDED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The :class:`Memory` for which each storage on the meta device stands."""

_COUNT = itertools.count(1)
"""The indices of operations, in the order of the program: one recording may go on with what another has recorded."""


def is_recorded(tensor: Tensor) -> bool:
    """Whether a tensor on the meta device has values that :func:`recorded_value` can give."""
    return has_no_memory(tensor) and _memory_without_values(tensor) is not None


@torch.no_grad()
def recorded_value(tensor: Tensor) -> Tensor:
    """A new tensor with the values that one process would have in ``tensor``, on the device that the user's program chose.

    Raises:
        ValueError: a tensor that the values depend on has changed since.
    """
    memory = _memory_without_values(tensor)
    assert memory is not None
    with torch_private.without_modes():
        value = _repeated(View.from_tensor(tensor, memory))
        return value.clone() if value.untyped_storage().nbytes() != value.numel() * value.element_size() else value


def active() -> Recording | None:
    """The recording in whose block this is called."""
    return next((mode for mode in torch_private.dispatch_modes() if isinstance(mode, Recording)), None)


class Recording(DispatchMode):
    """A context manager that records operations on parameters without memory, and the sources of their values."""

    def __init__(self) -> None:
        super().__init__()
        self._is_running = False  # functions of torch that are written in Python must see what a tensor is
        self._memories: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """The :class:`Memory` of each storage with values that the block has created."""
        self._freed = ReturnOfFreed()  # most tensors with memory are freed when a module registers them

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor that the block has created; ``None`` for others."""
        storage = tensor.untyped_storage()
        memory: Memory | None = (_RECORDED if has_no_memory(tensor) else self._memories).get(storage)
        return memory

    def __enter__(self) -> Self:
        for name, attribute in self._attributes().items():
            setattr(torch.Tensor, name, attribute)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name in self._attributes():
            delattr(torch.Tensor, name)

    def _attributes(self) -> dict[str, Any]:
        """Attributes of tensors inside the block. A recorded tensor looks like one with memory: ``torch.nn.init`` does nothing to others."""

        def device(tensor: Tensor) -> torch.device:
            memory = _memory_without_values(tensor) if has_no_memory(tensor) and not self._is_running else None
            actual: torch.device = TensorBase.device.__get__(tensor)
            return actual if memory is None else memory.device

        def is_meta(tensor: Tensor) -> bool:
            return has_no_memory(tensor) and (self._is_running or _memory_without_values(tensor) is None)

        def set_data(tensor: Tensor, value: Tensor) -> None:
            lacks_values = is_recorded(tensor) and not has_no_memory(value)
            TensorBase.data.__set__(tensor, self.without_memory(value) if lacks_values else value)

        def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _is_foreign(tensor) and not has_no_memory(tensor):
                self._memories.pop(tensor.untyped_storage(), None)  # numpy may change it, unseen
            return TensorBase.numpy(tensor, *args, **kwargs)

        data = property(TensorBase.data.__get__, set_data)
        return {"device": property(device), "is_meta": property(is_meta), "data": data, "numpy": numpy}

    def stand_in(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """A parameter without memory that has the recorded values of ``parameter`` and shares further changes with it; ``None`` if the block has not
        created its values."""
        if self.memory_of(parameter) is None:
            return None
        return nn.Parameter(self.without_memory(parameter), parameter.requires_grad)

    def without_memory(self, tensor: Tensor) -> Tensor:
        """A tensor without memory that has the values of ``tensor``, and shares further changes with one that the block has created."""
        with torch_private.without_modes(), torch.no_grad():
            memory = self.memory_of(tensor)
            if memory is None:
                operation = self._operation(torch.ops.aten.clone.default, (tensor,), {}, (tensor,), ())
                result = _on_meta(tensor.contiguous())
                self._finish(operation, result, (), ())
                return result
            storage = torch.empty(memory.nbytes, dtype=torch.uint8, device=_META).untyped_storage()
            _RECORDED[storage] = memory
            return View.from_tensor(tensor, memory).tensor_on(storage)

    def with_memory(self, tensor: Tensor) -> Tensor:
        """A tensor with the values that were recorded for ``tensor``, which shares further changes with it."""
        with torch_private.without_modes(), torch.no_grad():
            memory = _memory_without_values(tensor)
            assert memory is not None
            storage = memory.storage()
            if storage is None:
                storage = _repeated(View.from_tensor(tensor, memory)).untyped_storage()
                self._has_values(memory, storage)
            return View.from_tensor(tensor, memory).tensor_on(storage)

    def _has_values(self, memory: Memory, storage: torch.UntypedStorage) -> None:
        """Note that ``storage`` has the current values of ``memory``."""
        self._memories[storage], memory.real = memory, weakref.ref(storage)
        self._freed.count(memory.nbytes)

    def reserved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor like ``tensor`` whose values will be recorded as those of one on ``device``; it has no memory."""
        with torch_private.without_modes():
            reserved = torch.empty_like(tensor, device=_META)
            _RECORDED[reserved.untyped_storage()] = Memory(device, reserved.untyped_storage().nbytes())
            return reserved

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self._is_running = self._is_running, True
        try:
            return self._dispatch(function, args, kwargs or {})
        finally:
            self._is_running = outer

    def _dispatch(self, function: Any, args: Any, kwargs: Any) -> Any:
        leaves = flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if function is torch.ops.aten.scalar_tensor.default and kwargs.get("device") == _META:
            # The number of an assignment to a part of a tensor without memory.
            return self._run(function, args, {**kwargs, "device": torch.device("cpu")}, (), (), {})
        if any(map(_is_foreign, tensors)) or any(has_no_memory(t) and self.memory_of(t) is None for t in tensors):
            return function(*args, **kwargs)
        written = _written(function, args, kwargs)
        if not any(map(has_no_memory, tensors)):
            return self._run(function, args, kwargs, tensors, written, {})
        if not written and any(result.alias_info is not None for result in function._schema.returns):
            return function(*args, **kwargs)  # a view
        return self._run_without_values(function, args, kwargs, tensors, written)

    def _run(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        values: Mapping[int, Tensor],
    ) -> Any:
        """Run an operation with values, and record it if something that is recorded may depend on it.

        Args:
            values: the values of tensors without memory, by their ids.
        """
        operation = self._operation(function, args, kwargs, tensors, written)
        real_args, real_kwargs = map_only(Tensor, lambda t: values.get(id(t), t), (args, kwargs))
        result = function(*real_args, **real_kwargs)
        if any(map(has_no_memory, _tensors(result))):  # the user asks for a tensor without values
            return result
        originals = {id(value): t for t in tensors if (value := values.get(id(t))) is not None}
        self._finish(operation, result, [values.get(id(t), t) for t in tensors], written)
        return map_only(Tensor, lambda t: originals.get(id(t), t), result)

    def _run_without_values(
        self, function: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], written: Sequence[Tensor]
    ) -> Any:
        """Run an operation of which an argument has no memory: for its shapes, if that is enough, and otherwise with repeated values."""
        written_ids = {id(t) for t in written}
        draws, reads = _draws(function), [t for t in tensors if id(t) not in written_ids]
        keeps_values = any(not has_no_memory(t) or self._storage_with_values(t) is not None for t in written)
        if not keeps_values and not _needs_values(function) and not (draws and any(map(has_no_memory, reads))):
            operation = self._operation(function, args, kwargs, tensors, written)
            shapes = {id(t): t if has_no_memory(t) else _on_meta(t) for t in tensors}
            meta_args, meta_kwargs = map_only(Tensor, lambda t: shapes[id(t)], (args, kwargs))
            try:
                result = function(*meta_args, **{name: v for name, v in meta_kwargs.items() if name != "generator"})
            except (NotImplementedError, RuntimeError):
                result = None
            if result is not None and all(map(has_no_memory, _tensors(result))):
                if draws:
                    self._draw(function, args, kwargs)
                self._finish(operation, result, [shapes[id(t)] for t in tensors], written)
                originals = {id(shapes[id(t)]): t for t in tensors}
                return map_only(Tensor, lambda t: originals.get(id(t), t), result)
        return self._run(function, args, kwargs, tensors, written, self._values(tensors))

    def _values(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """The values of the tensors among ``tensors`` that have no memory, by their ids."""
        values: dict[int, Tensor] = {}
        repeated: dict[Memory, torch.UntypedStorage] = {}
        for tensor in tensors:
            if has_no_memory(tensor) and id(tensor) not in values:
                memory = self.memory_of(tensor)
                assert memory is not None
                storage = memory.storage() or repeated.get(memory)
                if storage is None:
                    storage = repeated[memory] = _repeated(View.from_tensor(tensor, memory)).untyped_storage()
                    self._freed.count(memory.nbytes)
                values[id(tensor)] = View.from_tensor(tensor, memory).tensor_on(storage)
        return values

    def _storage_with_values(self, tensor: Tensor) -> torch.UntypedStorage | None:
        memory = self.memory_of(tensor)
        return None if memory is None else memory.storage()

    def _draw(self, function: Any, args: Any, kwargs: Any) -> None:
        """Draw the random numbers of an operation on memory of this moment, so that the generator continues as in one process."""
        storages: dict[int, torch.UntypedStorage] = {}

        def scratch(tensor: Tensor) -> Tensor:
            memory = self.memory_of(tensor)
            if memory is None or not has_no_memory(tensor):
                return tensor
            storage = storages.get(id(memory))
            if storage is None:
                storage = torch.empty(memory.nbytes, dtype=torch.uint8, device=memory.device).untyped_storage()
                storages[id(memory)] = storage
                self._freed.count(memory.nbytes)
            return View.from_tensor(tensor, memory).tensor_on(storage)

        real_args, real_kwargs = map_only(Tensor, scratch, (args, kwargs))
        function(*real_args, **real_kwargs)

    # -- recording --------------------------------------------------------------------------------------------------------------------------

    def _operation(
        self, function: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], written: Sequence[Tensor]
    ) -> Operation | None:
        """The operation as it is recorded, before it runs; ``None`` if it changes only tensors from outside the recording."""
        if written and all(self.memory_of(t) is None for t in written):
            return None
        memories = {id(t): self.memory_of(t) for t in tensors}

        def recorded(tensor: Tensor) -> View | Constant:
            memory = memories[id(tensor)]
            return Constant.from_tensor(tensor) if memory is None else View.from_tensor(tensor, memory)

        recorded_args, recorded_kwargs = map_only(Tensor, recorded, (args, kwargs))
        operation = Operation(next(_COUNT), function, recorded_args, recorded_kwargs)
        written_ids = {id(t) for t in written}
        operation.reads = [m for t in tensors if id(t) not in written_ids and (m := memories[id(t)]) is not None]
        name = function._schema.name.rpartition("::")[2]
        for tensor in written:
            memory = memories[id(tensor)]
            if memory is not None:
                is_first = tensor is next(iter(args), None)
                if name in _OVERWRITES and is_first and View.from_tensor(tensor, memory).covers_memory():
                    operation.overwrites += [memory] if memory not in operation.reads else []
                else:
                    operation.reads.append(memory)
        if _draws(function):
            device = next((m.device for m in memories.values() if m is not None), None)
            operation.generator = _generator(kwargs, device)
            operation.state = operation.generator.get_state()
        return operation

    def _finish(
        self, operation: Operation | None, result: Any, arguments: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        """Record an operation that has run: the memories that it has written, and those that it has created."""
        if operation is None:
            return
        old = {id(t.untyped_storage()) for t in arguments if not _is_foreign(t)}
        for tensor in written:
            if (memory := self.memory_of(tensor)) is not None and memory.writers[-1:] != [operation]:
                memory.writers.append(operation)
        fresh: dict[int, Memory] = {}
        for leaf in flatten(result)[0]:
            view = None
            if isinstance(leaf, Tensor) and not _is_foreign(leaf) and id(leaf.untyped_storage()) not in old:
                view = View.from_tensor(leaf, self._created(leaf, operation, fresh))
            operation.outputs.append(view)

    def _created(self, tensor: Tensor, operation: Operation, fresh: dict[int, Memory]) -> Memory:
        """The memory of a tensor that ``operation`` has created."""
        storage = tensor.untyped_storage()
        memory = fresh.get(id(storage))
        if memory is None:
            lacks_values = has_no_memory(tensor)
            device = next((m.device for m in operation.reads), torch.device("cpu")) if lacks_values else tensor.device
            memory = fresh[id(storage)] = Memory(device, storage.nbytes())
            if lacks_values:
                _RECORDED[storage] = memory
            else:
                self._has_values(memory, storage)
            memory.writers.append(operation)
            operation.overwrites.append(memory)
        return memory


def _repeated(view: View) -> Tensor:
    """Repeat the operations on which the values of ``view`` depend."""
    chosen: dict[int, Operation] = {}
    demands: list[tuple[Memory, int | None]] = [(view.memory, None)]
    seen: set[tuple[int, int | None]] = set()
    while demands:
        memory, before = demands.pop()
        if (id(memory), before) in seen:
            continue
        seen.add((id(memory), before))
        for operation in reversed(memory.writers):
            if before is not None and operation.index >= before:
                continue
            if operation.index not in chosen:
                chosen[operation.index] = operation
                demands += [(read, operation.index) for read in operation.reads]
            if memory in operation.overwrites:
                break
    storages: dict[Memory, torch.UntypedStorage] = {}
    for index in sorted(chosen):
        chosen[index].run(storages)
    return view.tensor_on(_storage(view.memory, storages))


def _storage(memory: Memory, storages: dict[Memory, torch.UntypedStorage]) -> torch.UntypedStorage:
    """The storage that stands for ``memory``; a new one if its earlier values do not matter."""
    if memory not in storages:
        storages[memory] = torch.empty(memory.nbytes, dtype=torch.uint8, device=memory.device).untyped_storage()
    return storages[memory]


def _with_tensors(tree: Any, storages: dict[Memory, torch.UntypedStorage]) -> Any:
    """Replace each :class:`View` and :class:`Constant` in ``tree`` by a tensor."""

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, Constant):
            return leaf.value()
        return leaf.tensor_on(_storage(leaf.memory, storages))

    return map_only((View, Constant), tensor, tree)


def _laid_out(view: View, value: Tensor) -> torch.UntypedStorage:
    """The storage of an operation's result, in the layout that was recorded."""
    is_same = (value.stride(), value.storage_offset()) == (view.stride, view.offset)
    if is_same and value.untyped_storage().nbytes() >= view.memory.nbytes:
        return value.untyped_storage()
    storage = torch.empty(view.memory.nbytes, dtype=torch.uint8, device=value.device).untyped_storage()
    view.tensor_on(storage).copy_(value)
    return storage


def _memory_without_values(tensor: Tensor) -> Memory | None:
    if _is_foreign(tensor):
        return None
    memory: Memory | None = _RECORDED.get(tensor.untyped_storage())
    return memory


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device, whatever it looks like inside a recording."""
    is_meta: bool = TensorBase.is_meta.__get__(tensor)
    return is_meta


def _is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor has no storage of its own, as subclasses that wrap tensors, and sparse ones."""
    return tensor.layout != torch.strided or is_wrapper(tensor)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _needs_values(function: Any) -> bool:
    """Whether the layout of an operation's result is known only once it has run: that of a matrix decomposition."""
    name = function._schema.name.rpartition("::")[2]
    return name.startswith(("linalg_", "_linalg_", "geqrf", "ormqr", "cholesky", "lu_", "_lu_", "triangular_"))


def _draws(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags


def _generator(kwargs: Mapping[str, Any], device: torch.device | None) -> torch.Generator:
    """The generator from which an operation draws: the one that it was given, or its device's."""
    generator: torch.Generator | None = kwargs.get("generator")
    if generator is not None:
        return generator
    device = torch.device(kwargs.get("device") or device or "cpu")
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = accelerator.module(device)
    default: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return default


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes."""
    schema = function._schema
    name = schema.name.rpartition("::")[2]
    hidden = ("running_mean", "running_var") if name in _CHANGES_RUNNING_STATISTICS else ()
    written: list[Tensor] = []
    for index, argument in enumerate(schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or argument.name in hidden:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += _tensors(value)
    return written


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor))
