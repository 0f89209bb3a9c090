"""Finds the largest batch size that fits into memory: copies of the module train with larger and larger batches until one runs out of it."""

from __future__ import annotations

import copy
import gc
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from engine import Callback, CheckError, DataModule, Fit, Loss, Run, TrainModule

from .trial import is_main, log, train_copy

if TYPE_CHECKING:
    from engine import Plan

_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")
"""Messages of out-of-memory errors that are not a ``torch.OutOfMemoryError``."""
SMALLEST = 2
"""First batch size where no plan gives one."""
_MARGIN = 0.9
"""Share of the memory that the first batch size may fill. A start that is too small costs one doubling, one that is too large a failed training."""

Sizer = Callable[[int], DataLoader[Any] | DataModule | TrainModule]
"""Returns a copy of the loader, the data module or the module with a batch size."""


def find_batch_size(
    module: TrainModule,
    train_loader: Any = None,
    *,
    datamodule: DataModule | None = None,
    fit: Fit | None = None,
    mode: Literal["binsearch", "power"] = "binsearch",
    init_val: int | None = None,
    max_trials: int = 25,
    steps_per_trial: int = 3,
    batch_arg_name: str = "batch_size",
    memory: int | None = None,
) -> int:
    """Train copies of ``module`` for a few steps each, and double the batch size until memory runs out; then halve the interval.

    The search leaves the module, the loader and all random number generators as they were; set the batch size yourself. With several ranks
    (``ddp``), call it on all of them: each gets the size that fits on every rank. Leave a margin if your samples differ in size.

    Args:
        module: as in :meth:`engine.Fit.run`.
        train_loader: a ``DataLoader`` over a map-style dataset; it is copied with another batch size.
        datamodule: a data module instead of a loader; its attribute (or hyperparameter) ``batch_arg_name`` is set in a copy. Without loader and data
            module, it is set in a copy of the module, whose ``train_dataloader`` uses it.
        fit: gives strategy, devices, precision and accumulation window; default: a plain ``Fit()``.
        mode: ``"binsearch"`` finds the exact maximum; ``"power"`` the largest ``init_val * 2 ** n`` that fits.
        init_val: the first batch size, on each rank; ``None``: the one that fits according to a plan (:meth:`engine.Fit.plan`), or 2 if there is no
            accelerator or the run cannot be planned.
        max_trials: the maximum number of trainings.
        steps_per_trial: optimizer steps of a training; memory is complete from the second one on.
        batch_arg_name: the data module's name of the batch size.
        memory: bytes of a device that the plan counts with; ``None``: the accelerator's.

    Returns:
        Samples per micro-batch on each rank, at most a rank's share of the dataset.

    Raises:
        ValueError: an argument is not valid, or the batch size cannot be changed (not a ``DataLoader``, or no attribute ``batch_arg_name``).
        torch.OutOfMemoryError, MemoryError, RuntimeError: not even one sample fits; the error is the one of that training.
    """
    _check(mode, init_val, max_trials, steps_per_trial)
    data_module = train_loader if datamodule is None and isinstance(train_loader, DataModule) else datamodule
    sizes_owner = train_loader is None or data_module is train_loader
    if sizes_owner:
        with_batch_size = _sizer_of_owner(module if data_module is None else data_module, batch_arg_name)
    else:
        with_batch_size = _sizer_of_loader(train_loader)
    if init_val is None:
        init_val = planned_start(
            module, with_batch_size, None if data_module is train_loader else data_module, fit, memory
        )
    trials = _Trials(
        module, with_batch_size, None if data_module is train_loader else data_module, fit, steps_per_trial
    )
    best, failed = 0, 0
    size = init_val
    for _ in range(max_trials):
        if trials.size_fits(size):
            best = size if trials.samples_per_rank is None else min(size, trials.samples_per_rank)
            if best == trials.samples_per_rank:
                break
        else:
            failed = size
            if size == 1:
                raise trials.error()
        if failed and (failed - best <= 1 or (mode == "power" and best)):
            break
        size = _next_size(best, failed, mode, trials.samples_per_rank)
    trials.clear()
    if not best:
        raise ValueError(
            f"find_batch_size: batch size {failed} does not fit, and max_trials={max_trials} is reached: give a smaller init_val"
        )
    if is_main(fit):
        log().info("find_batch_size: %d (%s)", best, _why_not_larger(best, failed, trials.samples_per_rank, max_trials))
    return best


