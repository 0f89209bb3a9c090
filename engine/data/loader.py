"""The loader that the engine hands back: the user's own, on the device, in the engine's order, telling the engine what each batch weighs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.data.feed import feed_for
from engine.distributed.group import Group
from engine.gradients import Window
from engine.seed import isolated
from engine.tree import move


class PreparedLoader:
    """Iterates a user's loader for one rank. Attributes that are not its own (``dataset``, ``batch_size``, ...) are the user's loader's."""

    def __init__(self, loader: Any, *, group: Group, window: Window, seed: int, dtype: torch.dtype | None = None, place: bool = True) -> None:
        self.loader = loader
        self.limit: int | None = None
        """At most so many micro-batches of each rank in an epoch."""
        self._group, self._window, self._dtype, self._place = group, window, dtype, place
        self._feed = feed_for(loader, group, seed)
        self._epoch = 0
        self._begun = False
        self._start = 0
        self._given = 0
        self.hooks: tuple[Callable[..., Any], Callable[..., Any], int] | None = None
        """Called with (batch, loader's index) before and after a batch is moved."""
        self.window_size: int | None = None
        """Micro-batches in a window; by default the engine's. Evaluation sets 1."""

    def __getattr__(self, name: str) -> Any:
        # What a wrapper cannot know: subclasses of DataLoader carry attributes that users read (``loader.tokenizer``).
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.loader,)  # a copy is the plain loader: handles of this job's processes cannot travel

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch."""
        length = self.length
        if length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return length

    @property
    def length(self) -> int | None:
        """Like ``len``, but ``None`` when it is not known."""
        return self._feed.length(self.limit)

    @property
    def epoch(self) -> int:
        """Which epoch's order is given out; each pass begins the next one unless ``set_epoch`` is called."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Give out the order of that epoch in the next pass."""
        if epoch != self._epoch:
            self._epoch, self._start = epoch, 0
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._epoch, self._start = self._epoch + 1, 0
        self._begun = True
        window = self._window
        moves = self._place and (self._group.device.type != "cpu" or self._dtype is not None)
        place = self._through_hooks if self.hooks else self._move
        moves = moves or self.hooks is not None
        start, self._start, self._given = self._start, 0, 0
        # Making a DataLoader's iterator takes a random number. In the middle of an epoch that has happened before.
        with isolated() if start else contextlib.nullcontext():
            micros = self._feed.micros(self._epoch, start, self.window_size or window.size, self.limit)
        outer = window.share
        try:
            for batch, share in micros:
                window.share = share
                self._given += 1
                yield place(batch) if moves else batch
        except GeneratorExit:  # left early: worker processes are not to wait for the next pass
            self._feed.iterator = None
            raise
        finally:
            window.share = outer
        if not self._given and not start:
            raise ValueError(
                f"{type(self.loader).__name__} gave no batch in epoch {self._epoch}: "
                "it is empty, or a generator, which can be read only once (pass a list, a DataLoader or an object whose __iter__ starts anew)"
            )

    def close(self) -> None:
        """End the loader's worker processes now: the traceback of an error would keep them as long as it is looked at."""
        end = getattr(self._feed.iterator, "_shutdown_workers", None)  # a DataLoader has no public way
        self._feed.iterator = None
        if end is not None:
            end()

    def resume(self, epoch: int, position: int) -> None:
        """Begin the next pass at ``position`` of ``epoch``."""
        self._epoch, self._start, self._begun = epoch, position, False

    def _move(self, batch: Any) -> Any:
        return move(batch, self._group.device, self._dtype)

    def _through_hooks(self, batch: Any) -> Any:
        assert self.hooks is not None
        before, after, index = self.hooks
        return after(self._move(before(batch, index)), index)

    def reseed(self, seed: int) -> None:
        """Give out another seed's order."""
        self._feed = feed_for(self.loader, self._group, seed)

    @property
    def stride(self) -> int:
        """What a full window adds to the position."""
        return self._feed.advance(self.window_size or self._window.size)




def _itself(loader: Any) -> Any:
    return loader
