"""A replica of a model that may change while it is trained: parameters frozen and unfrozen, modules added, replaced and removed, weights tied."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.health import stacks
from engine.step.gradients import check_held
from engine.transforms.blocks import user_module
from engine.utils.log import logger
from engine.utils.torch_private import reduce_by

PATIENCE_S = 5.0
"""Seconds after which a rank whose model has changed warns that the others have not made the same change."""
_END = (object(),)
_requires_grad = attrgetter("requires_grad")
_WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
"""The end of torch's error about a reduction that did not finish; the numbers count the parameters that its reducer was given."""


class Composition:
    """The modules and parameters of a model, and which parameters are trained. Built by a traversal, compared without one.

    Args:
        left_out: names of parameters to ignore.
    """

    def __init__(self, model: nn.Module, left_out: Iterable[str] = ()) -> None:
        self.modules = list(model.modules())
        self._prefix = next(f"{name}." if name else "" for name, m in model.named_modules() if m is user_module(model))
        # Live views of each module's members: about 200 ns per module and parameter, in two calls.
        self._views: list[Any] = [
            view for module in self.modules for view in (module._parameters.values(), module._modules.values())
        ]
        self._views.append(_END)
        skipped = set(left_out)
        self.named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in skipped}
        once = dict.fromkeys(self.named.values())
        self._parameters = list(once)
        self.trained = [p for p in once if p.requires_grad]
        self._expected = [*chain.from_iterable(self._views), *map(_requires_grad, once)]

    def holds(self) -> bool:
        """Whether the model is unchanged."""
        # Called twice a step. Without `all`, `any` and `from_iterable`: each of them is one call more.
        return False not in map(is_, self._expected, chain(*self._views, map(_requires_grad, self._parameters)))

    def newer_than(self, before: Composition) -> list[Tensor]:
        """Parameters that ``before`` does not have, and the buffers of modules that it does not have."""
        known, there = {id(p) for p in before.named.values()}, {id(m) for m in before.modules}
        parameters = [p for p in dict.fromkeys(self.named.values()) if id(p) not in known]
        return [
            *parameters,
            *(b for m in self.modules if id(m) not in there for b in m._buffers.values() if b is not None),
        ]

    def names(self, parameters: Sequence[Tensor]) -> list[str]:
        """One name for each of these parameters, in the user's own module."""
        first: dict[int, str] = {}
        for name, parameter in self.named.items():
            first.setdefault(id(parameter), name.removeprefix(self._prefix))
        return [first.get(id(p), "one that the model no longer has") for p in parameters]


class _Unwatched:
    """Stands in for the composition of a copy."""

    def holds(self) -> bool:
        return True


