"""Fine-tuning: a part of the model is frozen at first, and trained from some epoch on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, PolynomialLR, StepLR

from engine import Callback, Run

Modules = nn.Module | Iterable[nn.Module]


class BaseFinetuning(Callback):
    """The base of callbacks that freeze and unfreeze parts of the model. Override the two methods::

        class Gradual(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze(module.backbone)

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 5:
                    self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=1e-5)

    Parameters that an optimizer has from the start may be frozen: it leaves them as they are until they have gradients. A checkpoint has the
    names of frozen parameters, and the parameter groups that were added: a resumed run has both before its optimizers' states are loaded.
    All ranks must freeze and unfreeze the same at the same step, which follows from the epoch.

    Raises:
        ValueError: in ``setup``, under DeepSpeed, which shards only parameters that are trained at the start.
    """

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._saved: dict[str, Any] | None = None
        self._given: list[int] = []
        self._added: list[list[dict[str, Any]]] = []
        self._still: dict[_BatchNorm, bool] = {}  # frozen batch norms, which keep their statistics

    # -- what to define ---------------------------------------------------------------------------------------------------------

    def freeze_before_training(self, module: Any) -> None:
        """Freeze what is not trained at first; called before ``configure_optimizers``."""
        raise NotImplementedError(f"{type(self).__name__} must define freeze_before_training(self, module)")

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze what is trained from this epoch on; called at the start of each epoch, for each optimizer.

        Called again when a run resumes in the middle of an epoch.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define finetune_function(self, module, epoch, optimizer)"
        )

    # -- what to call -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """The modules in ``modules`` that have parameters of their own, or no submodules."""
        roots = [modules] if isinstance(modules, nn.Module) else list(modules)
        found = dict.fromkeys(inner for root in roots for inner in root.modules())
        return [m for m in found if m._parameters or not list(m.children())]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of ``modules`` that are trained (``requires_grad=False``: that are frozen), without those of batch norms if ``train_bn`` is
        False."""
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                yield from (p for p in module.parameters(recurse=False) if p.requires_grad == requires_grad)

    def make_trainable(self, modules: Modules) -> None:
        """Unfreeze these modules; batch norms among them that were frozen compute statistics again."""
        self._train(self.flatten_modules(modules))

    def _train(self, flat: list[nn.Module]) -> None:
        for module in flat:
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(True)
            if isinstance(module, _BatchNorm) and self._still.pop(module, False):
                module.train()

    def freeze(self, modules: Modules, train_bn: bool = True) -> None:
        """Freeze these modules.

        Args:
            train_bn: batch norms among them stay as they are. With False they are frozen too, and use the statistics that they have, which
                then do not change.
        """
        for module in self.flatten_modules(modules):
            if isinstance(module, _BatchNorm):
                if train_bn:
                    continue
                self._still[module] = module.training
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
        """Unfreeze modules. Those of their parameters that the optimizer does not have become a parameter group of it.

        Args:
            lr: of that group; by default that of the first group divided by ``initial_denom_lr``.
            train_bn: unfreeze batch norms too.

        Afterwards a scheduler of this optimizer that was made for fewer groups scales the rates of all, if it goes from each group's present rate
        (``StepLR``, ``MultiStepLR``, ``ExponentialLR``, ``PolynomialLR``); others are an error.
        """
        flat = [m for m in self.flatten_modules(modules) if train_bn or not isinstance(m, _BatchNorm)]
        self._train(flat)
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = [p for module in flat for p in module.parameters(recurse=False) if id(p) not in known]
        if parameters:
            rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
            optimizer.add_param_group({"params": list(dict.fromkeys(parameters)), "lr": rate})

    # -- when -------------------------------------------------------------------------------------------------------------------

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        if stage != "fit":
            return
        strategy = run.engine.strategy
        if strategy.owns_weights:
            raise ValueError(
                f"{type(self).__name__} does not work with {type(strategy).__name__}, which shards only parameters that are trained at the "
                "start: use 'fsdp' or 'ddp'"
            )
        self._module, self._saved, self._given, self._added, self._still = module, None, [], [], {}
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
        self._given = [len(optimizer.param_groups) for optimizer in run.optimizers]
        for optimizer, groups in zip(run.optimizers, self._saved["added"], strict=False):
            for group in groups:
                optimizer.add_param_group({**group, "params": [named[name] for name in group["params"]]})
        self._added = self._saved["added"]
        still = set(self._saved["statistics"])
        self._still = {m: True for name, m in module.named_modules() if name in still and isinstance(m, _BatchNorm)}

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        if not self._given:
            self._given = [len(optimizer.param_groups) for optimizer in run.optimizers]

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        show_shards(module)
        for optimizer in run.optimizers:
            self.finetune_function(module, run.epoch, optimizer)
        for optimizer in run.optimizers:
            check_schedulers(self, run, optimizer)
        self._note(run, module)
        for frozen in self._still:
            frozen.eval()

    def _note(self, run: Run, module: nn.Module) -> None:
        """Remember the groups that were added."""
        names = {id(p): name for name, p in module.named_parameters()}
        self._added = [
            [
                {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
                for group in optimizer.param_groups[given:]
            ]
            for optimizer, given in zip(run.optimizers, self._given, strict=True)
        ]

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        self._module, self._still = None, {}

    def state_dict(self) -> dict[str, Any]:
        if self._module is None:
            return {"frozen": [], "statistics": [], "added": []}
        return {
            "frozen": [name for name, p in self._module.named_parameters() if not p.requires_grad],
            "statistics": [name for name, m in self._module.named_modules() if m in self._still],
            "added": self._added,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state


def show_shards(module: nn.Module) -> None:
    """Under FSDP, free the parameters that a forward pass gathered, so that the modules have the shards that the optimizers have."""
    module.state_dict(keep_vars=True)


_FROM_PRESENT_RATES = tuple(each.get_lr for each in (StepLR, MultiStepLR, ExponentialLR, PolynomialLR))
"""Rules by which a group's next rate follows from its present one, whatever it was when the scheduler was made. Those of warm-ups do too, but
would raise a group that was added later above the rate that it was given."""


def check_schedulers(callback: Callback, run: Run, optimizer: Any) -> None:
    """Check that the schedulers of this optimizer know all of its groups, or need not know them.

    Raises:
        ValueError: one does not, and its next step would fail, or set a rate that nobody has asked for.
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
