"""The loaders of a run: prepared from the user's, limited by the settings, closed at the end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from engine.config.duration import Duration, Every
from engine.config.settings import Settings
from engine.data.combined import CombinedLoader
from engine.data.datamodule import DataModule
from engine.data.feed import MicroBatch
from engine.data.loader import BatchTransfer, PreparedLoader, in_dataset_order
from engine.data.packed_rows import LengthSchedule, length_schedule_of, note_restarts
from engine.data.user_loaders import flat_loaders, holds_loaders
from engine.distributed.collectives import gather_json
from engine.distributed.comparison import check_alike
from engine.distributed.group import Group
from engine.engine import Engine
from engine.loop.batch_sizes import BatchSizes, Stage, batch_sizes, reached
from engine.loop.method_arguments import step_accepting
from engine.loop.state import StageLog, TrainState
from engine.module import TrainModule, overrides
from engine.utils.log import logger, warn_once
from engine.utils.overrides import overridden_methods
from engine.utils.tree import cast, move

METHODS = {
    "train": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
"""By kind of loader, the method of a data module or a module that returns it."""
LIMITS = {
    "train": "limit_train_batches",
    "validation": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}
"""By kind of loader, the setting that limits its batches."""
MAX_EPOCHS_COUNTED = 10_000
"""For how many epochs :meth:`RunLoaders.steps` looks up the accumulation window; later epochs count as the last of these."""
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""The methods of a module or a data module for the transfer of a batch, in the order of their calls."""


@dataclass(frozen=True)
class RunData:
    """The data that a user passes to a run."""

    datamodule: DataModule | None = None
    loaders: Mapping[str, Any] = field(default_factory=dict)
    """By kind (``"train"``, ``"validation"``, ``"test"``, ``"predict"``), the loaders as the user passed them; ``None``: not passed."""


