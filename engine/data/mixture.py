"""``Mixture``: several datasets read as one, each with its share of the samples."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from engine.data.arguments import whole_number
from engine.data.data_states import load_state, stateful, states_of
from engine.data.drawn import DrawnDataset
from engine.data.epochs import tell_epoch
from engine.data.mixture_draws import MixtureDraws, Origin, Stage, apportion, draws_of_epoch, percentages, share_texts
from engine.data.mixture_weights import parsed_weights, repeated_weights, resolved
from engine.data.order import epoch_of_repetition, mixed
from engine.data.packed_rows import LengthSchedule, length_schedule_of
from engine.data.sample_forms import SampleForms
from engine.data.source_order import SourceOrder, seed_of_source
from engine.data.stream import shuffle_buffers
from engine.data.user_loaders import tokens_per_sample
from engine.utils.errors import nearest
from engine.utils.log import warn_once

STOPS = ("first_exhausted", "all_exhausted")
ON_CHANGE = ("continue", "error")
_MOST_PASSES = 100
_ENDLESS = 1 << 62
_END = object()
"""Returned in place of a sample at the end of a source's pass."""
_COMPUTED = ("_draws", "_by_name", "_sources_by_name", "_several_at_once")
"""Attributes that are computed when they are first used."""
_CHUNK = 1024


