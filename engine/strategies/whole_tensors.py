"""Steps of optimizers that need whole tensors: each tensor is lent to one rank, its owner, where the unchanged class steps it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine import optim
from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.step.optimizers import ReplacedStep
from engine.step.window import Window
from engine.strategies.tensor_exchange import Bucket, Layout, Lent, LentTensor, Transfer, layout_of, local_part
from engine.strategies.update_scope import check_lent
from engine.transforms.blocks import user_module
from engine.utils import accelerator
from engine.utils.parameters import is_sharded

BUCKET_BYTES = 256 * 2**20
"""The most bytes of whole values that one rank gets at once, unless a single tensor is larger."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class WholeStep(ReplacedStep):
    """The step of an optimizer that needs whole tensors.

    Each tensor has an owner, a rank that the others send their parts of value and gradient to. There the optimizer's own step runs on plain
    parameters, and the new values come back. Its state of a tensor lives on the owner, whole, under the parameter in ``optimizer.state``.

    - Owners follow from the tensors' costs and order, so all ranks find the same ones; they stay what they are when parameters are added.
    - Tensors are exchanged in buckets, by two collectives each; the next bucket is on its way while one is stepped. The step of the class runs once
      a bucket. What it counts in parameter groups or in itself counts once.
    - Plain tensors that every rank has are stepped by every rank, unless the work is divided.
    - Hooks around the step see the parameters themselves, and run once.

    Args:
        optimizer: an optimizer with a :func:`engine.optim.treatment`.
        group: the ranks that hold the parameters.
        axes: the number of ranks on each axis of their mesh, from the outermost to the innermost.
        window: the engine's window, whose models have the parameters' names.
    """

    def __init__(self, optimizer: Optimizer, group: Group, axes: Mapping[str, int], window: Window) -> None:
        treatment = optim.treatment(optimizer)
        assert treatment is not None
        super().__init__(optimizer)
        self._group, self._axes, self._window = group, axes, window
        self._treatment = treatment
        self._owners: dict[int, int] = {}
        self._members: list[int] = []  # ids of the parameters that are lent now
        self._buckets: list[Bucket] = []
        self._lent_ids: set[int] = set()
        self._unread: list[tuple[Bucket, Tensor, torch.Event]] = []

    # -- who owns what ----------------------------------------------------------------------------------------------------------

    def is_lent(self, parameter: Tensor) -> bool:
        """Whether a parameter is lent to an owner; known after :meth:`settle_owners`."""
        return id(parameter) in self._lent_ids

    def is_elsewhere(self, parameter: Tensor) -> bool:
        """Whether another rank has the state of a parameter; known after :meth:`settle_owners`."""
        return id(parameter) in self._lent_ids and self._owners[id(parameter)] != self._group.rank

    @property
    def steps_copies(self) -> bool:
        """Whether every rank steps some tensors beside the lent ones, which have one owner each."""
        trained = [p for p in _parameters(self.optimizer) if p.requires_grad and not p.is_meta]
        return len({self._is_to_lend(p) for p in trained}) > 1

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank sends in a step."""
        return sum(bucket.bytes_sent for bucket in self._buckets)

    def settle_owners(self) -> None:
        """Choose an owner for each parameter that has none yet, and form the buckets. All ranks call this together.

        Raises:
            ValueError: the ranks have different parameters, or one that cannot be lent; raised on all ranks.
        """
        parameters = [p for p in _parameters(self.optimizer) if self._is_to_lend(p)]
        members = list(map(id, parameters))
        if members == self._members:
            return
        layouts = {id(p): layout_of(p, self._axes) for p in parameters}
        for parameter in parameters:
            self._check_layout(parameter, layouts[id(parameter)])
        having = self._ranks_with_state(parameters, layouts)
        loads = [0.0] * self._group.world_size
        owners: dict[int, int] = {}
        for parameter, ranks in zip(parameters, having, strict=True):
            previous = self._owners.get(id(parameter))
            if previous is None and ranks and len(ranks) < self._group.world_size:
                previous = ranks[0]
            if previous is not None:
                owners[id(parameter)] = previous
                loads[previous] += self._cost(parameter)
        ordered = sorted(range(len(parameters)), key=lambda number: (-self._cost(parameters[number]), number))
        for number in ordered:
            parameter = parameters[number]
            if id(parameter) not in owners:
                owner = min(layouts[id(parameter)].holders(), key=lambda rank: (loads[rank], rank))
                owners[id(parameter)] = owner
                loads[owner] += self._cost(parameter)
        self._members, self._owners, self._lent_ids = members, owners, set(members)
        self._form_buckets([LentTensor(p, layouts[id(p)], owners[id(p)]) for p in (parameters[n] for n in ordered)])
        for parameter in parameters:
            if self.is_elsewhere(parameter):
                self.optimizer.state.pop(parameter, None)

    def _is_to_lend(self, parameter: Tensor) -> bool:
        """Whether a parameter is trained, and must be whole or is divided with all others."""
        if parameter.is_meta or not (parameter.requires_grad or parameter.grad is not None):
            return False
        return is_sharded(parameter) or self._treatment.divides_work

    def _check_layout(self, parameter: Tensor, layout: Layout) -> None:
        """Check that this rank's part is where the layout says."""
        shape = [piece.stop - piece.start for piece in layout.part(self._group.rank).where]
        local = list(local_part(parameter).shape)
        if shape != local:
            raise ValueError(
                f"{type(self.optimizer).__name__} needs whole tensors, and {self._name(parameter)} of shape {list(parameter.shape)} is laid out in "
                f"a way that is not known: this rank has {local} of it, expected was {shape}"
            )

    def _ranks_with_state(self, parameters: Sequence[Tensor], layouts: Mapping[int, Layout]) -> list[list[int]]:
        """For each parameter the ranks that have a state of it. Compares the parameters over the ranks."""
        forms = [str((p.dtype, *layouts[id(p)])) for p in parameters]
        have = [bool(self.optimizer.state.get(p)) for p in parameters]
        rows = gather_json(self._group, [forms, have])
        for rank, row in enumerate(rows):
            if row[0] != rows[0][0]:
                raise ValueError(
                    f"{type(self.optimizer).__name__} has other trained parameters on rank {rank} than on rank 0 ({len(row[0])} and "
                    f"{len(rows[0][0])}, or of other shapes), and steps whole tensors of all ranks: give all ranks the same"
                )
        return [[rank for rank, row in enumerate(rows) if row[1][number]] for number in range(len(parameters))]

    def _cost(self, parameter: Tensor) -> float:
        """The relative time of a tensor's step: of a matrix, that of products of rows and columns."""
        count = parameter.numel()
        if not self._treatment.is_matrixwise or parameter.ndim < 2 or not count:
            return float(count)
        rows = parameter.shape[0]
        return float(count * min(rows, count // rows))

    def _form_buckets(self, tensors: Sequence[LentTensor]) -> None:
        """Distribute tensors over buckets, each of one dtype and device."""
        kinds: dict[Any, list[LentTensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.parameter.dtype, tensor.parameter.device), []).append(tensor)
        self._buckets = []
        for of_kind in kinds.values():
            current: list[LentTensor] = []
            sizes = [0] * self._group.world_size
            for tensor in of_kind:
                size = tensor.parameter.numel() * tensor.parameter.element_size()
                if current and sizes[tensor.owner] + size > BUCKET_BYTES:
                    self._buckets.append(Bucket(current, self._group))
                    current, sizes = [], [0] * self._group.world_size
                current.append(tensor)
                sizes[tensor.owner] += size
            self._buckets.append(Bucket(current, self._group))

    def _name(self, parameter: Tensor) -> str:
        """The name of a parameter in the engine's models."""
        for model in self._window.models:
            for name, candidate in user_module(model).named_parameters():
                if candidate is parameter:
                    return repr(name)
        return f"a parameter of shape {list(parameter.shape)}"

    # -- the step ---------------------------------------------------------------------------------------------------------------

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Step as the class does, on whole tensors."""
        if any(map(callable, (*args, *kwargs.values()))):
            raise ValueError(
                f"{type(self.optimizer).__name__} steps whole tensors, which are lent for one step: a closure would evaluate the loss without them. "
                "Call step() without a closure, or use strategy='ddp'"
            )
        self._read_differing()
        hooks = {name: vars(self.optimizer)[name] for name in _HOOKS if name in vars(self.optimizer)}
        for hook in tuple(hooks.get(_HOOKS[0], {}).values()):
            args, kwargs = hook(self.optimizer, args, kwargs) or (args, kwargs)
        # Not at each step of a bucket, in which groups have the whole tensors.
        vars(self.optimizer).update({name: OrderedDict() for name in hooks})
        try:
            with torch.no_grad():
                self.settle_owners()
                result = self._step_buckets(args, kwargs)
        finally:
            vars(self.optimizer).update(hooks)
        for hook in tuple(hooks.get(_HOOKS[1], {}).values()):
            hook(self.optimizer, args, kwargs)
        return result

    def _step_buckets(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Exchange and step one bucket after the other. While one is stepped, the next one is gathered and the previous one returned."""
        buckets, result = self._buckets, None
        if not buckets:
            with self._lent_groups({}, is_first=True):
                return self._original(*args, **kwargs)
        counts = _Counts(self.optimizer) if len(buckets) > 1 else None
        gathering, returning = buckets[0].start_gathering(), None
        for number, bucket in enumerate(buckets):
            following = buckets[number + 1].start_gathering() if number + 1 < len(buckets) else None
            lent = bucket.finish_gathering(gathering)
            gathering = following  # the buffers of the exchange are freed before the step
            if counts is not None and number:
                counts.restore()
            with self._lent_groups(lent.by_parameter(), is_first=not number):
                result = self._original(*args, **kwargs)
            transfer = bucket.start_returning(lent)
            if returning is not None:
                self._finish(*returning)
            returning = transfer, lent
        assert returning is not None
        self._finish(*returning)
        return result

    def _finish(self, transfer: Transfer, lent: Lent) -> None:
        """Take over a bucket's new values, and check that all ranks have gradients of the same tensors."""
        differing = lent.bucket.finish_returning(transfer, lent)
        device = differing.device
        if device.type == "cpu":
            self._check(lent.bucket, differing.tolist())
        elif accelerator.defers(device):  # the host does not wait: it looks at the next step
            host = torch.empty(differing.shape, dtype=differing.dtype, pin_memory=True)
            host.copy_(differing, non_blocking=True)
            event = torch.Event(device)
            event.record()
            self._unread.append((lent.bucket, host, event))
        else:
            self._check(lent.bucket, differing.tolist())

    def _read_differing(self) -> None:
        """Check what earlier steps have found on a device."""
        while self._unread:
            bucket, host, event = self._unread.pop(0)
            event.synchronize()
            self._check(bucket, host.tolist())

    def _check(self, bucket: Bucket, differing: Sequence[int]) -> None:
        """Raise ``ValueError`` if a tensor has a gradient on some ranks only."""
        names = [self._name(tensor.parameter) for tensor, bits in zip(bucket.lent, differing, strict=True) if bits]
        if names:
            raise ValueError(
                f"{type(self.optimizer).__name__}: {', '.join(names[:5])}: the gradient is None on some ranks and not on others, so there is no "
                "whole gradient to step with. Set gradients to None, or to zero, on all ranks alike"
            )

    @contextmanager
    def _lent_groups(self, wholes: Mapping[int, nn.Parameter], is_first: bool) -> Iterator[None]:
        """Give the optimizer's groups whole tensors, and placeholders without a gradient for those of other ranks, inside the block.

        Args:
            wholes: the whole tensors, by the id of the parameter.
            is_first: whether parameters that are not lent are in the groups.
        """
        optimizer, state = self.optimizer, self.optimizer.state
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        pairs = [(p, wholes[id(p)]) for _, parameters in groups for p in parameters if id(p) in wholes]
        placeholders: dict[Any, nn.Parameter] = {}
        for group, parameters in groups:
            chosen: list[Tensor] = []
            for p in parameters:
                if id(p) in wholes:
                    chosen.append(wholes[id(p)])
                elif is_first and id(p) not in self._lent_ids and not is_sharded(p):
                    chosen.append(p)
                elif not self._treatment.fills_gradients:
                    kind = (p.dtype, p.device)
                    if kind not in placeholders:
                        placeholders[kind] = nn.Parameter(
                            torch.empty(0, dtype=p.dtype, device=p.device), p.requires_grad
                        )
                    chosen.append(placeholders[kind])
            group["params"] = chosen
        for p, whole in pairs:
            if p in state:
                state[whole] = state.pop(p)
        try:
            yield
        finally:
            for group, parameters in groups:
                group["params"] = parameters
            for p, whole in pairs:
                if whole in state:
                    state[p] = state.pop(whole)
            for placeholder in placeholders.values():  # Adam-mini makes a state for parameters without a gradient, too
                state.pop(placeholder, None)


class WholeSteps:
    """The optimizers of one engine whose steps get whole tensors. For all others the methods do nothing."""

    def __init__(self) -> None:
        self._steps: list[WholeStep] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, optimizer: Optimizer, group: Group, axes: Mapping[str, int], window: Window) -> None:
        """Replace the optimizer's step.

        Raises:
            ValueError: it seems to need all tensors at once.
        """
        check_lent(optimizer)
        self._steps.append(WholeStep(optimizer, group, axes, window))

    def step_of(self, optimizer: Optimizer) -> WholeStep | None:
        """The replaced step of an optimizer; ``None`` if it is its own."""
        return next((step for step in self._steps if step.optimizer is optimizer), None)

    def lends(self, parameter: Tensor) -> bool:
        """Whether a parameter is lent to an owner."""
        return any(step.is_lent(parameter) for step in self._steps)

    def settle_owners(self, optimizer: Optimizer) -> None:
        """Choose the owners of an optimizer's parameters. All ranks call this together."""
        if (step := self.step_of(optimizer)) is not None:
            step.settle_owners()

    def lent_by(self, optimizer: Optimizer) -> set[int]:
        """The ids of an optimizer's parameters that are lent."""
        step = self.step_of(optimizer)
        return set() if step is None else {id(p) for p in _parameters(optimizer) if step.is_lent(p)}

    def draw_obstacle(self, optimizer: Optimizer) -> str:
        """Why ranks would draw different random numbers for copies of the same tensors in a step; empty if they would not."""
        step = self.step_of(optimizer)
        if step is None or not step.steps_copies:
            return ""
        return (
            "each rank steps the tensors that it owns beside others that all ranks have. engine.optim.whole(optimizer, divide_work=True) gives "
            "these one owner, too. Otherwise"
        )

    def own_part(self, optimizer: Optimizer, state: dict[str, Any], names: Mapping[int, str | int]) -> dict[str, Any]:
        """The part of a saved state that belongs to this rank.

        Args:
            names: the name of each parameter, by its number in the optimizer.
        """
        step = self.step_of(optimizer)
        if step is None:
            return state
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        are_numbered = all(isinstance(key, int) for group in state["param_groups"] for key in group["params"])
        elsewhere = {
            number if are_numbered else names[number] for number, p in enumerate(parameters) if step.is_elsewhere(p)
        }
        return {**state, "state": {key: entry for key, entry in state["state"].items() if key not in elsewhere}}

    def leave(self) -> None:
        """Let all optimizers step as before."""
        for step in self._steps:
            step.undo()
        self._steps.clear()


class _Counts:
    """The values that an optimizer keeps besides the states of its parameters, such as a number of steps, so that several calls count as one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [_copies(group) for group in optimizer.param_groups]
        self._beside = _copies(_beside(optimizer))
        self._numbers = {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}

    def restore(self) -> None:
        """Set them to what they were."""
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in group.keys() - saved.keys() - {"params"}:
                del group[name]
            _restore(group, saved)
        for name in _beside(self._optimizer).keys() - self._beside.keys():
            del self._optimizer.state[name]
        _restore(self._optimizer.state, self._beside)
        vars(self._optimizer).update(self._numbers)


def _beside(optimizer: Optimizer) -> dict[Any, Any]:
    """The entries of an optimizer's state under other keys than its parameters."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _restore(values: dict[Any, Any], saved: Mapping[Any, tuple[Any, Any]]) -> None:
    """Set values to what :func:`_copies` has saved."""
    for name, (value, copy) in saved.items():
        if isinstance(value, Tensor):
            value.copy_(copy)
            values[name] = value
        else:
            values[name] = list(copy) if type(copy) is list else copy


def _copies(group: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """The values of a parameter group, or of a state, each with a copy."""
    return {
        name: (value, value.clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value)
        for name, value in group.items()
        if name != "params"
    }


def _parameters(optimizer: Optimizer) -> list[Any]:
    """The parameters of an optimizer, each once."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