class RunLoaders:
    """The loaders of one run.

    Args:
        data: the loaders and the data module that the user passed.
        stage: see :attr:`engine.Run.stage`.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        module: TrainModule,
        data: RunData,
        stage: str,
    ) -> None:
        self._engine, self._settings, self._module = engine, settings, module
        self._datamodule, self._user_loaders, self._is_training = data.datamodule, data.loaders, stage == "fit"
        self.sources: dict[str, Any] = {}
        """By kind, the loaders as they came from the user, the data module or the module."""
        self.prepared: dict[str, list[PreparedLoader]] = {}
        """By kind, the prepared loaders."""
        self.train: PreparedLoader | None = None
        self.validation: list[PreparedLoader] = []
        """The validation loaders of a training."""
        self.train_batches: int | None = None
        """Micro-batches of this rank in a training epoch; ``None``: the loader has no length."""
        self.eval_batches: list[int | None] = []
        """By loader of the evaluation, or of the training's validation, the micro-batches of this rank."""
        self.stride = 1
        """The samples, or batches, by which a full accumulation window advances the position in the data."""
        self.reload_every = 0
        """After how many epochs the loaders that the data module or the module provides are created again; 0: never. Set before the training."""
        self._created: dict[
            str, int
        ] = {}  # by kind, the epoch in which the loaders were created; empty before the first epoch
        self.window_factor = 1
        """A multiplier for the micro-batches in a window, so that a replay on fewer ranks has the same samples in a step."""
        self.batch_sizes: BatchSizes | None = None
        """The stages of ``global_batch_size``; ``None``: it is not set, or the training loader is not prepared."""
        self.row_lengths: LengthSchedule | None = None
        """The stages of the lengths of rows; ``None``: all rows have one length."""
        self.stages = StageLog()
        """The stages that have begun."""
        self._window: int | None = None
        self._stage = 0
        self._stream_state: Any = None
        self._first_batch: Any = None
        self._closed = False

    # -- training -----------------------------------------------------------------------------------------------------------------

    def training(self) -> PreparedLoader:
        """Return the training loader. The first call, which may come from a ``setup`` that asks for the number of steps, prepares it and its window;
        all ranks call this together.

        Raises:
            ValueError: there is no training data, or the settings do not fit it.
            RuntimeError: the run is over.
        """
        if self.train is not None:
            return self.train
        if self._closed:
            raise RuntimeError("the training loader is created during a run, and this run is over")
        loaders = self._prepare("train")
        if not loaders:
            raise ValueError(
                "no training data: give a train_loader, a datamodule (fit run, fit plan: --data my.module:Data) or a module with train_dataloader"
            )
        loader = loaders[0]
        self._engine.strategy.train_with(loader.loader)
        self._limit(loader, "train")
        if loader.length == 0 and self._settings.limit_train_batches != 0:
            raise ValueError(f"the training loader ({type(loader.loader).__name__}) is empty")
        ranks, size = self._engine.data_group.world_size, self._settings.global_batch_size
        self.batch_sizes = None if size is None else batch_sizes(size, loader, ranks)
        if self.batch_sizes is not None:
            self._window = self.batch_sizes.stages[0].window
            batch, drops = (getattr(loader.loader, name, None) for name in ("batch_size", "drop_last"))
            if batch is not None and not self.batch_sizes.changes and loader.limit is None and not drops:
                loader.count_steps(self._window * ranks * batch)
        self.row_lengths = length_schedule_of(loader.loader)
        if self.row_lengths is not None and isinstance(loader.loader, CombinedLoader):
            raise ValueError(
                f"Packed(length={self.row_lengths}) cannot be read beside other loaders: give one length, or read it alone"
            )
        self.train, self.train_batches = loader, loader.length
        return loader

    @property
    def asks_for_training(self) -> bool:
        """Whether the training loader will come from the data module or the module, and has not been asked for yet."""
        return self._user_loaders.get("train") is None and self.train is None

    def for_validation(self, every: Every) -> list[PreparedLoader]:
        """Prepare the validation loaders of a training; ``[]`` when validation is switched off or the module has no ``validation_step``.

        Args:
            every: when validation is due.
        """
        settings, module = self._settings, self._module
        if settings.limit_val_batches == 0 or every.is_never:
            return []
        loaders = self._prepare("validation")
        if loaders and not overrides(module, "validation_step"):
            if self._engine.is_main_process:
                warn_once(f"{type(module).__name__} has no validation_step: the validation data is not used")
            return []
        for loader in loaders:
            self._limit(loader, "validation")
        step_accepting(
            module, "validation_step", module.validation_step, len(loaders) > 1
        )  # raises if the arguments are wrong
        self._refuse_empty("validation", loaders)
        self.validation, self.eval_batches = loaders, [loader.length for loader in loaders]
        return loaders

    def window_at(self, epoch: int) -> int:
        """Micro-batches in a window of this epoch; with stages of ``global_batch_size`` in a window now."""
        window = self._settings.accumulate_at(epoch) if self._window is None else self._window
        return window * self.window_factor

    def steps(self, epochs: int) -> int | None:
        """The number of optimizer steps in ``epochs`` epochs; the length of an epoch must be known. ``None``: stages of ``global_batch_size`` begin
        at a number of samples or tokens that this data reaches at a step which is not known before."""
        batches = self.train_batches
        assert batches is not None
        if self.batch_sizes is not None and self.batch_sizes.changes:
            return self.batch_sizes.steps(epochs)
        by_epoch = [-(-batches // self.window_at(epoch)) for epoch in range(min(epochs, MAX_EPOCHS_COUNTED))]
        return sum(by_epoch) + (epochs - len(by_epoch)) * (by_epoch[-1] if by_epoch else 0)

    def steps_of(self, length: Duration) -> int | None:
        """The number of optimizer steps until the training has reached a ``length`` in samples, tokens or epochs; ``None``: not known before."""
        train, batches = self.train, self.train_batches
        changes = self.batch_sizes is not None and self.batch_sizes.changes
        if length.unit == "epochs" and batches and not changes:
            epochs, part = divmod(length.exact, 1)
            return (self.steps(epochs) or 0) + ceil(part * -(-batches // self.window_at(epochs)))
        if train is not None and length.unit in ("samples", "tokens") and train.tells_tokens:
            if self.batch_sizes is not None and changes:
                return self.batch_sizes.steps(None, **{length.unit: int(length.value)})
            return self._steps_of_batches(train, length)
        samples, left = None if train is None else train.samples_of_pass, self.samples_of(length)
        if not samples or left is None or train is None:
            return None
        if self.batch_sizes is not None:
            return self.batch_sizes.steps(None, left)
        steps, per_window = 0, train.samples_of_round or 1
        first = 0 if isinstance(self._settings.accumulate_grad_batches, int) else MAX_EPOCHS_COUNTED
        for epoch in range(first):
            if left <= samples:
                return steps - (-left // (per_window * self.window_at(epoch)))
            steps, left = steps - (-samples // (per_window * self.window_at(epoch))), left - samples
        window = per_window * self.window_at(first)
        epochs, left = divmod(left, samples)
        return steps + epochs * -(-samples // window) - (-left // window)

    def _steps_of_batches(self, train: PreparedLoader, length: Duration) -> int | None:
        """The number of optimizer steps until batches that tell their samples and tokens have as many as ``length``; ``None``: a limit makes each
        epoch's number another."""
        positions = train.positions_of_pass
        if not positions or train.limit is not None:
            return None
        count_between = train.tokens_between if length.unit == "tokens" else train.samples_between
        epochs, left = divmod(int(length.value), count_between(0, 0, positions))
        window = self._engine.data_group.world_size * self.window_at(epochs)
        windows = range(0, positions + window, window)
        return (self.steps(epochs) or 0) + bisect_left(
            windows, left, key=lambda position: count_between(epochs, 0, position)
        )

    def steps_of_stages(
        self, max_epochs: int | None, max_steps: int | None, max_length: Duration | None = None
    ) -> list[tuple[Stage, int]] | None:
        """The stages of ``global_batch_size``, each with its optimizer steps in the whole training; ``None``: not known, or no stages."""
        if self.batch_sizes is None or not self.batch_sizes.changes:
            return None
        samples = None if max_length is None else self.samples_of(max_length)
        tells = (
            self.train is not None
            and self.train.tells_tokens
            and max_length is not None
            and max_length.unit == "tokens"
        )
        tokens = int(max_length.value) if max_length is not None and tells else None
        counts = self.batch_sizes.steps_by_stage(max_epochs, samples, max_steps, tokens)
        if counts is None or (max_length is not None and samples is None and tokens is None):
            return None
        return list(zip(self.batch_sizes.stages, counts, strict=True))

    def largest_window(self) -> int:
        """The largest number of micro-batches in a window of the first epoch."""
        return self.window_at(0) if self.batch_sizes is None else self.batch_sizes.largest_window * self.window_factor

    def samples_of(self, length: Duration) -> int | None:
        """The number of samples in a ``length`` in samples, tokens or epochs; ``None``: not known before."""
        train = self.train
        if train is None or length.unit == "samples":
            return None if train is None else int(length.value)
        if length.unit == "tokens":
            return None if train.tokens_per_sample is None else ceil(length.value / train.tokens_per_sample)
        size = train.samples_of_pass
        return None if size is None else ceil(length.exact * size)

    def total_steps(
        self, max_epochs: int | None, max_steps: int | None, max_length: Duration | None = None
    ) -> int | None:
        """The number of optimizer steps in the whole training; ``None``: not known before."""
        if not self._closed:
            self.training()
        limits = [max_steps, None if max_length is None else self.steps_of(max_length)]
        if max_epochs is not None and self.train_batches is not None:
            limits.append(self.steps(max_epochs))
            if limits[-1] is None:
                return None
        return min((limit for limit in limits if limit is not None), default=None)

    def told_steps(
        self, max_epochs: int | None, max_steps: int | None, max_length: Duration | None = None
    ) -> int | None:
        """Implements :attr:`engine.Run.total_steps`.

        Raises:
            ValueError: stages of ``global_batch_size`` begin at steps that are not known before, in data with a length.
        """
        steps = self.total_steps(max_epochs, max_steps, max_length)
        if steps is None and max_epochs is not None and self.train_batches is not None and self.batch_sizes is not None:
            assert self.train is not None
            raise ValueError(
                f"run.total_steps: global_batch_size has a stage from {self.batch_sizes.stages[-1].start}, and at which step "
                f"{type(self.train.loader).__name__} reaches that is not known before: give the starts of the stages in steps or epochs, or the "
                "schedule a number of steps of your own"
            )
        return steps

    def total_batches(
        self, max_epochs: int | None, max_steps: int | None, max_length: Duration | None = None
    ) -> int | None:
        """Implements :attr:`engine.Run.total_steps` for a module that steps its optimizers itself: ``max_steps`` counts their steps.

        Raises:
            ValueError: the module's ``steps_per_batch`` is not a number above 0.
        """
        steps, name = self._module.steps_per_batch, type(self._module).__name__
        if steps is not None and (
            isinstance(steps, bool) or not isinstance(steps, (int, float)) or not 0 < steps < inf
        ):
            raise ValueError(
                f"{name}.steps_per_batch={steps!r}: must be a number above 0, that of the optimizer steps in a batch"
            )
        if max_steps is not None and steps is not None:
            max_steps = ceil(max_steps / Fraction(str(steps)))
        return self.told_steps(max_epochs, max_steps, max_length)

    def locate(self, state: TrainState) -> None:
        """Set the engine's window for the position, and compute the micro-batch index from it, which another world size may have saved."""
        assert self.train is not None
        if self.batch_sizes is not None:
            self._stage = self.batch_sizes.index_at(state)
            stage = self.batch_sizes.stages[self._stage]
            self._window = stage.window
            if self.batch_sizes.changes:
                self.stages.note("batch size", str(stage.size), state.step, self._stage == 0)
        window = self._engine.accumulate_grad_batches = self.window_at(state.epoch)
        self.stride = self.train.stride
        state.batch_idx = state.position // (self.stride // window)

    def in_stages(self, state: TrainState) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch. Where a stage of ``global_batch_size`` begins, the rest of the epoch is read in windows of its size,
        as a run would that resumes there."""
        assert self.train is not None
        assert self.batch_sizes is not None
        train, is_over = self.train, False
        while not is_over:
            is_over = True
            with closing(train.micro_batches()) as micro_batches:
                for batch, share in micro_batches:
                    yield batch, share
                    del batch
                    if not share.last or state.batch_idx == self.train_batches:
                        continue
                    if self.batch_sizes.unit == "steps":
                        self._engine.settle()  # a step whose verdict is pending may not count
                    if self.batch_sizes.index_at(state) != self._stage:
                        is_over = False
                        break
            if not is_over:
                stream = train.state(state.position)
                self.locate(state)
                train.resume(state.epoch, state.position, stream)

    def in_row_lengths(self, micro_batches: Iterator[MicroBatch], state: TrainState) -> Iterator[MicroBatch]:
        """Yield the micro-batches with their rows cut to the length of the stage in which their window begins."""
        schedule, train, begins, length = self.row_lengths, self.train, True, 0
        assert schedule is not None
        assert train is not None
        for batch, share in micro_batches:
            if begins:
                if schedule.unit == "steps":
                    self._engine.settle()  # a step whose verdict is pending may not count
                length = schedule.length_at(at := reached(state, schedule.unit, train))
                self.stages.note("row length", str(length), state.step, schedule.is_first(at))
            yield schedule.cut(batch, length), share
            begins = share.last
            del batch

    def in_mixture_stages(
        self, micro_batches: Iterator[MicroBatch], state: TrainState, stages: Sequence[tuple[int, str, bool]]
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch, and note ``stages`` of a mixture's weights (:meth:`PreparedLoader.stages_in`) in the windows that
        have their first samples."""
        ahead = [stage for stage in stages if stage[0] > state.position]
        _, text, is_first = stages[-len(ahead) - 1]
        self.stages.note("mixture", text, state.step, is_first)
        begins = True
        for batch, share in micro_batches:
            while begins and ahead and ahead[0][0] < state.position + self.stride:
                self.stages.note("mixture", ahead.pop(0)[1], state.step)
            yield batch, share
            begins = share.last
            del batch
            if not ahead:
                break
        yield from micro_batches

    def continue_stream(self, state: Any) -> None:
        """Keep ``state``, which the training loader needs in addition to its position, until :func:`engine.loop.train.begin_epoch` takes it."""
        self._stream_state = state

    def take_stream(self) -> Any:
        """Return the state of :meth:`continue_stream` and forget it."""
        state, self._stream_state = self._stream_state, None
        return state

    def reload_for(self, kind: str, epoch: int) -> bool:
        """Whether :attr:`reload_every` asks for new loaders of ``kind`` in this epoch; if so, release the present ones. All ranks call this."""
        self._created = self._created or dict.fromkeys(METHODS, epoch)
        if not self.reload_every or self._user_loaders.get(kind) is not None:
            return False
        if epoch < self._created[kind] + self.reload_every:
            return False
        self._created[kind] = epoch
        for loader in self.prepared.pop(kind, []):
            loader.close()
            self._engine.prepared.loaders.remove(loader)
        if kind == "train":
            self.train = None
        return True

    # -- evaluations ----------------------------------------------------------------------------------------------------------------

    def for_evaluation(self, kind: str) -> list[PreparedLoader]:
        """Prepare the loaders of a ``"validation"``, ``"test"`` or ``"predict"`` run (``kind``); ``[]`` when the limit of its batches is 0.

        Raises:
            ValueError: there is no data, or a loader is empty.
        """
        setting = LIMITS[kind]
        if getattr(self._settings, setting) == 0:
            logger.warning("%s=0: %s_step gets no batch", setting, kind)
            return []
        loaders = self._prepare(kind)
        if not loaders:
            method = METHODS[kind]
            if self._datamodule is not None:
                raise ValueError(
                    f"no data: {type(self._datamodule).__name__} has no {method}: define it, or give a loader instead"
                )
            raise ValueError(f"no data: give a loader, a datamodule or a module with {method}")
        for loader in loaders:
            self._limit(loader, kind)
        self._refuse_empty(kind, loaders)
        self.eval_batches = [loader.length for loader in loaders]
        return loaders

    # -- all loaders ----------------------------------------------------------------------------------------------------------------

    def first_batch(self) -> Any:
        """The first training batch, else that of the first prepared loader, on the device; ``None``: no loader. All ranks call this together."""
        if self._first_batch is None and not self._closed:
            all_loaders = [loader for loaders in self.prepared.values() for loader in loaders]
            loader = self.train if self.train is not None else next(iter(all_loaders), None)
            self._first_batch = None if loader is None else loader.first()
        return self._first_batch

    def close(self) -> None:
        """End the loaders' worker processes, and release the loaders."""
        for loaders in self.prepared.values():
            for loader in loaders:
                loader.close()
        self.train, self.validation, self._closed = None, [], True

    def _prepare(self, kind: str) -> list[PreparedLoader]:
        """Prepare the loaders of a kind: those that the user passed, else the data module's, else the module's own.

        Several training loaders are read side by side, the shorter ones repeatedly; loaders of other kinds are read one after the other.
        """
        source = self._user_loaders.get(kind)
        for owner in (self._datamodule, self._module):
            if source is None and owner is not None:
                source = getattr(owner, METHODS[kind])()
        if source is None:
            self._check_count(kind, 0)
            return []
        loaders = source
        if kind == "train" and isinstance(source, tuple):
            _refuse_loaders_as_batches(source)
        if kind == "train" and (isinstance(loaders, dict) or (isinstance(loaders, list) and holds_loaders(loaders))):
            loaders = CombinedLoader(loaders, "max_size_cycle")
        if kind != "train" and holds_loaders(loaders):
            loaders = flat_loaders(loaders)  # also those in nested containers are read one after the other
        elif isinstance(loaders, dict):
            loaders = list(loaders.values())
        elif kind == "train" or not isinstance(loaders, (list, tuple)) or not all(map(is_loader, loaders)):
            loaders = [loaders]
        if self._is_training and self._settings.overfit_batches:
            loaders = [in_dataset_order(loader) for loader in loaders]
        self._check_count(kind, len(loaders))
        prepared = [self._engine.prepare_data_loader(loader, group=self.ranks_of(kind)) for loader in loaders]
        self.sources[kind], self.prepared[kind] = source, prepared
        for index, loader in enumerate(prepared):
            loader.transfer = hooked_transfer(self._module, self._datamodule, index)
            loader.use.owner = counting_owner(self._module, self._datamodule)
            loader.use.evaluates, loader.use.ranks_draw_apart = kind != "train", True
            loader.use.repeats = self._is_training and bool(self._settings.overfit_batches)
            if kind != "train":
                loader.window_size = 1
                if (schedule := length_schedule_of(loader.loader)) is not None:
                    raise ValueError(
                        f"Packed(length={schedule}): the lengths follow the clock of a training, and this is {kind} data: give it one length"
                    )
        return prepared

    def _check_count(self, kind: str, count: int) -> None:
        """Check that all ranks have this number of loaders of a kind, which they prepare and read together. A collective."""
        check_alike(
            self.ranks_of(kind),
            f"{kind} loaders",
            {"number": count},
            "All ranks train and evaluate together: give each the same loaders",
        )

    def ranks_of(self, kind: str) -> Group:
        """The ranks that see different samples of one kind of loaders. Ranks that train on parts of the same samples evaluate different ones."""
        return self._engine.data_group if kind == "train" else self._engine.loss_group

    def _limit(self, loader: PreparedLoader, kind: str) -> None:
        """Set the loader's limit in batches, also if the setting is a fraction."""
        name = LIMITS[kind]
        limit = getattr(self._settings, name)
        if isinstance(limit, float):
            length = loader.length
            if limit == 1.0:
                return
            if length is None:
                raise ValueError(
                    f"{name}={limit} is a fraction, but {type(loader.loader).__name__} has no length: give a number of batches"
                )
            limit = int(length * limit)
            if not limit:
                raise ValueError(
                    f"{name} leaves no batch of the {length} that each rank has: give a larger fraction, or a number of batches"
                )
        loader.limit = limit

    def _refuse_empty(self, kind: str, loaders: Sequence[PreparedLoader]) -> None:
        """Refuse a loader that has no batch on any rank. A collective."""
        by_rank = gather_json(self._engine.group, [loader.length for loader in loaders])
        for index, loader in enumerate(loaders):
            if loader.limit != 0 and all(lengths[index] == 0 for lengths in by_rank):
                title = f"{kind} loader {index}" if len(loaders) > 1 else f"{kind} loader"
                raise ValueError(
                    f"the {title} ({type(loader.loader).__name__}) is empty; leave it out, or check its dataset"
                )

    def global_batch(self, epoch: int) -> int | None:
        """Samples of a step over all ranks in this epoch; ``None``: the training loader has no ``batch_size``, or does not exist."""
        size = None if self.train is None else getattr(self.train.loader, "batch_size", None)
        return size * self._engine.data_group.world_size * self.window_at(epoch) if isinstance(size, int) else None


def _refuse_loaders_as_batches(batches: tuple[Any, ...]) -> None:
    """Refuse a tuple of loaders as training data: its entries would be batches.

    Raises:
        TypeError: an entry is a loader, or has loaders in it.
    """
    if holds_loaders(batches):
        raise TypeError(
            f"got a tuple of {len(batches)} DataLoaders as training data: give validation data as the second argument, "
            "fit.run(module, train, val), or a DataModule (fit run: --data my.module:Data). A list of loaders is read side by side"
        )


def is_loader(item: Any) -> bool:
    """Whether an item of a list is a loader rather than a batch. Containers count as batches, however deeply nested."""
    if isinstance(item, (DataLoader, PreparedLoader)):
        return True
    batch = (
        isinstance(item, (Tensor, Mapping, str, list, tuple))
        or hasattr(item, "shape")
        or callable(getattr(item, "to", None))
    )
    return not batch and isinstance(item, Iterable)


class HookedTransfer(BatchTransfer):
    """Transfers batches to the device through hooks of the module or the data module.

    Args:
        owners: for each of :data:`TRANSFER_HOOKS`, the object whose hook to call; ``None``: call none.
        index: the loader's index, passed to the hooks.
    """

    def __init__(self, owners: Sequence[TrainModule | DataModule | None], index: int) -> None:
        (self._before, self._transfer, self._after), self._index = owners, index

    def move(self, batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
        """Implements :meth:`engine.data.loader.BatchTransfer.move`."""
        index = self._index
        if self._before is not None:
            batch = self._before.on_before_batch_transfer(batch, index)
        if self._transfer is None:
            moved = move(batch, device, dtype)
        else:  # the hook may leave tensors on the host, so only the dtype is changed here
            moved = self._transfer.transfer_batch_to_device(cast(batch, dtype), device, index)
        note_restarts(batch, moved)
        batch = moved
        return batch if self._after is None else self._after.on_after_batch_transfer(batch, index)


def counting_owner(module: TrainModule, datamodule: DataModule | None) -> TrainModule | DataModule | None:
    """The data module or the module, whichever overrides ``count_samples`` (the data module's is called if both do); ``None``: neither."""
    if datamodule is not None and overridden_methods(datamodule, ("count_samples",), DataModule):
        return datamodule
    return module if overrides(module, "count_samples") else None


def hooked_transfer(module: TrainModule, datamodule: DataModule | None, index: int) -> HookedTransfer | None:
    """Create the transfer that calls overridden hooks, the data module's rather than the module's; ``None``: none is overridden.

    Args:
        index: the loader's index, passed to the hooks.
    """
    of_module = overridden_methods(module, TRANSFER_HOOKS, TrainModule)
    of_data = overridden_methods(datamodule, TRANSFER_HOOKS, DataModule)
    for name in sorted(of_module & of_data):
        warn_once(
            f"both {type(module).__name__} and {type(datamodule).__name__} define {name}: the data module's is called"
        )
    if not of_module and not of_data:
        return None
    owners = [datamodule if name in of_data else module if name in of_module else None for name in TRANSFER_HOOKS]
    return HookedTransfer(owners, index)
