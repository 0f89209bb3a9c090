"""Averages of the weights during a training, for validation, in checkpoints, and in the module after the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from engine import Callback, Run

Average = Callable[[Tensor, Tensor, int], Tensor]
MultiAverage = Callable[[list[Tensor], list[Tensor], int], None]
_HALF = (torch.float16, torch.bfloat16)


class WeightAveraging(Callback):
    """Averages the weights during a training; :class:`callbacks.EMA` and :class:`callbacks.SWA` are the usual averages.

    The average starts as a copy of the weights at the first update. It is on the device, sharded as the parameters are: nothing is
    gathered or copied to the host. It covers the parameters that an optimizer has, and the buffers that the model saves. Averages of
    half-precision parameters are kept in fp32, in which small changes are not lost.

    - Validation uses the averages. Afterwards the trained weights are back, bit for bit, also after an error.
    - A checkpoint has both: the trained weights, and the averages in parts, under ``name``. ``load_from_checkpoint(path)``,
      ``fit.test(module, checkpoint=path)``, ``engine.Resume(path, weights_only=True)`` and ``fit checkpoint export`` use the weights with which
      its score was measured: the averages, unless there were none yet, or the score is a metric of the training. ``weights="trained"`` and
      ``weights="ema"`` ask for one of them.
    - After the training the module has the averages (with ``Fit(reload_best=True)``, the best checkpoint's averages).

    If a run has several callbacks that average, validation and the module get the averages of the first; checkpoints have all.
    A resumed run continues with its averages. Steps that were skipped, of fp16 for example, are not averaged. To decide when to update,
    override :meth:`should_update`.

    Statistics of batch norms are averaged with the other buffers. To compute them from data instead, call
    ``torch.optim.swa_utils.update_bn(loader, module)`` after the run.

    Args:
        use_buffers: average floating-point buffers; other buffers, and all with ``False``, are copied from the model at each update.
        avg_fn: ``f(average, current, updates so far) -> new average``, for each tensor; default: the mean. It gets local shards.
        multi_avg_fn: ``f(averages, currents, updates so far)``, which changes the averages in place: one of ``torch.optim.swa_utils``, for
            example. It gets lists of local shards.
        name: the name of the averages in checkpoints.

    Raises:
        ValueError, TypeError: an argument is not valid. In ``setup``: under DeepSpeed, which has its own copy of the weights,
            or if two averages have the same ``name``.
    """

    def __init__(
        self,
        *,
        use_buffers: bool = True,
        avg_fn: Average | None = None,
        multi_avg_fn: MultiAverage | None = None,
        name: str = "average",
    ) -> None:
        who = type(self).__name__
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError(f"{who}: give avg_fn or multi_avg_fn, not both")
        for argument, value in (("avg_fn", avg_fn), ("multi_avg_fn", multi_avg_fn)):
            if value is not None and not callable(value):
                raise TypeError(f"{who}({argument}={value!r}): it must be a function")
        if not isinstance(name, str) or not name or "/" in name or name == "trained":
            raise ValueError(f"{who}(name={name!r}): it must be text without '/', and not 'trained'")
        self.use_buffers, self.avg_fn, self.multi_avg_fn, self.name = use_buffers, avg_fn, multi_avg_fn, name
        self.n_averaged = 0
        """Number of updates so far."""
        self._step: int | None = None
        self._epoch = -1
        self._restored = False
        self._forget()

    def _forget(self) -> None:
        self._names: dict[str, str] = {}  # name in the model -> the first name of the same tensor
        self._weights: dict[str, Tensor] = {}
        self._averages: dict[str, Tensor] = {}
        # While weights and averages are swapped: the weights whose dtype differs from their average's.
        self._swapped_out: dict[str, Tensor] | None = None
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []  # local averages, and the tensors that they are of
        self._found_count = 0

    # -- when -------------------------------------------------------------------------------------------------------------------

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update now; called after each optimizer step with ``step_idx``, and at the end of each epoch with ``epoch_idx``, from 0.

        By default it returns true after each step; override it to decide otherwise. All ranks must return the same.
        """
        return step_idx is not None

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        if stage != "fit":
            return
        who, strategy = type(self).__name__, run.engine.strategy
        if strategy.owns_weights:
            raise ValueError(
                f"{who} does not work with {type(strategy).__name__}, which has its own copy of the weights: use strategy='fsdp' or 'ddp'"
            )
        averaging = [c for c in run.callbacks if isinstance(c, WeightAveraging)]
        if sum(c.name == self.name for c in averaging) > 1:
            raise ValueError(f"two callbacks keep averages called {self.name!r}: give one of them another name=")
        self.validates_with = self.name if averaging[0] is self else None
        self.n_averaged, self._step, self._epoch, self._restored = 0, None, -1, False
        self._forget()

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        if self._restored and self._step is not None and self._step < run.step:
            self._after_step(run, module)  # a checkpoint that was saved between the step and its update
        self._step = run.step

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step + run.engine.pending_steps != self._step:
            self._after_step(run, module)
        if batch_idx + 1 == run.num_train_batches:  # before the validation at the epoch's end
            self._after_epoch(run, module)

    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None:
        self._restore(run, module)  # after a validation that Ctrl-C or SIGTERM has ended
        if run.num_train_batches is None and not run.stopping:
            self._after_epoch(run, module)

    def _after_step(self, run: Run, module: nn.Module) -> None:
        if not self.should_update(step_idx=run.step + run.engine.pending_steps - 1):
            self._step = run.step + run.engine.pending_steps
            return
        run.engine.settle()  # fp16: was the step skipped?
        if run.step != self._step:
            self._step = run.step
            self.update(run, module)

    def _after_epoch(self, run: Run, module: nn.Module) -> None:
        if run.epoch > self._epoch and self.should_update(epoch_idx=run.epoch):
            self._epoch = run.epoch
            run.engine.settle()
            self.update(run, module)

    # -- the averages -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, run: Run, module: nn.Module) -> None:
        """Add the current weights to the average; all ranks call this together, between two steps."""
        run.saver.hold()  # a checkpoint in progress may still be copying them
        if _parameter_count(run) != self._found_count:
            self._find_weights(run, module)
        for averages, weights in self._groups:
            currents = run.engine.strategy.local(weights)
            if averages[0].dtype != currents[0].dtype:
                currents = [current.to(averages[0].dtype) for current in currents]
            if self.n_averaged and self._is_averaged(weights[0]):
                self.average(averages, currents)
            else:
                torch._foreach_copy_(averages, currents)
        self.n_averaged += 1

    def average(self, averages: list[Tensor], currents: list[Tensor]) -> None:
        """Change ``averages`` in place by the ``currents``; both lists are of one dtype and device, and local shards."""
        if self.avg_fn is None:
            (self.multi_avg_fn or _MEAN)(averages, currents, self.n_averaged)
            return
        for average, current in zip(averages, currents, strict=True):
            average.copy_(self.avg_fn(average, current, self.n_averaged))

    def _find_weights(self, run: Run, module: nn.Module) -> None:
        """Find the tensors to average. A new one, such as a parameter that an optimizer got later, starts with its current values."""
        trained = {id(p) for o in run.optimizers for group in o.param_groups for p in group["params"]}
        buffers = {id(buffer) for buffer in module.buffers()}
        parts = {
            name: value
            for name, value in run.engine.strategy.model_parts(module).items()
            if isinstance(value, Tensor) and (id(value) in trained or id(value) in buffers)
        }
        first: dict[int, str] = {}
        self._names = {name: first.setdefault(id(value), name) for name, value in parts.items()}
        self._weights = {name: parts[name] for name in first.values()}
        earlier, self._averages = self._averages, {}
        for name, weight in self._weights.items():
            average = earlier.get(name)
            if average is None or average.shape != weight.shape:
                average = weight.detach().clone()
                if average.dtype in _HALF:
                    average = average.float()
            self._averages[name] = average
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        locally = run.engine.strategy.local(list(self._averages.values()))
        for weight, average in zip(self._weights.values(), locally, strict=True):
            averages, weights = groups.setdefault(
                (average.device, average.dtype, weight.dtype, self._is_averaged(weight)), ([], [])
            )
            averages.append(average)
            weights.append(weight)
        self._groups, self._found_count = list(groups.values()), _parameter_count(run)

    def _is_averaged(self, tensor: Tensor) -> bool:
        """Whether a tensor is averaged. Tensors that are not are copied from the model at each update."""
        numbers = tensor.is_floating_point() or tensor.is_complex()
        return numbers and (self.use_buffers or isinstance(tensor, nn.Parameter))

    @torch.no_grad()
    def _swap(self, run: Run, module: nn.Module) -> None:
        """Exchange the weights of the model with the averages."""
        self._find_weights(run, module)  # under FSDP, it also frees gathered weights
        self._swapped_out = {}
        for name, weight in self._weights.items():
            average, now = self._averages[name], weight.detach().clone()
            weight.copy_(average)
            if average.dtype == weight.dtype:
                average.copy_(now)
            else:
                self._swapped_out[name] = now

    @torch.no_grad()
    def _restore(self, run: Run, module: nn.Module) -> None:
        """Undo :meth:`_swap`, if the weights are swapped."""
        swapped_out, self._swapped_out = self._swapped_out, None
        if swapped_out is None:
            return
        run.engine.strategy.model_parts(module)
        for name, weight in self._weights.items():
            average = self._averages[name]
            if name in swapped_out:
                weight.copy_(swapped_out[name])
            else:
                now = weight.detach().clone()
                weight.copy_(average)
                average.copy_(now)

    # -- where they are used ----------------------------------------------------------------------------------------------------

    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        if run.stage == "fit" and self.validates_with and self.n_averaged and self._swapped_out is None:
            self._swap(run, module)

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        self._restore(run, module)

    def on_exception(self, run: Run, module: nn.Module, exception: BaseException) -> None:
        self._restore(run, module)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        self._restore(run, module)

    def on_fit_end(self, run: Run, module: nn.Module) -> None:
        if self.validates_with and self.n_averaged:
            self._swap(run, module)
            self._swapped_out = None  # the trained weights are in the checkpoints
            run.engine.share_buffers(module)

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        self._forget()

    # -- checkpoints ------------------------------------------------------------------------------------------------------------

    def other_weights(self, run: Run, module: nn.Module) -> dict[str, dict[str, Any]]:
        if self._swapped_out is not None:
            raise RuntimeError(
                f"a checkpoint is to be saved during the validation of {type(self).__name__}'s averages, while the model does not have its "
                "trained weights: save it in on_validation_end, after this callback"
            )
        if not self.n_averaged:
            return {}
        if not self._averages:
            self._find_weights(run, module)
        return {self.name: {name: self._averages[first] for name, first in self._names.items()}}

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}[name={self.name!r}]"

    def state_dict(self) -> dict[str, Any]:
        return {"n_averaged": self.n_averaged, "step": self._step, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_averaged, self._step, self._epoch = int(state["n_averaged"]), state["step"], int(state["epoch"])
        self._restored = True


class EMA(WeightAveraging):
    """Exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights`` after an optimizer step.

    :class:`callbacks.WeightAveraging` says where it is used and how it is saved. The first update copies the weights. Averages have the
    parameters' shapes and dtypes; averages of half-precision parameters are in float32.

    Args:
        decay: share of the old average, from 0 to 1.
        update_every_n_steps: update after each step whose index (from 0) is a multiple of this.
        update_starting_at_step: do not update before this step, from 0.
        update_starting_at_epoch: do not update before this epoch, from 0.
        warmup: the decay of update n (from 0) is at most ``(1 + n) / (10 + n)``: the first weights are forgotten sooner.
        use_buffers, name: as in :class:`callbacks.WeightAveraging`.

    Raises:
        ValueError, TypeError: an argument is not valid.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        warmup: bool = False,
        use_buffers: bool = True,
        name: str = "ema",
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ValueError(f"EMA(decay={decay!r}): it must be a number from 0 to 1")
        for argument, value, minimum in (
            ("update_every_n_steps", update_every_n_steps, 1),
            ("update_starting_at_step", update_starting_at_step, 0),
            ("update_starting_at_epoch", update_starting_at_epoch, 0),
        ):
            if (value is not None or minimum) and (
                isinstance(value, bool) or not isinstance(value, int) or value < minimum
            ):
                raise ValueError(f"EMA({argument}={value!r}): it must be a whole number of at least {minimum}")
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=use_buffers, name=name)
        self.decay, self.warmup = decay, warmup
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch
        self._waiting = False

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        self._waiting = run.epoch < (self.update_starting_at_epoch or 0)
        super().on_train_start(run, module)

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        self._waiting = run.epoch < (self.update_starting_at_epoch or 0)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None or self._waiting:
            return False
        return step_idx >= (self.update_starting_at_step or 0) and step_idx % self.update_every_n_steps == 0

    def average(self, averages: list[Tensor], currents: list[Tensor]) -> None:
        if self.warmup:
            decay = min(self.decay, (1 + self.n_averaged) / (10 + self.n_averaged))
            get_ema_multi_avg_fn(decay)(averages, currents, self.n_averaged)
        else:
            super().average(averages, currents)


_MEAN: MultiAverage = get_swa_multi_avg_fn()


def _parameter_count(run: Run) -> int:
    """Number of parameters in all optimizers."""
    return sum(len(group["params"]) for optimizer in run.optimizers for group in optimizer.param_groups)
