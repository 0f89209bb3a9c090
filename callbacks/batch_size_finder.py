"""The largest batch size that fits into memory: train copies with ever larger batches until one does not."""

from __future__ import annotations

import copy
import gc
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from engine import Callback, CheckError, DataModule, Fit, Loss, Run, TrainModule

from .trial import is_main, log, train_copy

_SAID = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")
"""Messages of out-of-memory errors that are not a ``torch.OutOfMemoryError``."""
SMALLEST = 2
"""Where no plan says more."""
_MARGIN = 0.9
"""The share of the memory that the first guess fills: one that is a little too small costs a doubling, one that is too large a training."""


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

    The search restores the module, the loader and the state of all random number generators; set the batch size yourself. With several ranks
    (``ddp``), call it on all of them: each gets the size that fits on every rank. Leave a margin if your samples differ in size.

    Args:
        module: as in :meth:`engine.Fit.run`.
        train_loader: a ``DataLoader`` over a map-style dataset; it is copied with another batch size.
        datamodule: instead of a loader; its attribute (or hyperparameter) ``batch_arg_name`` is set in a copy. Without both, the
            module's, whose ``train_dataloader`` uses it.
        fit: gives strategy, devices, precision and accumulation window; by default a plain ``Fit()``.
        mode: ``"binsearch"`` finds the exact maximum; ``"power"`` the largest ``init_val * 2 ** n`` that fits.
        init_val: the first batch size, on each rank; ``None``: what fits by a plan (:meth:`engine.Fit.plan`), and 2 where there is no accelerator or
            the plan does not say.
        max_trials: the maximum number of trainings.
        steps_per_trial: optimizer steps of a training; memory is complete from the second one on.
        batch_arg_name: the data module's name of the batch size.
        memory: bytes of a device that the plan counts with; ``None``: the accelerator's.

    Returns:
        Samples per micro-batch on each rank, at most a rank's share of the dataset.

    Raises:
        ValueError: an argument is not valid, or the batch size cannot be changed (not a ``DataLoader``, or no attribute ``batch_arg_name``).
        torch.OutOfMemoryError, MemoryError, RuntimeError: not even one sample fits; this is the error of that training.
    """
    _check(mode, init_val, max_trials, steps_per_trial)
    data = train_loader if datamodule is None and isinstance(train_loader, DataModule) else datamodule
    by_owner = train_loader is None or data is train_loader
    sized = _of_owner(module if data is None else data, batch_arg_name) if by_owner else _of_loader(train_loader)
    if init_val is None:
        init_val = planned_start(module, sized, None if data is train_loader else data, fit, memory)
    trials = _Trials(module, sized, None if data is train_loader else data, fit, steps_per_trial)
    best, failed = 0, 0
    size = init_val
    for _ in range(max_trials):
        if trials.fits(size):
            best = size if trials.most is None else min(size, trials.most)
            if best == trials.most:
                break
        else:
            failed = size
            if size == 1:
                raise trials.error()
        if failed and (failed - best <= 1 or (mode == "power" and best)):
            break
        size = _next(best, failed, mode, trials.most)
    trials.clear()
    if not best:
        raise ValueError(
            f"find_batch_size: batch size {failed} does not fit, and max_trials={max_trials} is reached: give a smaller init_val"
        )
    if is_main(fit):
        log().info("find_batch_size: %d (%s)", best, _limit(best, failed, trials.most, max_trials))
    return best


def planned_start(
    module: TrainModule,
    sized: Callable[[int], Any],
    datamodule: DataModule | None,
    fit: Fit | None,
    memory: int | None,
) -> int:
    """The largest batch size whose plan fits, by the plans of 2 and 4 samples: memory grows at least as fast beyond them.

    Args:
        module, datamodule, fit: as of ``find_batch_size``.
        sized: the loader, the data module or the module with a batch size.
        memory: bytes of the device; ``None``: of the accelerator.

    Returns:
        :data:`SMALLEST` without an accelerator, and for what cannot be planned.
    """
    fit = Fit() if fit is None else fit
    room = _accelerator_memory(fit) if memory is None else memory
    if room is None:
        return SMALLEST

    def need(size: int) -> Any:
        changed = sized(size)
        own, data, loader = module, datamodule, changed
        if isinstance(changed, TrainModule):
            own, loader = changed, None
        elif isinstance(changed, DataModule):
            data, loader = changed, None
        return fit.plan(own, loader, datamodule=data, world_size=_ranks(fit), device=f"h100,{room}").need

    try:
        low, high = need(SMALLEST), need(2 * SMALLEST)
    except Exception as error:
        log().info("find_batch_size starts with %d: no plan (%s: %s)", SMALLEST, type(error).__name__, error)
        return SMALLEST
    # Of tensors: the allocator's segments hide what few samples add.
    each = (high.tensors - low.tensors) / SMALLEST
    found = SMALLEST if each <= 0 else SMALLEST + int(max(0.0, _MARGIN * room - low.total) / each)
    log().info("find_batch_size starts with %d, by a plan", found)
    return found


def _ranks(fit: Fit) -> int:
    devices = fit.settings.devices
    return (
        devices * fit.settings.num_nodes
        if isinstance(devices, int) and devices > 0
        else int(os.environ.get("WORLD_SIZE", "1"))
    )


def _accelerator_memory(fit: Fit) -> int | None:
    """Bytes of the current accelerator, if it is what ``fit`` trains on."""
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


def _limit(best: int, failed: int, most: int | None, max_trials: int) -> str:
    if best == most:
        return "all of the data"
    return f"{failed} does not fit" if failed else f"max_trials={max_trials}"


def _next(best: int, failed: int, mode: str, most: int | None) -> int:
    if not failed:
        return 2 * best if most is None else min(2 * best, most)
    return failed // 2 if mode == "power" or not best else (best + failed) // 2


Sized = Callable[[int], Any]
"""The loader, the data module or the module with this batch size."""


def _of_owner(owner: DataModule | TrainModule, name: str) -> Sized:
    if getattr(type(owner), "train_dataloader", None) in (None, TrainModule.train_dataloader):
        raise ValueError("find_batch_size needs a DataLoader, or a datamodule with a batch size")
    in_hparams = name in owner.hparams
    if not in_hparams and not hasattr(owner, name):
        raise ValueError(
            f"find_batch_size: {type(owner).__name__} has no {name!r}, in its attributes or hyperparameters: use it in train_dataloader "
            "(DataLoader(data, batch_size=self.batch_size)), or name it with batch_arg_name"
        )

    def sized(size: int) -> Any:
        changed = copy.copy(owner)
        if in_hparams:
            changed._hparams = copy.copy(owner.hparams)
            changed.hparams[name] = size
        if hasattr(owner, name):
            setattr(changed, name, size)
        return changed

    return sized


def _of_loader(loader: Any) -> Sized:
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

    def sized(size: int) -> Any:
        changed = copy.copy(loader)  # of the same class, with workers and collate function
        # DataLoader refuses these assignments: they contradict how it was created.
        object.__setattr__(changed, "batch_sampler", BatchSampler(batches.sampler, size, batches.drop_last))
        object.__setattr__(changed, "batch_size", size)
        changed._iterator = None
        return changed

    return sized


class _Trials:
    """Trainings with different batch sizes."""

    def __init__(
        self, module: TrainModule, sized: Sized, datamodule: DataModule | None, fit: Fit | None, steps: int
    ) -> None:
        self._module, self._sized, self._datamodule, self._fit, self._steps = module, sized, datamodule, fit, steps
        self.most: int | None = None
        """Samples of the data for each rank; ``None``: not known yet."""
        self._error: BaseException | None = None

    def fits(self, size: int) -> bool:
        """Whether a training with this batch size ends without running out of memory."""
        self.clear()
        changed = self._sized(size)
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
            # Its window would depend on the batch size. Gradients of an earlier micro-batch take memory, so there is one.
            settings.update(global_batch_size=None, accumulate_grad_batches=2)
        try:
            train_copy(module, loader, datamodule, self._fit, probe, **settings)
        except Exception as error:
            if not _is_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the model and its activations
            self._error = error.with_traceback(None)
            error.__cause__ = error.__context__ = None
        self.most = probe.most
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
    """A rank ran out of memory. All ranks raise it at the same place, so that they can try another size."""


class _Probe(Callback):
    """Finds how many samples a rank has (``most``). With several ranks, each tries each step for itself first: one that ran out of
    memory in the middle of a backward pass would leave the others waiting for its gradients."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.most: int | None = None

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        assert run.train_loader is not None
        loader, samples = run.train_loader.loader, run.train_loader.samples
        there = getattr(loader, "batch_size", None)
        if isinstance(loader, DataLoader) and there != self.size:
            raise ValueError(
                f"find_batch_size: the loader of train_dataloader has batch_size={there} where {self.size} was set: use the data module's batch "
                "size in it"
            )
        if isinstance(loader, DataLoader) and samples is not None:
            self.most = max(1, samples // run.world_size)
        elif run.num_train_batches == 1:
            self.most = self.size
        if run.world_size > 1:
            if type(run.engine.strategy).__name__ != "DDP" or not isinstance(module, TrainModule):
                raise ValueError(
                    f"find_batch_size with several ranks works with strategy='ddp', not with {type(run.engine.strategy).__name__}: "
                    "a rank that runs out of memory there leaves the others waiting"
                )
            step = module.training_step

            def tried(*args: Any) -> Any:
                error = _tried(lambda: step(*args), module)
                if run.engine.reduce(torch.tensor(float(error is not None), device=run.device), "max"):
                    raise _TooLarge("out of memory on a rank" if error is None else str(error))
                return step(*args)

            module.training_step = tried  # type: ignore[method-assign,assignment]

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        """Nothing is shown."""


def _tried(step: Callable[[], Any], module: nn.Module) -> str | None:
    """Run the forward and backward pass on this rank alone, without effect on gradients; return its out-of-memory error, if any."""
    try:
        with torch.random.fork_rng():
            outputs = step()
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            root = loss.sum if isinstance(loss, Loss) else loss
            if isinstance(root, Tensor):
                trained = [p for p in module.parameters() if p.requires_grad]
                torch.autograd.grad(root.sum(), trained, allow_unused=True)
    except Exception as error:
        if not _is_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        return str(error)
    return None


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, _TooLarge)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)
