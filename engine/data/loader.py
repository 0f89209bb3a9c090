"""The prepared loader: it yields the user's batches on the device, in the engine's order, each with its share of its window."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from engine.data.combined import CombinedLoader, combined_feed
from engine.data.feed import Feed, LoaderUse, MicroBatch
from engine.data.indexed import indexed_feed
from engine.data.packed_rows import note_restarts
from engine.data.prefetch import SideStream, ahead
from engine.data.stream import StreamFeed
from engine.data.user_loaders import altered
from engine.distributed.group import Group
from engine.step.position import NOT_FROM_LOADER, Share
from engine.step.window import Window
from engine.utils import accelerator
from engine.utils.log import warn_once
from engine.utils.seed import isolated
from engine.utils.tree import move


class BatchTransfer:
    """Moves batches to a device. If the module or data module has transfer hooks, a run uses :class:`engine.loop.loaders.HookedTransfer` instead."""

    def move(self, batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
        """Return the batch on the device.

        Args:
            dtype: the dtype for floating point tensors; ``None``: unchanged.
        """
        moved = move(batch, device, dtype)
        note_restarts(batch, moved)
        return moved


@dataclass(frozen=True, slots=True)
class Start:
    """Where in the data a pass starts."""

    epoch: int = 0
    position: int = 0
    state: Any = None
    """The state that the feed needs besides the position (:meth:`engine.data.feed.Feed.state`)."""


@dataclass(slots=True)
class Pass:
    """A pass over the data, and its progress."""

    start: Start
    window: int = 1
    """The number of micro-batches in a full window."""
    yielded: int = 0
    """Micro-batches of this rank so far."""
    share: Share = NOT_FROM_LOADER
    """The share of the latest micro-batch in its window."""
    over: bool = False
    """True if the data is exhausted."""

    @property
    def after_window(self) -> bool:
        """True if the latest window was yielded completely."""
        return not self.yielded % self.window or self.share.last

    @property
    def windows(self) -> int:
        """The number of complete windows so far."""
        return -(-self.yielded // self.window) if self.after_window else self.yielded // self.window


class PreparedLoader:
    """Iterates over a user's loader for one rank. Other attributes (``dataset``, ``batch_size``, ...) are those of the user's loader."""

    def __init__(
        self,
        loader: Any,
        *,
        group: Group,
        window: Window,
        seed: int,
        dtype: torch.dtype | None = None,
        place: bool = True,
    ) -> None:
        self.loader = loader
        self.limit: int | None = None
        """The maximum number of micro-batches per rank in an epoch."""
        self._group, self._window, self._seed, self._dtype, self._moves = group, window, seed, dtype, place
        self.use = LoaderUse()
        """Facts about the loop that reads this loader, for its feed."""
        self._feed = feed_for(loader, group, seed, use=self.use)
        self._feistel = True
        self._next: Start | None = Start()
        """Where the next pass starts; ``None``: at the beginning of the epoch after the latest pass's."""
        self._pass = Pass(Start())
        """The latest pass."""
        self.transfer: BatchTransfer | None = None
        """The run's transfer with hooks, which may read the model and so must be called just before their batch is used; ``None``: no hooks."""
        self.window_size: int | None = None
        """The number of micro-batches in a window; ``None``: the engine's. Evaluation sets 1."""

    def __getattr__(self, name: str) -> Any:
        # Not a fixed list, since users read attributes of their DataLoader subclasses (``loader.tokenizer``).
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or pickle is the user's loader: handles of this job's processes cannot be copied.
        return _plain_loader, (self.loader,)

    def __len__(self) -> int:
        """The number of micro-batches of this rank in an epoch."""
        length = self.length
        if length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return length

    @property
    def length(self) -> int | None:
        """Like ``len``, but ``None`` if unknown."""
        return self._feed.length(self.limit)

    @property
    def whole_length(self) -> int | None:
        """Like :attr:`length`, without :attr:`limit`."""
        return self._feed.length(None)

    @property
    def batches_given(self) -> int:
        """The number of this epoch's micro-batches that this rank has received, including those before a resume."""
        return self._pass.start.position // self._feed.stride(1) + self._pass.yielded

    @property
    def samples(self) -> int | None:
        """The number of samples (or ready batches, if :attr:`position` counts those) per epoch; ``None`` if it depends on the epoch or world size."""
        return self._feed.units

    @property
    def epoch(self) -> int:
        """The epoch whose order is used. Each pass uses the order of the next epoch, unless ``set_epoch`` is called."""
        return self._pass.start.epoch if self._next is None else self._next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch in the next pass."""
        if self._next is None or epoch != self._next.epoch:
            self._next = Start(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, for loops that do not handle shares: while a batch is used, its share is that of the engine's window.

        Passes may be nested: when one ends, the window has the share from before it again.
        """
        position = self._window.position
        with position.nested(), contextlib.closing(self.micro_batches()) as micro_batches:
            for batch, share in micro_batches:
                position.share = share
                yield batch
                del batch  # so that the next batch can use its memory

    def micro_batches(self) -> Generator[MicroBatch, None, None]:
        """Yield the batches of the next pass, each with its share of its window."""
        device, dtype = self._group.device, self._dtype
        start = self._next or Start(self.epoch + 1)
        current = self._pass = Pass(start, self.window_size or self._window.position.size)
        self._next = None
        moves = self._moves and (device.type != "cpu" or dtype is not None)
        moves = moves or self.transfer is not None
        transfer = self.transfer or BatchTransfer()
        # Creating a DataLoader's iterator draws a random number. In the middle of an epoch, and with persistent workers in any epoch but the first,
        # that was done before the resume, so it is undone.
        begun_before = start.position or (start.epoch > 0 and getattr(self.loader, "persistent_workers", False))
        with torch.random.fork_rng(devices=()) if begun_before else contextlib.nullcontext():
            batches = self._feed.micro_batches(start.epoch, start.position, current.window, self.limit, start.state)
        # With hooks nothing is copied ahead: they may read the model, and are called when their batch is next.
        if moves and not self.transfer and accelerator.has_streams(device):
            batches, moves = ahead(batches, SideStream(device, dtype), self._feed.reads_ahead), False
        try:
            for batch, share in batches:
                current.share = share
                current.yielded += 1
                yield transfer.move(batch, device, dtype) if moves else batch, share
                del batch  # so that the next batch can use its memory
            current.over = True
            # Feeds that count batches do not exhaust the iterator, which is released here: if garbage collection found it in a cycle, it would
            # wait 5 s for each worker, because the threads of its queues are stopped before its __del__ asks the workers to end.
            self._feed.stop_pass()
        except GeneratorExit:  # the caller ended the pass early: worker processes must not wait for the next one
            self._feed.stop_pass()
            raise
        if not current.yielded and not start.position:
            raise ValueError(
                f"{type(self.loader).__name__} yielded no batch in epoch {start.epoch}: "
                "it is empty, or a generator, which can be read only once (pass a list, a DataLoader or an object whose __iter__ starts again)"
            )

    def first(self) -> Any:
        """Read the first batch of the next pass without changing that pass. All ranks call this together, between two passes.

        ``None`` for data whose position cannot be set (a stream, a sampler with a state of its own): the pass would lack this batch.
        """
        if self.samples is None or self.carried() is not None:
            return None
        start = self._next or Start(self.epoch + 1)
        with isolated(), contextlib.closing(self.micro_batches()) as micro_batches:
            batch = next((batch for batch, _ in micro_batches), None)
        self.close()
        self._next = start
        return batch

    def units(self, start: int, count: int) -> list[int] | None:
        """The indices of ``count`` samples of the epoch from ``start`` on, in the order in which the ranks together get them; of ready batches their
        numbers. ``None`` for streams and several loaders, and for a user's sampler before its order is drawn. All ranks call this together."""
        return self._feed.indices_at(self.epoch, start, count) or None

    @property
    def without_units(self) -> str:
        """A name of the kind of data, for texts, where :meth:`units` gives nothing."""
        return self._feed.without_units

    def close(self) -> None:
        """End the loader's worker processes now. Otherwise the traceback of an error could keep them alive."""
        self._feed.close()

    def resume(self, epoch: int, position: int, state: Any = None) -> None:
        """Start the next pass at ``position`` of ``epoch``.

        Args:
            state: the result of :meth:`state` at that position. Without it, data that needs a state is read from the epoch's start, with a warning.
        """
        self._next = Start(epoch, position, state)

    def restart(self) -> None:
        """Start the next pass at the beginning of its epoch, even after a :meth:`resume` at a later position; no effect once a pass has begun."""
        if self._next is not None:
            self._next = Start(self._next.epoch)

    @property
    def skipped(self) -> int:
        """The number of micro-batches per rank that the next pass skips at the start of its epoch."""
        return 0 if self._next is None else self._next.position // self._feed.stride(1)

    @property
    def position(self) -> int:
        """The position in the epoch's data at the end of the latest complete window, in samples of all ranks, or in batches if the
        data's items already are batches."""
        if self._next is not None:
            return self._next.position
        return self._pass.start.position + self._pass.windows * self._feed.stride(self._pass.window)

    def state(self, position: int | None = None) -> Any:
        """The state that a resume needs besides the position, by default at the latest window's end: a tree of plain values and tensors, or ``None``.

        Args:
            position: the start or the end of the current window, whose step may not be done yet.

        Raises:
            ValueError: ``position`` is neither.
        """
        start = self._next
        if start is not None:
            return start.state if start.position or start.state is not None else self.carried()
        if position == 0:
            return self._feed.start_state()
        current, after_window = self.position, self._pass.after_window
        if position is not None and position != current:
            if not after_window or position != current - self._feed.stride(self._pass.window):
                raise ValueError(
                    f"state(position={position}): {type(self.loader).__name__} is at {current}; only the latest window's ends are known"
                )
            after_window = False
        return self._feed.state(after_window)

    def carried(self) -> Any:
        """The state at an epoch's end from which the next epoch begins, for data that continues across passes; else ``None``."""
        return self._feed.next_pass_state()

    def state_dict(self) -> dict[str, Any]:
        """The position at the end of the latest complete window: ``epoch``, ``position``, ``stream`` (:meth:`state`) and, unless it is ``None``,
        :attr:`order`. It is valid for any number of processes; of ``presharded`` data for the same number, and for this rank only."""
        order = {} if self.order is None else {"order": self.order}
        if self._next is None and self._pass.over:
            return {"epoch": self.epoch + 1, "position": 0, "stream": self.carried(), **order}
        return {"epoch": self.epoch, "position": self.position, "stream": self.state(), **order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue at the position of a :meth:`state_dict`. A collective."""
        self.reseed(self._seed, state_dict.get("order"))
        self.resume(state_dict["epoch"], state_dict["position"], state_dict["stream"])

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Create a loader that starts with this loader's next pass, but skips the first ``num_batches`` micro-batches per rank of that pass.

        Raises:
            ValueError: ``num_batches`` is negative.
        """
        if num_batches < 0:
            raise ValueError(f"num_batches={num_batches} must be 0 or more")
        seed, dtype = self._seed, self._dtype
        loader = PreparedLoader(
            self.loader, group=self._group, window=self._window, seed=seed, dtype=dtype, place=self._moves
        )
        loader.reseed(seed, self.order)
        loader.limit, loader.transfer, loader.window_size = self.limit, self.transfer, self.window_size
        loader.use.evaluates, loader.use.ranks_draw_apart = self.use.evaluates, self.use.ranks_draw_apart
        start = self._next or Start(self.epoch + 1)
        loader.resume(start.epoch, start.position + num_batches * self._feed.stride(1))
        # The new loader's first pass also counts as a pass of this one.
        self._next, self._pass = (
            None,
            Pass(start, over=True),
        )
        return loader

    @property
    def order(self) -> str | None:
        """The kind of shuffle that a resume must use again: ``"feistel"`` if it is computed index by index; ``None`` if it is stored as a list."""
        return "feistel" if self._feed.feistel else None

    def reseed(self, seed: int, order: str | None = "feistel") -> None:
        """Use the order of another seed. A collective.

        Args:
            order: the saved value of :attr:`order`; with ``None`` large shuffles are stored as lists, too.

        Raises:
            ValueError: ``order`` is unknown.
        """
        if order not in (None, "feistel"):
            raise ValueError(f"the data's order has the unknown kind {order!r}: a newer version saved it")
        computed = order is not None
        if seed != self._seed or (computed != self._feed.feistel and computed != self._feistel):
            self._seed, self._feistel = seed, computed
            self._feed = feed_for(self.loader, self._group, seed, self._feistel, self.use)

    @property
    def stride(self) -> int:
        """How far a full accumulation window advances the position, in samples or in batches."""
        return self._feed.stride(self.window_size or self._window.position.size)


def _plain_loader(loader: Any) -> Any:
    """Return the loader, as what a pickled :class:`PreparedLoader` becomes."""
    return loader


def feed_for(data: Any, group: Group, seed: int, feistel: bool = True, use: LoaderUse | None = None) -> Feed:
    """Create the feed for the user's data. A collective.

    Args:
        feistel: compute large shuffles rather than store them (see :class:`engine.data.order.FeistelIndices`).
        use: facts about the loop that reads the data; the loop may change them before the first pass.

    Raises:
        TypeError: ``data`` cannot be iterated, or is a dataset without a loader.
    """
    use = use or LoaderUse()
    if isinstance(data, CombinedLoader):
        return combined_feed(data, group, seed, feistel, use)
    feed = indexed_feed(data, group, seed, feistel)
    if feed is not None:
        feed.use = use
        return feed
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"a loader gives batches, and {type(data).__name__} is a dataset of samples: give DataLoader(dataset, batch_size=32, shuffle=True), "
            "or batch_size=None if its items are batches already"
        )
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise TypeError(
            f"a loader must be iterable (a DataLoader, a list of batches, a generator), got {type(data).__name__}: {data!r:.80}"
        )
    return StreamFeed(data, group, seed, use=use)


def in_dataset_order(loader: Any) -> Any:
    """For ``overfit_batches``: the loader itself if its order is fixed, else a copy that reads the dataset in order, with a warning.

    Raises:
        ValueError: a user's batch sampler makes the batches.
    """
    if isinstance(loader, PreparedLoader):
        loader = loader.loader
    if isinstance(loader, CombinedLoader):
        members = [in_dataset_order(member) for member in loader.members]
        if all(new is member for new, member in zip(members, loader.members, strict=True)):
            return loader
        return loader.with_members(members)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if type(sampler) is SequentialSampler:
        return loader
    if batches is not None and type(batches) is not BatchSampler:
        raise ValueError(
            f"overfit_batches needs the same batches in every epoch, and {type(batches).__name__} makes those of {type(loader).__name__}: "
            "give a DataLoader with batch_size= and shuffle=False, or a list of batches"
        )
    warn_once(
        f"overfit_batches: {type(loader).__name__} is read in the dataset's order, not in that of {type(sampler).__name__}"
    )
    order = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    if batches is None:
        return altered(loader, sampler=order)
    return altered(loader, sampler=order, batch_sampler=BatchSampler(order, batches.batch_size, batches.drop_last))
