"""A job of many ranks in one process: torch's fake process groups carry no data, and every exchange returns what it would if all ranks were like this
one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from engine.distributed.environments import Environment
from engine.distributed.group import DeviceKind, Group, Made
from engine.planning import torch_private

CPU = DeviceKind()


class SimulatedGroup(Group):
    """The group of a simulated job, as one of its ranks sees it. Strategies, meshes and engines use it as any other group. Created by
    :func:`simulated`."""

    __slots__ = ("_kind", "_objects", "failed")

    def __init__(self, environment: Environment, objects: dict[Hashable, Any], kind: DeviceKind) -> None:
        super().__init__(environment, torch.device("cpu"))
        self._objects, self._kind = objects, kind
        self.failed = False
        if self.world_size > 1:
            self.cpu = self.made_once("cpu", lambda: torch_private.simulated_group(list(range(self.world_size))))

    @property
    def kind(self) -> DeviceKind:
        return self._kind

    def part(self, parts: Sequence[Sequence[int]]) -> Group:
        ranks = next(part for part in parts if self.environment.rank in part)
        subgroup = SimulatedGroup(self.environment, self._objects, self._kind)
        subgroup.rank, subgroup.world_size = ranks.index(self.environment.rank), len(ranks)
        subgroup.is_main = subgroup.rank == 0
        subgroup.cpu = subgroup.wide = self.part_for_device(parts) if len(ranks) > 1 else None
        return subgroup

    def part_for_device(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        # Only this rank's group: a mesh of many ranks has as many others.
        own_ranks = next((tuple(part) for part in parts if self.environment.rank in part), None)
        if own_ranks is None:
            return None
        if len(own_ranks) == dist.get_world_size():
            return dist.group.WORLD
        return self.made_once(("divided", own_ranks), lambda: torch_private.simulated_group(list(own_ranks)))

    def made_once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._objects:
            with torch_private.with_values():
                self._objects[key] = make()
        return self._objects[key]


@contextmanager
def simulated(rank: int, world_size: int, num_nodes: int = 1, kind: DeviceKind = CPU) -> Iterator[SimulatedGroup]:
    """Yield the group of rank ``rank`` in a job of ``world_size`` ranks on ``num_nodes`` nodes with devices of ``kind``. The job exists within the
    block.

    Raises:
        ValueError: the ranks cannot be divided over the machines.
        RuntimeError: this process is in a job already.
    """
    if world_size % num_nodes:
        raise ValueError(f"world_size={world_size} cannot be divided over nodes={num_nodes} machines of equal size")
    if dist.is_initialized():
        raise RuntimeError(
            "this process has joined a job (torch.distributed is initialized), and a plan needs a simulated one: plan in a process of its own, "
            "with `fit plan`, or call torch.distributed.destroy_process_group() before"
        )
    ranks_per_node = world_size // num_nodes
    environment = Environment("simulated", rank, world_size, rank % ranks_per_node, ranks_per_node, num_nodes)
    if world_size == 1:
        yield SimulatedGroup(environment, {}, kind)
        return
    with torch_private.simulated_processes(rank, world_size), _equal_objects():
        yield SimulatedGroup(environment, {}, kind)


@contextmanager
def _equal_objects() -> Iterator[None]:
    """Inside the block an exchange of Python objects returns this rank's object for every rank."""

    def gather(value: Any, results: list[Any] | None) -> None:
        if results is not None:
            results[:] = [value] * len(results)

    def scatter(results: list[Any], values: list[Any] | None = None, *_: Any, **__: Any) -> None:
        results[0] = values[0] if values else None

    with (
        patch.object(dist, "all_gather_object", lambda results, value, *_, **__: gather(value, results)),
        patch.object(dist, "gather_object", lambda value, results=None, *_, **__: gather(value, results)),
        patch.object(dist, "broadcast_object_list", lambda *_, **__: None),
        patch.object(dist, "scatter_object_list", scatter),
    ):
        yield
