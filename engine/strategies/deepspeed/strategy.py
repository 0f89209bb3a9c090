"""The strategy ``"deepspeed"``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.checkpoint.reader import Report, Source, empty_tensor
from engine.config.settings import Settings
from engine.distributed import stacks
from engine.distributed.group import Group
from engine.step.gradient_sync import StepStream
from engine.step.optimizer_step import Stepper
from engine.step.precision import Precision
from engine.step.scaler import Scaler
from engine.strategies import deferred_init
from engine.strategies.adopted_shards import check_whole
from engine.strategies.base import (
    Strategy,
    broadcast_from_rank_0,
    class_name,
    named_state,
    numbered_state,
    sum_over_ranks,
)
from engine.strategies.deepspeed import configuration, shards
from engine.strategies.deepspeed.configuration import RequiredValue
from engine.strategies.deepspeed.deferred_model import shard_deferred
from engine.strategies.deepspeed.driven_model import (
    ELEMENTWISE,
    DrivenModel,
    LossScale,
    check_one_set_of_weights,
    check_only_optimizer,
    check_optimizer,
    convert_rest,
    half_dtype,
    import_deepspeed,
    quiet_setup,
    restore_linear,
    use_process_group,
)
from engine.strategies.deepspeed.gathered_order import GatheredOrder
from engine.strategies.deepspeed.reduced_order import ReducedOrder, ShardedReducedOrder
from engine.strategies.deepspeed.shards import Shards
from engine.strategies.owned_step import OwnedStepper, OwnsStep
from engine.strategies.quantized_weights import of_torchao
from engine.transforms.offload import check_offload
from engine.utils import accelerator, torch_private
from engine.utils.log import warn_once
from engine.utils.loss import LEAVE_OUT
from engine.utils.parameters import of_classes, parameters_of

stacks.know_sharding("deepspeed.runtime.zero.", Path("deepspeed", "utils", "nvtx.py"))


@dataclass(kw_only=True)
class DeepSpeed(Strategy, OwnsStep):
    """Trains with DeepSpeed's engine (``deepspeed.initialize``), set by fields, by a configuration (file or dict), or by both.

    DeepSpeed's engine is created when a model and its optimizer have both been prepared, and steps that optimizer. It reduces and
    accumulates gradients, clips them and always skips steps whose norm is not finite (``on_nonfinite="raise"`` makes that an error).
    Windows, their weights, schedulers and checkpoints are as under every other strategy, and every other strategy can read the checkpoints.

    A value that is missing in the configuration, or ``"auto"``, comes from ``Fit``'s arguments (precision, ``gradient_clip_val``,
    ``accumulate_grad_batches``, the loader's batch size), or else is DeepSpeed's default. A value that contradicts an argument is an error.

    From stage 1 on, ``bf16-*`` and ``16-*`` precision are DeepSpeed's own: parameters in the half format, fp32 master copies sharded over
    the ranks (which start from the rounded parameters), gradients summed in fp32. fp16 needs CUDA. At stage 0 nothing is sharded and
    mixed precision is autocast's.
    """

    config: str | Path | Mapping[str, Any] | None = None
    """DeepSpeed's own configuration: a JSON file or a dict."""
    stage: int | None = None
    """ZeRO stage. 0: nothing is sharded; 1: optimizer states are; 2 (the default): gradients, too; 3: parameters, too."""
    offload_optimizer: bool | str = False
    """Keep optimizer states and master copies in the host's memory (``True`` or ``"cpu"``) or on disk (``"nvme"``). From stage 1 on."""
    offload_parameters: bool | str = False
    """Keep parameters in the host's memory (``True`` or ``"cpu"``) or on disk (``"nvme"``). Stage 3 only."""
    nvme_path: str | Path | None = None
    """The directory for offloading to ``"nvme"``."""
    pin_memory: bool | None = None
    """Whether offloaded memory is page-locked; ``None``: only on CUDA."""
    overlap_comm: bool | None = None
    """Reduce gradients while backward runs (stages 2 and 3)."""
    reduce_bucket_size: int | None = None
    """Elements that are reduced at a time. Default: the model's size, at most 500 million."""
    allgather_bucket_size: int | None = None
    """Elements of updated parameters that are gathered at a time (stages 1 and 2)."""
    param_persistence_threshold: int | None = None
    """Parameters with fewer elements stay gathered on every rank (stage 3)."""

    _config: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    _where: str = field(default="", init=False, repr=False)
    _requirements: dict[str, RequiredValue] | None = field(default=None, init=False, repr=False)
    _batch_size: Any = field(default=None, init=False, repr=False)
    _models: list[DrivenModel] = field(default_factory=list, init=False, repr=False)
    keeps_activations: str | None = field(
        default="DeepSpeed empties and refills the parameters that autograd saves, which was not tried together on a device",
        init=False,
        repr=False,
    )

    def __post_init__(self) -> None:
        self._config, self._where = configuration.read(self.config)
        zero = self._config.setdefault("zero_optimization", {})
        for name, key in configuration.IN_ZERO.items():
            if getattr(self, name) is not None:
                required = RequiredValue(getattr(self, name), f"DeepSpeed({name}={getattr(self, name)!r})")
                configuration.fill_or_check(self._config, f"zero_optimization.{key}", required, self._where)
        for name, section in configuration.OFFLOAD.items():
            if getattr(self, name):
                configuration.offload(
                    self._config, self._where, f"zero_optimization.{section}", name, getattr(self, name), self.nvme_path
                )
        configuration.default(self._config, "zero_optimization.stage", 2)
        if zero["stage"] not in (0, 1, 2, 3) or isinstance(zero["stage"], bool):
            raise ValueError(f"stage={zero['stage']!r} in {self._where} is not a ZeRO stage; possible: 0, 1, 2, 3")
        self.zero_stage: int = zero["stage"]
        configuration.check_offload(self._config, self._where, self.zero_stage)
        self._own_config = self._config
        self.owns_weights = True
        self.fused = "clips, steps and clears gradients in one call"
        self.matched_backward = self.zero_stage > 0

    def check(self, settings: Settings, origins: Mapping[str, str], world_size: int | None) -> None:
        configuration.check_precision(Precision.parse(settings.precision).name, self.zero_stage, settings.accelerator)
        configuration.check_clipping(settings, origins)
        check_offload(settings.activation_offload, type(self).__name__, self.keeps_activations)

    # -- where it runs ----------------------------------------------------------------------------------------------------------

    def connect(self, group: Group) -> None:
        super().connect(group)
        self.parts_differ = group.world_size > 1
        self._config = copy.deepcopy(self._own_config)  # one object may be used in several runs
        self._requirements = None
        name, stage = self.precision.name, self.zero_stage
        configuration.check_precision(name, stage, group.kind.type)
        for kind in ("bf16", "fp16"):
            is_half = self._half == kind
            required = RequiredValue(is_half, f"precision={name!r}")
            if stage or configuration.is_set(self._config, f"{kind}.enabled"):
                enabled = configuration.fill_or_check(self._config, f"{kind}.enabled", required, self._where)
                configuration.set_value(self._config, f"{kind}.enabled", enabled and stage > 0)
        if self._half and stage:
            # In sums in half precision, a window's micro-batches would be lost to rounding.
            configuration.default(self._config, "data_types.grad_accum_dtype", "fp32")
        import_deepspeed(group.device)
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        configuration.check_names(
            "zero_optimization", self._config["zero_optimization"], DeepSpeedZeroConfig.model_fields, self._where
        )
        self.matched_forward = self.zero_stage == 3

    @property
    def _half(self) -> str:
        return {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}.get(
            self.precision.name, ""
        )

    def configure(self, settings: Settings, origins: Mapping[str, str]) -> Settings:
        def required_value(name: str) -> RequiredValue:
            value = getattr(settings, name)
            return RequiredValue(value, f"{name}={value!r} ({origins.get(name, 'code')})")

        configuration.check_clipping(settings, origins)
        names = {"gradient_clip_val": "gradient_clipping", "accumulate_grad_batches": "gradient_accumulation_steps"}
        if settings.global_batch_size is not None:
            names = {"gradient_clip_val": "gradient_clipping", "global_batch_size": "train_batch_size"}
        changes, config = {}, self._config
        for name, path in names.items():
            if configuration.is_set(config, path) and origins.get(name) == "default":
                changes[name] = configuration.get(config, path)
            elif configuration.is_set(config, path):
                required = required_value(name)
                configuration.fill_or_check(config, path, replace(required, value=required.value or 0), self._where)
        settings = replace(settings, **changes)
        self._requirements = {
            name: required_value(name) for name in ("gradient_clip_val", "accumulate_grad_batches", "global_batch_size")
        }
        return settings

    def building(self) -> AbstractContextManager[Any]:
        if self.zero_stage < 3:
            return nullcontext()
        if not torch_private.is_simulated():
            return deferred_init.values_recorded()
        import deepspeed

        use_process_group(self.group.device, self.group.local_rank)
        with quiet_setup(self.group.device, self.group.local_rank):
            # No dtype is given, because on CPUs DeepSpeed takes any explicit one as bf16.
            context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=self._complete(None))
        return context

    # -- the model and its optimizer ----------------------------------------------------------------------------------------------

    def scaler(self) -> Any:
        return LossScale(self._models) if self._half == "fp16" else None

    def stepper(self, scaler: Scaler | None, on_nonfinite: str | None) -> Stepper:
        return OwnedStepper(self.window, self, scaler, on_nonfinite)

    def train_with(self, loader: Any) -> None:
        self._batch_size = getattr(loader, "batch_size", None)

    def place(self, model: nn.Module) -> None:
        check_whole(model, f"strategy='deepspeed_stage_{self.zero_stage}'")
        if self.zero_stage == 3 and deferred_init.is_deferred(model):
            use_process_group(self.group.device, self.group.local_rank)
            with quiet_setup(self.group.device, self.group.local_rank):
                shard_deferred(model, self.group, self._complete(None), half_dtype(self._half))
        super().place(model)

    def setup(self, model: nn.Module) -> nn.Module:
        if self.zero_stage == 3 and (quantized := of_classes(model, ("Int8Params",)) + of_torchao(model)):
            raise ValueError(
                f"{', '.join(quantized[:3])}: weights in 8 bits of these classes cannot be sharded by ZeRO stage 3; use stage 1 or 2"
            )
        sharding = (self.zero_stage, self.group.world_size, self.precision.name)
        shards.mark_sharded(model)
        if isinstance(model, DrivenModel):
            if model.sharding != sharding:
                raise ValueError(
                    f"the model was sharded with (stage, world size, precision) = {model.sharding}, but {sharding} is requested now: "
                    "load a checkpoint into a new module"
                )
            model.release()
        elif self.zero_stage < 3 and any(hasattr(p, "ds_id") for p in model.parameters()):
            raise ValueError(
                f"{class_name(model)} has parameters that ZeRO stage 3 has sharded, but stage {self.zero_stage} is requested now: "
                "use stage=3 again, or load a checkpoint into a new module"
            )
        else:
            self.share_parameters(model)
            model = DrivenModel(model, sharding, partial(self._start, optimizer=None, trains=False), self.group)
        self._models.append(model)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DrivenModel) else model

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def flat_range(self, parameter: Tensor) -> tuple[int, int] | None:
        return shards.flat_range(parameter) if hasattr(parameter, "ds_id") else None

    def local(self, grads: list[Tensor]) -> list[Tensor]:
        return [getattr(tensor, "ds_tensor", tensor) for tensor in grads]

    def share_parameters(self, model: nn.Module) -> None:
        broadcast_from_rank_0(
            self.group, [t.detach() for t in (*model.parameters(), *model.buffers()) if not hasattr(t, "ds_id")]
        )

    def repoint(self, optimizer: Optimizer) -> None:
        parameters = {id(p) for p in parameters_of([optimizer])}
        if any(model.optimizer is optimizer for model in self._models):
            return
        owners = [model for model in self._models if any(id(p) in parameters for p in model.parameters())]
        if not owners:
            return  # its model is prepared later
        owner = owners[0]
        check_only_optimizer(optimizer, owners)
        check_one_set_of_weights(optimizer)
        configuration.check_no_other(self._config, self._where, type(optimizer).__name__)
        if self.zero_stage:
            check_optimizer(optimizer, self.zero_stage, bool(self._config.get("zero_allow_untested_optimizer")))
        state = named_state(optimizer, owner) if optimizer.state else None
        optimizer.state.clear()
        self._start(owner, optimizer, trains=True)
        if state is not None:
            optimizer_shards = self._model_of(optimizer).shards
            if optimizer_shards is None:
                optimizer.load_state_dict(numbered_state(optimizer, owner, state))
            else:
                shards.load_optimizer(optimizer_shards, owner, state, lambda value: value)

    def own_optimizers(self, model: nn.Module) -> Any:
        """The optimizer and scheduler that the configuration names, as ``configure_optimizers`` would return them; ``None`` without any.

        In your own loop: ``model = engine.prepare(model)``, then ``engine.strategy.own_optimizers(model)``.

        Raises:
            ValueError: ``lr`` is ``"auto"`` and the module has no ``hparams.lr`` or ``hparams.learning_rate``.
        """
        if not configuration.is_set(self._config, "optimizer"):
            return None
        assert isinstance(model, DrivenModel)
        hparams = getattr(getattr(model.module, "module", model.module), "hparams", {})
        configuration.fill_optimizer(self._config, self._where, hparams.get("lr", hparams.get("learning_rate")))
        self._start(model, None, trains=True)
        scheduler = self._config.get("scheduler")
        if scheduler is None:
            return model.optimizer
        torch_scheduler = configuration.scheduler(scheduler, self._where)(
            model.optimizer, **scheduler.get("params", {})
        )
        return {"optimizer": model.optimizer, "lr_scheduler": {"scheduler": torch_scheduler, "interval": "step"}}

    def _start(self, model: DrivenModel, optimizer: Optimizer | None, trains: bool) -> None:
        """Create DeepSpeed's engine for a model: with ``optimizer``, with the configuration's, or with none for evaluation (not ``trains``)."""
        import deepspeed

        use_process_group(self.group.device, self.group.local_rank)
        model.end()
        config = self._complete(model)
        config.pop("scheduler", None)  # our loop steps it
        if not trains:
            config.pop("optimizer", None)
        elif optimizer is not None or config["optimizer"].get("type") in ELEMENTWISE:
            config["zero_allow_untested_optimizer"] = True
        trained = [p for p in model.module.parameters() if p.requires_grad]
        groups = [trained] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
        if any(hasattr(p, "ds_id") for p in model.module.parameters()):
            convert_rest(model.module, self._half)
        with quiet_setup(self.group.device, self.group.local_rank):
            engine, wrapper, _, _ = deepspeed.initialize(
                model=model.module,
                optimizer=optimizer,
                model_parameters=trained if trains and optimizer is None else None,
                config=config,
                dist_init_required=False,
            )
        inner = engine.basic_optimizer if trains else None
        own_shards = Shards(wrapper, inner, groups, (self.group.rank, self.group.world_size))
        shards.mark_sharded(model.module)
        # In bf16 DeepSpeed has another optimizer for stage 1, which reduces all gradients at the step.
        if trains and self.zero_stage in (1, 2) and self.group.world_size > 1 and hasattr(wrapper, "process_gradients"):
            ReducedOrder(self.group, wrapper)
        order = None
        if self.zero_stage == 3 and not torch_private.is_simulated():
            order = GatheredOrder(model.module, self.group, wrapper) if self.group.world_size > 1 else None
            if trains:
                ShardedReducedOrder(self.group, wrapper, order)
        model.begin(engine, inner, own_shards if trains and self.zero_stage else None, order)

    def _complete(self, model: DrivenModel | None) -> dict[str, Any]:
        """The configuration to give to DeepSpeed for ``model``, in which no value is ``"auto"``; ``None``: the model is not built yet."""
        required, batch_size = self._requirements or {}, self._batch_size
        config = copy.deepcopy(self._config)
        micro = (
            RequiredValue(batch_size, f"the training loader's batch_size={batch_size}")
            if isinstance(batch_size, int)
            else None
        )
        window = configuration.window(required, batch_size, self.group.world_size, self.window.position.size)
        configuration.batch_sizes(config, self._where, micro, window, self.group.world_size)
        clip = required.get("gradient_clip_val")
        pinned = accelerator.pins(self.group.device) if self.pin_memory is None else self.pin_memory
        # ds_numel: the elements of a parameter that ZeRO-3 has sharded.
        numel = 0 if model is None else sum(getattr(p, "ds_numel", p.numel()) for p in model.module.parameters())
        configuration.complete(config, (clip.value or 0.0) if clip else 0.0, numel, pinned)
        configuration.no_auto_left(config, self._where)
        return config

    def release(self) -> None:
        for model in self._models:
            model.end()
        self._models.clear()
        restore_linear()

    @property
    def models(self) -> Sequence[DrivenModel]:
        """The models that DeepSpeed trains now."""
        return self._models

    @property
    def config_in_effect(self) -> Mapping[str, Any]:
        """DeepSpeed's configuration, merged with the fields and the run's settings."""
        return self._config

    @property
    def where(self) -> str:
        """The name of the configuration in messages."""
        return self._where

    # -- gradients --------------------------------------------------------------------------------------------------------------

    def backward_nothing(self, models: Sequence[nn.Module], last: bool) -> None:
        if self.zero_stage:
            raise ValueError(
                f"training_step returned None on rank {self.group.rank} under DeepSpeed, whose backward passes all ranks run together: "
                f"{LEAVE_OUT}"
            )

    def traces(self, optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> list[tuple[Any, int]]:
        if not self.zero_stage:
            return super().traces(optimizers, models)
        return [(model, model.backwards) for model in self._models if any(model.optimizer is o for o in optimizers)]

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        raise RuntimeError("DeepSpeed averages gradients by itself; manual averaging needs strategy='ddp'")

    def sum(self, value: Tensor | float) -> Tensor | float:
        return sum_over_ranks(self.group, value)

    def step_stream(self, optimizer: Optimizer) -> StepStream | None:
        # From stage 1 on each rank steps its own part of the flattened parameters.
        return StepStream(self.group.rank if self.zero_stage else 0) if self.group.world_size > 1 else None

    def _model_of(self, optimizer: Any) -> DrivenModel:
        for model in self._models:
            if model.optimizer is optimizer:
                return model
        raise RuntimeError(
            f"{type(optimizer).__name__} steps, but no model with its parameters was prepared: prepare both"
        )

    def step(
        self,
        optimizers: Sequence[Any],
        divisor: Tensor | float | None,
        max_norm: float | None,
        max_value: float | None,
        checked: bool,
    ) -> tuple[Tensor | None, bool]:
        """Step one optimizer; the arguments are those of :meth:`engine.strategies.owned_step.OwnsStep.step`."""
        if max_value is not None:
            raise ValueError("DeepSpeed clips by norm only")
        if len(optimizers) != 1:
            raise ValueError(f"DeepSpeed steps {len(optimizers)} optimizers one by one, not as one")
        model = self._model_of(optimizers[0])
        norm, applied = model.step(None if divisor is None else float(divisor), max_norm, checked)
        if not applied and not checked and self._half != "fp16":
            warn_once("a gradient was not finite, and DeepSpeed skipped the step; set on_nonfinite='skip' or 'raise'")
        return norm, applied

    def clip_at_step(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> None:
        """Clip the norm of these parameters' gradients in the next step."""
        ids = {id(p) for p in parameters if p.requires_grad}
        for model in self._models:
            if ids == {id(p) for p in model.module.parameters() if p.requires_grad}:
                if norm_type != 2.0:
                    raise ValueError(f"clip_grad_norm_(norm_type={norm_type}) under DeepSpeed, which clips the 2-norm")
                model.max_norm = max_norm
                return
        raise ValueError(
            "clip_grad_norm_ under DeepSpeed takes all parameters of one prepared model: it clips their global norm in the step"
        )

    # -- checkpoints ------------------------------------------------------------------------------------------------------------

    def _shards(self, module: nn.Module) -> Shards | None:
        ids = {id(p) for p in module.parameters()}
        return next(
            (m.shards for m in self._models if m.shards is not None and not ids.isdisjoint(m.shards.managed)), None
        )

    def model_parts(self, module: nn.Module) -> dict[str, Any]:
        ranks, rank = self.group.world_size, self.group.rank
        return shards.model_state(module, self._shards(module), lambda number: number % ranks == rank)

    def load_model(self, module: nn.Module, source: Source, strict: bool = True) -> Report:
        return shards.load_model(module, self._shards(module), source, strict)

    def optimizer_parts(self, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
        return named_state(self._model_of(optimizer).shards or optimizer, module)

    def load_optimizer(self, optimizer: Optimizer, module: nn.Module, state: dict[str, Any], source: Source) -> None:
        optimizer_shards = self._model_of(optimizer).shards
        if optimizer_shards is None:
            super().load_optimizer(optimizer, module, state, source)
        else:
            shards.load_optimizer(optimizer_shards, module, state, lambda value: source.read_optim(value, empty_tensor))

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        return shards.model_state(module, self._shards(module), lambda number: self.group.is_main)
