"""A model that DeepSpeed's engine trains in the order of our loop, and the import of DeepSpeed without its side effects."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import metadata
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from engine.distributed import process_groups
from engine.distributed.group import Group
from engine.optim import is_known
from engine.step import gradients
from engine.step.optimizers import Modes
from engine.strategies.base import class_name
from engine.strategies.deepspeed.gathered_order import GatheredOrder
from engine.strategies.deepspeed.shards import Shards
from engine.strategies.model_structure import ShardedStructure
from engine.utils import torch_private
from engine.utils.parameters import parameters_of
from engine.utils.tree import leaves, map_tensors

ELEMENTWISE = ("Adam", "AdamW", "SGD", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop")
"""torch optimizers that treat each element by itself, so that stepping flat shards of parameters equals stepping the whole."""


def check_optimizer(optimizer: Optimizer, stage: int, trusted: bool) -> None:
    """Check that an optimizer can step flat shards of the parameters. ``trusted``: the user vouches for an unknown optimizer.

    Raises:
        ValueError: the optimizer cannot, or is unknown.
    """
    name, module = type(optimizer).__name__, type(optimizer).__module__
    for group in optimizer.param_groups:
        if not any(p.requires_grad for p in group["params"]):
            raise ValueError(
                f"{name} has a parameter group without trained parameters, which ZeRO cannot flatten: leave the group out"
            )
    if is_known(optimizer) and name not in ELEMENTWISE:
        raise ValueError(
            f"{name} under ZeRO stage {stage}: it needs whole tensors, and DeepSpeed steps flat shards of the parameters. Use strategy='fsdp', which "
            "lends it whole ones, 'ddp', or stage=0"
        )
    is_elementwise = (module.startswith("torch.optim") and name in ELEMENTWISE) or module.startswith("deepspeed.ops.")
    if not is_elementwise and not trusted:
        raise ValueError(
            f"{name} under ZeRO stage {stage}: DeepSpeed steps flat shards of the parameters, which is right only for optimizers that treat "
            f"each element by itself ({', '.join(ELEMENTWISE)}, deepspeed.ops.*). Use one of them, stage=0 or strategy='fsdp'; if {name} does, "
            'say so with config={"zero_allow_untested_optimizer": True}'
        )


def check_one_set_of_weights(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` for an optimizer that trains with other weights than the ones to evaluate, as schedule-free optimizers do."""
    if Modes([optimizer]).switched:
        raise ValueError(
            f"{type(optimizer).__name__} has train() and eval(), which swap the weights, and DeepSpeed keeps the weights itself: "
            "use another strategy, or another optimizer"
        )


def check_only_optimizer(optimizer: Optimizer, owners: Sequence[DrivenModel]) -> None:
    """Raise ``ValueError`` unless this is the only optimizer of one model. ``owners``: the models that have some of its parameters."""
    owner, name = owners[0], type(optimizer).__name__
    if len(owners) > 1 or not {id(p) for p in parameters_of([optimizer])} <= {id(p) for p in owner.parameters()}:
        raise ValueError(
            f"{name} has parameters of several models, or of none that was prepared: under DeepSpeed each model has its own"
        )
    if owner.optimizer is not None:
        raise ValueError(
            f"{name} is a second optimizer of {class_name(owner.module)}: DeepSpeed trains a model with one; give one optimizer "
            "several parameter groups"
        )


