"""The modules and parameters of a model: recorded by one traversal, and compared with the model later without another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engine.distributed.comparison import check_equal
from engine.distributed.group import Group
from engine.distributed.waiting import told_waiting
from engine.transforms.blocks import user_module

_END = (object(),)
"""An object that no model contains, after the members of all modules. If a module has gained or lost members, something else is in its place."""
_requires_grad = attrgetter("requires_grad")


class TrainedParameters:
    """A record of a replica's modules and parameters, and of which parameters are trained.

    The comparison with the model later must not traverse it, which takes milliseconds. So the record keeps live views of the dictionaries in
    which each module has its parameters and submodules: iterating over them gives the members of that moment, at about 200 ns a module and
    parameter, in two calls.

    Args:
        left_out: names of parameters to ignore.
    """

    def __init__(self, model: nn.Module, left_out: Iterable[str] = ()) -> None:
        self.modules = list(model.modules())
        self._prefix = next(f"{name}." if name else "" for name, m in model.named_modules() if m is user_module(model))
        self._views: list[Any] = [
            view for module in self.modules for view in (module._parameters.values(), module._modules.values())
        ]
        self._views.append(_END)
        skipped = set(left_out)
        self.named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in skipped}
        distinct = dict.fromkeys(self.named.values())
        self._parameters = list(distinct)
        self.trained = [p for p in distinct if p.requires_grad]
        self._expected = [*chain.from_iterable(self._views), *map(_requires_grad, distinct)]
        """The iteration that :meth:`unchanged` expects: the members of all modules, ``_END``, and ``requires_grad`` of each parameter."""

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainedParameters, (nn.Module(),)  # a copy of the model is another model, and is never compared

    def unchanged(self) -> bool:
        """Whether the model still consists of the recorded modules, and trains the same parameters."""
        # This is called twice a step, so it avoids `all`, `any` and `from_iterable`, each of which would be one call more.
        return False not in map(is_, self._expected, chain(*self._views, map(_requires_grad, self._parameters)))

    def newer_than(self, before: TrainedParameters) -> list[Tensor]:
        """Parameters that ``before`` does not contain, and buffers of modules that ``before`` does not contain."""
        parameter_ids, module_ids = {id(p) for p in before.named.values()}, {id(m) for m in before.modules}
        parameters = [p for p in dict.fromkeys(self.named.values()) if id(p) not in parameter_ids]
        return [
            *parameters,
            *(b for m in self.modules if id(m) not in module_ids for b in m._buffers.values() if b is not None),
        ]

    def names(self, parameters: Sequence[Tensor]) -> list[str]:
        """The names of these parameters in the user's module; of several names the first."""
        name_by_id: dict[int, str] = {}
        for name, parameter in self.named.items():
            name_by_id.setdefault(id(parameter), name.removeprefix(self._prefix))
        return [name_by_id.get(id(p), "one that the model no longer has") for p in parameters]


class ShardedStructure:
    """A record of a model's modules and parameter names when a strategy sharded it: gradients of later parameters would not be reduced.

    Full parameters and shards alternate in a sharded model, so names and counts are compared, not objects as in :class:`TrainedParameters`.

    Ranks that freeze or unfreeze parameters must all do so: their reductions would not match. So they compare what has changed, when something has.

    Args:
        who: the name of the strategy, for the error.
        ranks: the ranks that reduce gradients together; ``None``: each has parameters of its own.
    """

    _parameters: list[dict[str, nn.Parameter | None]]
    _trained: list[bool]
    _trained_names: set[str]

    def __init__(self, model: nn.Module, who: str, ranks: Group | None) -> None:
        self._model, self._called, self._who, self._ranks = user_module(model), model, who, ranks
        self._record()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of the model is another model

    def watch(self) -> RemovableHandle:
        """Check the model at each forward pass with gradients; return the handle that ends this."""
        return self._called.register_forward_pre_hook(lambda *_: self.check() if torch.is_grad_enabled() else None)

    def check(self) -> None:
        """Check that no trained parameters were added, without traversing the model, and that all ranks train the same ones (60 ns a parameter).

        Raises:
            ValueError: trained parameters were added.
            CheckError: ranks have frozen or unfrozen different parameters; raised on all ranks that have.
        """
        self._check_members()
        trained = [p is not None and p.requires_grad for members in self._parameters for p in members.values()]
        if trained != self._trained:
            self._compare_trained()
            self._trained = trained

    def _check_members(self) -> None:
        if (
            all(map(is_, self._expected, chain.from_iterable(self._views)))
            and list(map(len, self._parameters)) == self._counts
        ):
            return
        new = [
            name
            for name, p in _owned(self._model)
            if p[1].requires_grad and (name not in self._names or id(p[0]) not in self._known)
        ]
        if new:
            names = ", ".join(new[:6]) + (f" and {len(new) - 6} more" if len(new) > 6 else "")
            raise ValueError(
                f"{self._who} sharded {type(self._model).__name__} before these parameters were added, and no rank would reduce their "
                f"gradients: {names}. Add modules in __init__ or configure_model and freeze them until they are needed "
                "(requires_grad), or use strategy='ddp', which follows such changes"
            )
        self._record()

    def _compare_trained(self) -> None:
        """Compare over the ranks which parameters are trained now. A rank that has changed none does not take part: this one waits for it then."""
        if self._ranks is None or self._ranks.world_size == 1:
            return
        trained = {name: p[1].requires_grad for name, p in _owned(self._model)}
        changed = [name for name, flag in trained.items() if flag != (name in self._trained_names)]
        names = ", ".join(changed[:6]) + (f" and {len(changed) - 6} more" if len(changed) > 6 else "")
        why = f"because requires_grad of {names} has changed here, and must change on all ranks before the same forward pass"
        with told_waiting(self._ranks, why):
            check_equal(
                self._ranks,
                "trained parameters",
                {f"{name}.requires_grad": flag for name, flag in trained.items()},
                "Freeze and unfreeze parameters on all ranks, at the same step",
            )
        self._trained_names = {name for name, flag in trained.items() if flag}

    def _record(self) -> None:
        """Record the model as it is now."""
        self._modules = list(self._model.modules())  # kept alive, so that no other object gets one of these ids
        self._known = {id(m) for m in self._modules}
        self._names = {name for name, _ in _owned(self._model)}
        self._trained_names = {name for name, (_, p) in _owned(self._model) if p.requires_grad}
        self._views: list[Any] = [*(m._modules.values() for m in self._modules), _END]
        self._parameters = [m._parameters for m in self._modules]
        self._trained = [p is not None and p.requires_grad for members in self._parameters for p in members.values()]
        self._counts = list(map(len, self._parameters))
        self._expected = list(chain.from_iterable(self._views))


def _nothing() -> None:
    return None


def _owned(model: nn.Module) -> list[tuple[str, tuple[nn.Module, nn.Parameter]]]:
    """Return ``(name, (module, parameter))`` for all parameters; a shared one occurs under each of its names."""
    return [
        (f"{prefix}.{name}" if prefix else name, (module, parameter))
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