class Mixture(DrawnDataset):
    """Datasets mixed by weights: a dataset for a ``DataLoader``, whose samples are those of the sources::

        train = Mixture({"web": web, "code": code}, weights={"web": 0.8, "code": 0.2})
        fit.run(module, DataLoader(train, batch_size=8, shuffle=True, num_workers=4))

    Draw ``k`` is a function of (seed, k), so the training sees the same samples on any number of ranks and workers, and a resume costs nothing.
    Every source is read pass by pass, also across epochs of the mixture: no sample comes again before all of its source have come. Shares are
    exact, to half the number of sources, at the end of every epoch and of every block of about 1,024 draws; within a block the order is random.
    With ``shuffle=False`` the sources take turns as evenly as their weights allow, each in its own order.

    A resume may change weights, sources and sizes: each source continues where it was. A new source starts at its beginning; a source that has
    grown finishes its pass with the new samples. The log names each change.

    Args:
        sources: by name, datasets with indices (``__getitem__`` and ``__len__``), streams (iterable datasets), further mixtures, or several kinds.
            With a stream among them the mixture is a stream.
        weights: ``"proportional"`` to the sizes (the default), ``"equal"``, or a dict of source name -> number, of which only the ratios count. By
            stage: a dict of start -> weights. Starts are samples (``5_000``, ``"5_000 samples"``), ``"2 epochs"``, tokens if all sources have the
            same ``tokens_per_sample``, or steps if ``Fit(global_batch_size=)`` is an int. A weight of 0 leaves a source out of a stage.
        temperature: ``T`` makes the shares proportional to ``weight ** (1 / T)``: above 1 they are more equal.
        repeats: instead of weights, by source name the number of passes in an epoch, such as 0.5 or 3; sources without a number are read once.
        stop: with ``"first_exhausted"`` an epoch is the longest in which no source's share is larger than the source, with ``"all_exhausted"`` the
            shortest in which every source's is at least as large. Of streams: until the first has ended, or all have.
        samples: instead of ``stop``, the number of samples in an epoch.
        source_key: under this name each sample, which must be a dict, gets the number of its source (0 for the first), for losses by source.
        on_change: ``"error"``: a resume with other weights, sources or sizes is refused.

    Raises:
        TypeError, ValueError: an argument is not usable, a source is empty, or all stages leave one out.
    """

    def __new__(cls, sources: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Create a :class:`StreamMixture` if a source is a stream."""
        values = sources.values() if isinstance(sources, Mapping) else ()
        return object.__new__(StreamMixture if cls is Mixture and any(map(_is_stream, values)) else cls)

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Any = None,
        *,
        temperature: float = 1.0,
        repeats: Mapping[str, float] | None = None,
        stop: str = "first_exhausted",
        samples: int | None = None,
        source_key: str | None = None,
        on_change: str = "continue",
    ) -> None:
        self.names, self.sources = _checked_sources(sources)
        """``names``: of the sources; ``sources``: the datasets in the same order."""
        for argument, value, choices in (("stop", stop, STOPS), ("on_change", on_change, ON_CHANGE)):
            if not isinstance(value, str) or value not in choices:
                raise ValueError(
                    f"Mixture({argument}={value!r}) is unknown{nearest(value, choices)}; possible: {', '.join(map(repr, choices))}"
                )
        if samples is not None:
            samples = whole_number(f"Mixture(samples={samples!r})", samples, "the samples in an epoch")
        if source_key is not None and not isinstance(source_key, str):
            raise TypeError(f"Mixture(source_key={source_key!r}): give the name of an entry, such as 'source'")
        if repeats is not None and (weights is not None or temperature != 1):
            raise ValueError(
                "Mixture(repeats=...) decides the weights: leave weights= and temperature= out, or give weights alone"
            )
        if stop != "first_exhausted" and (samples is not None or repeats is not None):
            other = "samples" if samples is not None else "repeats"
            raise ValueError(f"Mixture(stop={stop!r}, {other}=...): both say when an epoch ends; give one of them")
        self.stop, self.samples, self.source_key, self.on_change = stop, samples, source_key, on_change
        self.sizes = [_size_of(source) for source in self.sources]
        """By source, its number of samples; ``None``: a stream that does not tell."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if size == 0:
                raise ValueError(f"Mixture: the source {name!r} is empty: leave it out, or check its data")
        self.seed, self.shuffle = 0, True
        self._length = samples
        if repeats is None:
            self._schedule = parsed_weights(
                "proportional" if weights is None else weights, self.names, self.sizes, temperature
            )
        else:
            self._schedule, length = repeated_weights(repeats, self.names, self.sizes)
            self._length = samples or length
        self._samples_of_step: int | None = None
        self._saved: Mapping[str, Any] | None = None
        """The state of a checkpoint from which this mixture continues."""
        self._forms: SampleForms | None = None
        """The forms of the sources' samples, until each source has given one; ``None``: they are not compared."""
        self._resolve()

    # -- the arithmetic of draws --------------------------------------------------------------------------------------------------------------

    @property
    def tokens_per_sample(self) -> int | None:
        """The tokens in each sample, if all sources have an attribute of this name with one value."""
        return tokens_per_sample(*self.sources)

    def _resolve(self) -> None:
        """Find the first draws of the stages, and the length of an epoch."""
        schedule, tokens, step = self._schedule, self.tokens_per_sample, self._samples_of_step
        length = self._length
        if length is None:
            sizes = [size or 0 for size in self.sizes]
            # Stages whose start follows from the length begin after the first epoch, unless this shows that they do not. Those that begin at a
            # step do not change it, so that it is known before a training says how many samples a step has.
            length = draws_of_epoch(resolved(schedule, None, tokens, None)[0], sizes, self.stop)
            if length != draws_of_epoch(resolved(schedule, length, tokens, None)[0], sizes, self.stop):
                raise ValueError(
                    "Mixture(weights=...): a stage begins within the first epoch, at a place that depends on the epoch's length, which depends on "
                    "the stage: give its start in samples, or samples= for the length of an epoch"
                )
        self.epoch_length = length
        """The draws in an epoch."""
        self._stages, self._problem = resolved(schedule, length, tokens, step)
        self._forget()
        if self.stop == "all_exhausted":
            self._warn_of_many_passes()
        self._warn_of_few_samples()

    def _warn_of_few_samples(self) -> None:
        """Warn of a source that has a weight, and no sample in a whole epoch."""
        ends = [*(stage.start for stage in self._stages[1:]), _ENDLESS]
        for stage, end in zip(self._stages, ends, strict=True):
            draws = self.epoch_length
            if end - stage.start < draws:
                continue
            for name, share, count in zip(self.names, stage.shares, apportion(stage.weights, draws), strict=True):
                if share and not count:
                    warn_once(
                        f"an epoch of this mixture has no sample of {name!r}, whose share of its {draws:,} draws is {float(share):.3g}: the first "
                        f"comes after about {float(1 / (2 * share)):,.0f} draws. Give it more weight, a larger samples=, or remove it"
                    )

    def _warn_of_many_passes(self) -> None:
        for name, size, share in zip(self.names, self.sizes, self._stages[0].shares, strict=True):
            passes = share * self.epoch_length / (size or self.epoch_length)
            if passes > _MOST_PASSES:
                slowest = max(
                    range(len(self.names)), key=lambda s: (self.sizes[s] or 0) / (self._stages[0].shares[s] or 1)
                )
                warn_once(
                    f"an epoch of this mixture reads {name!r} {float(passes):,.0f} times, because stop='all_exhausted' waits for "
                    f"{self.names[slowest]!r}, whose weight is small for its size: give {self.names[slowest]!r} more weight, or use "
                    "stop='first_exhausted' or samples="
                )
                return

    @cached_property
    def _draws(self) -> MixtureDraws:
        if self._problem:
            raise ValueError(self._problem)
        # The arithmetic has the sources in the order of their names, so that another order in the dict changes nothing.
        saved = self._saved or {}
        order = self._by_name
        names = [self.names[s] for s in order]
        stages = [Stage(stage.start, tuple(stage.shares[s] for s in order)) for stage in self._stages]
        sizes = [None if self._is_nested(s) else self._sizes_of(s, saved) for s in order]
        origin = saved.get("origin") or {}
        counts = origin.get("counts", {})
        return MixtureDraws(
            names,
            sizes,
            stages,
            self.epoch_length,
            Origin(
                origin.get("draw", 0),
                tuple(counts.get(name, 0) for name in names),
                origin.get("epoch", 0),
                origin.get("first", 0),
            ),
            self.seed,
            self.shuffle,
        )

    @cached_property
    def _by_name(self) -> list[int]:
        """The numbers of the sources, in the order of their names."""
        return sorted(range(len(self.names)), key=self.names.__getitem__)

    def _sizes_of(self, s: int, saved: Mapping[str, Any]) -> list[tuple[int, int]]:
        """The sizes that a source has had, each with the number of the draw from which on."""
        sizes: list[tuple[int, int]] = [tuple(pair) for pair in saved.get("sizes", {}).get(self.names[s], ())]
        return sizes or [(0, self.sizes[s] or 0)]

    def _is_nested(self, s: int) -> bool:
        return hasattr(self.sources[s], "seeded")

    def _forget(self) -> None:
        """Forget computed draws."""
        for name in _COMPUTED:
            self.__dict__.pop(name, None)

    def seeded(self, seed: int, shuffle: bool) -> Mixture:
        """A copy that draws with this seed; ``shuffle=False``: the sources take turns evenly, and each is read in its own order."""
        copied = copy.copy(self)
        copied.seed, copied.shuffle, copied.sources = seed, shuffle, list(self.sources)
        for s, source in enumerate(self.sources):
            if self._is_nested(s):
                copied.sources[s] = source.seeded(seed_of_source(seed, self.names[s]), shuffle)
        copied._forget()
        return copied

    def draws(self, epoch: int) -> range:
        """The numbers of an epoch's draws.

        Raises:
            ValueError: the start of a stage is not known.
        """
        start = self._draws.start_of(
            whole_number(f"Mixture.draws({epoch!r})", epoch, "the number of an epoch", lowest=0)
        )
        return range(start, start + self.epoch_length)

    def counts(self, draws: int) -> dict[str, int]:
        """By source, its samples in the first ``draws`` draws.

        Raises:
            ValueError: ``draws`` is negative, or the start of a stage is not known.
        """
        draws = whole_number(f"Mixture.counts({draws!r})", draws, "a number of draws, 0 or more", lowest=0)
        counts = self._draws.counts(draws)
        return {name: counts[self._by_name.index(s)] for s, name in enumerate(self.names)}

    def counts_between(self, epoch: int, start: int, stop: int) -> dict[str, int]:
        before, after = (self.counts(self._draw_at(epoch, position)) for position in (start, stop))
        return {name: after[name] - before[name] for name in self.names}

    def stages_in(self, epoch: int) -> list[tuple[int, str, bool]]:
        if len(self._stages) == 1:
            return []
        start, last = self._draw_at(epoch, 0), self._draw_at(epoch, self.epoch_length)
        before = [index for index, stage in enumerate(self._stages) if stage.start <= start][-1]
        stages = [stage for stage in self._stages[before:] if stage.start < last]
        return [
            (max(0, stage.start - start), percentages(self.names, stage.shares), stage is self._stages[0])
            for stage in stages
        ]

    def locate(self, draw: int) -> tuple[str, int]:
        """The name of the source that a draw reads, and the index in this source; of a further mixture, the number of its draw.

        Raises:
            IndexError, TypeError: ``draw`` is not the number of a draw.
            ValueError: the start of a stage is not known, or a resume has changed the mixture after this draw.
        """
        draw = self._number_of_draw(draw)
        block = self._draws.block(draw)
        place = draw - block.low
        return self._draws.names[block.sources[place]], block.indices[place]

    def place_of(self, draw: int) -> str:
        name, index = self.locate(draw)
        source = self.sources[self.names.index(name)]
        return f"{name}/{source.place_of(index)}" if isinstance(source, DrawnDataset) else f"{name}[{index}]"

    def count_steps(self, samples: int) -> None:
        self._samples_of_step = samples
        self._resolve()

    def compare_samples(self) -> None:
        self._forms = SampleForms(self.names, self.sources)
        for source in self.sources:
            if isinstance(source, Mixture):
                source.compare_samples()

    @property
    def sample_keys(self) -> tuple[str, ...] | None:
        """The keys of each sample, if all sources have an attribute of this name with one value."""
        values = {getattr(source, "sample_keys", None) for source in self.sources}
        keys = values.pop() if len(values) == 1 else None
        return keys if keys is None or self.source_key is None else (*keys, self.source_key)

    @property
    def length_schedule(self) -> LengthSchedule | None:
        """The schedule of the lengths of rows, if the sources have one; all have the same then.

        Raises:
            ValueError: the sources have different ones.
        """
        return length_schedule_of(*self.sources)

    def restart(self) -> None:
        return

    # -- the state ------------------------------------------------------------------------------------------------------------------------------

    def _draw_at(self, epoch: int, position: int) -> int:
        """The number of draws before a position in an epoch."""
        draws = self._draws
        return draws.origin.first if epoch < draws.origin.epoch else draws.start_of(epoch) + position

    def _epoch_and_position(self, draw: int) -> tuple[int, int]:
        """The opposite of :meth:`_draw_at`."""
        origin = self._draws.origin
        epochs, position = divmod(draw - origin.first, self.epoch_length)
        return origin.epoch + epochs, position

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        draw = self._draw_at(epoch, position)
        origin, counts = self._draws.origin, self.counts(draw)
        saved = self._saved or {}
        nested = {
            name: source.state_at(*source._epoch_and_position(counts[name]))
            for name, source in zip(self.names, self.sources, strict=True)
            if isinstance(source, Mixture)
        }
        return {
            "draw": draw,
            "epoch": epoch,
            "position": position,
            "length": self.epoch_length,
            "counts": {**saved.get("gone", {}), **counts},
            "sizes": {
                **{name: sizes for name, sizes in saved.get("sizes", {}).items() if name not in self.names},
                **{name: list(map(list, self._sizes_of(s, saved))) for s, name in enumerate(self.names)},
            },
            "stages": self._stage_texts(),
            "origin": {
                "draw": origin.draw,
                "counts": dict(zip(self._draws.names, origin.counts, strict=True)) if origin.counts else {},
                "epoch": origin.epoch,
                "first": origin.first,
            },
            "gone": saved.get("gone", {}),
            **({"nested": nested} if nested else {}),
        }

    def changes_since(self, state: Mapping[str, Any]) -> list[str]:
        changes = self._changes(state["draw"], state, self.sizes)
        if self.epoch_length != state["length"]:
            changes.append(f"an epoch of the mixture has {self.epoch_length:,} samples, and had {state['length']:,}")
        for name, inner in self._nested_states(state):
            source = self.sources[self.names.index(name)]
            changes += [f"in {name!r}: {change}" for change in source.changes_since(inner)]
        return self._allowed(changes)

    def _changes(self, draw: int, state: Mapping[str, Any], sizes: Sequence[int | None]) -> list[str]:
        """The changes of sources, weights and sizes. ``sizes``: the present ones, as the state counts them."""
        counts, old_sizes = state["counts"], state["sizes"]
        old_stages: list[tuple[int, dict[str, str]]] = [tuple(stage) for stage in state["stages"]]
        old_names = list(old_stages[0][1])
        old_shares = [shares for start, shares in old_stages if start <= draw][-1]
        stages = [(start, shares) for start, shares in self._stage_texts()]
        shares = [share for start, share in stages if start <= draw][-1]
        where = f"from draw {draw:,} on"
        changes = []
        for s, name in enumerate(self.names):
            size, count = sizes[s], counts.get(name, 0)
            old_size = old_sizes[name][-1][1] if name in old_sizes else size
            if name not in old_names:
                again = f", and continues after {count:,} samples" if count else ""
                changes.append(
                    f"the mixture has the new source {name!r} with a share of {_percent(shares[name])} {where}{again}"
                )
            elif shares[name] != old_shares[name]:
                changes.append(
                    f"the mixture's source {name!r} has a share of {_percent(shares[name])} {where}, and had {_percent(old_shares[name])}; it "
                    f"continues after {count:,} samples"
                )
            if size is not None and size != old_size:
                order = SourceOrder(
                    [*((c, n) for c, n in old_sizes[name]), (count, size)], seed_of_source(self.seed, name), False
                )
                how = "the pass over it that has begun reads what it has not read, the new ones last"
                if size < (old_size or 0):
                    how = "the pass over it that has begun goes on without those that are gone"
                if order.cut:
                    how = "a new pass over it begins, because the rest of this one is too long to be listed: samples are left out of it"
                changes.append(
                    f"the mixture's source {name!r} has {size:,} samples {where}, and had {old_size:,}: {how}"
                )
        for name in old_names:
            if name not in self.names:
                changes.append(
                    f"the mixture no longer has the source {name!r}, which has given {counts[name]:,} samples"
                )
        following, old_following = (
            [stage for stage in all_stages if stage[0] > draw] for all_stages in (stages, old_stages)
        )
        if following != old_following and set(old_names) == set(self.names):
            changes.append(f"the mixture has other weights for the stages after draw {draw:,}")
        return changes

    def facts(self) -> dict[str, Any]:
        sizes = dict(zip(self.names, self.sizes, strict=True))
        return {"sizes of sources": sizes, "weights (by the draw at which they begin)": self._stage_texts()}

    def _stage_texts(self) -> list[list[Any]]:
        """Start and shares of each stage, for a state."""
        return [[stage.start, share_texts(self.names, stage.shares)] for stage in self._stages]

    def _allowed(self, changes: list[str]) -> list[str]:
        """The changes, unless the user wants none."""
        if changes and self.on_change == "error":
            raise ValueError(
                f"Mixture(on_change='error'): this mixture is not the one that the checkpoint was saved with: {'; '.join(changes)}. Give the mixture "
                "as it was, or on_change='continue', with which each source continues where it was"
            )
        return changes

    def _nested_states(self, state: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
        """Pairs of the name of a source that is a mixture itself, and its state."""
        nested = state.get("nested", {})
        return [
            (name, nested[name])
            for name, source in zip(self.names, self.sources, strict=True)
            if isinstance(source, Mixture) and name in nested
        ]

    def continue_from(self, state: Mapping[str, Any]) -> None:
        self._saved = self._continued(state)
        self._forget()
        for name, inner in self._nested_states(state):
            self.sources[self.names.index(name)].continue_from(inner)

    def _continued(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with the sizes of now, and with another origin of the arithmetic if something has changed."""
        draw, counts = state["draw"], state["counts"]
        sizes = {name: list(map(list, pairs)) for name, pairs in state["sizes"].items()}
        for name, size in zip(self.names, self.sizes, strict=True):
            pairs = sizes.setdefault(name, [[0, size]])
            if size is not None and pairs[-1][1] != size:
                sizes[name] = [*(pair for pair in pairs if pair[0] < counts.get(name, 0)), [counts.get(name, 0), size]]
        stages = self._stage_texts()
        is_same = stages == [list(stage) for stage in state["stages"]] and self.epoch_length == state["length"]
        origin = state["origin"]
        if not is_same:
            epoch, first = state["epoch"], draw - state["position"]
            if state["position"] >= self.epoch_length:  # the epoch is over
                epoch, first = epoch + 1, draw
            origin = {"draw": draw, "counts": dict(counts), "epoch": epoch, "first": first}
        gone = {name: count for name, count in counts.items() if name not in self.names}
        return {"sizes": sizes, "origin": origin, "gone": gone}

    # -- the dataset ------------------------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of samples in an epoch.

        Raises:
            ValueError: it depends on the start of a stage in tokens, which the sources do not tell.
        """
        if self._problem and self._length is None and self.tokens_per_sample is None and self._has_stages_in("tokens"):
            raise ValueError(self._problem)
        return self.epoch_length

    def _has_stages_in(self, unit: str) -> bool:
        return any(stage.start.unit == unit and stage.start.amount for stage in self._schedule)

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of the first epoch."""
        return map(self.__getitem__, range(self.epoch_length))

    def set_epoch(self, epoch: int) -> None:
        """Tell the sources the epoch of the training, where they have ``set_epoch``."""
        for source in self.sources:
            tell_epoch(source, epoch)

    def __getitem__(self, draw: int) -> Any:
        (sample,) = self.__getitems__((draw,))
        return sample

    def __getitems__(self, draws: Sequence[int]) -> list[Any]:
        """The samples of several draws; a source that has ``__getitems__`` itself is asked once for all of its samples."""
        block, low, high = None, 0, 0
        places: list[tuple[int, int]] = []
        for draw in draws:
            if block is None or not low <= draw < high:
                block = self._draws.block(self._number_of_draw(draw))
                low, high, turns, indices = block.low, block.high, block.sources, block.indices
            places.append((turns[draw - low], indices[draw - low]))
        numbers, sources = self._by_name, self._sources_by_name
        if self._several_at_once:
            samples = self._read_at_once(places)
        else:
            samples = [sources[s][index] for s, index in places]
        if self._forms is not None:
            self._compare_first([numbers[s] for s, _ in places], samples)
        if self.source_key is None:
            return samples
        return [self._labelled(sample, numbers[s]) for sample, (s, _) in zip(samples, places, strict=True)]

    def _number_of_draw(self, draw: Any) -> int:
        """The number of a draw as an int.

        Raises:
            IndexError, TypeError: it is none.
        """
        if type(draw) is int and draw >= 0:
            return draw
        meaning = "the number of a draw; those of an epoch are mixture.draws(epoch)"
        number = whole_number(f"Mixture[{draw!r}]", draw, meaning, lowest=-(2**62))
        if number < 0:
            raise IndexError(
                f"Mixture[{number}]: the draws of a mixture begin with 0, and go on after an epoch; the last one of the first epoch is "
                f"mixture[{self.epoch_length - 1}]"
            )
        return number

    @cached_property
    def _sources_by_name(self) -> list[Any]:
        return [self.sources[s] for s in self._by_name]

    @cached_property
    def _several_at_once(self) -> list[bool]:
        """By source in the order of names, whether it reads several samples at once; empty: none does."""
        flags = [callable(getattr(source, "__getitems__", None)) for source in self._sources_by_name]
        return flags if any(flags) else []

    def _read_at_once(self, places: list[tuple[int, int]]) -> list[Any]:
        samples: list[Any] = [None] * len(places)
        by_source: dict[int, list[int]] = {}
        for place, (s, _) in enumerate(places):
            by_source.setdefault(s, []).append(place)
        for s, own_places in by_source.items():
            source, indices = self._sources_by_name[s], [places[place][1] for place in own_places]
            values = source.__getitems__(indices) if self._several_at_once[s] else [source[i] for i in indices]
            for place, value in zip(own_places, values, strict=True):
                samples[place] = value
        return samples

    def _compare_first(self, numbers: Sequence[int], samples: Sequence[Any]) -> None:
        """Look at the first sample of each source that has given none before."""
        assert self._forms is not None
        for s, sample in zip(numbers, samples, strict=True):
            if s in self._forms.unseen:
                self._forms.see(s, sample)
        if not self._forms.unseen:
            self._forms = None

    def _labelled(self, sample: Any, s: int) -> Any:
        """The sample with the number of its source."""
        if self.source_key is None:
            return sample
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"Mixture(source_key={self.source_key!r}) adds an entry to samples that are dicts, and {self.names[s]!r} gives "
                f"{type(sample).__name__}: let it give dicts, or leave source_key out"
            )
        if self.source_key in sample:
            raise ValueError(
                f"Mixture(source_key={self.source_key!r}): samples of {self.names[s]!r} have an entry of this name already: choose another name"
            )
        return {**sample, self.source_key: s}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _COMPUTED}


class StreamMixture(Mixture, IterableDataset[Any]):
    """A mixture with a stream among its sources: :class:`Mixture` creates it.

    Each process that reads it (the rank, or each of its workers) takes draw after draw, and reads a source that has indices pass by pass; of
    several workers each reads every n-th of its samples. The state has the draws, and for each source the passes, the samples, whether it has
    ended in this epoch, and its own state; a stream without a state is read again up to its place, with a warning. Without workers the sources
    continue from epoch to epoch; workers begin each epoch with the streams' first samples.
    """

    def _resolve(self) -> None:
        self.epoch_length = self._length or _ENDLESS
        self._stages, self._problem = resolved(self._schedule, self._length, self.tokens_per_sample, None)
        if self._length is not None:
            self._warn_of_few_samples()
        self._epoch = 0
        self._in_pass: list[int] = []
        self._left: set[int] = set()
        """Streams that were left within a pass, and must begin again."""
        self._first_states: dict[int, Any] = {}
        """The states of streams before they were read."""
        self._forget()
        self.restart()

    def __len__(self) -> int:
        raise TypeError("a mixture with a stream has no length")

    def __bool__(self) -> bool:
        return True

    def seeded(self, seed: int, shuffle: bool) -> StreamMixture:
        copied = super().seeded(seed, shuffle)
        assert isinstance(copied, StreamMixture)
        copied._in_pass, copied._left, copied._first_states = [], set(), {}
        copied.restart()
        return copied

    def draws(self, epoch: int) -> range:
        raise TypeError("a mixture with a stream is read from its start, not by the numbers of its draws")

    def restart(self) -> None:
        self._left |= {s for s, count in enumerate(self._in_pass) if count}
        nothing = [0] * len(self.names)
        self._drawn, self._epoch_start, self._salt = 0, 0, 0
        self._loaded_epoch: int | None = None
        self._origin: dict[str, Any] = {"draw": 0, "counts": {}}
        self._passes, self._counts, self._in_pass, self._told = (list(nothing) for _ in range(4))
        self._finished: set[int] = set()
        self._local_sizes: dict[str, list[list[int]]] = {}
        self._gone: dict[str, int] = {}
        self._source_states: list[Any] = [None] * len(self.names)
        self._iterators: list[Iterator[Any] | None] = [None] * len(self.names)

    def set_epoch(self, epoch: int) -> None:
        """Take note of the epoch: sources get numbers from it with each of their passes, if they have ``set_epoch``."""
        self._epoch = epoch

    @cached_property
    def _draws(self) -> MixtureDraws:
        return self._draws_of(*_place())

    def _draws_of(self, worker: int, workers: int) -> MixtureDraws:
        """The draws of one worker."""
        order = self._by_name
        names = [self.names[s] for s in order]
        stages = [Stage(-(-stage.start // workers), tuple(stage.shares[s] for s in order)) for stage in self._stages]
        seed = self.seed if workers == 1 else mixed(self.seed, worker + 1)
        origin = Origin(
            self._origin["draw"],
            tuple(self._origin["counts"].get(name, 0) for name in names),
            first=self._origin["draw"],
        )
        length = self.epoch_length if self._length is None else _part(self._length, worker, workers)
        seed = mixed(seed, self._salt) if self._salt else seed
        return MixtureDraws(names, [None] * len(names), stages, max(1, length), origin, seed, self.shuffle)

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _place()
        if self._problem or (len(self._stages) > 1 and self._length is None and workers > 1):
            raise ValueError(
                self._problem
                or "a mixture of streams whose weights change by stage is read by several workers, which do not know how many samples came in "
                "earlier epochs: give samples= for the length of an epoch, or read it with num_workers=0"
            )
        self._begin_epoch(worker, workers)
        draws, numbers = self._draws, self._by_name
        end = _ENDLESS if self._length is None else self._epoch_start + _part(self._length, worker, workers)
        block = None
        while self._drawn < end:
            if block is None or self._drawn >= block.high:
                block = draws.block(self._drawn)
            s = numbers[block.sources[self._drawn - block.low]]
            sample = self._next(s, worker, workers)
            if sample is _END and self._in_pass[s]:
                self._finished.add(s)
                self._end_pass(s)
                if self._is_over(draws):
                    break
                sample = self._next(s, worker, workers)
            if sample is _END:
                again = " when it was read again" if self._passes[s] else ""
                raise ValueError(
                    f"Mixture: the source {self.names[s]!r} gave no sample{again}: it is empty, has fewer samples than there are workers, or can be "
                    "read only once"
                )
            if self._forms is not None:
                self._compare_first((s,), (sample,))
            self._drawn += 1
            self._counts[s] += 1
            self._in_pass[s] += 1
            yield self._labelled(sample, s)
        self._begin_new_epoch()

    def _begin_epoch(self, worker: int, workers: int) -> None:
        """Set the place at which this pass over the mixture begins."""
        if self._loaded_epoch != self._epoch:  # it does not continue within an epoch
            if get_worker_info() is not None:  # persistent workers begin as new ones do, so that a resume can
                self.restart()
                self._forget()
            self._begin_new_epoch()
            if self._epoch and not self._drawn:  # a worker that starts with this epoch
                if self._length is None:
                    self._salt = self._epoch
                    self._forget()
                else:
                    self._drawn = self._epoch_start = self._epoch * _part(self._length, worker, workers)
                    for place, count in enumerate(self._draws.counts(self._drawn)):
                        self._counts[self._by_name[place]] = count
        self._loaded_epoch = None
        for s, name in enumerate(self.names):
            if self._is_indexed(s):
                size = _part(self.sizes[s] or 0, worker, workers)
                pairs = self._local_sizes.setdefault(name, [[0, size]])
                if pairs[-1][1] != size:
                    pairs[:] = [*(pair for pair in pairs if pair[0] < self._counts[s]), [self._counts[s], size]]

    def _begin_new_epoch(self) -> None:
        self._finished.clear()
        self._epoch_start = self._drawn

    def _is_over(self, draws: MixtureDraws) -> bool:
        """Whether the epoch ends, now that a source has ended."""
        if self._length is not None:
            return False
        shares = draws.stage_at(self._drawn).shares
        used = {self._by_name[place] for place, share in enumerate(shares) if share}
        return self.stop == "first_exhausted" or used <= self._finished

    def _is_indexed(self, s: int) -> bool:
        return not _is_stream(self.sources[s])

    def _next(self, s: int, worker: int, workers: int) -> Any:
        """The next sample of a source's pass, or ``_END``."""
        iterator = self._iterators[s]
        if iterator is None:
            iterator = self._read_indexed(s, worker, workers) if self._is_indexed(s) else self._open(s)
            self._iterators[s] = iterator
        return next(iterator, _END)

    def _end_pass(self, s: int) -> None:
        self._iterators[s], self._source_states[s] = None, None
        self._passes[s], self._in_pass[s] = self._passes[s] + 1, 0

    def _read_indexed(self, s: int, worker: int, workers: int) -> Iterator[Any]:
        """Yield the rest of a pass over this worker's part of a source with indices."""
        source, name, number = self.sources[s], self.names[s], self._counts[s]
        pairs = [(count, size) for count, size in self._local_sizes[name]]
        if not pairs[-1][1]:
            return
        seed = seed_of_source(self._draws.seed, name)
        order = SourceOrder(pairs, seed, self.shuffle)
        if self._in_pass[s] and order.end_of_pass(number - 1) == number:
            return  # all samples of the pass were given before a resume, and its end is still to be noticed
        end = order.end_of_pass(number)
        while number < end:
            stop = min(end, number + _CHUNK)
            indices = range(number, stop) if self._is_nested(s) else order.read(number, stop).tolist()
            for index in indices:
                yield source[index * workers + worker]
            number = stop

    def _open(self, s: int) -> Iterator[Any]:
        """Start reading a stream, at its saved state or at the beginning of a pass."""
        source, state = self.sources[s], self._source_states[s]
        self._source_states[s] = None
        if not self._in_pass[s]:
            self._told[s] = epoch_of_repetition(self._epoch, self._passes[s])
        tell_epoch(source, self._told[s])
        if (first := states_of(source=source)) is not None:
            if s not in self._first_states:
                self._first_states[s] = first["source"]
            elif s in self._left:
                load_state(source, copy.deepcopy(self._first_states[s]))
        self._left.discard(s)
        if state is not None and "source" in state:
            load_state(source, state["source"])
        iterator = iter(source)
        if state is not None and "iterator" in state:
            load_state(iterator, state["iterator"])
        if state is None and self._in_pass[s]:
            warn_once(
                f"Mixture: the source {self.names[s]!r} has no state from which it can continue: {self._in_pass[s]} samples are read and discarded "
                "to get back to its place"
            )
            next(itertools.islice(iterator, self._in_pass[s] - 1, self._in_pass[s]), None)
        return iterator

    # -- the state ------------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The place after the sample that was given last."""
        named = self._named
        return {
            "draws": self._drawn,
            "epoch": self._epoch,
            "epoch_start": self._epoch_start,
            "counts": {**self._gone, **named(self._counts)},
            "passes": named(self._passes),
            "in_pass": named(self._in_pass),
            "told": named(self._told),
            "finished": sorted(self.names[s] for s in self._finished),
            "sources": {name: self._state_of(s) for s, name in enumerate(self.names)},
            "sizes": copy.deepcopy(self._local_sizes),
            "stages": self._stage_texts(),
            "origin": copy.deepcopy(self._origin),
            "gone": dict(self._gone),
            "salt": self._salt,
            "lengths": dict(zip(self.names, self.sizes, strict=True)),
        }

    def _named(self, values: list[int]) -> dict[str, int]:
        return dict(zip(self.names, values, strict=True))

    def _state_of(self, s: int) -> Any:
        source, iterator = self.sources[s], self._iterators[s]
        if self._is_indexed(s) or shuffle_buffers(source):
            return None
        if iterator is None:
            return self._source_states[s]
        return states_of(source=source, **({} if iterator is source else {"iterator": iterator}))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the sample that was given last when ``state`` was saved, also with other weights and sources."""
        self.restart()
        self._drawn, self._epoch_start, self._salt = state["draws"], state["epoch_start"], state["salt"]
        self._loaded_epoch = state["epoch"]
        for s, name in enumerate(self.names):
            for values, entry in (
                (self._passes, "passes"),
                (self._counts, "counts"),
                (self._in_pass, "in_pass"),
                (self._told, "told"),
            ):
                values[s] = state[entry].get(name, 0)
            self._source_states[s] = state["sources"].get(name)
        self._finished = {s for s, name in enumerate(self.names) if name in state["finished"]}
        self._local_sizes = {name: [list(pair) for pair in pairs] for name, pairs in state["sizes"].items()}
        self._gone = {name: count for name, count in state["counts"].items() if name not in self.names}
        self._origin = dict(state["origin"])
        if self._stage_texts() != [list(stage) for stage in state["stages"]]:
            self._origin = {"draw": self._drawn, "counts": dict(state["counts"])}
        self._forget()

    def changes_since(self, state: Mapping[str, Any]) -> list[str]:
        changes = self._changes(state["draws"], state, [None] * len(self.names))
        for name, size in zip(self.names, self.sizes, strict=True):
            if state["lengths"].get(name, size) != size:
                changes.append(f"the mixture's source {name!r} has {size} samples, and had {state['lengths'][name]}")
        return self._allowed(changes)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_iterators": [None] * len(self.names)}


def _place() -> tuple[int, int]:
    """The number of this worker, and how many there are; in the process itself it is the only one."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


def _part(count: int, worker: int, workers: int) -> int:
    """How many of ``count`` samples a worker has that takes every ``workers``-th."""
    return -(-(count - worker) // workers)


def _percent(share: str) -> str:
    numerator, _, denominator = share.partition("/")
    return f"{100 * int(numerator) / int(denominator or 1):.4g} %"


def _is_stream(source: Any) -> bool:
    return isinstance(source, IterableDataset) or not hasattr(source, "__getitem__")


def _size_of(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _checked_sources(sources: Any) -> tuple[list[str], list[Any]]:
    """The names and the datasets of a mixture's sources.

    Raises:
        TypeError, ValueError: a name or a dataset is not usable.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise TypeError(
            f"Mixture takes a dict of name -> dataset, such as {{'web': web, 'code': code}}, and got {type(sources).__name__}: {sources!r:.80}"
        )
    for name, source in sources.items():
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"Mixture: a source is called {name!r}: give names as text, which are used in logs and checkpoints"
            )
        if isinstance(source, DataLoader):
            raise TypeError(
                f"Mixture: the source {name!r} is a DataLoader, which gives batches: give its dataset, or read loaders side by side with "
                "engine.CombinedLoader"
            )
        if isinstance(source, (Mapping, str, bytes)):
            raise TypeError(
                f"Mixture: the source {name!r} is a {type(source).__name__}, not a dataset: give a dataset, or for a mixture within the mixture "
                "Mixture({...})"
            )
        if not _is_stream(source):
            if _size_of(source) is None:
                raise TypeError(
                    f"Mixture: the source {name!r} ({type(source).__name__}) has __getitem__ and no length: give it __len__, or make it an "
                    "IterableDataset"
                )
        elif not callable(getattr(source, "__iter__", None)):
            raise TypeError(
                f"Mixture: the source {name!r} ({type(source).__name__}) cannot be read: a source has __getitem__ and __len__, or __iter__"
            )
        elif isinstance(source, Iterator) and not stateful(source):
            raise TypeError(
                f"Mixture: the source {name!r} is a {type(source).__name__}, which can be read only once: give an object whose __iter__ starts "
                "again, such as an IterableDataset"
            )
    return list(sources), list(sources.values())
