"""The loaders of a run: prepared from the user's, limited by the settings, closed at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from engine.config.duration import Every
from engine.config.settings import Settings
from engine.data.combined import CombinedLoader
from engine.data.datamodule import DataModule
from engine.data.loader import BatchTransfer, PreparedLoader, in_dataset_order
from engine.data.packed_rows import note_restarts
from engine.data.user_loaders import flat_loaders, holds_loaders
from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.engine import Engine
from engine.loop.method_arguments import step_accepting
from engine.loop.state import TrainState
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
        self._created: dict[str, int] = {}  # by kind, the epoch in which the loaders were created
        self.window_factor = 1
        """A multiplier for the micro-batches in a window, so that a replay on fewer ranks has the same samples in a step."""
        self._window: int | None = None
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
        self._window = self._window_of_global_batch(loader)
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
        """Micro-batches in a window of this epoch."""
        window = self._settings.accumulate_at(epoch) if self._window is None else self._window
        return window * self.window_factor

    def steps(self, epochs: int) -> int:
        """The number of optimizer steps in ``epochs`` epochs; the length of an epoch must be known."""
        batches = self.train_batches
        assert batches is not None
        by_epoch = [-(-batches // self.window_at(epoch)) for epoch in range(min(epochs, MAX_EPOCHS_COUNTED))]
        return sum(by_epoch) + (epochs - len(by_epoch)) * (by_epoch[-1] if by_epoch else 0)

    def total_steps(self, max_epochs: int | None, max_steps: int | None) -> int | None:
        """Implements :attr:`engine.Run.total_steps`."""
        if not self._closed:
            self.training()
        if max_epochs is None or self.train_batches is None:
            return max_steps
        steps = self.steps(max_epochs)
        return steps if max_steps is None else min(steps, max_steps)

    def locate(self, state: TrainState) -> None:
        """Set the engine's window for the epoch, and compute the micro-batch index from the position, which another world size may have saved."""
        assert self.train is not None
        window = self._engine.accumulate_grad_batches = self.window_at(state.epoch)
        self.stride = self.train.stride
        state.batch_idx = state.position // (self.stride // window)

    def continue_stream(self, state: Any) -> None:
        """Keep ``state``, which the training loader needs in addition to its position, until :func:`engine.loop.train.begin_epoch` takes it."""
        self._stream_state = state

    def take_stream(self) -> Any:
        """Return the state of :meth:`continue_stream` and forget it."""
        state, self._stream_state = self._stream_state, None
        return state

    def reload_for(self, kind: str, epoch: int) -> bool:
        """Whether :attr:`reload_every` asks for new loaders of ``kind`` in this epoch; if so, release the present ones. All ranks call this."""
        for each_kind in METHODS:
            self._created.setdefault(each_kind, epoch)
        created = self._created[kind]
        if not self.reload_every or epoch < created + self.reload_every or self._user_loaders.get(kind) is not None:
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
        prepared = [self._engine.prepare_data_loader(loader, group=self.ranks_of(kind)) for loader in loaders]
        self.sources[kind], self.prepared[kind] = source, prepared
        for index, loader in enumerate(prepared):
            loader.transfer = hooked_transfer(self._module, self._datamodule, index)
            loader.use.owner = counting_owner(self._module, self._datamodule)
            loader.use.evaluates, loader.use.ranks_draw_apart = kind != "train", True
            if kind != "train":
                loader.window_size = 1
        return prepared

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

    def _window_of_global_batch(self, loader: PreparedLoader) -> int | None:
        """The micro-batches in a window that ``global_batch_size`` asks for; ``None``: it is not set."""
        global_batch = self._settings.global_batch_size
        if global_batch is None:
            return None
        size = getattr(loader.loader, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError(
                f"global_batch_size={global_batch} needs a loader with a batch_size; {type(loader.loader).__name__} has none"
            )
        ranks = self._engine.data_group.world_size
        micro_batch = size * ranks
        window, remainder = divmod(global_batch, micro_batch)
        if not remainder and window:
            return window
        global_sizes = sorted({max(1, window) * micro_batch, (window + 1) * micro_batch})
        divisors = [b for b in range(1, global_batch // ranks + 1) if global_batch % (b * ranks) == 0]
        nearest_sizes = sorted(sorted(divisors, key=lambda b: abs(b - size))[:4])
        raise ValueError(
            f"global_batch_size={global_batch} cannot be divided into batches of {size} on {ranks} rank(s) ({micro_batch} samples per micro-batch); "
            f"nearest possible: {', '.join(map(str, global_sizes))}, or "
            + (
                f"batch_size={', '.join(map(str, nearest_sizes))} in the loader"
                if nearest_sizes
                else f"a multiple of {ranks}, the number of ranks"
            )
        )


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
