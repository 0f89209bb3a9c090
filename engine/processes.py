"""The processes of a job as a raw loop sees them: who am I, wait, gather, reduce, split."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.distributed import collectives
from engine.distributed.group import Group
from engine.step.window import Window
from engine.utils.tree import map_tensors

F = TypeVar("F", bound=Callable[..., Any])


class Processes:
    """The part of :class:`engine.Engine` that concerns processes. The names are Accelerate's."""

    group: Group
    data_group: Group
    window: Window
    _trigger = False

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.group.device

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank among those of its machine."""
        return self.group.local_rank

    @property
    def num_processes(self) -> int:
        """World size."""
        return self.group.world_size

    @property
    def is_main_process(self) -> bool:
        return self.group.is_main

    @property
    def is_local_main_process(self) -> bool:
        return self.group.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return self.group.rank == self.group.world_size - 1

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, on the main process only."""
        if self.is_main_process:
            builtins.print(*args, **kwargs)

    def on_main_process(self, function: F) -> F:
        """Decorator: the function runs on the main process only and gives ``None`` elsewhere."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: F) -> F:
        """Decorator: the function runs on one process of each machine."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """Decorator: the function runs on the last process only."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: F | None = None, process_index: int = 0) -> Any:
        """Decorator: the function runs on that process only."""
        if function is None:
            return lambda f: self.on_process(f, process_index)
        return self._only(function, lambda: self.process_index == process_index)

    def _only(self, function: F, here: Callable[[], bool]) -> F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return run  # type: ignore[return-value]

    def wait_for_everyone(self) -> None:
        """Return once every process has called this."""
        self.group.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the block before the others do (to download or build something once)."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """On each machine, its main process runs the block before the others do."""
        yield from self._first(self.is_local_main_process)

    def _first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:  # an exception in the first process still releases the others: later barriers stay matched
            if first:
                self.wait_for_everyone()

    def gather(self, tree: Any) -> Any:
        """The tensors of all processes, joined along dim 0 (scalars: stacked), on every process. Lengths may differ."""
        if self.num_processes == 1:
            return map_tensors(lambda t: t.detach() if t.ndim else t.detach().reshape(1), tree)
        return collectives.gather(self.group, tree)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like :meth:`gather`, without the samples that a micro-batch repeats only to keep the ranks matched.

        Ranks that hold parts of one model see the same samples, which come once. Anything that holds no tensor is gathered as objects:
        a list from each process, joined.
        """
        size = self.window.share.size
        has_tensors = False

        def own(tensor: Tensor) -> Tensor:
            nonlocal has_tensors
            has_tensors = True
            return tensor if size or not tensor.ndim else tensor[:0]

        kept = map_tensors(own, input_data)
        if has_tensors and not use_gather_object:
            return collectives.gather(self.data_group, map_tensors(Tensor.detach, kept))
        objects = input_data if isinstance(input_data, list) else [input_data]
        return [item for part in collectives.gather_object(self.data_group, objects if size else []) for item in part]

    def reduce(self, tree: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """``tree`` reduced over the processes by ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``, times ``scale``.

        Raises:
            ValueError: for another reduction.
        """
        reduced = collectives.all_reduce(self.group, tree, reduction)
        return reduced if scale == 1.0 else map_tensors(lambda t: t * scale, reduced)

    def broadcast(self, tree: Any, from_process: int = 0) -> Any:
        """One process's tensors, on every process."""
        return collectives.broadcast(self.group, tree, from_process)

    def pad_across_processes(self, tree: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded along ``dim`` to the longest of all processes."""
        return collectives.pad_across_processes(self.group, tree, dim, pad_index, pad_first)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's contiguous part of a list, tuple, tensor, or dict of them; the first ones get one more when it does not divide.

        Args:
            apply_padding: repeat the last item so that all parts are equally long.
        """
        yield self._part(inputs, apply_padding)

    def _part(self, inputs: Any, pad: bool) -> Any:
        if isinstance(inputs, Mapping):
            lengths = {key: len(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"split_between_processes got a dict whose values differ in length: {lengths}")
            return {key: self._part(value, pad) for key, value in inputs.items()}
        if not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
            raise TypeError(f"split_between_processes takes a list, tuple, tensor or a dict of them, got {type(inputs).__name__}")
        part, larger = divmod(len(inputs), self.num_processes)
        low = self.process_index * part + min(self.process_index, larger)
        mine = inputs[low : low + part + (self.process_index < larger)]
        missing = (part + (larger > 0)) - len(mine)
        if pad and missing and len(inputs):
            last = inputs[-1:]
            mine = torch.cat([mine, *[last] * missing]) if isinstance(inputs, Tensor) else mine + last * missing
        return mine

    def set_trigger(self) -> None:
        """Raise a flag that :meth:`check_trigger` shows to every process."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has raised the flag since the last check; it is lowered again. All processes call this together."""
        raised = bool(collectives.all_reduce(self.group, torch.tensor(self._trigger, dtype=torch.int32), "max"))
        if raised:
            self._trigger = False
        return raised
