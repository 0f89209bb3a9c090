"""Data parallelism: every rank has the whole model; gradients are averaged while backward runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from engine.checkpoint.reader import Source
from engine.config.settings import Settings
from engine.optim import divides_work
from engine.strategies.adopted_shards import check_whole
from engine.strategies.base import (
    Strategy,
    broadcast_from_rank_0,
    class_name,
    parameter_names,
    sum_over_ranks,
    trained_parameters,
)
from engine.strategies.ddp_replica import Replica
from engine.strategies.quantized_weights import of_torchao
from engine.strategies.unreduced_gradients import GradientAverage, LaterPasses, PassCount, ReachedParameters
from engine.strategies.whole_tensors import WholeSteps
from engine.transforms.blocks import user_module
from engine.utils import torch_private
from engine.utils.errors import nearest
from engine.utils.parameters import is_sharded

HOOKS = ("fp16", "bf16", "powersgd")


@dataclass(kw_only=True)
class DDP(Strategy):
    """Trains with ``torch.nn.parallel.DistributedDataParallel``, whose settings are fields."""

    find_unused_parameters: bool = False
    """Search the graph for parameters without a gradient in each step. Costs time; needed if forward passes do not use all parameters."""
    static_graph: bool = False
    """Promise that all steps use the same parameters in the same order."""
    gradient_as_bucket_view: bool = False
    """Make gradients views of the communication buckets, which saves one copy of all gradients."""
    bucket_cap_mb: float | None = None
    """Size of a communication bucket in MiB; torch's default is 25."""
    broadcast_buffers: bool = True
    """Give every rank rank 0's buffers before each forward pass."""
    comm_hook: str | None = None
    """Compress gradients on the wire: ``"fp16"``, ``"bf16"`` (half the bytes) or ``"powersgd"`` (low rank, lossy)."""
    powersgd_rank: int = 1
    """Rank of the matrices that ``"powersgd"`` sends."""
    powersgd_start: int = 1000
    """PowerSGD: steps that are reduced exactly before compression starts."""
    _optimizers: list[Optimizer] = field(default_factory=list, init=False, repr=False)
    _replicas: list[Replica] = field(default_factory=list, init=False, repr=False)
    _watches: list[RemovableHandle] = field(default_factory=list, init=False, repr=False)
    _reached: ReachedParameters = field(default_factory=ReachedParameters, init=False, repr=False)
    _average: GradientAverage = field(default_factory=GradientAverage, init=False, repr=False)
    _later_passes: LaterPasses = field(default_factory=LaterPasses, init=False, repr=False)
    _whole_steps: WholeSteps = field(default_factory=WholeSteps, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.comm_hook is not None and self.comm_hook not in HOOKS:
            raise ValueError(
                f"DDP(comm_hook={self.comm_hook!r}) is unknown{nearest(self.comm_hook, HOOKS)}; possible: {', '.join(HOOKS)}, None"
            )
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise ValueError(f"DDP(bucket_cap_mb={self.bucket_cap_mb!r}) must be positive")

    def check(self, settings: Settings, origins: Mapping[str, str], world_size: int | None) -> None:
        if settings.compile and self.bucket_cap_mb is not None and self.bucket_cap_mb < 1 and world_size != 1:
            raise ValueError(
                f"DDP(bucket_cap_mb={self.bucket_cap_mb!r}) with compile={settings.compile!r}: torch compiles a replica for buckets of at least "
                "1 MiB; give bucket_cap_mb=1 or more, or compile=False"
            )

    def setup(self, model: nn.Module) -> nn.Module:
        check_whole(model, "strategy='ddp'")
        if any(map(is_sharded, model.parameters())):
            raise ValueError(
                f"strategy='ddp' with {class_name(model)}, whose parameters are sharded already. If an earlier run has done so, "
                "use its strategy again, or load a checkpoint into a new module; otherwise give the whole model and let strategy='fsdp' shard it"
            )
        if self.group.cpu is None:
            return model
        if not any(True for _ in trained_parameters(model)) and (
            user_module(model) is model or not any(True for _ in model.parameters())
        ):
            # Nothing is reduced, so the user's model needs no wrapper; Fit's own wrappers get one even so.
            self.share_parameters(model)
            self._watches.append(model.register_forward_pre_hook(_still_frozen))
            return model
        if quantized := of_torchao(model):
            raise ValueError(
                f"strategy='ddp' with {', '.join(quantized[:3])}{', ...' if len(quantized) > 3 else ''}: weights that torchao has quantized cannot "
                "be sent between ranks. Quantize with bitsandbytes (Linear4bit, Linear8bitLt), or train on one process"
            )
        device = self.group.device
        wrapped = Replica(
            model,
            self.group,
            self._optimizers,
            PassCount(self.window.position),
            process_group=_unchecked()
            if device.type == "cpu" and dist.get_debug_level() == dist.DebugLevel.DETAIL
            else None,
            device_ids=None if device.type == "cpu" else [device.index],
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            bucket_cap_mb=self.bucket_cap_mb,
            # Passed only when it differs: torch 2.13 warns about the name at any use.
            **({} if self.broadcast_buffers else {"broadcast_buffers": False}),
        )
        self._replicas.append(wrapped)
        self.window.position.reduced_passes = 0
        for replica in self._replicas:
            replica.passes.alone = len(self._replicas) == 1
        self._register_hook(wrapped)
        if self.find_unused_parameters:  # otherwise every micro-batch reaches all parameters
            self._watches.append(wrapped.register_forward_pre_hook(self._watch))
        return wrapped

    def _register_hook(self, model: DistributedDataParallel) -> None:
        if self.comm_hook == "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(None, fp16_compress_hook)
        elif self.comm_hook == "bf16":
            model.register_comm_hook(None, _bf16_hook)
        elif self.comm_hook == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=self.powersgd_rank, start_powerSGD_iter=max(2, self.powersgd_start)
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def repoint(self, optimizer: Optimizer) -> None:
        if not any(optimizer is prepared for prepared in self._optimizers):
            self._optimizers.append(optimizer)
        if divides_work(optimizer) and self.group.world_size > 1 and self._whole_steps.step_of(optimizer) is None:
            self._whole_steps.add(optimizer, self.group, {"dp_replicate": self.group.world_size}, self.window)
            self.optimizer_parts_differ = True

    def optimizer_parts(self, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
        self._whole_steps.settle_owners(optimizer)
        return super().optimizer_parts(optimizer, module)

    def load_optimizer(self, optimizer: Optimizer, module: nn.Module, state: dict[str, Any], source: Source) -> None:
        self._whole_steps.settle_owners(optimizer)
        own_part = self._whole_steps.own_part(optimizer, state, parameter_names(optimizer, module))
        super().load_optimizer(optimizer, module, own_part, source)

    def release(self) -> None:
        for watch in self._watches:
            watch.remove()
        for parts in (self._watches, self._optimizers, self._replicas):
            parts.clear()
        self._reached.forget()
        self._average.forget()
        self._later_passes.parameters.clear()
        self._whole_steps.leave()
        self.unreduced = False
        self.window.position.reduced_passes = math.inf

    def settle(self) -> None:
        if not self.group.failed:  # an error may have ended a backward pass early
            for replica in self._replicas:
                replica.check_finished()

    def sync(self, models: Sequence[nn.Module], enabled: bool) -> None:
        for model in models:
            if (
                type(model) is Replica  # a call less than isinstance, in every micro-batch
                and model.require_backward_grad_sync != enabled
                and (enabled or model.may_wait)
            ):
                model.require_backward_grad_sync = enabled
                if not enabled:
                    model.open_window()

    def expect(self, models: Sequence[nn.Module], root: Tensor) -> None:
        for model in models:
            if isinstance(model, Replica) and model.find_unused_parameters and model.require_backward_grad_sync:
                # Forward returned nothing, so the search for unused parameters at its end has taken all of them for unused.
                model.reducer.prepare_for_backward([root])

    def _watch(self, model: nn.Module, inputs: Any) -> None:
        """A forward pre-hook: in windows with repeated micro-batches, record which parameters samples reach."""
        share = self.window.position.share
        if share.repeats and torch.is_grad_enabled():
            self._reached.watch(model.parameters(), repeated=not share.size)

    def drop_repeated(self, parameters: Sequence[Tensor]) -> None:
        if self.find_unused_parameters and self.group.world_size > 1:
            self._reached.clear_unreached(self.group, parameters)

    def follow_pass(self) -> None:
        for replica in self._replicas:
            if replica.passes.is_later():
                self._later_passes.add(replica.reduced)
                self.unreduced = True

    def reduce_rest(self, parameters: Sequence[Tensor]) -> None:
        self._later_passes.average(self.group, parameters)
        self.unreduced = bool(self._later_passes.parameters)
        if not self.unreduced:
            self._forget_later_passes()

    def _forget_later_passes(self) -> None:
        if self.find_unused_parameters:
            for replica in self._replicas:
                torch_private.forget_reached(replica)

    @contextmanager
    def watched_passes(self) -> Iterator[None]:
        with ExitStack() as stack:
            for replica in self._replicas:
                if replica.require_backward_grad_sync:
                    stack.enter_context(self._later_passes.watch(replica.reduced))
            yield
        self.unreduced = bool(self._later_passes.parameters)

    def backward_nothing(self, models: Sequence[nn.Module], last: bool) -> None:
        for model in models:
            if isinstance(model, Replica):
                model.skip_batch()
        # Passes that follow in the window may reach only some parameters; a zero loss now reaches all of them.
        super().backward_nothing(models, last or self.find_unused_parameters)

    def discard(self, models: Sequence[nn.Module]) -> None:
        self._reached.forget()
        self._later_passes.parameters.clear()
        if self.unreduced:
            self._forget_later_passes()
        self.unreduced = False

    def share_parameters(self, model: nn.Module) -> None:
        broadcast_from_rank_0(self.group, [t.detach() for t in (*model.parameters(), *model.buffers())])

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        if self.group.world_size > 1:
            self._average(self.group, parameters)

    def sum(self, value: Tensor | float) -> Tensor | float:
        return sum_over_ranks(self.group, value)


def _still_frozen(model: nn.Module, inputs: Any) -> None:
    """A forward pre-hook of models that were prepared without a trained parameter: raise ``ValueError`` if they have one now."""
    if torch.is_grad_enabled() and any(True for _ in trained_parameters(model)):
        raise ValueError(
            f"{type(model).__name__} had no trained parameter when it was prepared, and has some now, which no rank would reduce: "
            "prepare it while one of its parameters is trained (requires_grad), and freeze it afterwards"
        )


def _unchecked() -> dist.ProcessGroup | None:
    """A process group whose collectives debug mode does not check: torch 2.13's DDP crashes with a checked gloo group. The check is not
    needed: DDP compares the parameters' shapes when it is built, and then all ranks reduce the same shapes."""
    dist.set_debug_level(dist.DebugLevel.OFF)
    try:
        return dist.new_group(backend="gloo")
    finally:
        dist.set_debug_level(dist.DebugLevel.DETAIL)


def _bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in bf16, on gloo too, which torch's own hook refuses. As in that hook, each rank divides by the number of ranks before
    the sum, so that the sum cannot overflow; if the number is not a power of two, each rank rounds."""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


# torch compares a hook's annotations with types, and postponed annotations are strings.
_bf16_hook.__annotations__.clear()