class DrivenModel(nn.Module):
    """A model and, once its optimizer is known, its DeepSpeed engine. Calling it calls the model."""

    def __init__(
        self,
        module: nn.Module,
        sharding: tuple[int, int, str],
        start: Callable[[DrivenModel], None],
        ranks: Group,
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self.module, self.sharding, self._start = module, sharding, start
        self.optimizer: Any = None
        """The optimizer that the engine steps."""
        self.shards: Shards | None = None
        """Where master copies and optimizer states are; ``None``: nothing is sharded."""
        self.max_norm: float | None = None
        """The norm to which the next step clips gradients."""
        self._fed = False  # whether a backward pass has reached the model since the last step
        self._inside = False  # whether `forward` runs now
        self.backwards = 0
        """How many backward passes have reached the model."""
        self._structure: ShardedStructure | None = None
        self._frozen: list[tuple[str, Tensor]] = []
        self._nested_output: Any = None
        self._hooks: list[Any] = []
        self._order: GatheredOrder | None = None
        if sharding[0] == 3:  # registered now, so that it runs before DeepSpeed's own hooks
            module.register_forward_hook(self._flatten)
        self._engine: list[Any] = []  # in a list, because the engine is a module and must not become a submodule

    @property
    def engine(self) -> Any:
        return self._engine[0] if self._engine else None

    def begin(
        self, deepspeed_engine: Any, optimizer: Any, shards: Shards | None, order: GatheredOrder | None = None
    ) -> None:
        """Use DeepSpeed's engine from now on, for training with ``optimizer``, or for evaluation if that is ``None``."""
        self._order = order
        self._engine, self.optimizer, self.shards, self._fed = [deepspeed_engine], optimizer, shards, False
        if optimizer is not None:
            self._structure = ShardedStructure(self.module, "DeepSpeed", self._ranks)
            self._frozen = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]
            # The optimizer's parameters are flat shards now; their gradients are DeepSpeed's buffers, which must not be freed.
            optimizer.zero_grad = self._zero_grad
        if self.sharding[0] and "16" in self.sharding[2] and deepspeed_engine.device.type == "cpu":
            norms = [m for m in self.module.modules() if isinstance(m, _NORMS)]
            self._hooks = [m.register_forward_pre_hook(_cast_inputs) for m in norms]

    def _check_frozen(self) -> None:
        """Raise ``ValueError`` if a parameter that was frozen when DeepSpeed was set up is trained now."""
        unfrozen = [name for name, p in self._frozen if p.requires_grad]
        if unfrozen:
            raise ValueError(
                f"{', '.join(unfrozen[:6])}: frozen when DeepSpeed sharded the model, and unfrozen now, but DeepSpeed would not train it: "
                "unfreeze before the run and resume with Resume(path, optimizer=False), or use strategy='fsdp'"
            )

    def release(self) -> None:
        """Release the optimizer; the model can still be called."""
        self._structure = None
        if self.optimizer is not None:
            vars(self.optimizer).pop("zero_grad", None)
        self.optimizer = self.shards = None

    def end(self) -> None:
        """Release the optimizer, destroy DeepSpeed's engine, and remove the hooks of both from the model."""
        self.release()
        if self._engine:
            for hook in self._hooks:
                hook.remove()
            if self._order is not None:
                self._order.leave()
                self._order = None
            engine = self._engine.pop()
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            engine.destroy()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.sharding[0]
        if not self._engine and stage == 3:
            self._start(self)
        if self._structure is not None and torch.is_grad_enabled():
            self._structure.check()
            self._check_frozen()
        self._inside = True
        try:
            out = self.module(*args, **kwargs)
        finally:
            self._inside, nested, self._nested_output = False, self._nested_output, None
        if nested is not None:
            tensors = iter(out)
            out = map_tensors(lambda tensor: next(tensors), nested)
        if stage and self._engine and torch.is_grad_enabled():
            map_tensors(partial(self._watch, []), out)
        return out

    def _flatten(self, module: nn.Module, args: Any, out: Any) -> Any:
        """Return a list of the output's tensors: at stage 3, DeepSpeed's hooks find tensors only in lists and dicts."""
        if not self._inside or out is None or isinstance(out, Tensor):
            return out
        self._nested_output = out
        return leaves(out)

    # DeepSpeed's own forward pass finds tensors only in lists and dicts, divides gradients by a fixed number of micro-batches, and
    # expects one backward pass per forward pass. So the model is called directly, and a backward pass begins when it reaches an output.

    def _watch(self, passed: list[bool], tensor: Tensor) -> Tensor:
        """Call :meth:`_backward_begins` when a backward pass reaches this output. ``passed``: not empty once one has, for all outputs of a pass."""
        if tensor.grad_fn is not None:
            tensor.register_hook(partial(self._backward_begins, passed))
        return tensor

    def _backward_begins(self, passed: list[bool], gradient: Tensor) -> None:
        """Prepare DeepSpeed for a backward pass, once, however many outputs it reaches.

        A pass that adds to no gradient is none for DeepSpeed: one through a frozen model, and ``torch.autograd.grad``.

        Raises:
            RuntimeError: stage 3 has freed the weights that this pass needs.
        """
        engine = self._engine[0]
        if engine.optimizer._backward_active_depth:
            return
        if self.sharding[0] == 3:
            self._check_weights(bool(passed))
        passed.append(True)
        if all(torch_private.fate_of_gradient(p) != "added" for p in self.module.parameters() if p.requires_grad):
            return
        self._fed = True
        self.backwards += 1
        engine.optimizer.clear_backward_seen_flag()
        engine._backward_prologue()

    def _check_weights(self, again: bool) -> None:
        """Raise ``RuntimeError`` if this backward pass cannot work at stage 3. ``again``: another has gone through this forward pass."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        what = (
            "create_graph=True (a gradient penalty)"
            if torch.is_grad_enabled()  # autograd enables it for passes that create a graph
            else "a second backward pass through one forward pass (retain_graph=True)"
            if again
            else "torch.autograd.grad with respect to parameters"
            if any(torch_private.fate_of_gradient(p) == "returned" for p in trained)
            else ""
        )
        if what:
            raise RuntimeError(
                f"{what} under ZeRO stage 3, which frees each layer's weights after their pass: use stage 1 or 2, or strategy='ddp'; "
                "for several losses add them up, or run the model once for each"
            )

    def step(self, divisor: float | None, max_norm: float | None, checked: bool) -> tuple[Tensor | None, bool]:
        """Divide gradients by ``divisor``, clip them to ``max_norm``, step; return the divided gradients' norm, and whether the step was applied.

        ``checked``: at stage 0, skip a step whose norm is not finite.
        """
        limit, self.max_norm = self.max_norm if max_norm is None else max_norm, None
        engine = self._engine[0]
        if not self.sharding[0]:
            return self._step_replicated(engine, divisor, limit, checked)
        if not self._fed:
            raise RuntimeError(
                "the optimizer steps, but no backward pass has gone through the prepared model since its last step"
            )
        self._fed = False
        wrapper = engine.optimizer
        wrapper.clip_grad = limit or 0.0
        if not hasattr(wrapper, "loss_scaler"):  # bf16 at stage 1, which never unscales
            if divisor is not None:
                gradients.divide(wrapper.fp32_groups_gradients_flat, divisor)
            engine.step()
        else:
            # DeepSpeed divides by the loss scale when it clips; with our divisor in the scale, one pass does both, and the norm is that of
            # the divided gradients. With fp16 this is always needed: otherwise a step that raises the scale would divide by the new scale.
            if divisor is not None or wrapper.dynamic_loss_scale:
                wrapper.external_loss_scale, wrapper.custom_loss_scaler = (
                    wrapper.loss_scaler.cur_scale * (divisor or 1.0),
                    True,
                )
            try:
                engine.step()
            finally:
                wrapper.custom_loss_scaler = False
        norm = engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm), engine.was_step_applied()

    def _step_replicated(
        self, deepspeed_engine: Any, divisor: float | None, limit: float | None, checked: bool
    ) -> tuple[Tensor | None, bool]:
        """Step at stage 0: DeepSpeed reduces the gradients and steps; in between every rank has the whole gradients, to divide and clip."""
        deepspeed_engine.buffered_allreduce_fallback()
        norm, applied = None, True
        grads = gradients.gradients(p for group in self.optimizer.param_groups for p in group["params"])
        if limit is not None or checked:
            norm = torch.nn.utils.get_total_norm(grads)
            if limit is not None:
                norm, divisor = gradients.clip_norm(grads, norm, limit, divisor), None
            elif divisor is not None:
                norm = norm / divisor
            applied = not checked or bool(norm.isfinite())
        if divisor is not None:
            gradients.divide(grads, divisor)
        if applied:
            deepspeed_engine.enable_backward_allreduce = False
            deepspeed_engine.step()
        else:
            deepspeed_engine.zero_grad()
        return norm, applied

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that no step has used."""
        engine, stage = self._engine[0], self.sharding[0]
        if not stage:
            engine.zero_grad()
        elif self._fed:
            self._fed = False
            _forget(engine.optimizer, stage)


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def half_dtype(half: str) -> torch.dtype | None:
    """The dtype of DeepSpeed's half format (``"bf16"``, ``"fp16"``); ``None``: there is none."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(half)


def convert_rest(module: nn.Module, half: str) -> None:
    """Convert parameters that are not sharded yet to ``half`` (``"bf16"``, ``"fp16"``), as DeepSpeed does with the others."""
    for parameter in module.parameters():
        if not hasattr(parameter, "ds_id") and parameter.is_floating_point():
            parameter.data = parameter.data.to(half_dtype(half) or parameter.dtype)


def _cast_inputs(module: nn.Module, args: Any) -> Any:
    """Cast a norm's input to its parameters' dtype: autocast on CPUs does not, and norms refuse fp32 input with half-precision parameters."""
    weight: Any = module.weight
    if weight is None or weight.dtype == args[0].dtype:
        return None
    return (args[0].to(weight.dtype), *args[1:])


def _forget(wrapper: Any, stage: int) -> None:
    """Discard gradients as DeepSpeed does after a step that has overflowed."""
    if stage == 3:
        wrapper._pre_step()
        wrapper._overflow_clean_up(1.0)
    elif hasattr(wrapper, "clear_hp_grads"):
        wrapper.clear_hp_grads()
        wrapper.clear_lp_grads()
    else:
        wrapper.micro_step_id = -1
        wrapper.zero_grad(set_to_none=True)
        wrapper._release_preflattened_grad_buffers()
        if wrapper.cpu_offload:
            wrapper._wait_for_offload_copies()
            wrapper._offload_accumulated_param_ids = set()
            wrapper.reset_cpu_buffers()
        for key in wrapper.averaged_gradients:
            wrapper.averaged_gradients[key] = None
        for key in wrapper.all_grad_tensors:
            wrapper.all_grad_tensors[key] = None


class LossScale:
    """The fp16 loss scale, which DeepSpeed keeps for each model, with the methods of our :class:`engine.step.scaler.Scaler`."""

    def __init__(self, models: Sequence[DrivenModel]) -> None:
        self._models = models

    def _engines(self) -> list[Any]:
        return [model.engine for model in self._models if model.optimizer is not None]

    def get_scale(self) -> float:
        """The scale of the first model."""
        return float(next((engine.optimizer.loss_scaler.cur_scale for engine in self._engines()), 1.0))

    def seed(self, seed: Tensor) -> Tensor:
        """The scaled gradient of the loss itself, for ``loss.backward(seed)``. Shape ``()``.

        Raises:
            RuntimeError: the models have different scales, so they cannot share a loss.
        """
        scales = {engine.optimizer.loss_scaler.cur_scale for engine in self._engines()}
        if len(scales) > 1:
            raise RuntimeError(
                f"several models under DeepSpeed in fp16 have different loss scales ({sorted(scales)}): use bf16-mixed"
            )
        for engine in self._engines():
            engine._manual_backward_expected = True
        return seed * scales.pop() if scales else seed

    def state_dict(self) -> dict[str, Any]:
        scalers = [vars(engine.optimizer.loss_scaler) for engine in self._engines()]
        plain = (bool, int, float)
        return {
            "deepspeed": [
                {key: value for key, value in scaler.items() if isinstance(value, plain)} for scaler in scalers
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for engine, saved in zip(self._engines(), state.get("deepspeed", ()), strict=False):
            vars(engine.optimizer.loss_scaler).update(saved)


@contextmanager
def quiet_setup(device: torch.device, local_rank: int) -> Iterator[None]:
    """Tell DeepSpeed its device inside the block, in which it sets up, and suppress torch's deprecation warnings and all standard output."""
    with (
        variables(LOCAL_RANK=_device_index(device, local_rank)),
        warnings.catch_warnings(),
        redirect_stdout(StringIO()),
    ):
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        yield


