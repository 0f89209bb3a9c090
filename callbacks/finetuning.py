"""Fine-tuning: a part of the model is frozen at first, and trained from some epoch on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, PolynomialLR, StepLR

from engine import Callback, Run

Modules = nn.Module | Iterable["Modules"]


def _roots(modules: Modules) -> Iterator[nn.Module]:
    """The modules in lists that may be nested."""
    if isinstance(modules, nn.Module):
        yield modules
    else:
        for entry in modules:
            yield from _roots(entry)


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze and unfreeze parts of the model. Override two methods::

        class Gradual(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze(module.backbone)

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 5:
                    self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=1e-5)

    Parameters that an optimizer has from the start may be frozen: it leaves them as they are until they have gradients. A checkpoint has the
    names of frozen parameters, and the parameter groups that were added; a resumed run restores both before it loads its optimizers' states.
    All ranks must freeze and unfreeze the same parameters at the same step; a decision by the epoch does so.

    Raises:
        ValueError: in ``setup``, under DeepSpeed, which shards only parameters that are trained at the start.
    """

    unfreezes = True

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._saved: dict[str, Any] | None = None
        self._group_counts: list[int] = []
        self._added: list[list[dict[str, Any]]] = []
        self._frozen_norms: dict[_BatchNorm, bool] = {}  # frozen batch norm -> whether it was in training mode

    # -- methods to override -------------------------------------------------------------------------------------------------------

    def freeze_before_training(self, module: Any) -> None:
        """Freeze the parts that are not trained at first. Called before ``configure_optimizers``."""
        raise NotImplementedError(f"{type(self).__name__} must define freeze_before_training(self, module)")

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze the parts that are trained from this epoch on. Called at the start of each epoch, for each optimizer.

        Also called when a run resumes in the middle of an epoch.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define finetune_function(self, module, epoch, optimizer)"
        )

    # -- methods to call ----------------------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """The modules in ``modules`` that have parameters of their own, or no submodules."""
        submodules = dict.fromkeys(inner for root in _roots(modules) for inner in root.modules())
        return [m for m in submodules if m._parameters or not list(m.children())]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """The trained parameters of ``modules``, or with ``requires_grad=False`` the frozen ones; ``train_bn=False`` leaves out batch norms."""
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                yield from (p for p in module.parameters(recurse=False) if p.requires_grad == requires_grad)

    def make_trainable(self, modules: Modules) -> None:
        """Unfreeze ``modules``; batch norms among them that were frozen compute statistics again."""
        self._unfreeze(self.flatten_modules(modules))

    def _unfreeze(self, flat: list[nn.Module]) -> None:
        for module in flat:
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(True)
            if isinstance(module, _BatchNorm) and self._frozen_norms.pop(module, False):
                module.train()

    def freeze(self, modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters of ``modules``.

        Args:
            train_bn: leave batch norms as they are. With False they are frozen too: they normalize with their running statistics, which
                then do not change.
        """
        for module in self.flatten_modules(modules):
            if isinstance(module, _BatchNorm):
                if train_bn:
                    continue
                self._frozen_norms[module] = module.training
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)

    def unfreeze_and_add_param_group(
        self,
        modules: Modules,
        optimizer: Any,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze ``modules``, and add the parameters that the optimizer does not have yet as a parameter group.

        Args:
            lr: learning rate of the new group; default: the first group's, divided by ``initial_denom_lr``.
            train_bn: unfreeze batch norms too.

        The optimizer's scheduler was made for fewer groups. It scales the rates of all of them if it computes each rate from the present one
        (``StepLR``, ``MultiStepLR``, ``ExponentialLR``, ``PolynomialLR``); any other scheduler is an error.
        """
        flat = [m for m in self.flatten_modules(modules) if train_bn or not isinstance(m, _BatchNorm)]
        self._unfreeze(flat)
        optimized_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = [p for module in flat for p in module.parameters(recurse=False) if id(p) not in optimized_ids]
        if parameters:
            rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
            optimizer.add_param_group({"params": list(dict.fromkeys(parameters)), "lr": rate})

    # -- events of the run -----------------------------------------------------------------------------------------------------------

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        if stage != "fit":
            return
        strategy = run.engine.strategy
        if strategy.owns_weights:
            raise ValueError(
                f"{type(self).__name__} does not work with {type(strategy).__name__}, which shards only parameters that are trained at the "
                "start: use 'fsdp' or 'ddp'"
            )
        self._module, self._saved, self._group_counts, self._added, self._frozen_norms = module, None, [], [], {}
        show_shards(module)
        self.freeze_before_training(module)

    def on_load_checkpoint(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        if self._saved is None:
            return
        frozen = set(self._saved["frozen"])
        named = dict(module.named_parameters())
        if lost := sorted(frozen - named.keys()):
            raise ValueError(
                f"{type(self).__name__}: the checkpoint has the frozen parameter {lost[0]!r}, which the module lacks: resume with the same model"
            )
        for name, parameter in named.items():
            parameter.requires_grad_(name not in frozen)
        self._group_counts = [len(optimizer.param_groups) for optimizer in run.optimizers]
        for optimizer, groups in zip(run.optimizers, self._saved["added"], strict=False):
            for group in groups:
                optimizer.add_param_group({**group, "params": [named[name] for name in group["params"]]})
        self._added = self._saved["added"]
        still = set(self._saved["statistics"])
        self._frozen_norms = {
            m: True for name, m in module.named_modules() if name in still and isinstance(m, _BatchNorm)
        }

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        if not self._group_counts:
            self._group_counts = [len(optimizer.param_groups) for optimizer in run.optimizers]

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        show_shards(module)
        for optimizer in run.optimizers:
            self.finetune_function(module, run.epoch, optimizer)
        for optimizer in run.optimizers:
            check_schedulers(self, run, optimizer)
        self._note_added_groups(run, module)
        for frozen in self._frozen_norms:
            frozen.eval()

    def _note_added_groups(self, run: Run, module: nn.Module) -> None:
        """Note the groups that were added, for checkpoints."""
        names = {id(p): name for name, p in module.named_parameters()}
        self._added = [
            [
                {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
                for group in optimizer.param_groups[count:]
            ]
            for optimizer, count in zip(run.optimizers, self._group_counts, strict=True)
        ]

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        self._module, self._frozen_norms = None, {}

    def state_dict(self) -> dict[str, Any]:
        if self._module is None:
            return {"frozen": [], "statistics": [], "added": []}
        return {
            "frozen": [name for name, p in self._module.named_parameters() if not p.requires_grad],
            "statistics": [name for name, m in self._module.named_modules() if m in self._frozen_norms],
            "added": self._added,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state


def show_shards(module: nn.Module) -> None:
    """Under FSDP, free the parameters that a forward pass has gathered, so that modules have the shards of the optimizers."""
    module.state_dict(keep_vars=True)


_FROM_PRESENT_RATES = tuple(scheduler.get_lr for scheduler in (StepLR, MultiStepLR, ExponentialLR, PolynomialLR))
"""Rules by which a group's next rate follows from its present one, whatever its rate was when the scheduler was made. Rules of warm-ups do too,
but would raise a group that was added later above its own rate."""


def check_schedulers(callback: Callback, run: Run, optimizer: Any) -> None:
    """Check that the schedulers of this optimizer know all of its groups, or need not know them.

    Raises:
        ValueError: a scheduler does not know a group: its next step would fail, or set a learning rate that nobody has asked for.
    """
    raw = getattr(optimizer, "optimizer", optimizer)
    for schedule in run.schedulers:
        rates = getattr(schedule.scheduler, "base_lrs", None)
        if (
            rates is not None
            and schedule.scheduler.optimizer in (raw, optimizer)
            and len(rates) < len(raw.param_groups)
            and type(schedule.scheduler).get_lr not in _FROM_PRESENT_RATES
        ):
            raise ValueError(
                f"{type(callback).__name__} has added a parameter group, and {type(schedule.scheduler).__name__} was made for {len(rates)}: give "
                "all groups in configure_optimizers, the frozen parameters too"
            )


class BackboneFinetuning(BaseFinetuning):
    """Freezes ``module.backbone`` at first and trains it from a given epoch on. Its smaller learning rate grows to that of the rest.

    The backbone's parameters are in an optimizer from the start. If ``configure_optimizers`` left them out, or put them into a group with other
    parameters, they get a group of their own. A scheduler knows only the groups that the optimizer had when it was made, so with a scheduler
    ``configure_optimizers`` must return the backbone's group itself::

        torch.optim.AdamW([{"params": self.head.parameters()}, {"params": self.backbone.parameters(), "lr": 1e-5}], lr=1e-3)

    Such a group keeps its learning rate and its scheduler, unless ``backbone_initial_lr`` or ``lambda_func`` is given here.

    Args:
        unfreeze_backbone_at_epoch: the first epoch, from 0, in which the backbone is trained.
        lambda_func: ``f(epoch)``: the factor by which the backbone's learning rate grows at the start of each later epoch; by default 2.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a share of the rest's.
        backbone_initial_lr: the backbone's first learning rate as a number; wins over the share.
        should_align: the backbone's learning rate does not grow beyond the rest's.
        train_bn: train the backbone's batch norms from the start. With False they are frozen with it, in eval mode, and stay frozen.
        backbone: the name of the submodule (``"model.encoder"``).

    Raises:
        ValueError, TypeError: an argument is not valid. Before the first step: the module does not have the submodule ``backbone``, or a
            scheduler was created without the backbone's group.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] | None = None,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        train_bn: bool = True,
        *,
        backbone: str = "backbone",
    ) -> None:
        super().__init__()
        at = unfreeze_backbone_at_epoch
        if isinstance(at, bool) or not isinstance(at, int) or at < 0:
            raise ValueError(
                f"BackboneFinetuning(unfreeze_backbone_at_epoch={at!r}): it must be an epoch, counted from 0"
            )
        if lambda_func is not None and not callable(lambda_func):
            raise TypeError(f"BackboneFinetuning(lambda_func={lambda_func!r}): it must be a function of the epoch")
        for name, rate in (
            ("backbone_initial_ratio_lr", backbone_initial_ratio_lr),
            ("backbone_initial_lr", backbone_initial_lr),
        ):
            if rate is not None and (type(rate) not in (int, float) or not 0 < rate < math.inf):
                raise ValueError(f"BackboneFinetuning({name}={rate!r}): it must be a positive number")
        self.unfreeze_backbone_at_epoch, self.lambda_func = unfreeze_backbone_at_epoch, lambda_func
        self.backbone_initial_ratio_lr, self.backbone_initial_lr = backbone_initial_ratio_lr, backbone_initial_lr
        self.should_align, self.train_bn, self.backbone = should_align, train_bn, backbone
        self._is_frozen = False
        self._controls_rate = False
        self._rate: float | None = None
        self._epoch = -1
        self._every_step = False
        self._backbone_groups: list[dict[str, Any]] = []

    def _backbone_in(self, module: nn.Module) -> nn.Module:
        try:
            return module.get_submodule(self.backbone)
        except AttributeError:
            names = ", ".join(name for name, _ in module.named_children()) or "none"
            raise ValueError(
                f"BackboneFinetuning: {type(module).__name__} has no submodule {self.backbone!r}; it has {names}: give its name with backbone="
            ) from None

    def freeze_before_training(self, module: Any) -> None:
        """Freeze the backbone, if it is not built in ``configure_model``."""
        self._is_frozen, self._controls_rate, self._rate, self._epoch, self._backbone_groups = (
            False,
            False,
            None,
            -1,
            [],
        )
        if not self.backbone or not any(name == self.backbone for name, _ in module.named_modules()):
            return
        self.freeze(self._backbone_in(module), self.train_bn)
        self._is_frozen = True

    def on_load_checkpoint(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        if self._saved is not None:
            self._separate_groups(run, module)
        super().on_load_checkpoint(run, module, checkpoint)

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        if not self._is_frozen and self._saved is None:
            self.freeze(self._backbone_in(module), self.train_bn)
        self._separate_groups(run, module)
        super().on_fit_start(run, module)
        self._every_step = any(schedule.interval == "step" for schedule in run.schedulers)

    def _separate_groups(self, run: Run, module: nn.Module) -> None:
        """Give the backbone parameter groups of its own."""
        show_shards(module)
        parameters = list(dict.fromkeys(self._backbone_in(module).parameters()))
        ids, optimized_ids = {id(p) for p in parameters}, set()
        controls = self.backbone_initial_lr is not None or self.lambda_func is not None
        for optimizer in run.optimizers:
            for group in list(optimizer.param_groups):
                in_group = [p for p in group["params"] if id(p) in ids]
                optimized_ids |= {id(p) for p in in_group}
                if in_group and len(in_group) < len(group["params"]):
                    _split_group(optimizer, group, ids)
                    check_schedulers(self, run, optimizer)
                    controls = True
        if missing := [p for p in parameters if id(p) not in optimized_ids]:
            if not run.optimizers:
                raise ValueError(
                    "BackboneFinetuning: configure_optimizers returns no optimizer, and the backbone needs one: return an optimizer"
                )
            run.optimizers[0].add_param_group({"params": missing})
            check_schedulers(self, run, run.optimizers[0])
            controls = True
        self._controls_rate = self._controls_rate or controls

    # -- the learning rate ------------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        super().on_train_epoch_start(run, module)
        if self._controls_rate and run.epoch >= self.unfreeze_backbone_at_epoch:
            self._backbone_groups = self._parameter_groups(run, module, True)
            self._update_rate(run, module)
            self._set_rates()

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._every_step and self._backbone_groups:
            self._set_rates()  # a scheduler has stepped

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze the backbone at the start of its first epoch."""
        if epoch >= self.unfreeze_backbone_at_epoch:
            self._unfreeze(
                [part for part in self.flatten_modules(self._backbone_in(module)) if part not in self._frozen_norms]
            )

    def _update_rate(self, run: Run, module: nn.Module) -> None:
        if run.epoch == self._epoch:  # the epoch was resumed in its middle
            return
        other_group = next(iter(self._parameter_groups(run, module, False)), None)
        limit = None if other_group is None else float(other_group["lr"])
        if self._rate is None:
            share = (float(self._backbone_groups[0]["lr"]) if limit is None else limit) * self.backbone_initial_ratio_lr
            self._rate = share if self.backbone_initial_lr is None else self.backbone_initial_lr
        else:
            self._rate *= 2.0 if self.lambda_func is None else float(self.lambda_func(run.epoch))
        if self.should_align and limit is not None:
            self._rate = min(self._rate, limit)
        self._epoch = run.epoch

    def _parameter_groups(self, run: Run, module: nn.Module, of_backbone: bool) -> list[dict[str, Any]]:
        """The parameter groups of the backbone; with ``of_backbone=False`` all other groups."""
        ids = {id(p) for p in self._backbone_in(module).parameters()}
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups if group["params"]]
        return [group for group in groups if (id(group["params"][0]) in ids) == of_backbone]

    def _set_rates(self) -> None:
        assert self._rate is not None
        for group in self._backbone_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self._rate)
            else:
                group["lr"] = self._rate

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        super().teardown(run, module, stage)
        self._backbone_groups = []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rate": self._rate, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rate, self._epoch = state["rate"], state["epoch"]


def _split_group(optimizer: Any, group: dict[str, Any], ids: set[int]) -> None:
    """Move the parameters whose ``id`` is in ``ids`` from a group of the optimizer to a new group."""
    names = group.get("param_names") or [None] * len(group["params"])
    pairs = list(zip(names, group["params"], strict=True))
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "name" in options:
        options["name"] = f"{options['name']}-backbone"
    if isinstance(options.get("lr"), Tensor):
        options["lr"] = options["lr"].clone()
    named = "param_names" in group
    moved = [(name, p) if named else p for name, p in pairs if id(p) in ids]
    group["params"] = [p for _, p in pairs if id(p) not in ids]
    if named:
        group["param_names"] = [name for name, p in pairs if id(p) not in ids]
    optimizer.add_param_group({**options, "params": moved})
