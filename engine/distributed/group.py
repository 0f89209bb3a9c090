"""The processes of one job, as seen by one of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from engine.distributed import process_groups
from engine.distributed.environments import Environment
from engine.distributed.own_process import JoinedGroups, own_process
from engine.utils import accelerator as accelerators
from engine.utils import torch_private

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device: the facts on which strategies and transforms depend."""

    type: str = "cpu"
    """Torch's name for the device type: ``"cpu"``, ``"cuda"``, ..."""
    has_fp8: bool = False
    """Whether the device has hardware for fp8 matrix products."""

    @property
    def is_accelerator(self) -> bool:
        """Whether the device is an accelerator, with memory of its own: any device but the CPU."""
        return self.type != "cpu"


class Group:
    """The processes of one job. Created by :func:`engine.distributed.join.join`.

    ``rank``, ``world_size``, ``local_rank``, ``is_main`` (whether this is rank 0) and this process's ``device`` are plain
    attributes. ``cpu`` is a separate gloo process group for flags, sizes, objects and CPU tensors, so that these never mix with the
    gradients' collectives; with one process it is ``None``, and every collective is a no-op. ``wide`` is the process group for
    the device's tensors; ``None`` means torch's default group.
    """

    __slots__ = ("_joined", "cpu", "device", "environment", "is_main", "local_rank", "rank", "wide", "world_size")

    def __init__(self, environment: Environment, device: torch.device, joined: JoinedGroups | None = None) -> None:
        self.environment = environment
        self.device = device
        self.rank, self.world_size, self.local_rank = environment.rank, environment.world_size, environment.local_rank
        self.is_main = environment.rank == 0
        self.cpu: dist.ProcessGroup | None = joined.cpu if joined else None
        self.wide: dist.ProcessGroup | None = None
        self._joined = joined

    @property
    def kind(self) -> DeviceKind:
        """The kind of this process's device, which is that of every rank."""
        return DeviceKind(self.device.type, accelerators.has_fp8(self.device))

    @property
    def ranks(self) -> list[int]:
        """The ranks of the job that are in this group."""
        return [self.environment.rank] if self.cpu is None else dist.get_process_group_ranks(self.cpu)

    @property
    def failed(self) -> bool:
        """Whether a run has ended with an error, so that this process leaves the job without waiting for the others. The next ``join`` clears it."""
        return self._joined is not None and self._joined.failed

    @failed.setter
    def failed(self, value: bool) -> None:
        if self._joined is not None:
            self._joined.failed = value

    @property
    def store(self) -> dist.Store | None:
        """The store of the rendezvous; ``None`` with one process."""
        return self._joined.store if self._joined is not None else None

    def limit(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives in all process groups. Those that have started keep theirs."""
        if self.cpu is not None:
            for group in torch_private.process_groups():
                torch_private.set_timeout(group, timeout)

    def part(self, parts: Sequence[Sequence[int]]) -> Group:
        """Create the subgroup of this rank's part, with ranks counted from 0. A collective; every rank is in exactly one of ``parts``."""
        cpu, wide = self.made_once(("part", *map(tuple, parts)), lambda: self._groups(parts))
        ranks = next(part for part in parts if self.rank in part)
        subgroup = Group(self.environment, self.device, self._joined)
        subgroup.rank, subgroup.world_size = ranks.index(self.rank), len(ranks)
        subgroup.is_main, subgroup.cpu, subgroup.wide = subgroup.rank == 0, cpu, wide
        return subgroup

    def _groups(self, parts: Sequence[Sequence[int]]) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The process groups of this rank's subgroup, for CPU tensors and for the device's tensors."""
        shared = [ranks for ranks in parts if len(ranks) > 1]
        cpu = process_groups.on_cpu(shared) if shared else None
        return cpu, cpu if self.device.type == "cpu" or not shared else self.part_for_device(parts)

    def part_for_device(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The process group of this rank's part for the device's tensors, created once; ``None`` for a rank in no part. A collective.

        There is no gloo group for the part. A part of all ranks has torch's default group.
        """
        if len(parts) == 1 and sorted(parts[0]) == list(range(dist.get_world_size())):
            return dist.group.WORLD
        key = ("divided", *(tuple(ranks) for ranks in parts))
        return self.made_once(key, lambda: process_groups.on_device(parts, self.device))

    def made_once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Call ``make`` at the first call with this key, and keep its result, a mesh or process groups, for the life of the job.

        Each process group has threads and sockets of its own, and a sharded module uses its mesh even after the run. So all runs
        share them, rather than create and leak their own.
        """
        if self._joined is None:
            return make()
        if key not in self._joined.made_objects:
            self._joined.made_objects[key] = make()
        return self._joined.made_objects[key]  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until every rank calls this. Only the processes wait for each other, not for work that is queued on a device."""
        if self.cpu is not None:
            dist.barrier(group=self.cpu)

    def close(self) -> None:
        """Leave the job now rather than at the interpreter's exit, for every ``Group`` of this process. Repeated calls do nothing.

        A default group that the user has initialised is not destroyed.
        """
        if self._joined is not None and self._joined is own_process.joined:
            own_process.leave()
        self._joined = self.cpu = None
