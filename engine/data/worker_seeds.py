"""Random numbers of worker processes, which must differ between ranks that read different samples."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from engine.data.order import mixed
from engine.distributed.group import Group


class WorkerSeeds:
    """Lets the worker processes of a loader draw other random numbers on each rank, where the ranks' own generators would give all the same.

    Rank 0's workers draw what they would draw anyway, and this process's random numbers go on as if nothing were done.

    Args:
        loader: a copy of the user's loader (:func:`engine.data.user_loaders.altered`).
        generator: the generator of the user's loader, from which a loader draws its workers' seed; ``None``: the process's.
    """

    def __init__(self, loader: DataLoader[Any], generator: torch.Generator | None, group: Group) -> None:
        self.generator, self._loader, self._group = generator, loader, group

    def separate(self) -> None:
        """Separate the seeds of the workers that the loader's next iterator starts."""
        loader, rank = self._loader, self._group.rank
        starts = loader.num_workers > 0 and loader._iterator is None  # persistent workers keep their numbers
        if rank and starts:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
            object.__setattr__(loader, "generator", torch.Generator().manual_seed(mixed(seed, rank)))