def _device_index(device: torch.device, local_rank: int) -> str:
    return str(local_rank if device.index is None else device.index)


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables inside the block and restore them afterwards."""
    previous_values = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_REPORTED_BY_US = (
    "You are using ZeRO with an untested optimizer",
    "OVERFLOW! Skipping step",
    "learning rate from scheduler before it has started",
)
"""Parts of DeepSpeed's log lines that report what this library reports itself."""


def _is_unreported(record: logging.LogRecord) -> bool:
    """Whether a log line of DeepSpeed reports what this library does not report itself."""
    return not any(text in str(record.msg) for text in _REPORTED_BY_US)


REQUIREMENT = "deepspeed>=0.19.8,<0.20"  # as in setup.cfg: other releases have other internals


def import_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed for the kind of ``device``, whatever other devices this machine has.

    Raises:
        ImportError: DeepSpeed is not installed, or in a version that does not work with this strategy.
        ValueError: this process has imported it for another kind of device.
    """
    from lightning_utilities.core.imports import RequirementCache

    if not (spec := importlib.util.find_spec("deepspeed")) or not RequirementCache(REQUIREMENT):
        installed = metadata.version("deepspeed") if spec else "nothing"
        raise ImportError(f'it needs {REQUIREMENT}, found {installed}: pip install "fit-trainer[deepspeed]"')
    with variables(DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", device.type)):
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        installed = get_accelerator().device_name()
    log = logging.getLogger(deepspeed.utils.logger.name)
    log.setLevel(max(log.level, logging.WARNING))
    log.addFilter(_is_unreported)
    if installed.split(":")[0] != device.type:
        raise ValueError(
            f"DeepSpeed runs on {installed!r} in this process (DS_ACCELERATOR, or an earlier engine), now asked for {device.type!r}"
        )


def use_process_group(device: torch.device, local_rank: int) -> None:
    """Let DeepSpeed use the existing process group; create one for a single process."""
    import deepspeed

    # At stage 3 DeepSpeed reads LOCAL_RANK in forward passes, too. If we set only this one of torchrun's variables for the whole process,
    # it would look like an incomplete launcher.
    deepspeed.runtime.zero.utils.os = SimpleNamespace(environ={"LOCAL_RANK": _device_index(device, local_rank)})

    backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
    if not dist.is_initialized():
        process_groups.initialise_alone(device)
    # On CPUs DeepSpeed would now compile a collective of its own, which only inference uses.
    possible = deepspeed.ops.__compatible_ops__
    shm_comm = possible.pop("deepspeed_shm_comm", None)
    try:
        deepspeed.comm.init_distributed(backend, auto_mpi_discovery=False, dist_init_required=False)
    finally:
        if shm_comm is not None:
            possible["deepspeed_shm_comm"] = shm_comm
    # torch 2.13 warns about the old names of these functions at each call.
    backend_object: Any = deepspeed.comm.comm.cdb
    backend_object.all_gather_function = getattr(dist, "all_gather_single", backend_object.all_gather_function)
    backend_object.reduce_scatter_function = getattr(
        dist, "reduce_scatter_single", backend_object.reduce_scatter_function
    )


def restore_linear() -> None:
    """Put back ``torch.nn.functional.linear``, which DeepSpeed replaces for the rest of the process when it shards parameters.

    DeepSpeed's function saves memory in training, but models that call it cannot be compiled, scripted or exported afterwards.
    """
    sharding = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    torch_linear = getattr(getattr(sharding, "InsertPostInitMethodToModuleSubClasses", None), "linear_bk", None)
    if torch_linear is not None:
        functional.linear = torch_linear
