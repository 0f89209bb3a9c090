"""The prepared loader: it yields the user's batches on the device, in the engine's order, each with its share of its window."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from engine.data.combined import CombinedLoader, combined_feed
from engine.data.drawn import DrawnDataset
from engine.data.feed import Feed, LoaderUse, MicroBatch
from engine.data.indexed import indexed_feed
from engine.data.loader_facts import check_loaders_alike
from engine.data.order import LARGE, kind_of_shuffles, read_kind_of_shuffles
from engine.data.packed_rows import length_schedule_of, note_restarts
from engine.data.prefetch import SideStream, ahead
from engine.data.stream import StreamFeed
from engine.data.user_loaders import altered, tokens_per_sample
from engine.distributed.group import Group
from engine.step.position import NOT_FROM_LOADER, Share
from engine.step.window import Window
from engine.utils import accelerator
from engine.utils.log import logger, warn_once
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
    """The position in the data at which a pass starts."""

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
        self._computed_from = LARGE
        """The number of samples from which on shuffles are computed rather than stored."""
        self._feed = feed_for(loader, group, seed, self._computed_from, self.use)
        self._next: Start | None = Start()
        """Where the next pass starts; ``None``: at the beginning of the epoch after the latest pass's."""
        self._pass = Pass(Start())
        """The latest pass."""
        self._skipping_loader: PreparedLoader | None = None
        """The loader that :meth:`skipping` has created, while its first pass counts as the latest one of this loader."""
        self._samples_of_step: int | None = None
        self._continued: Mapping[str, Any] | None = None
        """The state from which a mixture continues, if one was loaded."""
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
        """The number of batches, as ``len`` returns it; ``None`` if unknown."""
        return self._feed.length(self.limit)

    @property
    def whole_length(self) -> int | None:
        """The number of batches without :attr:`limit`; ``None`` if unknown."""
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
    def samples_of_round(self) -> int | None:
        """The number of samples in a full micro-batch of every rank; ``None``: it differs, or is not known before a batch is read."""
        return self._feed.samples_of_round

    @property
    def positions_of_round(self) -> int:
        """The advance of the :attr:`position` by a micro-batch of every rank."""
        return self._feed.stride(1)

    @property
    def positions_of_pass(self) -> int | None:
        """The :attr:`position` at the end of an epoch's data, apart from a last window that is not full; ``None``: not known."""
        length, units = self.length, self._feed.units
        positions = None if length is None else length * self._feed.stride(1)
        return positions if positions is None or units is None else min(positions, units)

    @property
    def samples_of_pass(self) -> int | None:
        """The number of samples that all ranks read in an epoch; ``None``: it differs, or is not known."""
        if self._feed.samples_of_round is None or self._feed.units is None:
            return None
        return self.positions_of_pass

    @property
    def tokens_per_sample(self) -> int | None:
        """The number of tokens in each sample, if the data says that all have as many."""
        return tokens_per_sample(self.loader)

    @property
    def tokens_per_batch(self) -> int | None:
        """The most tokens in a batch, if the loader's batch sampler says it as ``TokenBudget`` does."""
        tokens: int | None = getattr(getattr(self.loader, "batch_sampler", None), "tokens_per_batch", None)
        return tokens

    @property
    def tells_tokens(self) -> bool:
        """Whether the data tells the tokens and samples of its batches, as those of a ``TokenBudget`` do."""
        return self._feed.tells_tokens

    def tokens_between(self, epoch: int, start: int, stop: int) -> int:
        """The tokens between two positions of an epoch, of data that :attr:`tells_tokens`. Positions: see :meth:`counts_between`."""
        start, stop = self._within_pass(start, stop)
        return self._feed.tokens_between(epoch, start, stop)

    def samples_between(self, epoch: int, start: int, stop: int) -> int:
        """The number of samples between two positions of an epoch, of data that :attr:`tells_tokens`."""
        start, stop = self._within_pass(start, stop)
        return self._feed.samples_between(epoch, start, stop)

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
        if (schedule := length_schedule_of(self.loader)) is not None:
            raise ValueError(
                f"Packed(length={schedule}): the lengths follow the clock of a training with Fit, which a loop of your own does not have: give one "
                "length, and another loader for each stage"
            )
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
        self._next = self._skipping_loader = None
        moves = self._moves and (device.type != "cpu" or dtype is not None)
        moves = moves or self.transfer is not None
        transfer = self.transfer or BatchTransfer()
        # Creating a DataLoader's iterator draws a random number. In the middle of an epoch, and with persistent workers in any epoch but the first,
        # that was done before the resume, so it is undone.
        begun_before = start.position or (start.epoch > 0 and getattr(self.loader, "persistent_workers", False))
        with torch.random.fork_rng(devices=()) if begun_before else contextlib.nullcontext():
            epoch = 0 if self.use.repeats else start.epoch
            batches = self._feed.micro_batches(epoch, start.position, current.window, self.limit, start.state)
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
        if self._next is None and self._skipping_loader is not None:
            return self._skipping_loader.state_dict()
        if self._next is None and self._pass.over:
            place = {"epoch": self.epoch + 1, "position": 0, "stream": self.carried()}
        else:
            place = {"epoch": self.epoch, "position": self.position, "stream": self.state()}
        return {**place, **self.kind_and_draws(place["epoch"], place["position"])}

    def kind_and_draws(self, epoch: int, position: int) -> dict[str, Any]:
        """The entries of a state at a position besides the position: :attr:`order`, ``draws`` of a mixture and :attr:`plan`. Most data has none."""
        draws = self._feed.draws_state(epoch, position)
        return {
            **({} if self.order is None else {"order": self.order}),
            **({} if draws is None else {"draws": draws}),
            **({} if self.plan is None else {"plan": self.plan}),
        }

    @property
    def plan(self) -> int | None:
        """A checksum of the plan by which the data is packed into rows or batches. A position in an epoch depends on it. ``None`` for other data."""
        return self._feed.plan

    def continues_draws(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether :meth:`continue_draws` continues a mixture, also if its length has changed."""
        return state_dict.get("draws") is not None and self._feed.has_draws

    def continue_draws(self, state_dict: Mapping[str, Any]) -> None:
        """Let a mixture continue what was drawn before a :meth:`state_dict`, also with other weights, sources and sizes.

        Raises:
            ValueError: the mixture has changed, and may not.
        """
        saved, is_mixture = state_dict.get("draws"), self._feed.has_draws
        if saved is not None and is_mixture:
            self._continued = state_dict
            self._feed.continue_draws(saved)
        elif (saved is not None or is_mixture) and (state_dict["epoch"] or state_dict["position"]):
            logger.warning(
                "the checkpoint's data %s, and this run's %s: samples may be repeated or left out. Continue with the data that it was saved with",
                "was a mixture" if saved is not None else "was not a mixture",
                "is one" if is_mixture else "is not one",
            )

    def counts_between(self, epoch: int, start: int, stop: int) -> dict[str, int] | None:
        """By source of a mixture, its samples between two positions of an epoch; ``None`` if the data is not a mixture with indices.

        Positions are those of :attr:`position`: the last one of an epoch may lie behind its end, which :attr:`limit` may bring forward.
        """
        start, stop = self._within_pass(start, stop)
        return self._feed.counts_between(epoch, start, stop)

    def stages_in(self, epoch: int) -> list[tuple[int, str, bool]]:
        """The stages of the weights of a mixture with indices in an epoch: position, text, and whether it is the first; ``[]`` for other data."""
        return self._feed.stages_in(epoch)

    def _within_pass(self, start: int, stop: int) -> tuple[int, int]:
        """Two positions, none of which is behind the end of an epoch's data."""
        end = min((self.length or 0) * self._feed.stride(1), self._feed.units or 0)
        return min(start, end), min(stop, end)

    def count_steps(self, samples: int) -> None:
        """Take note that a step has this number of samples, for a mixture whose weights change at a step."""
        self._samples_of_step = samples
        if self._feed.drawn is not None:
            self._feed.drawn.count_steps(samples)

    def named(self, units: list[int]) -> list[int] | list[str]:
        """The samples of :meth:`units` as texts if they are draws of a mixture, such as ``"web[183]"``; else the indices themselves."""
        drawn = self._feed.drawn
        return units if drawn is None else [drawn.place_of(draw) for draw in units]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue at the position of a :meth:`state_dict`. A collective."""
        self.reseed(self._seed, state_dict.get("order"))
        self.continue_draws(state_dict)
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
        if self._samples_of_step is not None:
            loader.count_steps(self._samples_of_step)
        if self._continued is not None:
            loader.continue_draws(self._continued)
        loader.limit, loader.transfer, loader.window_size = self.limit, self.transfer, self.window_size
        loader.use.evaluates, loader.use.ranks_draw_apart = self.use.evaluates, self.use.ranks_draw_apart
        loader.use.repeats = self.use.repeats
        start = self._next or Start(self.epoch + 1)
        loader.resume(start.epoch, start.position + num_batches * self._feed.stride(1))
        # The new loader's first pass also counts as a pass of this one.
        self._next, self._pass, self._skipping_loader = None, Pass(start, over=True), loader
        return loader

    @property
    def order(self) -> str | None:
        """The kind of shuffle that a resume must use again: from how many samples on shuffles are computed; ``None`` if all are stored."""
        return kind_of_shuffles(self._computed_from) if self._feed.feistel else None

    def reseed(self, seed: int, order: str | None = kind_of_shuffles(LARGE)) -> None:
        """Use the order of another seed. A collective.

        Args:
            order: the saved value of :attr:`order`; with ``None`` large shuffles are stored as lists, too.

        Raises:
            ValueError: ``order`` is unknown.
        """
        computed_from = read_kind_of_shuffles(order)
        changed = self._feed.feistel if order is None else computed_from != self._computed_from
        if seed != self._seed or changed:
            self._seed, self._computed_from = seed, computed_from
            self._feed = feed_for(self.loader, self._group, seed, computed_from, self.use)
            if self._samples_of_step is not None:
                self.count_steps(self._samples_of_step)

    @property
    def stride(self) -> int:
        """The advance of the position by a full accumulation window, in samples or in batches."""
        return self._feed.stride(self.window_size or self._window.position.size)


def _plain_loader(loader: Any) -> Any:
    """Return the loader, as what a pickled :class:`PreparedLoader` becomes."""
    return loader


def feed_for(data: Any, group: Group, seed: int, computed_from: int = LARGE, use: LoaderUse | None = None) -> Feed:
    """Create the feed for the user's data. A collective.

    Args:
        computed_from: the number of samples from which on shuffles are computed (:class:`engine.data.order.FeistelIndices`) rather than stored.
        use: facts about the loop that reads the data; the loop may change them before the first pass.

    Raises:
        TypeError: ``data`` cannot be iterated, or is a dataset without a loader.
        CheckError: the ranks' loaders differ.
    """
    use = use or LoaderUse()
    if group.world_size > 1:
        check_loaders_alike(data, group)
    if isinstance(data, CombinedLoader):
        return combined_feed(data, group, seed, computed_from, use)
    feed = indexed_feed(data, group, seed, computed_from)
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
    """Return the loader itself if its order is fixed, else a copy that reads the dataset in order, with a warning. ``overfit_batches`` uses it.

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
    dataset: Any = loader.dataset
    if isinstance(dataset, DrawnDataset):  # its draws would be others in each epoch
        dataset = Subset(dataset.seeded(0, False), range(len(dataset)))  # type: ignore[arg-type]
        loader = altered(loader, dataset=dataset)
    elif type(sampler) is SequentialSampler:
        return loader
    if batches is not None and type(batches) is not BatchSampler:
        raise ValueError(
            f"overfit_batches needs the same batches in every epoch, and {type(batches).__name__} makes those of {type(loader).__name__}: "
            "give a DataLoader with batch_size= and shuffle=False, or a list of batches"
        )
    if type(sampler) is not SequentialSampler:
        warn_once(
            f"overfit_batches: {type(loader).__name__} is read in the dataset's order, not in that of {type(sampler).__name__}"
        )
    order = SequentialSampler(dataset)
    if batches is None:
        return altered(loader, sampler=order)
    return altered(loader, sampler=order, batch_sampler=BatchSampler(order, batches.batch_size, batches.drop_last))
