"""Pipeline parallelism: a model's stages, each on one rank of an axis, run by the schedules of ``torch.distributed.pipelining``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.utils.rnn import PackedSequence

from engine.step.gradients import Loss
from engine.step.precision import Precision
from engine.strategies.pipeline_shapes import Shapes, Spec
from engine.strategies.pipeline_stages import Stage
from engine.utils import accelerator, torch_private
from engine.utils.log import warn_once
from engine.utils.tree import batch_size, full_tensor, map_tensors

SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1, False),
    "1f1b": ("Schedule1F1B", 1, False),
    "interleaved": ("ScheduleInterleaved1F1B", 2, False),
    "zero_bubble": ("ScheduleInterleavedZeroBubble", 2, False),
    "zbv": ("ScheduleZBVZeroBubble", 2, True),
    "dualpipev": ("ScheduleDualPipeV", 2, True),
}
"""Class in ``torch.distributed.pipelining.schedules``; stages per rank; whether the second stages run over the ranks in reverse (a V)."""

SPLIT_BACKWARD = ("zero_bubble", "zbv", "dualpipev")
"""Schedules that compute gradients of inputs and of weights in separate backward passes."""

Step = Callable[[Any, int], Tensor | Loss]
"""Computes the loss of a chunk of a micro-batch; the second argument is how many of the chunk's samples count."""