def planned_start(
    module: TrainModule,
    with_batch_size: Sizer,
    datamodule: DataModule | None,
    fit: Fit | None,
    memory: int | None,
) -> int:
    """Estimate the largest batch size that fits from the plans of 2 and 4 samples: beyond them memory grows at least as fast.

    Args:
        module, datamodule, fit: as in ``find_batch_size``.
        with_batch_size: returns a copy of the loader, the data module or the module with a batch size.
        memory: bytes of the device; ``None``: the accelerator's.

    Returns:
        :data:`SMALLEST` without an accelerator, and if the run cannot be planned.
    """
    fit = Fit() if fit is None else fit
    memory_bytes = _accelerator_memory(fit) if memory is None else memory
    if memory_bytes is None:
        return SMALLEST

    def plan_of(size: int) -> Plan:
        changed = with_batch_size(size)
        model = changed if isinstance(changed, TrainModule) else module
        data = changed if isinstance(changed, DataModule) else datamodule
        loader = None if isinstance(changed, (TrainModule, DataModule)) else changed
        return fit.plan(model, loader, datamodule=data, world_size=_ranks(fit), device=f"h100,{memory_bytes}")

    try:
        low, high = plan_of(SMALLEST).need, plan_of(2 * SMALLEST).need
    except Exception as error:
        log().info("find_batch_size starts with %d: no plan (%s: %s)", SMALLEST, type(error).__name__, error)
        return SMALLEST
    # Counted in tensors: the allocator's segments hide what few samples add.
    bytes_per_sample = (high.tensors - low.tensors) / SMALLEST
    start = SMALLEST
    if bytes_per_sample > 0:
        start += int(max(0.0, _MARGIN * memory_bytes - low.total) / bytes_per_sample)
    log().info("find_batch_size starts with %d, by a plan", start)
    return start


def _ranks(fit: Fit) -> int:
    devices = fit.settings.devices
    return (
        devices * fit.settings.num_nodes
        if isinstance(devices, int) and devices > 0
        else int(os.environ.get("WORLD_SIZE", "1"))
    )


def _accelerator_memory(fit: Fit) -> int | None:
    """Memory of the current accelerator in bytes, if ``fit`` trains on it."""
    with suppress(RuntimeError, AttributeError, NotImplementedError):
        if fit.settings.accelerator != "cpu" and torch.accelerator.is_available():
            return int(torch.accelerator.get_memory_info()[1])
    return None


def _check(mode: str, init_val: int | None, max_trials: int, steps_per_trial: int) -> None:
    if mode not in ("binsearch", "power"):
        raise ValueError(f"find_batch_size(mode={mode!r}): it must be 'binsearch' or 'power'")
    for name, value in (("init_val", init_val), ("max_trials", max_trials), ("steps_per_trial", steps_per_trial)):
        if name == "init_val" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"find_batch_size({name}={value!r}): it must be an int of at least 1")


def _why_not_larger(best: int, failed: int, largest: int | None, max_trials: int) -> str:
    if best == largest:
        return "all of the data"
    return f"{failed} does not fit" if failed else f"max_trials={max_trials}"


def _next_size(best: int, failed: int, mode: str, largest: int | None) -> int:
    if not failed:
        return 2 * best if largest is None else min(2 * best, largest)
    return failed // 2 if mode == "power" or not best else (best + failed) // 2


def _sizer_of_owner(owner: DataModule | TrainModule, name: str) -> Sizer:
    if getattr(type(owner), "train_dataloader", None) in (None, TrainModule.train_dataloader):
        raise ValueError(
            f"find_batch_size needs a DataLoader, and {type(owner).__name__} has no train_dataloader: give train_loader= or datamodule="
        )
    in_hparams = name in owner.hparams
    if not in_hparams and not hasattr(owner, name):
        raise ValueError(
            f"find_batch_size: {type(owner).__name__} has no {name!r}, in its attributes or hyperparameters: use it in train_dataloader "
            "(DataLoader(data, batch_size=self.batch_size)), or name it with batch_arg_name"
        )

    def with_batch_size(size: int) -> DataModule | TrainModule:
        changed = copy.copy(owner)
        if in_hparams:
            changed._hparams = copy.copy(owner.hparams)
            changed.hparams[name] = size
        if hasattr(owner, name):
            setattr(changed, name, size)
        return changed

    return with_batch_size


def _sizer_of_loader(loader: Any) -> Sizer:
    batches = getattr(loader, "batch_sampler", None)
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or type(batches) is not BatchSampler
    ):
        kind = (
            type(loader).__name__
            if type(batches) in (BatchSampler, type(None))
            else f"a loader with a {type(batches).__name__}"
        )
        raise ValueError(
            f"find_batch_size cannot change the batch size of {kind}: give a DataLoader(dataset, batch_size=...) over a map-style "
            "dataset, or a DataModule with batch_size"
        )

    def with_batch_size(size: int) -> DataLoader[Any]:
        changed = copy.copy(loader)  # keeps class, workers and collate function
        # DataLoader refuses these assignments: they contradict how it was created.
        object.__setattr__(changed, "batch_sampler", BatchSampler(batches.sampler, size, batches.drop_last))
        object.__setattr__(changed, "batch_size", size)
        changed._iterator = None
        return changed

    return with_batch_size


