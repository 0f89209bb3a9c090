"""A pretrained backbone that is frozen at first, and then trained with a learning rate of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from engine import Run

from .finetuning import BaseFinetuning, check_schedulers, show_shards


class BackboneFinetuning(BaseFinetuning):
    """Freezes ``module.backbone`` at first and trains it from a given epoch on. Its smaller learning rate grows to that of the rest.

    The backbone's parameters are in an optimizer from the start. Those that ``configure_optimizers`` has left out, or given together with
    others, get a group of their own. With a scheduler, which is made for the groups that it finds, ``configure_optimizers`` must give that group::

        torch.optim.AdamW([{"params": self.head.parameters()}, {"params": self.backbone.parameters(), "lr": 1e-5}], lr=1e-3)

    A group that it gives keeps its learning rate, and its scheduler, unless ``backbone_initial_lr`` or ``lambda_func`` is given here.

    Args:
        unfreeze_backbone_at_epoch: the first epoch, from 0, in which the backbone is trained.
        lambda_func: ``f(epoch)``: the factor by which the backbone's learning rate grows at the start of each later epoch; by default 2.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a share of the rest's.
        backbone_initial_lr: the same as a number; wins over the share.
        should_align: the backbone's learning rate does not grow beyond the rest's.
        train_bn: the backbone's batch norms are trained from the start. With False they are frozen with it, in eval mode, and stay so.
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
        self._frozen = False
        self._controls = False
        self._rate: float | None = None
        self._epoch = -1
        self._every_step = False
        self._mine: list[dict[str, Any]] = []

    def _part(self, module: nn.Module) -> nn.Module:
        try:
            return module.get_submodule(self.backbone)
        except AttributeError:
            there = ", ".join(name for name, _ in module.named_children()) or "none"
            raise ValueError(
                f"BackboneFinetuning: {type(module).__name__} has no submodule {self.backbone!r}; it has {there}: give its name with backbone="
            ) from None

    def freeze_before_training(self, module: Any) -> None:
        """Freeze the backbone, if it is not built in ``configure_model``."""
        self._frozen, self._controls, self._rate, self._epoch, self._mine = False, False, None, -1, []
        if not self.backbone or not any(name == self.backbone for name, _ in module.named_modules()):
            return
        self.freeze(self._part(module), self.train_bn)
        self._frozen = True

    def on_load_checkpoint(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        if self._saved is not None:
            self._separate(run, module)
        super().on_load_checkpoint(run, module, checkpoint)

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        if not self._frozen and self._saved is None:
            self.freeze(self._part(module), self.train_bn)
        self._separate(run, module)
        super().on_fit_start(run, module)
        self._every_step = any(schedule.interval == "step" for schedule in run.schedulers)

    def _separate(self, run: Run, module: nn.Module) -> None:
        """Give the backbone parameter groups of its own."""
        show_shards(module)
        own = list(dict.fromkeys(self._part(module).parameters()))
        ids, there = {id(p) for p in own}, set()
        asked = self.backbone_initial_lr is not None or self.lambda_func is not None
        for optimizer in run.optimizers:
            for group in list(optimizer.param_groups):
                mine = [p for p in group["params"] if id(p) in ids]
                there |= {id(p) for p in mine}
                if mine and len(mine) < len(group["params"]):
                    _split(optimizer, group, ids)
                    check_schedulers(self, run, optimizer)
                    asked = True
        if left := [p for p in own if id(p) not in there]:
            if not run.optimizers:
                raise ValueError(
                    "BackboneFinetuning: configure_optimizers gives no optimizer to train the backbone with"
                )
            run.optimizers[0].add_param_group({"params": left})
            check_schedulers(self, run, run.optimizers[0])
            asked = True
        self._controls = self._controls or asked

    # -- the learning rate ------------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        super().on_train_epoch_start(run, module)
        if self._controls and run.epoch >= self.unfreeze_backbone_at_epoch:
            self._mine = self._groups(run, module, True)
            self._grow(run, module)
            self._set()

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._every_step and self._mine:
            self._set()  # a scheduler has stepped

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze the backbone at the start of its first epoch."""
        if epoch >= self.unfreeze_backbone_at_epoch:
            self._train([part for part in self.flatten_modules(self._part(module)) if part not in self._still])

    def _grow(self, run: Run, module: nn.Module) -> None:
        if run.epoch == self._epoch:  # the epoch was resumed in its middle
            return
        rest = next(iter(self._groups(run, module, False)), None)
        top = None if rest is None else float(rest["lr"])
        if self._rate is None:
            share = (float(self._mine[0]["lr"]) if top is None else top) * self.backbone_initial_ratio_lr
            self._rate = share if self.backbone_initial_lr is None else self.backbone_initial_lr
        else:
            self._rate *= 2.0 if self.lambda_func is None else float(self.lambda_func(run.epoch))
        if self.should_align and top is not None:
            self._rate = min(self._rate, top)
        self._epoch = run.epoch

    def _groups(self, run: Run, module: nn.Module, own: bool) -> list[dict[str, Any]]:
        """The groups of the backbone's parameters, or the others."""
        ids = {id(p) for p in self._part(module).parameters()}
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups if group["params"]]
        return [group for group in groups if (id(group["params"][0]) in ids) == own]

    def _set(self) -> None:
        assert self._rate is not None
        for group in self._mine:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self._rate)
            else:
                group["lr"] = self._rate

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        super().teardown(run, module, stage)
        self._mine = []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rate": self._rate, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rate, self._epoch = state["rate"], state["epoch"]


def _split(optimizer: Any, group: dict[str, Any], ids: set[int]) -> None:
    """Move the parameters with these ``id`` from a group of the optimizer to a new one."""
    names = group.get("param_names") or [None] * len(group["params"])
    pairs = list(zip(names, group["params"], strict=True))
    rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "name" in rest:
        rest["name"] = f"{rest['name']}-backbone"
    if isinstance(rest.get("lr"), Tensor):
        rest["lr"] = rest["lr"].clone()
    named = "param_names" in group
    moved = [(name, p) if named else p for name, p in pairs if id(p) in ids]
    group["params"] = [p for _, p in pairs if id(p) not in ids]
    if named:
        group["param_names"] = [name for name, p in pairs if id(p) not in ids]
    optimizer.add_param_group({**rest, "params": moved})