class Pipeline:
    """The pipeline of one model, with this rank's stages. It replaces the model's ``forward``, which the steps of users call."""

    def __init__(
        self,
        model: nn.Module,
        schedule: str,
        num_microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.model, self.group, self.device, self.precision = model, group, device, precision
        self.num_microbatches = num_microbatches
        self.rank, self.size = group.rank(), group.size()
        self.schedule, stages_per_rank, self._v = SCHEDULES[schedule]
        self.num_stages = stages_per_rank * self.size
        self.modules: dict[int, Stage] = {}
        """This rank's stages, by their index."""
        self.weighted: bool | None = None
        """Whether the step returns a ``Loss`` rather than a scalar; known after the first step."""
        self._uncalled = (
            f"pipeline parallel: the step of {type(model).__name__} ended before it called the model: compute the loss from self(...): its "
            "stages are on several ranks, not from submodules"
        )
        self._schedules: dict[Any, Any] = {}
        self._returned: Spec = ()
        """The shapes of the last stage's output."""
        self._inputs: list[Any] | None = None
        """While a step runs to capture the model's inputs: the list for them."""
        self._output: Any = None
        """While a step computes a chunk's loss: a tuple of the model's output, empty once the step has called the model."""
        self._loss_of: Callable[[Any, Tensor], Tensor] | None = None

    def owner(self, stage: int) -> int:
        """The rank, on the pipeline axis, that has a stage."""
        return 2 * self.size - 1 - stage if self._v and stage >= self.size else stage % self.size

    def kinds(self) -> list[Any]:
        """The structure of the stages of each rank on the pipeline axis; ranks with equal values compute alike."""
        stage_kinds = self.shapes.kinds()
        return [
            tuple(kind for index, kind in enumerate(stage_kinds) if self.owner(index) == rank)
            for rank in range(self.size)
        ]

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, and so the loss."""
        return self.owner(self.num_stages - 1) == self.rank

    def build(self, parts: list[list[nn.Module]]) -> None:
        """Take this rank's stages of ``parts``, and replace the model's ``forward``."""
        flat = [part for stage in parts for part in stage]
        if any(isinstance(m, torch_private.BatchNorm) for part in flat for m in part.modules()):
            warn_once(
                "batch norm in a pipeline takes its statistics from each chunk of a micro-batch, and from padding samples"
            )
        self.shapes = Shapes(self.model, parts, self.device, self.precision)
        for index, stage in enumerate(parts):
            if self.owner(index) == self.rank:
                self.modules[index] = Stage(stage, self.precision, self.device)
        self.model.forward = self._forward

    # -- training ---------------------------------------------------------------------------------------------------------------

    def train(self, step: Step, root: Callable[[Any, float], Tensor], batch: Any) -> Tensor:
        """Run forward and backward of one micro-batch in ``num_microbatches`` chunks.

        Args:
            step: a function to call with the whole batch, as far as its call of the model; on ranks with the loss also with each chunk.
            root: a function that returns the scalar to start backward from, given a chunk's loss and its fraction of the batch.

        Returns:
            ``[weighted, sum or mean, count]``, fp64, the same on every rank.
        """
        count = batch_size(batch)
        if not count:
            raise ValueError(
                f"pipeline parallel splits batches along dim 0 of tensors; this one ({type(batch).__name__}) has no samples"
            )
        rows = -(-count // self.num_microbatches)
        padded = _rows(batch, count, torch.arange(rows * self.num_microbatches).clamp(max=count - 1))
        inputs = self._captured(step, padded)
        totals = torch.zeros(3, dtype=accelerator.wide(self.device), device=self.device)

        def loss_of(output: Any, index: Tensor) -> Tensor:
            low = int(index) * rows
            samples = max(0, min(rows, count - low))
            if not samples:  # padding samples
                return _first(output).sum() * 0.0
            self._output = (_rows(self._full_output(output), rows, torch.arange(samples)),)
            try:
                with self.precision.context(self.device):
                    loss = step(_rows(batch, count, torch.arange(low, low + samples)), samples)
            finally:
                self._output = None
            if loss is None:
                raise ValueError(
                    "training_step returned None in a pipeline: return Loss(out.sum() * 0, 0) to leave samples out"
                )
            if self.weighted is None:  # known here now; ranks without the loss read it from the totals
                self.weighted = isinstance(loss, Loss)
            elif self.weighted is not isinstance(loss, Loss):
                raise TypeError(
                    "training_step returned a scalar loss in one micro-batch and Loss(sum, count) in another of one run: return one kind"
                )
            _add_loss(totals, loss, samples / count)
            return root(loss, samples / count)

        self._loss_of = loss_of
        schedule, is_new = self._scheduled(inputs, rows)
        earlier_grads = self._take_gradients() if is_new else {}
        # Stages run their forward passes under autocast themselves; backward runs without.
        with torch.autocast(self.device.type, enabled=False):
            arguments = inputs if 0 in self.modules else ()
            schedule.step(*arguments, target=torch.arange(self.num_microbatches))
        for parameter, grad in earlier_grads.items():
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        self._loss_of = None
        dist.broadcast(totals, group_src=self.owner(self.num_stages - 1), group=self.group)
        return totals

    def _captured(self, step: Step, batch: Any) -> tuple[Tensor, ...]:
        """The model's inputs, which are found by running ``step`` as far as its call of the model."""
        states_before = _generator_states(self.device)
        self._inputs = []
        try:
            with self.precision.context(self.device), torch.no_grad():
                step(batch, 0)
        except _ModelCalled:
            pass
        except Exception as error:
            raise ValueError(f"{self._uncalled} ({type(error).__name__}: {error})") from error
        else:
            raise ValueError(self._uncalled)
        finally:
            inputs, self._inputs = self._inputs, None
        states_after = _generator_states(self.device)
        if drawn := [name for name, state in states_after.items() if states_before.get(name) != state]:
            raise ValueError(
                f"pipeline parallel: random numbers were drawn before the model was called (from {' and '.join(drawn)}). The rank with the "
                "inputs and the one with the loss would draw different ones: do it in the dataset, the collate function or on_after_batch_transfer"
            )
        # Some versions of torch compare the inputs' strides with those of example inputs.
        return tuple(t.contiguous() for t in inputs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the model's ``forward``: capture its inputs, return its output to a step, or evaluate the model."""
        if self._output is not None:
            if not self._output:
                raise ValueError("pipeline parallel: the model was called twice in one step; call it once")
            (output,), self._output = self._output, ()
            return output
        if kwargs or not args or not all(isinstance(a, Tensor) for a in args):
            argument_texts = [type(a).__name__ for a in args] + [f"{name}=" for name in kwargs]
            raise TypeError(
                f"pipeline parallel: the model takes positional tensors only, but was called with ({', '.join(argument_texts)})"
            )
        if self._inputs is not None:
            self._inputs.extend(args)
            raise _ModelCalled
        if torch.is_grad_enabled():
            raise RuntimeError(
                "pipeline parallel: forward and backward run together; train with Fit, or Engine.forward_backward(step, batch)"
            )
        return self._evaluate(args)

    def _expect(self, inputs: tuple[Tensor, ...]) -> list[Spec]:
        """Tell this rank's stages the shapes to expect for inputs like these; return the shapes of all stages."""
        specs = self.shapes.specs_for(inputs)
        for index, module in self.modules.items():
            module.input_specs, module.output_specs = specs[index], specs[index + 1]
        self._returned = specs[-1]
        return specs

    def _take_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Remove the gradients of this window's earlier micro-batches from sharded stages, and return them: torch sets the gradients of such a
        stage to ``None`` when a schedule runs for the first time."""
        stages = [stage for stage in self.modules.values() if isinstance(stage, FSDPModule)]
        # By parameter, because two stages of this rank may share one.
        earlier_grads = {p: p.grad for stage in stages for p in stage.parameters() if p.grad is not None}
        for parameter in earlier_grads:
            parameter.grad = None
        return earlier_grads

    def _scheduled(self, inputs: tuple[Tensor, ...], rows: int) -> tuple[Any, bool]:
        """The schedule for chunks of ``rows`` rows of inputs like these, created once for each shape, and whether it is new."""
        specs = self._expect(tuple(t[:rows] for t in inputs))
        key = tuple(specs[0])
        is_new = key not in self._schedules
        if is_new:
            stages = []
            for index, module in self.modules.items():
                examples = [
                    tuple(tensor.empty("meta").requires_grad_(tensor.requires_grad) for tensor in specs[i])
                    for i in (index, index + 1)
                ]
                stages.append(
                    PipelineStage(
                        module,
                        index,
                        self.num_stages,
                        self.device,
                        input_args=examples[0],
                        output_args=examples[1],
                        group=self.group,
                    )
                )
            schedule = getattr(importlib.import_module("torch.distributed.pipelining.schedules"), self.schedule)
            single = "stage" in inspect.signature(schedule).parameters
            self._schedules[key] = schedule(
                stages[0] if single else stages, self.num_microbatches, loss_fn=self._loss, scale_grads=False
            )
        return self._schedules[key], is_new

    def _loss(self, output: Any, index: Tensor) -> Tensor:
        assert self._loss_of is not None
        return self._loss_of(output, index)

    # -- evaluation -------------------------------------------------------------------------------------------------------------

    def _evaluate(self, inputs: tuple[Tensor, ...]) -> Any:
        """Run the model stage by stage, and return its output on every rank of the axis."""
        specs = self._expect(inputs)
        passed: Any = inputs
        for index in range(self.num_stages):
            owner, previous_owner = self.owner(index), self.owner(index - 1) if index else self.owner(0)
            if self.rank == owner and previous_owner != owner:
                passed = tuple(tensor_spec.empty(self.device) for tensor_spec in specs[index])
                for tensor in passed:
                    dist.recv(tensor, group_src=previous_owner, group=self.group)
            elif self.rank == previous_owner != owner:
                for tensor in passed:
                    dist.send(tensor.contiguous(), group_dst=owner, group=self.group)
            if self.rank == owner:
                passed = self.modules[index](*passed)
                passed = passed if isinstance(passed, tuple) else (passed,)
        if not self.last:
            passed = tuple(tensor_spec.empty(self.device) for tensor_spec in specs[-1])
        for module in self.modules.values():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP frees gathered parameters by itself only after a backward pass
        passed = tuple(t.contiguous() for t in passed)
        for tensor in passed:
            dist.broadcast(tensor, group_src=self.owner(self.num_stages - 1), group=self.group)
        return self._full_output(passed)

    def _full_output(self, output: Any) -> Any:
        """The model's output, in its own form, from this rank's parts of the last stage's output."""
        parts = output if isinstance(output, tuple) else (output,)
        outputs = tuple(spec.restore_layout(part) for spec, part in zip(self._returned, parts, strict=True))
        return outputs if len(outputs) > 1 else outputs[0]


def _generator_states(device: torch.device) -> dict[str, Any]:
    """The states of the random generators that a step may use, by name. All are kept on the host, so this does not wait for the device."""
    states: dict[str, Any] = {"random": random.getstate(), "torch on the CPU": torch.get_rng_state().numpy().tobytes()}
    if numpy := sys.modules.get("numpy"):
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy"] = (keys.tobytes(), position)
    if device.type != "cpu":
        states[f"torch on {device.type}"] = accelerator.module(device).get_rng_state().numpy().tobytes()
    return states


class _ModelCalled(BaseException):
    """Ends a step at its call of the model: now the inputs are known, and ranks with the loss run the whole step later."""


def _rows(tree: Any, count: int, index: Tensor) -> Any:
    """The samples ``index`` of a batch: rows of each tensor with ``count`` rows, and items of lists of that length."""
    if isinstance(tree, list) and len(tree) == count and not any(isinstance(item, Tensor) for item in tree):
        return [tree[i] for i in index.tolist()]
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)(_rows(item, count, index) for item in tree)
    if isinstance(tree, Mapping) and type(tree) is dict:
        return {key: _rows(item, count, index) for key, item in tree.items()}
    low, high = int(index[0]) if len(index) else 0, int(index[-1]) + 1 if len(index) else 0
    is_range = high - low == len(index)

    def pick(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] != count:
            return tensor
        return tensor[low:high] if is_range else tensor[index.to(tensor.device)]

    return map_tensors(pick, tree, _refuse_indivisible)


def _refuse_indivisible(item: Any) -> Any:
    """Raise ``TypeError`` for an object whose samples are not rows of tensors; :func:`map_tensors` would put the whole into each chunk."""
    container = isinstance(item, (Mapping, Sequence, type)) or dataclasses.is_dataclass(item)
    if isinstance(item, PackedSequence) or (not container and callable(getattr(item, "to", None))):
        raise TypeError(
            f"pipeline parallel cannot divide a {type(item).__name__} into chunks: give batches of tensors, lists and dicts "
            "(a PackedSequence can be packed in the model)"
        )
    return NotImplemented


def _first(tree: Any) -> Tensor:
    """The first tensor of an output."""
    return tree if isinstance(tree, Tensor) else _first(tree[0])


def _add_loss(totals: Tensor, loss: Tensor | Loss, fraction: float) -> None:
    if isinstance(loss, Loss):
        totals[0] = 1.0
        totals[1] += full_tensor(loss.sum.detach())
        totals[2] += full_tensor(loss.count) if isinstance(loss.count, Tensor) else loss.count
    else:
        totals[1] += full_tensor(loss.detach()) * fraction
        totals[2] += fraction
