"""A run's loaders as the user gave them, for user code that iterates over them outside of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.compat.lightning.before_run import BeforeRun
from engine.data.loader import PreparedLoader
from engine.distributed.group import Group
from engine.engine import Engine
from engine.loop.loaders import is_loader
from engine.loop.run import Run
from engine.step.window import Window


class RankLoader:
    """A loader of a run with several ranks: its length is this rank's, and iterating over it yields this rank's batches on the CPU, independently of
    the run's own pass. Other attributes are those of the user's loader. All ranks must start a pass together.
    """

    def __init__(self, loader: Any, prepared: PreparedLoader | None, engine: Engine, group: Group) -> None:
        self.loader, self._prepared, self._engine, self._group = loader, prepared, engine, group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """This rank's micro-batches per epoch, ignoring the limits in the settings."""
        length = (self._prepared or self._independent_loader()).whole_length
        if length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        independent = self._independent_loader()
        if self._prepared is not None:
            independent.set_epoch(self._prepared.epoch)
        return iter(independent)

    def _independent_loader(self) -> PreparedLoader:
        """A new prepared loader over the same data, independent of the run's."""
        return PreparedLoader(self.loader, group=self._group, window=Window(), seed=self._engine.seed, place=False)


def loaders_as_given(run: Run | BeforeRun, kind: str) -> Any:
    """The ``"train"``, ``"validation"``, ``"test"`` or ``"predict"`` loaders of ``run``, in the list, dict or other form in which they were given.
    On one process they are the user's own objects, on several a :class:`RankLoader` for each; ``None`` before they are known.
    """
    if kind not in run.loaders.sources:
        return None
    sources, prepared = run.loaders.sources[kind], run.loaders.prepared[kind]
    if run.world_size == 1:
        return sources
    assert isinstance(run, Run)  # nothing is loaded before it starts

    def rank_loader(loader: Any, number: int) -> RankLoader:
        prepared_from = prepared[number].loader if number < len(prepared) else None
        prepared_loader = prepared[number] if prepared_from is loader else None
        return RankLoader(loader, prepared_loader, run.engine, run.loaders.ranks_of(kind))

    if isinstance(sources, Mapping):
        return {name: rank_loader(loader, number) for number, (name, loader) in enumerate(sources.items())}
    if isinstance(sources, (list, tuple)) and sources and all(map(is_loader, sources)):
        return [rank_loader(loader, number) for number, loader in enumerate(sources)]
    return rank_loader(sources, 0)