class Replica(DistributedDataParallel):
    """``DistributedDataParallel`` that detects changes of the module at each forward pass, and reduces the parameters that are trained now.

    All ranks must make a change between the same forward passes: they compare what they train from then on. New parameters and the
    buffers of new modules start with rank 0's values. Gradients of the open window are kept. A pass without trained parameters is not
    reduced, and costs nothing when all of them are alternately frozen and unfrozen.

    Args:
        ranks: the group of the job.
        optimizers: all that may have the module's parameters; the list may grow later.
        options: of ``DistributedDataParallel``.

    A forward pass raises:
        ValueError: the ranks train different parameters, or have different values in parameters that were created inside a forward pass; a
            trained parameter was replaced and its optimizer still has the old one. Raised on all ranks.
    """

    def __init__(self, module: nn.Module, ranks: Group, optimizers: Sequence[Optimizer], **options: Any) -> None:
        idle = not any(map(_requires_grad, module.parameters()))
        lent = list(module.parameters())[: int(idle)]  # torch builds no reducer without a trained parameter
        for parameter in lent:
            parameter.requires_grad_(True)
        super().__init__(module, **options)
        for parameter in lent:
            parameter.requires_grad_(False)
        self._ranks: Group | None = ranks
        self._optimizers = optimizers
        self._composition = Composition(module, self.parameters_to_ignore)
        self._reduced: Sequence[Tensor] = lent or self._composition.trained
        self._idle = idle
        self._open = False
        """Some gradients are not reduced yet."""
        self._trained_before: list[Tensor] = []
        """What the open window has trained before its latest changes."""
        self._stale = False
        """The reducer must be rebuilt before the next reduction."""
        self.searching = self.find_unused_parameters
        """Whether the reducer searches the graph for parameters without gradient."""
        self._trial = False
        """It does so for one pass only."""

    def open_window(self) -> None:
        """Note that a window leaves gradients to a later reduction. Every rank calls this, also one without a forward pass until then."""
        self._open = True
        self._trained_before.clear()

    @property
    def may_wait(self) -> bool:
        """Whether a pass may leave the reduction to a later one. The first pass of a static graph is always reduced: torch asserts it."""
        return not self.static_graph or self._static_graph_delay_allreduce_enqueued

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the wrapper (such as an average of weights) belongs to no job, and stays as it is.
        return {
            **super().__getstate__(),
            "_ranks": None,
            "_composition": _Unwatched(),
            "_optimizers": [],
            "_reduced": [],
            "_trained_before": [],
            "_idle": False,
        }

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if (self._stale or not self._composition.holds()) and torch.is_grad_enabled():
            assert self._ranks is not None
            self._catch_up(self._ranks)
        try:
            return super()._pre_forward(*inputs, **kwargs)
        except RuntimeError as error:
            self._name_unused(error)
            raise

    def _post_forward(self, output: Any) -> Any:
        if not self.require_backward_grad_sync:
            if not self._open and torch.is_grad_enabled():  # setting an attribute of a module takes 14 calls
                self._open = True
            return super()._post_forward(output)
        same = self._composition.holds()
        if (same and not self._idle and not self._trial) or not torch.is_grad_enabled():
            if self._open and torch.is_grad_enabled():
                self._open = False
            return super()._post_forward(output)
        assert self._ranks is not None
        if not same:
            self._notice(self._ranks, used=True)
            if self._stale:
                self._follow(self._ranks, inside=True)
        if self._idle:
            self._average_idle(self._ranks)
            return output
        self._open = False
        search, self.find_unused_parameters = self.find_unused_parameters, self.searching
        try:
            return super()._post_forward(output)
        finally:
            self.find_unused_parameters = search

    # -- a change -----------------------------------------------------------------------------------------------------------------

    def leave_out(self) -> None:
        """A micro-batch has no loss on this rank, and perhaps no forward pass: follow what the other ranks follow in theirs."""
        assert self._ranks is not None
        self._catch_up(self._ranks)
        if self._idle and self.require_backward_grad_sync:
            self._average_idle(self._ranks)

    def _catch_up(self, ranks: Group) -> None:
        """Follow a change before a forward pass."""
        if not self._composition.holds():
            self._notice(ranks, used=False)
        if self._stale and self.require_backward_grad_sync:
            self._follow(ranks, inside=False)

    def _notice(self, ranks: Group, used: bool) -> None:
        """Adopt the module's current composition. ``used``: a forward pass has computed with it already."""
        before, self._composition = self._composition, Composition(self.module, self.parameters_to_ignore)
        now = self._composition
        check_held(before.named, now.named, self._optimizers)
        self._idle = not now.trained
        if self._open:
            self._trained_before += before.trained
        self._stale = not self._idle and (self._trial or self._open or not _same(now.trained, self._reduced))
        new = now.newer_than(before)
        if new:
            self._agree(ranks, "now has these parameters", list(dict.fromkeys(now.named.values())), used)
            if used:  # too late to change them
                self._compare(ranks, [t for t in new if isinstance(t, nn.Parameter)])
            else:
                self._distributed_broadcast_coalesced([t.detach() for t in new], self.broadcast_bucket_size)

    def _follow(self, ranks: Group, inside: bool) -> None:
        """Reduce what is trained now, from this pass on. ``inside``: its forward pass is over, and may not have used new parameters."""
        trained = self._composition.trained
        same = _same(trained, self._reduced)
        if not same:
            self._agree(ranks, "now trains these parameters", trained, inside)
        self._average_left_over(ranks)
        if same and not self._trial:  # changed and changed back
            self._stale = False
            return
        self._rebuild(search=self.find_unused_parameters or (inside and not self.static_graph))
        if inside:
            self.reducer.prepare_for_forward()
        self._stale = inside  # the next pass needs no search

    def _rebuild(self, search: bool) -> None:
        """Rebuild the reducer with the same arguments."""
        self._check_reducer_finalized()  # a pending error of the previous pass must not be lost with its reducer
        self._remove_autograd_hooks()
        parameters, sparse = self._build_params_for_reducer()
        self._module_parameters = list(dict.fromkeys(self._composition.named.values()))
        own, self.find_unused_parameters = self.find_unused_parameters, search
        self._ddp_init_helper(
            parameters, sparse, self._build_debug_param_to_name_mapping(parameters), self.static_graph
        )
        self.find_unused_parameters, self.searching, self._trial = own, search, search != own
        self._reduced = self._composition.trained
        self._has_rebuilt_buckets = False
        for hook, state in self._comm_hooks:
            reduce_by(self.reducer, hook, state)
            _start_again(state)
        if self.static_graph:
            self._static_graph_delay_allreduce_enqueued = False
            self.reducer._set_static_graph()
            assert self.logger is not None
            self.logger._set_static_graph()

    def _average_left_over(self, ranks: Group) -> None:
        """Average the window's gradients of parameters that are no longer trained: the optimizer still uses them."""
        if self._open:
            trained = {id(p) for p in self._composition.trained}
            before = dict.fromkeys([*self._reduced, *self._trained_before])
            self._trained_before.clear()
            average(ranks, [p for p in before if id(p) not in trained])

    def _average_idle(self, ranks: Group) -> None:
        """The same where nothing is trained, so that no reduction follows and the window is over."""
        if self._open:
            self._average_left_over(ranks)
            self._open = False

    def check_finished(self) -> None:
        """Raise if the latest backward pass has left gradients unreduced. torch notices in the next forward pass only, and there may be none."""
        self._check_reducer_finalized()

    def _check_reducer_finalized(self) -> None:
        try:
            super()._check_reducer_finalized()
        except RuntimeError as error:
            self._name_unused(error)
            raise

    def _name_unused(self, error: RuntimeError) -> None:
        """Replace torch's error about parameters that got no gradient in the pass before: it gives their numbers, and advice for another class."""
        numbers = _WITHOUT_GRADIENT.search(str(error))
        if numbers is None:
            return
        parameters = [self._reduced[int(number)] for number in numbers[1].split()]
        raise RuntimeError(
            f"the loss did not depend on these trained parameters, whose gradients strategy 'ddp' waits for: "
            f"{_shown(self._composition.names(parameters))}. If a step may leave parameters out, use "
            'strategy={"name": "ddp", "find_unused_parameters": True}; freeze those that are never trained (requires_grad_(False))'
        ) from None

    # -- the other ranks ----------------------------------------------------------------------------------------------------------

    def _agree(self, ranks: Group, what: str, parameters: Sequence[Tensor], inside: bool) -> None:
        """Raise on all ranks unless all have made the same change. Waits for ranks that have made none, with a warning."""
        names = self._composition.names(parameters)
        form = [what, inside, *([name, list(p.shape), str(p.dtype)] for name, p in zip(names, parameters, strict=True))]
        doing = f"waiting for the other ranks to make the same change of the model, which {what} on this rank: {_shown(names)}"
        warning = threading.Timer(PATIENCE_S, logger.warning, [f"rank {ranks.rank} is {doing}"])
        warning.daemon = True
        warning.start()
        try:
            with stacks.doing(doing):
                digests = gather_json(ranks, hashlib.sha256(repr(form).encode()).hexdigest())
        except RuntimeError as error:
            raise RuntimeError(f"rank {ranks.rank} was {doing}: {error}") from error
        finally:
            warning.cancel()
        if len(set(digests)) > 1:
            raise ValueError(
                f"the ranks have changed the model in different ways:\n{_differences(gather_json(ranks, form))}"
            )

    def _compare(self, ranks: Group, new: Sequence[Tensor]) -> None:
        """Raise on all ranks if their values differ."""
        firsts = [t.detach().clone() for t in new]
        self._distributed_broadcast_coalesced(firsts, self.broadcast_bucket_size)
        if not all(gather_json(ranks, all(map(torch.equal, firsts, [t.detach() for t in new])))):
            raise ValueError(
                "modules were added inside a forward pass (training_step), with different values on each rank: "
                f"{_shown(self._composition.names(new))}. Add them before it, for example in on_train_batch_start, or with equal values on all ranks"
            )


