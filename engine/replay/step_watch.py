"""Watches one step of a training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.callback import Callback
from engine.distributed.collectives import gather_json
from engine.loop.run import Run
from engine.replay.replayed_step import ReplayedStep
from engine.step.gradients import Loss, loss_in, nonzero
from engine.utils.tree import leaves, whole


class LeftOut(Callback):
    """Stands for a callback that a replay leaves out: a checkpoint's state of it has a receiver, which drops it."""

    def __init__(self, state_key: str) -> None:
        self._state_key = state_key

    @property
    def state_key(self) -> str:
        return self._state_key


class StepWatch(Callback):
    """Fills a :class:`ReplayedStep` while the step runs; on all ranks."""

    def __init__(self, step: ReplayedStep, *, detect_anomaly: bool) -> None:
        self.step, self.detect_anomaly = step, detect_anomaly
        self.seen = False
        self._losses: list[float] = []
        self._micro_batches = 0
        self._handles: list[Any] = []
        self._outer_anomaly = False

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        step, settings = self.step, run.settings
        step.ranks = run.world_size
        if step.ranks == step.recorded_ranks or settings.global_batch_size is not None:
            return
        if step.recorded_ranks % step.ranks:
            raise ValueError(
                f"replay on {step.ranks} ranks of a run on {step.recorded_ranks}: give a number of ranks that divides it, 1 for example"
            )
        # As many micro-batches more: the window has the same samples.
        run.window_at = partial(_more, settings.accumulate_at, step.recorded_ranks // step.ranks)

    def on_train_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        if run.step != self.step.step - 1:
            return
        if not self.seen:
            self._begin(run, module)
        self._check(f"the batch of micro-batch {len(self._losses)}", batch)

    def on_before_backward(self, run: Run, module: nn.Module, loss: Any) -> None:
        if self._handles:
            value = loss.sum.detach() / nonzero(loss.count) if isinstance(loss, Loss) else loss.detach()
            number = float(whole(value))
            self._check(f"the loss of micro-batch {len(self._losses)}", torch.tensor(number))
            self._losses.append(number)

    def _gradients(self, run: Run, module: nn.Module, optimizer: Any) -> None:
        try:
            norms = run.engine.grad_norms(module, optimizer=optimizer)
        except ValueError:  # the strategy keeps them to itself
            return
        for name, norm in norms.items():
            self.step.grad_norms[name] = float(norm)
            self._check(f"the gradient of {name}", norm)
        every = torch.tensor(list(self.step.grad_norms.values()), dtype=torch.float64)
        self.step.grad_norm = float(torch.linalg.vector_norm(every))

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._handles:
            return
        self._micro_batches += 1
        if len(self._losses) < self._micro_batches and (loss := loss_in(outputs, type(module).__name__)) is not None:
            self.on_before_backward(
                run, module, loss
            )  # a pipeline has no backward pass of its own for each micro-batch
        run.engine.settle()
        if run.step != self.step.step - 1:
            self._end(run)
            run.stop_reason = f"step {self.step.step} was replayed"  # on all ranks now: nothing to agree on

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if self.seen and step == self.step.step and not self.step.metrics:
            self.step.metrics.update(metrics)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        if self._handles:  # the step was left out
            self._end(run)

    def _begin(self, run: Run, module: nn.Module) -> None:
        self.seen = True
        step, state = self.step, run.state
        step.epoch = state.epoch
        assert run.train_loader is not None
        step.samples = run.train_loader.units(state.position, run.stride)
        self._handles = [each.register_forward_hook(self._hook(name)) for name, each in module.named_modules()]
        self._outer_anomaly = torch.is_anomaly_enabled()
        # Not before: reading gradients rounds them differently from a step that nobody watches.
        run.hooks.add("on_before_optimizer_step", f"[Callback]{self.state_key}", self._gradients)
        if self.detect_anomaly:
            torch.autograd.set_detect_anomaly(True)

    def _end(self, run: Run) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        torch.autograd.set_detect_anomaly(self._outer_anomaly)
        rows = gather_json(run.engine.group, [list(map(repr, self._losses)), self.step.nonfinite])
        self.step.losses = [list(map(float, losses)) for losses, _ in rows]
        several = len(rows) > 1
        found = [f"{where} (rank {rank})" if several else where for rank, (_, where) in enumerate(rows) if where]
        self.step.nonfinite = found[0] if found else None

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            where = f"the output of {name}" if name else "the model's output"
            self._check(f"{where} ({type(module).__name__}) in micro-batch {len(self._losses)}", output)

        return hook

    def _check(self, where: str, tree: Any) -> None:
        """Note the first place where a number is not finite."""
        if self.step.nonfinite is None:
            flags: list[bool] = []
            for tensor in leaves(tree):
                _note(flags, tensor)
            if not all(flags):
                self.step.nonfinite = where


def _note(flags: list[bool], tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        flags.append(bool(whole(tensor.detach()).isfinite().all()))


def _more(window_at: Callable[[int], int], times: int, epoch: int) -> int:
    return window_at(epoch) * times
