"""The processes of one job, as each of them sees it."""

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
    """A kind of device, as strategies and transforms ask for it."""

    type: str = "cpu"
    """Torch's name of the device type: ``"cpu"``, ``"cuda"``, ..."""
    has_fp8: bool = False
    """Whether the device multiplies matrices in fp8 itself."""

    @property
    def is_accelerator(self) -> bool:
        """Check whether the device has memory of its own: all but the CPU."""
        return self.type != "cpu"


class Group:
    """The processes of one job. Created by :func:`engine.distributed.join.join`.

    ``rank``, ``world_size``, ``local_rank``, ``is_main`` (rank 0) and ``device`` (of this process) are plain
    attributes. ``cpu`` is a gloo process group besides the default one, for flags, sizes, objects and CPU tensors, so that these never
    mix with the gradients' collectives; ``None`` with one process, and then every collective is a no-op. ``wide`` is the
    process group for the device's tensors; ``None`` is torch's default one.
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
        """The kind of device that each rank of the job has."""
        return DeviceKind(self.device.type, accelerators.has_fp8(self.device))

    @property
    def failed(self) -> bool:
        """Set to True after an error: then the process leaves without waiting for the others. The next ``join`` clears it."""
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
        """The subgroup in ``parts`` that contains this rank, with ranks from 0. A collective; every rank is in exactly one."""
        cpu, wide = self.made_once(("part", *map(tuple, parts)), lambda: self._groups(parts))
        ranks = next(part for part in parts if self.rank in part)
        subgroup = Group(self.environment, self.device, self._joined)
        subgroup.rank, subgroup.world_size = ranks.index(self.rank), len(ranks)
        subgroup.is_main, subgroup.cpu, subgroup.wide = subgroup.rank == 0, cpu, wide
        return subgroup

    def _groups(self, parts: Sequence[Sequence[int]]) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The process groups of this rank's subgroup: for CPU tensors and for the device's."""
        shared = [ranks for ranks in parts if len(ranks) > 1]
        cpu = process_groups.on_cpu(shared) if shared else None
        return cpu, cpu if self.device.type == "cpu" or not shared else self.part_for_device(parts)

    def part_for_device(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The process group for the device's tensors of this rank's part, made once; ``None`` for a rank in no part. A collective.

        The process group has no gloo group beside it. For a part with all ranks it is torch's default group.
        """
        if len(parts) == 1 and sorted(parts[0]) == list(range(dist.get_world_size())):
            return dist.group.WORLD
        key = ("divided", *(tuple(ranks) for ranks in parts))
        return self.made_once(key, lambda: process_groups.on_device(parts, self.device))

    def made_once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The result of ``make`` at the first call with this key, kept for the life of the job: meshes and process groups.

        Each process group has its own threads and sockets, and a sharded module uses its mesh also after the run: so runs
        share them, and do not leak them.
        """
        if self._joined is None:
            return make()
        if key not in self._joined.made_objects:
            self._joined.made_objects[key] = make()
        return self._joined.made_objects[key]  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until every rank calls this. On the CPU: it does not wait for work queued on a device."""
        if self.cpu is not None:
            dist.barrier(group=self.cpu)

    def close(self) -> None:
        """Leave the job now rather than at the interpreter's exit, for every ``Group`` of this process. Repeated calls do nothing.

        A default group that the user initialised is kept.
        """
        if self._joined is not None and self._joined is own_process.joined:
            own_process.leave()
        self._joined = self.cpu = None