@torch.no_grad()
def average(ranks: Group, parameters: Sequence[Tensor]) -> None:
    """Average gradients over the ranks. A parameter may have one on some ranks only; if none has, it stays ``None``, as on one process."""
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=ranks.device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    groups: dict[torch.dtype, list[Tensor]] = {}
    for parameter, anywhere in zip(parameters, present.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            groups.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in groups.values():
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= ranks.world_size
        for grad, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(piece.view_as(grad))


def _start_again(state: Any) -> None:
    """PowerSGD keeps matrices by bucket index, and bucket shapes have changed: reduce exactly until they are stable again."""
    if type(state).__name__ == "PowerSGDState":
        for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            kept.clear()
        state.iter = min(state.iter, state.start_powerSGD_iter - 2)


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _shown(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _differences(forms: Sequence[Sequence[Any]]) -> str:
    """Rank 0's change, and that of the first rank with another one."""
    rank = next(rank for rank, form in enumerate(forms) if form != forms[0])
    lines = []
    for who, other in ((0, rank), (rank, 0)):
        what, inside, *own = forms[who]
        only = [f"{name} {shape} {dtype}" for name, shape, dtype in own if [name, shape, dtype] not in forms[other]]
        when = "inside its forward pass" if inside else "before its forward pass"
        lines.append(f"  rank {who} {what}, changed {when}; only here: {_shown(only) or 'nothing'}")
    return "\n".join(lines)
