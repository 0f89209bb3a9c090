"""``HFModule``: trains a transformers model, with or without a peft adapter, with ``Fit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric
from transformers import PreTrainedModel

from engine.compat.transformers.files import Publication, adapter_names, trained_names
from engine.compat.transformers.loss import Count, CountedLoss, base_of
from engine.compat.transformers.optimizers import make_optimizer, make_schedule, parameter_groups
from engine.compat.transformers.pretrained import Pretrained
from engine.module import TrainModule
from engine.step.gradients import Loss, nonzero
from engine.utils.parameters import is_sharded

SHARDING = (
    'the strategy shards this model: leave it out, and give Fit(strategy="fsdp") instead of fsdp_size, or strategy="tp" instead of tp_size. Each '
    "rank reads only its own shards of the files. A model that transformers shards goes in as it is: HFModule(AutoModel.from_pretrained(...))"
)


class HFModule(TrainModule):
    """Trains a ``PreTrainedModel``, or a ``PeftModel``, that computes its loss from the batch::

        fit.run(HFModule(model, lr=2e-5), loader)

    Batches are dicts of the model's arguments, as transformers' collators return them. A loss over tokens is weighted by the number of labels that
    are not -100 (:class:`engine.huggingface.CountedLoss`), so that means over accumulation windows and ranks are exact. It logs ``train/loss``,
    ``val/loss`` and ``test/loss``, and for language models ``val/perplexity`` and ``test/perplexity``. ``predict_step`` returns logits, or generates.

    A checkpoint also contains the files that ``fit checkpoint export`` writes beside the weights: configuration, generation configuration and
    tokenizer. Of a ``PeftModel`` only the adapter is saved and exported.

    Override :meth:`loss` or any step; the model is ``self.model``.

    Args:
        model: the model, with the same values on every rank.
        optimizer: a name in ``torch.optim`` in any case, or a function of the parameter groups and ``lr``, such as an optimizer's class.
        lr: the learning rate at the end of the warm-up.
        weight_decay: the weight decay of all trained parameters except norms and biases.
        scheduler: a name of ``transformers.get_scheduler``; it steps once per optimizer step. ``None``: a constant learning rate.
        warmup: the number of warm-up steps, or, as a float below 1, a fraction of all steps.
        optimizer_args, scheduler_args: further arguments of the two, such as ``{"betas": (0.9, 0.95)}`` and ``{"num_cycles": 2}``.
        total_steps: the number of steps of the schedule; by default those of the training.
        monitor: the logged value that ``scheduler="reduce_lr_on_plateau"`` follows.
        tokenizer: a tokenizer or processor to export with the weights.
        generation: arguments of ``generate``, which ``predict_step`` then calls: ``{"max_new_tokens": 64}``.
        count: the number of items that a micro-batch's loss is a mean over, if this is not known from the model's own loss; see ``CountedLoss``.
        save_base: also save the frozen base model of a ``PeftModel`` in checkpoints.

    Raises:
        ValueError: an argument is unknown (some of them in ``configure_optimizers``, before the first step).
    """

    def __init__(
        self,
        model: nn.Module | Pretrained,
        *,
        optimizer: str | Callable[..., Optimizer] = "adamw",
        lr: float = 5e-5,
        weight_decay: float = 0.0,
        scheduler: str | None = "linear",
        warmup: int | float = 0,
        optimizer_args: Mapping[str, Any] | None = None,
        scheduler_args: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        monitor: str = "val/loss",
        tokenizer: Any = None,
        generation: Mapping[str, Any] | None = None,
        count: str | Count | None = None,
        save_base: bool = False,
    ) -> None:
        super().__init__()
        self.optimizer, self.lr, self.weight_decay, self.optimizer_args = (
            optimizer,
            lr,
            weight_decay,
            optimizer_args or {},
        )
        self.scheduler, self.warmup, self.scheduler_args = scheduler, warmup, scheduler_args or {}
        self.total_steps, self.monitor = total_steps, monitor
        self.tokenizer, self.generation, self.count, self.save_base = tokenizer, generation, count, save_base
        self.perplexity = _Perplexity()
        self.complete_state = False
        """Whether ``state_dict()`` includes an adapter's frozen base model despite ``save_base=False``; set by ``Fit.state_dict``."""
        self._pretrained = model if isinstance(model, Pretrained) else None
        if not isinstance(model, Pretrained):
            self._set_model(model)
            self.built = True

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        auto: Any = None,
        peft: Any = None,
        model_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Create a module whose model, from a folder or the Hub, is built when the run starts. Under FSDP and ZeRO-3 each rank reads only its own
        shards from the safetensors files; other strategies call ``from_pretrained``.

        Args:
            auto: a class of transformers, by default ``AutoModelForCausalLM``.
            peft: the configuration of a new adapter, such as ``LoraConfig(...)``.
            model_args: further arguments of ``from_pretrained``, such as ``{"dtype": torch.float32, "attn_implementation": "sdpa"}``.
            options: further arguments of the constructor.

        Raises:
            ValueError: ``model_args`` ask transformers to shard the model.
        """
        if refused := sorted({"distributed_config", "tp_plan", "tp_size"} & set(model_args or ())):
            raise ValueError(f"HFModule.from_pretrained(model_args={{{refused[0]!r}: ...}}): {SHARDING}")
        return cls(Pretrained(path, auto, peft, dict(model_args or {})), **options)

    def _set_model(self, model: nn.Module) -> None:
        """Set the model and all that depends on it."""
        self.model = model
        self._loss = CountedLoss(model, self.count)
        self._publication = Publication(model, self.tokenizer, "model.")
        if hasattr(model, "peft_config") and not self.save_base:
            kept_names = {f"model.{name}" for name in adapter_names(model) or trained_names(model)}
            self.register_state_dict_post_hook(partial(_remove_other_names, kept_names))

    # -- the model --------------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download a model of the Hub, once on each machine."""
        if self._pretrained is not None:
            self._pretrained.folder(download=True)

    def configure_model(self) -> None:
        if self._pretrained is not None:
            self._set_model(self._pretrained.build())
            self.built = True

    def init_weights(self, module: nn.Module) -> None:
        """Initialize ``module``, unless it is part of a saved model, whose weights :meth:`read_weights` reads."""
        if self._pretrained is None or not any(part is module for part in self.model.modules()):
            super().init_weights(module)

    def read_weights(self) -> None:
        """Read this rank's shards of a model that was built without values; the run calls this on every rank once the model is sharded."""
        if self._pretrained is not None:
            engine = self.run.engine
            self._pretrained.read(self.model, engine.strategy, engine.seed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._loss.begin()
        return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``model.generate`` under any strategy; all ranks must call this, in ``validation_step``, ``test_step`` or ``predict_step``.

        If parameters are sharded, every rank generates until the last rank has finished.
        """
        if self.attached and self.world_size > 1 and any(map(is_sharded, self.model.parameters())):
            kwargs.setdefault("synced_gpus", True)
        model: Any = self.model
        return model.generate(*args, **kwargs)

    # -- steps ------------------------------------------------------------------------------------------------------------------

    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Loss | Tensor:
        """Return a micro-batch's loss: an :class:`engine.Loss`, or a scalar that is the mean over the samples. Override this for your own loss."""
        return self._loss(outputs, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Loss | Tensor:
        loss = self.loss(self(**self.inputs(batch)), batch)
        self._record("train", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        inputs = {name: value for name, value in self.inputs(batch).items() if name != "labels"}
        if self.generation is None:
            return self(**inputs)["logits"]
        inputs.pop("use_cache", None)
        return self.generate(**inputs, **self.generation)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """The model's arguments for a batch.

        Raises:
            TypeError: the batch is not a dict.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"HFModule takes batches that are dicts of the model's arguments, got {type(batch).__name__}: let the loader's collate_fn make "
                "them (transformers.default_data_collator, DataCollatorForLanguageModeling), or override inputs(batch)"
            )
        # The cache of keys and values is useful only in generation.
        cached = getattr(base_of(self.model).config, "use_cache", None) is not None
        # transformers keeps the documents of packed rows apart by position_ids, and many models refuse names that they do not know.
        arguments = {name: value for name, value in batch.items() if name != "document_ids"}
        return {**({"use_cache": False} if cached else {}), **arguments}

    def _evaluate(self, stage: str, batch: Any) -> None:
        loss = self.loss(self(**self.inputs(batch)), batch)
        self._record(stage, loss)
        if isinstance(loss, Loss) and self._loss.of_tokens:
            self.perplexity.update(loss.sum.detach().float() / nonzero(loss.count), loss.count)
            self.log(f"{stage}/perplexity", self.perplexity)

    def _record(self, stage: str, loss: Loss | Tensor, prog_bar: bool = False) -> None:
        self.log(f"{stage}/loss", loss, prog_bar)

    # -- optimizer, checkpoints -------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        groups = parameter_groups(self.model, self.weight_decay)
        optimizer = make_optimizer(self.optimizer, groups, self.lr, self.optimizer_args)
        if self.scheduler is None:
            return optimizer
        schedule = make_schedule(
            self.scheduler, optimizer, self.warmup, self._total_steps, self.scheduler_args, self.monitor
        )
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def _total_steps(self) -> int:
        steps: int | None = self.run.total_steps if self.total_steps is None else self.total_steps
        if steps is None:
            raise ValueError(
                "the schedule needs the number of steps of the training, which is not known: give Fit(max_steps=), or HFModule(total_steps=)"
            )
        return steps

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            checkpoint["published"] = self._publication.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load nothing: the files for export are made from the current model."""


def as_module(value: Any) -> Any:
    """Wrap a model of transformers or peft in an :class:`HFModule` with its defaults, so that ``fit.run(model, loader)`` takes it.

    Every call with the same model returns the same module. Any other object is returned unchanged.
    """
    if not isinstance(value, PreTrainedModel) and not (isinstance(value, nn.Module) and hasattr(value, "peft_config")):
        return value
    wrappers: list[HFModule] | None = vars(value).get("_as_module")
    if wrappers is None:
        wrappers = [HFModule(value)]
        value._as_module = wrappers  # type: ignore[assignment]  # in a list, so that it is not a submodule
    return wrappers[0]


class _Perplexity(MeanMetric):
    """The exponential of the mean loss."""

    def compute(self) -> Tensor:
        return torch.exp(super().compute())


def _remove_other_names(
    kept_names: set[str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Remove the model's names that are not in ``kept_names`` from a ``state_dict``, unless ``complete_state`` is set."""
    if vars(module).get("complete_state"):
        return
    for name in list(state):
        if name.startswith(f"{prefix}model.") and name.removeprefix(prefix) not in kept_names:
            del state[name]
