"""A search over plans of a user's run: its global batch, the micro-batches of other sizes, and the settings of each candidate."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.config.file_size import size_in_bytes
from engine.config.resolve import Resolved
from engine.data.datamodule import DataModule
from engine.engine import Engine
from engine.module import TrainModule
from engine.planning import candidates
from engine.planning.candidates import RECOMPUTE, Candidate, has_blocks, layouts
from engine.planning.devices import Hardware, hardware, network
from engine.planning.first_batch import first_batch
from engine.planning.given_strategy import given, layouts_with
from engine.planning.job import Facts, machines_for
from engine.planning.plan import Plan
from engine.planning.search import Planner, PlanSearch, Space, Tried, search
from engine.planning.tracing import Start, set_up
from engine.utils.log import logger
from engine.utils.tree import batch_size, map_tensors

_ORIGIN = "the search"
_NOT_VARIED = "not varied: compilation, clipping, optimizers, sequence and loss parallel, a pipeline's schedule and number of parts"


def search_plans(
    fit: Any,
    start: Callable[[Any], Start],
    module: TrainModule | Callable[[], TrainModule],
    datamodule: DataModule | None,
    train_loader: Any,
    *,
    world_size: int,
    nodes: int | None,
    device: str | Hardware,
    links: str | None = None,
    memory_limit: int | str | None = None,
    precisions: Sequence[Any] = (),
    largest: int | None = None,
    seconds: float | None = None,
    first: bool = False,
    report: Callable[[Tried], None] = lambda tried: None,
) -> PlanSearch:
    """Plan the ways to train ``module`` on these ranks, as :func:`engine.planning.search.search` does.

    Args:
        fit: an :class:`engine.Fit`, whose settings hold but for those that the search changes.
        start: of a ``Fit``, as for :func:`engine.planning.tracing.trace`.
        module, train_loader, datamodule: of the run.
        world_size, nodes: of the job.
        device, links: as of :meth:`engine.Fit.plan`.
        memory_limit: bytes, or text such as ``"2GiB"``, that a rank may use; ``None``: what the device has.
        precisions: to try; by default the given one, and ``bf16-mixed`` beside ``32-true`` on a GPU.
        largest: no micro-batch is larger.
        seconds: begin no further plan after so many.
        first: end with the first that fits; the simplest strategies and the least recomputation come first.
        report: called with each candidate once its verdict is known.

    Raises:
        RuntimeError, ValueError, TypeError: as :meth:`engine.Fit.plan`.
    """
    settings = fit.settings
    device = limited(hardware(device) if links is None else network(links, hardware(device)), memory_limit)
    nodes = machines_for(world_size, nodes, device.per_node)
    own = given(settings.strategy, fit.origins.get("strategy", "default"), world_size)
    alone = fit.from_resolved(_with(fit, {"strategy": "single", "accumulate_grad_batches": 1}), ())
    with set_up(start(alone), module, train_loader, 0, 1, 1, datamodule, Facts()) as (run, _, _):
        assert run.train_loader is not None
        batch, samples = first_batch(run.train_loader)
        planned = own is not None and own.plan
        ways = layouts(run.module, world_size, world_size // nodes, not device.is_host, planned)
        blocks = has_blocks(run.module)
    data_ranks = world_size
    if own is not None:
        one = own.layout(
            _engine(start(fit.from_resolved(_with(fit, {}), ())), module, train_loader, world_size, nodes, datamodule),
            world_size,
        )
        ways, data_ranks = layouts_with(one, own, ways), one.data_ranks

    fixed = {name: fit.origins.get(name, "default") != "default" for name in ("precision", "activation_checkpointing")}
    if fixed["precision"] and not precisions:
        precisions = [settings.precision]
    recompute = (settings.activation_checkpointing,) if fixed["activation_checkpointing"] or not blocks else RECOMPUTE
    plan_of = _planner(fit, module, datamodule, batch, samples, world_size, nodes, device)
    space = Space(
        layouts=ways,
        precisions=candidates.precisions(settings.precision, device, precisions),
        recompute=recompute,
        global_batch=settings.global_batch_size or samples * settings.accumulate_at(0) * data_ranks,
        micro_batch=samples,
        largest=largest,
        first=first,
        derived=settings.global_batch_size is not None,
        notes=[
            *(own.notes() if own else []),
            *(
                f"{name}={getattr(settings, name)} was given: no other is tried"
                for name, asked in fixed.items()
                if asked
            ),
            _NOT_VARIED,
        ],
    )
    with _quiet():
        return search(
            space,
            plan_of,
            world_size=world_size,
            device=device.name,
            memory_bytes=device.memory,
            seconds=seconds,
            report=report,
        )


def _engine(start: Start, *job: Any) -> Engine | None:
    """The engine of the run as it was asked for; ``None``: it is refused, and its plan will say why."""
    module, train_loader, world_size, nodes, datamodule = job
    try:
        with set_up(start, module, train_loader, 0, world_size, nodes, datamodule, Facts()) as (run, _, _):
            return run.engine
    except ValueError:
        return None


def _planner(
    fit: Any,
    module: Any,
    datamodule: DataModule | None,
    batch: Any,
    samples: int,
    world_size: int,
    nodes: int,
    device: Hardware,
) -> Planner:
    """Plans a candidate of ``fit``; its micro-batch is made of ``batch``."""

    def plan_of(candidate: Candidate) -> Plan:
        one = fit.from_resolved(_with(fit, candidate.settings), fit.settings.callbacks)
        rows = [resized(batch, samples, candidate.micro_batch)]
        return one.plan(module, rows, datamodule=datamodule, world_size=world_size, nodes=nodes, device=device)

    return plan_of


def limited(device: Hardware, memory: int | str | None) -> Hardware:
    """``device`` with this much memory, in bytes or as text.

    Raises:
        ValueError: it is not a size.
    """
    if memory is None:
        return device
    try:
        return replace(device, memory=size_in_bytes(memory))
    except ValueError:
        raise ValueError(
            f"memory limit {memory!r} is not a size: give bytes, or text such as '2GiB' or '80GB'"
        ) from None


def resized(batch: Any, given: int, wanted: int) -> Any:
    """A batch of ``wanted`` samples: the first of its ``given`` ones, again from the first where there are too few.

    Raises:
        ValueError: its samples cannot be told apart.
    """
    if wanted == given:
        return batch
    rows = torch.arange(wanted) % given
    changed = map_tensors(partial(_rows, given=given, rows=rows), _lists(batch, given, rows.tolist()))
    if batch_size(changed) != wanted:
        raise ValueError(f"the batch ({type(batch).__name__}) of {given} samples cannot be made one of {wanted}")
    return changed


def _rows(tensor: Tensor, *, given: int, rows: Tensor) -> Tensor:
    return tensor[rows] if tensor.ndim and tensor.shape[0] == given else tensor


def _lists(tree: Any, given: int, rows: Sequence[int]) -> Any:
    """Lists with an item for each sample, such as texts, in plain containers."""
    if type(tree) is dict:
        return {key: _lists(item, given, rows) for key, item in tree.items()}
    if type(tree) is list and len(tree) == given and not any(isinstance(item, Tensor) for item in tree):
        return [tree[row] for row in rows]
    return tree


def _with(fit: Any, changes: Mapping[str, Any]) -> Resolved:
    """The settings of ``fit`` with these in their place. The window keeps the global batch, so that does not derive one."""
    changed = {**changes, "global_batch_size": None}
    return Resolved(replace(fit.settings, **changed), {**fit.origins, **dict.fromkeys(changed, _ORIGIN)}, fit.sections)


@contextmanager
def _quiet() -> Iterator[None]:
    """Candidates that nobody has chosen say nothing."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
