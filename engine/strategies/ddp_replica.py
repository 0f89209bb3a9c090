"""DDP for models that change while they are trained: parameters are frozen and unfrozen, modules added, replaced and removed, weights tied."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.distributed.waiting import told_waiting
from engine.step.gradients import check_held
from engine.step.position import Position
from engine.strategies.base import broadcast_from_rank_0, trained_parameters
from engine.strategies.model_structure import TrainedParameters
from engine.strategies.unreduced_gradients import PassCount, average
from engine.utils import torch_private
from engine.utils.tree import leaves

_WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
"""The end of torch's error about an unfinished reduction; its numbers are indices of the parameters that the reducer was given."""
_KEPT_ATTRIBUTES = (*vars(nn.Module()), "require_forward_param_sync")
"""Attributes that stay when the module is wrapped again: hooks, mode, submodules, and whether the next pass broadcasts buffers."""
_UNREDUCED = {"require_backward_grad_sync": False, "find_unused_parameters": False, "static_graph": False}
"""A wrapper's attributes during a forward pass whose gradients no reducer shall wait for."""


class Replica(DistributedDataParallel):
    """``DistributedDataParallel`` that detects changes of the module at each forward pass, and reduces the parameters that are trained now.

    All ranks must change the model between the same forward passes; they compare which parameters they train from then on. New parameters
    and the buffers of new modules start with rank 0's values. Gradients of the open window are kept. A pass without trained parameters is
    not reduced, so a model that is frozen and unfrozen alternately keeps its reducer at no cost.

    After a change this object is initialised as a wrapper once more, with the same arguments: users hold it, and their hooks are on it.

    Args:
        ranks: all processes of the job.
        optimizers: all optimizers that may have the module's parameters; the list may grow later.
        passes: counts the backward passes since this wrapper's latest forward pass.
        options: arguments of ``DistributedDataParallel``.

    A forward pass raises:
        ValueError: the ranks train different parameters, or have different values in parameters that were created inside a forward pass; a
            trained parameter was replaced and its optimizer still has the old one. Raised on all ranks.
    """

    def __init__(
        self, module: nn.Module, ranks: Group, optimizers: Sequence[Optimizer], passes: PassCount, **options: Any
    ) -> None:
        with _one_trained(module) as unfrozen:
            super().__init__(module, **options)
        self.passes = passes
        self._ranks, self._optimizers, self._options = ranks, optimizers, options
        self._hook: tuple[object, Callable[..., Any]] | None = None
        self._seen = TrainedParameters(module, self.parameters_to_ignore)
        """The parameters and modules that this replica has last seen in the module."""
        self.reduced: Sequence[Tensor] = unfrozen or self._seen.trained
        """The parameters that the reducer was given, in its order."""
        self._idle = not self._seen.trained
        """Whether no parameter is trained."""
        self._open = False
        """Whether the window has gradients that are not reduced yet."""
        self._trained_before: list[Tensor] = []
        """Parameters that were trained in the open window before the model's latest changes."""
        self._outdated = False
        """Whether the module must be wrapped again before the next reduction."""
        self._searches_once = False
        """Whether this reducer was made for one pass, in which it searches the graph for parameters without gradient."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients by ``hook``, also after the module has changed."""
        super().register_comm_hook(state, hook)
        self._hook = state, hook

    def open_window(self) -> None:
        """Record that a window leaves gradients to a later reduction. Every rank calls this, even if it has had no forward pass yet."""
        self._open = True
        self._trained_before.clear()

    @property
    def may_wait(self) -> bool:
        """Whether a pass may leave the reduction to a later one. With a static graph, torch requires that the first pass reduces."""
        return not self.static_graph or torch_private.static_graph_is_known(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the wrapper (such as an average of weights) belongs to no job, and does not follow changes.
        return {
            **super().__getstate__(),
            "_ranks": None,
            "_optimizers": [],
            "_options": {},
            "_hook": None,
            "reduced": [],
            "_trained_before": [],
            "_idle": False,
            "_outdated": False,
            "passes": PassCount(Position()),
        }

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass; before and after it, check whether the module has changed since it was wrapped."""
        if (self._outdated or not self._seen.unchanged()) and torch.is_grad_enabled():
            self._catch_up()
        try:
            if self._idle and self.require_backward_grad_sync and torch.is_grad_enabled():
                output = self._forward_unreduced(*inputs, **kwargs)
            else:
                output = super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            self._name_unused(error)
            raise
        if output.requires_grad if type(output) is Tensor else torch.is_grad_enabled():
            passes = self.passes
            if passes.alone:  # without a call, in every forward pass
                position = passes.position
                passes.before, passes.synced = position.passes, self.require_backward_grad_sync
                position.reduced_passes = position.passes + 1
            else:
                passes.forward_ended(output, self.require_backward_grad_sync)
        if not self.require_backward_grad_sync:
            if not self._open and torch.is_grad_enabled():  # setting an attribute of a module takes 14 calls
                self._open = True
            return output
        changed = not self._seen.unchanged()
        if (changed or self._open) and torch.is_grad_enabled():
            if changed:
                self._notice(used=True)
                if self._outdated:
                    self._follow(inside=True)
                if self._searches_once:
                    self.reducer.prepare_for_forward()
                    self.reducer.prepare_for_backward(leaves(output))
            self._close_window()
        return output

    def _forward_unreduced(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run a forward pass of a fully frozen module, after which no reducer may wait for gradients. Buffers are broadcast as before any pass."""
        attributes = vars(self)
        # torch clears require_forward_param_sync after a pass that reduces nothing; buffers would not be broadcast in the next one.
        previous = {name: attributes[name] for name in (*_UNREDUCED, "require_forward_param_sync")}
        attributes.update(_UNREDUCED)
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            attributes.update(previous)

    # -- changes of the model -----------------------------------------------------------------------------------------------------

    def skip_batch(self) -> None:
        """Apply the model's pending changes although this rank has no loss for the micro-batch, because other ranks apply them now."""
        self._catch_up()
        if self._idle and self.require_backward_grad_sync:
            self._close_window()

    def _catch_up(self) -> None:
        """Follow the model's changes before a forward pass."""
        if not self._seen.unchanged():
            self._notice(used=False)
        if self._outdated and self.require_backward_grad_sync:
            self._follow(inside=False)

    def _notice(self, used: bool) -> None:
        """Record the module's present submodules and parameters. ``used``: a forward pass has already computed with them."""
        old, self._seen = self._seen, TrainedParameters(self.module, self.parameters_to_ignore)
        new = self._seen
        check_held(old.named, new.named, self._optimizers)
        self._idle = not new.trained
        if self._open:
            self._trained_before += old.trained
        differs = self._searches_once or self._open or not _are_same_tensors(new.trained, self.reduced)
        self._outdated = differs and (used or not self._idle)
        added = new.newer_than(old)
        if added:
            self._agree("now has these parameters", list(dict.fromkeys(new.named.values())), used)
            if used:  # too late to broadcast rank 0's values
                self._compare([t for t in added if isinstance(t, nn.Parameter)])
            else:
                broadcast_from_rank_0(self._ranks, [t.detach() for t in added])

    def _follow(self, inside: bool) -> None:
        """Reduce the parameters that are trained now, from this pass on. ``inside``: its forward pass is over, and may not have used new ones."""
        trained = self._seen.trained
        is_same = _are_same_tensors(trained, self.reduced)
        if not is_same:
            self._agree("now trains these parameters", trained, inside)
        self._average_left_over()
        if is_same and not self._searches_once:  # changed and changed back
            self._outdated = False
            return
        self._searches_once = self._outdated = inside and not self._idle  # the next pass needs no search
        self._wrap_again({"find_unused_parameters": True, "static_graph": False} if self._searches_once else {})

    def _wrap_again(self, options: dict[str, Any]) -> None:
        """Initialise this wrapper again, with ``options`` in place of the original ones."""
        self.check_finished()  # a pending error of the previous pass must not be lost with its reducer
        attributes = {name: vars(self)[name] for name in _KEPT_ATTRIBUTES}
        with _one_trained(self.module) as unfrozen:
            # The new reducer replaces the old one, which then removes its hooks from the parameters.
            super().__init__(self.module, **{**self._options, **options}, init_sync=False)
        vars(self).update(attributes)
        self.reduced = unfrozen or self._seen.trained
        if self._hook is not None:
            state, function = self._hook
            _restart_powersgd(state)
            super().register_comm_hook(state, function)

    def _average_left_over(self) -> None:
        """Average the window's gradients of parameters that are no longer trained: the optimizer still uses them."""
        if self._open:
            trained_ids = {id(p) for p in self._seen.trained}
            trained_before = dict.fromkeys([*self.reduced, *self._trained_before])
            self._trained_before.clear()
            average(self._ranks, [p for p in trained_before if id(p) not in trained_ids])

    def _close_window(self) -> None:
        """Close the window after its last pass. If nothing is trained no reduction follows, so the gradients left over are averaged here."""
        if self._open:
            if self._idle:
                self._average_left_over()
            self._open = False

    def check_finished(self) -> None:
        """Raise if the latest backward pass has left gradients unreduced. torch notices only in the next forward pass, if there is one."""
        try:
            torch_private.check_reduced(self)
        except RuntimeError as error:
            self._name_unused(error)
            raise

    def _name_unused(self, error: RuntimeError) -> None:
        """Raise our own error instead of torch's about parameters that got no gradient in the previous pass: torch's has only their numbers."""
        numbers = _WITHOUT_GRADIENT.search(str(error))
        if numbers is None:
            return
        parameters = [self.reduced[int(number)] for number in numbers[1].split()]
        raise RuntimeError(
            f"the loss did not depend on these trained parameters, whose gradients strategy 'ddp' waits for: "
            f"{_first_names(self._seen.names(parameters))}. If a step may leave parameters out, use "
            'strategy={"name": "ddp", "find_unused_parameters": True}; freeze those that are never trained (requires_grad_(False))'
        ) from None

    # -- the other ranks ----------------------------------------------------------------------------------------------------------

    def _agree(self, what: str, parameters: Sequence[Tensor], inside: bool) -> None:
        """Raise on all ranks unless all have made the same change. Waits, with a warning, for ranks that have not changed their model."""
        names = self._seen.names(parameters)
        form = [what, inside, *([name, list(p.shape), str(p.dtype)] for name, p in zip(names, parameters, strict=True))]
        why = f"which must make the same change of the model. It {what} on this rank: {_first_names(names)}"
        with told_waiting(self._ranks, why) as doing:
            try:
                digests = gather_json(self._ranks, hashlib.sha256(repr(form).encode()).hexdigest())
            except RuntimeError as error:
                raise RuntimeError(f"rank {self._ranks.rank} was {doing}: {error}") from error
        if len(set(digests)) > 1:
            raise ValueError(
                f"the ranks have changed the model in different ways:\n{_differences(gather_json(self._ranks, form))}"
            )

    def _compare(self, new: Sequence[Tensor]) -> None:
        """Raise on all ranks if the values of these tensors differ between ranks."""
        values_of_rank_0 = [t.detach().clone() for t in new]
        broadcast_from_rank_0(self._ranks, values_of_rank_0)
        if not all(gather_json(self._ranks, all(map(torch.equal, values_of_rank_0, [t.detach() for t in new])))):
            raise ValueError(
                "modules were added inside a forward pass (training_step), with different values on each rank: "
                f"{_first_names(self._seen.names(new))}. Add them before it, for example in on_train_batch_start, or with equal values on all ranks"
            )


@contextmanager
def _one_trained(module: nn.Module) -> Iterator[Sequence[Tensor]]:
    """Unfreeze one parameter inside the block if all are frozen, and yield it in a list: without one, torch builds no reducer."""
    unfrozen = [] if any(True for _ in trained_parameters(module)) else list(module.parameters())[:1]
    for parameter in unfrozen:
        parameter.requires_grad_(True)
    try:
        yield unfrozen
    finally:
        for parameter in unfrozen:
            parameter.requires_grad_(False)


def _restart_powersgd(state: Any) -> None:
    """Let PowerSGD reduce exactly until bucket shapes are stable again: its matrices belong to the buckets before the change."""
    if type(state).__name__ == "PowerSGDState":
        for matrices in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            matrices.clear()
        state.iter = min(state.iter, state.start_powerSGD_iter - 2)


def _are_same_tensors(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


def _first_names(names: Sequence[str], limit: int = 6) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _differences(forms: Sequence[Sequence[Any]]) -> str:
    """The changes of rank 0 and of the first rank that differs, as two lines of text."""
    rank = next(rank for rank, form in enumerate(forms) if form != forms[0])
    lines = []
    for this_rank, other_rank in ((0, rank), (rank, 0)):
        what, inside, *parameters = forms[this_rank]
        only = [
            f"{name} {shape} {dtype}"
            for name, shape, dtype in parameters
            if [name, shape, dtype] not in forms[other_rank]
        ]
        when = "inside its forward pass" if inside else "before its forward pass"
        lines.append(f"  rank {this_rank} {what}, changed {when}; only here: {_first_names(only) or 'nothing'}")
    return "\n".join(lines)
