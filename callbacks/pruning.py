"""Pruning: the least important weights become zero, and stay zero while the training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from engine import Callback, Run, TrainModule

_log = logging.getLogger("engine")
_METHODS: dict[str, type[prune.BasePruningMethod]] = {
    "l1_unstructured": prune.L1Unstructured,
    "random_unstructured": prune.RandomUnstructured,
    "ln_structured": prune.LnStructured,
    "random_structured": prune.RandomStructured,
}


class Pruning(Callback):
    """Sets weights to zero before the first batch of an epoch, chosen by a method of ``torch.nn.utils.prune``; they stay zero from then on.

    Lightning's ``ModelPruning`` prunes at the end of epochs. Here the epoch after the pruning trains the remaining weights, so its validation and
    its checkpoints have pruned weights. Nothing is renamed: parameters, checkpoints and exports are plain weights with zeros. The masks are
    the same on all ranks, and part of this callback's state. Every rank must hold the whole model (one process, ``ddp``).
    """

    def __init__(
        self,
        pruning_fn: str | type[prune.BasePruningMethod] = "l1_unstructured",
        amount: float | int | Callable[[int], float | int] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        parameters_to_prune: Sequence[tuple[nn.Module, str]] = (),
        parameter_names: Sequence[str] = ("weight",),
        use_global_unstructured: bool | None = None,
        pruning_dim: int | None = None,
        pruning_norm: float | None = None,
        make_permanent: bool = True,
    ) -> None:
        """
        Args:
            pruning_fn: ``"l1_unstructured"``, ``"random_unstructured"``, ``"ln_structured"``, ``"random_structured"``, or a class of
                ``torch.nn.utils.prune`` (or a subclass), which is created with ``amount=...``.
            amount: how many of the remaining weights to prune each time: a fraction (``0.2``), a number (``100``), or a function of the epoch
                (from 0) that returns one of the two.
            apply_pruning: a function of the epoch that returns whether to prune before it; ``True``: prune before each epoch.
            parameters_to_prune: pairs of a submodule and the name of its parameter; by default all with ``parameter_names`` and at least two dims.
            parameter_names: names of the parameters to prune, if ``parameters_to_prune`` is empty.
            use_global_unstructured: compare the weights of all parameters with each other (the default of unstructured methods), or
                prune ``amount`` of each parameter.
            pruning_dim: the dim along which a structured method removes channels.
            pruning_norm: the n of the norm of ``"ln_structured"``.
            make_permanent: ``False``: after the training the module has torch's masks (``weight_orig`` and ``weight_mask``).

        Raises:
            ValueError, TypeError: an argument is not valid.
        """
        self.method = _method_class(pruning_fn)
        structured = getattr(self.method, "PRUNING_TYPE", "unstructured") == "structured"
        if structured and use_global_unstructured:
            raise ValueError(
                f"Pruning(pruning_fn={pruning_fn!r}, use_global_unstructured=True): a structured method prunes each parameter by itself; "
                "leave use_global_unstructured out"
            )
        if structured and pruning_dim is None:
            raise ValueError(f"Pruning(pruning_fn={pruning_fn!r}) needs pruning_dim: 0 removes output channels")
        if not structured and (pruning_dim is not None or pruning_norm is not None):
            raise ValueError(
                f"Pruning(pruning_fn={pruning_fn!r}): pruning_dim and pruning_norm are for structured methods; leave them out"
            )
        if (pruning_norm is None) == (self.method is prune.LnStructured):
            raise ValueError(
                f"Pruning(pruning_fn={pruning_fn!r}, pruning_norm={pruning_norm}): 'ln_structured' needs pruning_norm, other methods do not take it"
            )
        if isinstance(parameter_names, str):
            raise TypeError(f"Pruning(parameter_names={parameter_names!r}): give a list of names")
        if not callable(amount):
            _check_amount(amount)
        self._options = {k: v for k, v in (("dim", pruning_dim), ("n", pruning_norm)) if v is not None}
        self.amount, self.apply_pruning, self.make_permanent = amount, apply_pruning, make_permanent
        self.parameters_to_prune, self.parameter_names = tuple(parameters_to_prune), tuple(parameter_names)
        self.use_global = not structured if use_global_unstructured is None else use_global_unstructured
        self.masks: dict[str, Tensor] = {}
        """Parameter's name -> mask, which is ``False`` where the parameter is pruned."""
        self._epoch = -1  # the epoch of the latest pruning
        self._chosen: dict[str, tuple[nn.Module, str]] = {}
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []

    # -- events of the run --------------------------------------------------------------------------------------------------------

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        if isinstance(module, TrainModule) and not module.automatic_optimization:
            raise ValueError(
                f"Pruning: {type(module).__name__} has automatic_optimization = False, and Pruning needs automatic optimization: remove the callback"
            )
        if callable(getattr(run.engine.strategy, "step", None)):
            raise ValueError(
                f"Pruning does not work under {type(run.engine.strategy).__name__}, whose optimizer has a copy of the weights: use strategy='ddp'"
            )
        self._chosen = self._parameters_to_prune(module)
        if run.step == 0:
            self.masks, self._epoch = {}, -1
        if lost := self.masks.keys() - self._chosen.keys():
            raise ValueError(
                f"Pruning: the checkpoint has masks of {', '.join(sorted(lost))}, which are not among the parameters to prune: "
                "resume with the same model and parameters_to_prune"
            )
        self._use_masks({name: mask.to(run.device) for name, mask in self.masks.items()})

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        apply = self.apply_pruning
        if run.epoch <= self._epoch or not (apply(run.epoch) if callable(apply) else apply):
            return  # a run that is resumed within an epoch has pruned before it
        self._epoch = run.epoch
        amount = self.amount(run.epoch) if callable(self.amount) else self.amount
        _check_amount(amount)
        self._use_masks(run.engine.broadcast(self._next_masks(amount)))
        if run.is_main_process:
            weights = sum(mask.numel() for mask in self.masks.values())
            _log.info("Pruning: %.1f %% of %d weights are zero", 100 * self.sparsity, weights)

    def on_before_optimizer_step(self, run: Run, module: nn.Module, optimizer: Any) -> None:
        for parameter, mask in self._pairs:
            if parameter.grad is not None:
                parameter.grad.mul_(mask)  # clipping and the optimizer see the gradient of the pruned network

    def on_before_zero_grad(self, run: Run, module: nn.Module, optimizer: Any) -> None:
        self._zero_pruned_weights()  # momentum from before the pruning would move pruned weights

    def on_fit_end(self, run: Run, module: nn.Module) -> None:
        if not self.make_permanent:
            for name, mask in self.masks.items():
                owner, own_name = self._chosen[name]
                prune.custom_from_mask(owner, own_name, mask)

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        self._pairs.clear()
        self._chosen.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"masks": dict(self.masks), "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.masks, self._epoch = {name: mask.bool() for name, mask in state["masks"].items()}, int(state["epoch"])

    @property
    def sparsity(self) -> float:
        """Share of the pruned parameters' weights that is zero. Waits for the device."""
        total = sum(mask.numel() for mask in self.masks.values())
        return 1.0 - sum(int(mask.sum()) for mask in self.masks.values()) / total if total else 0.0

    # -- parts ------------------------------------------------------------------------------------------------------------------

    def _parameters_to_prune(self, module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        """Name of each parameter to prune -> its submodule, and its name there."""
        names = {id(submodule): name for name, submodule in module.named_modules()}
        pairs = self.parameters_to_prune or [
            (submodule, name)
            for submodule in module.modules()
            for name in self.parameter_names
            if isinstance(parameter := submodule._parameters.get(name), nn.Parameter) and parameter.ndim > 1
        ]
        chosen: dict[str, tuple[nn.Module, str]] = {}
        seen_ids: set[int] = set()
        for owner, name in pairs:
            parameter = owner._parameters.get(name)
            if id(owner) not in names or parameter is None:
                raise ValueError(
                    f"Pruning(parameters_to_prune): {type(module).__name__} has no {type(owner).__name__} with the parameter {name!r}"
                )
            if not parameter.numel() or hasattr(parameter, "full_tensor"):
                raise ValueError(
                    f"Pruning needs whole parameters on every rank, and {name!r} is sharded: use strategy='ddp', or one process"
                )
            if id(parameter) not in seen_ids:  # tied weights once
                seen_ids.add(id(parameter))
                chosen[".".join(filter(None, [names[id(owner)], name]))] = (owner, name)
        if not chosen:
            raise ValueError(
                f"Pruning: {type(module).__name__} has no parameter of at least two dims called {' or '.join(map(repr, self.parameter_names))}: "
                "give parameters_to_prune or other parameter_names"
            )
        return chosen

    def _use_masks(self, masks: dict[str, Tensor]) -> None:
        self.masks = masks
        self._pairs = [(getattr(*self._chosen[name]), mask) for name, mask in masks.items()]
        self._zero_pruned_weights()

    @torch.no_grad()
    def _zero_pruned_weights(self) -> None:
        for parameter, mask in self._pairs:
            parameter.mul_(mask)

    @torch.no_grad()
    def _next_masks(self, amount: float | int) -> dict[str, Tensor]:
        """Compute the masks with ``amount`` more of the remaining weights pruned."""
        weights = {name: getattr(*place) for name, place in self._chosen.items()}
        before = {name: self.masks.get(name, torch.ones_like(w, dtype=torch.bool)) for name, w in weights.items()}
        if not self.use_global:
            return {name: self._combined_mask(weight, before[name], amount) for name, weight in weights.items()}
        sizes = [weight.numel() for weight in weights.values()]
        flat = torch.cat([weight.flatten() for weight in weights.values()])
        mask = self._combined_mask(flat, torch.cat([earlier.flatten() for earlier in before.values()]), amount)
        parts = mask.split(sizes)
        return {name: part.reshape(weights[name].shape) for name, part in zip(weights, parts, strict=True)}

    def _combined_mask(self, weight: Tensor, before: Tensor, amount: float | int) -> Tensor:
        """Compute a weight's mask as ``prune.global_unstructured`` does: torch's container prunes the weights that an earlier mask kept."""
        method: Any = self.method(amount=amount, **self._options)  # type: ignore[call-arg]
        container = prune.PruningContainer()
        method._tensor_name = container._tensor_name = "weight"
        container.add_pruning_method(method)
        return container.compute_mask(weight, before.to(weight.dtype)).bool()


def _method_class(pruning_fn: str | type[prune.BasePruningMethod]) -> type[prune.BasePruningMethod]:
    if isinstance(pruning_fn, str) and pruning_fn in _METHODS:
        return _METHODS[pruning_fn]
    if isinstance(pruning_fn, type) and issubclass(pruning_fn, prune.BasePruningMethod):
        return pruning_fn
    raise ValueError(
        f"Pruning(pruning_fn={pruning_fn!r}): it must be {', '.join(map(repr, _METHODS))} or a subclass of torch.nn.utils.prune.BasePruningMethod"
    )


def _check_amount(amount: Any) -> None:
    number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
    if not number or amount < 0 or (isinstance(amount, float) and amount > 1.0):
        raise ValueError(f"Pruning(amount={amount!r}): it must be a fraction from 0.0 to 1.0, or a number of weights")