class _Trials:
    """Trainings with different batch sizes."""

    def __init__(
        self, module: TrainModule, with_batch_size: Sizer, datamodule: DataModule | None, fit: Fit | None, steps: int
    ) -> None:
        self._module, self._with_batch_size, self._datamodule = module, with_batch_size, datamodule
        self._fit, self._steps = fit, steps
        self.samples_per_rank: int | None = None
        """Samples of the dataset for each rank; ``None``: not known yet."""
        self._error: BaseException | None = None

    def size_fits(self, size: int) -> bool:
        """Whether a training with this batch size ends without running out of memory."""
        self.clear()
        changed = self._with_batch_size(size)
        module, datamodule, loader = self._module, self._datamodule, None
        if isinstance(changed, TrainModule):
            module = changed
        elif isinstance(changed, DataModule):
            datamodule = changed
        else:
            loader = changed
        probe = _Probe(size)
        settings: dict[str, Any] = {"max_steps": self._steps, "limit_train_batches": None, "overfit_batches": 0}
        if self._fit is not None and self._fit.settings.global_batch_size is not None:
            # The window would depend on the batch size. Two micro-batches are enough: gradients of an earlier one take memory.
            settings.update(global_batch_size=None, accumulate_grad_batches=2)
        try:
            train_copy(module, loader, datamodule, self._fit, probe, **settings)
        except Exception as error:
            if not _is_memory_error(error):
                raise
            traceback.clear_frames(error.__traceback__)  # frames hold the model and its activations
            self._error = error.with_traceback(None)
            error.__cause__ = error.__context__ = None
        self.samples_per_rank = probe.samples_per_rank
        return self._error is None

    def error(self) -> BaseException:
        """The error of the latest training that did not fit."""
        assert self._error is not None
        return self._error

    def clear(self) -> None:
        """Free the memory of the latest training."""
        on_device = torch.accelerator.is_available()
        if on_device or self._error is not None:
            self._error = None
            gc.collect()
        if on_device:
            torch.accelerator.memory.empty_cache()


class _TooLarge(CheckError):
    """A rank ran out of memory. All ranks raise the error at the same place, so that they can try another size."""


class _Probe(Callback):
    """Counts the samples of a rank. With several ranks, each one first tries every step alone: a rank that ran out of memory in the middle of
    a backward pass would leave the others waiting for its gradients."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.samples_per_rank: int | None = None

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        if run.world_size == 1:
            return
        if type(run.engine.strategy).__name__ != "DDP" or not isinstance(module, TrainModule):
            raise ValueError(
                f"find_batch_size with several ranks works with strategy='ddp', not with {type(run.engine.strategy).__name__}: "
                "a rank that runs out of memory there leaves the others waiting"
            )
        step = module.training_step

        def step_after_trial(*args: Any) -> Any:
            error = _memory_error_of(lambda: step(*args), module)
            if run.engine.reduce(torch.tensor(float(error is not None), device=run.device), "max"):
                raise _TooLarge("out of memory on a rank" if error is None else str(error))
            return step(*args)

        module.training_step = step_after_trial  # type: ignore[method-assign,assignment]

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        assert run.train_loader is not None
        loader, samples = run.train_loader.loader, run.train_loader.samples
        batch_size = getattr(loader, "batch_size", None)
        if isinstance(loader, DataLoader) and batch_size != self.size:
            raise ValueError(
                f"find_batch_size: the loader of train_dataloader has batch_size={batch_size} where {self.size} was set: use the data module's batch "
                "size in it"
            )
        if isinstance(loader, DataLoader) and samples is not None:
            self.samples_per_rank = max(1, samples // run.world_size)
        elif run.num_train_batches == 1:
            self.samples_per_rank = self.size

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        """Log nothing."""


def _memory_error_of(step: Callable[[], Any], module: nn.Module) -> str | None:
    """Run the forward and backward pass on this rank alone, without effect on gradients; return the message of its out-of-memory error, if any."""
    try:
        with torch.random.fork_rng():
            outputs = step()
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            root = loss.sum if isinstance(loss, Loss) else loss
            if isinstance(root, Tensor):
                trained = [p for p in module.parameters() if p.requires_grad]
                torch.autograd.grad(root.sum(), trained, allow_unused=True)
    except Exception as error:
        if not _is_memory_error(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return str(error)
    return None


def _is_memory_error(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, _TooLarge)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MEMORY_MESSAGES)
