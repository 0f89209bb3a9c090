"""Parameters that no rank's backward pass has reached: their gradients become ``None``, as in one process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.utils import accelerator

_numbers = itertools.count()


class UnreachedParameters:
    """Finds the parameters that no rank has reached among those for which this rank reduces a zero, without a collective. Created by all ranks
    together.

    A rank that has reached all parameters does nothing. Another rank writes into the job's store which ones it has not reached, before it takes
    part in the last reduction of the backward pass. Once this reduction is complete on this rank, all ranks have begun it, and so have written: a
    parameter is unreached if all ranks have written so. This costs such a rank a wait for its device and three requests to the store.

    Args:
        ranks: the ranks that reduce these gradients.
        parameters: the parameters, in the same order on all ranks.
    """

    def __init__(self, ranks: Group, parameters: Sequence[Tensor]) -> None:
        self._ranks, self._numbers = ranks, {id(p): number for number, p in enumerate(parameters)}
        self._parameters = parameters
        # The counts may differ: a rank may have had a model of its own, or an error in an earlier training of this process.
        number = max(gather_json(ranks, next(_numbers)))
        self._topic = f"unreached/{number}/{ranks.ranks[0]}"
        self._store: Any = None
        self.missing: dict[int, Tensor] = {}
        """The parameters, by id, that neither this rank has reached in this window nor, as far as it knows, another."""
        self._reached: set[int] = set()
        self._round = 0
        self._written: str | None = None
        self._asks = False

    def begin(self) -> None:
        """Begin a backward pass."""
        self.missing.clear()
        self._asks = False

    def add(self, missing: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Record that this rank reduces zeros for the ``missing`` ones of these ``parameters``."""
        missing_ids = {id(p) for p in missing}
        if len(missing_ids) < len(parameters):
            self._reached.update(id(p) for p in parameters if id(p) not in missing_ids)
            if self.missing:  # a block may run several times in a pass
                self.missing = {number: p for number, p in self.missing.items() if number not in self._reached}
        # One with a gradient was reached by a rank in an earlier pass of the window.
        self.missing.update((id(p), p) for p in missing if p.grad is None and id(p) not in self._reached)

    def ask(self) -> None:
        """Write which parameters this rank has not reached, before the last reduction."""
        if self.missing:
            key, store = self._key(self._ranks.rank), self._connected()
            store.set(key, json.dumps(sorted(self._numbers[id(p)] for p in self.missing.values())))
            store.check([key])  # a set has no answer
            self._asks = True

    def clear(self) -> None:
        """Clear the gradients of parameters that no rank has reached, after the last reduction. A rank that has asked waits for its device."""
        if self._asks:
            if self._ranks.device.type != "cpu":  # gloo's reductions are complete when they return
                accelerator.current_stream(self._ranks.device).synchronize()
            keys = [self._key(rank) for rank in range(self._ranks.world_size)]
            store = self._connected()
            if store.check(keys):
                unreached = set.intersection(*(set(json.loads(store.get(key))) for key in keys))
                for number in unreached:
                    self._parameters[number].grad = None
            if self._written is not None:
                store.delete_key(self._written)  # all ranks have read it before they began this pass
            self._written = self._key(self._ranks.rank)
        self.missing.clear()
        self._reached.clear()
        self._round += 1

    def _key(self, rank: int) -> str:
        return f"{self._round}/{rank}"

    def _connected(self) -> Any:
        if self._store is None:
            store: Any = self._ranks.store
            self._store = dist.PrefixStore(self._topic, store.clone())
        return self._store
