"""``check=True``: compares, before the first step, what must be the same on all ranks, because later a difference gives wrong results or a hang."""

from __future__ import annotations

import inspect
import platform
import zlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.callback import Callback
from engine.data.feed import MicroBatch
from engine.distributed.collectives import gather, gather_json
from engine.distributed.comparison import check_alike, check_equal, comparable, fingerprint, plain_text
from engine.distributed.group import Group
from engine.loop.run import Run
from engine.strategies.base import Strategy
from engine.strategies.rank_differences import RankDifferences
from engine.utils.errors import CheckError
from engine.utils.parameters import is_sharded
from engine.utils.tree import leaves

_OWN_SETTINGS = ("accelerator", "devices", "root_dir", "name", "callbacks", "seed")
"""Settings that need not be the same on all ranks. Seeds are compared with the order of the data."""


def compare_settings(run: Run) -> None:
    """Compare, by one small collective, the run's settings and those callbacks that work on all ranks together.

    Loggers, progress bars and callbacks of the user's own may be on some ranks only, and so may folders and devices differ.

    Raises:
        CheckError: ranks differ; raised on all ranks, with the differences.
    """
    if run.world_size == 1:
        return
    settings = {field.name: plain_text(getattr(run.settings, field.name)) for field in fields(run.settings)}
    facts = {name: value for name, value in settings.items() if name not in _OWN_SETTINGS}
    shared = [callback for callback in run.callbacks if _needs_all_ranks(callback)]
    facts["callbacks that all ranks need"] = ", ".join(type(callback).__name__ for callback in shared) or "none"
    for index, callback in enumerate(shared):
        facts.update(_arguments(callback, f"{type(callback).__name__} ({index})" if index else type(callback).__name__))
    check_alike(
        run.engine.group,
        "settings",
        facts,
        "Give all ranks the same: look for code that depends on the rank, and for fit.yaml and FIT_* variables that differ between the machines "
        "(`fit env` shows where a value comes from)",
    )


def _needs_all_ranks(callback: Callback) -> bool:
    """Whether a callback saves checkpoints, ends trainings or has weights of its own, which all ranks do together."""
    keeps_weights = type(callback).other_weights is not Callback.other_weights
    return callback.runs_last or callback.is_early_stopping or keeps_weights


def _arguments(callback: Callback, name: str) -> dict[str, str]:
    """The arguments of one of the library's callbacks, or of the one that a user's class extends, as text; folders may differ."""
    kind = next((base for base in type(callback).__mro__ if base.__module__.split(".")[0] == "callbacks"), None)
    arguments = () if kind is None else inspect.signature(kind).parameters
    values = {argument: getattr(callback, argument, None) for argument in arguments if argument != "dirpath"}
    return {f"{name}.{argument}": plain_text(value) for argument, value in values.items()}


def compare_models(run: Run) -> None:
    """Compare versions, and names, dtypes and shapes of the parameters that each rank built, before rank 0's values are broadcast.

    Raises:
        CheckError: ranks differ; raised on all ranks, with the differences.
    """
    group, strategy = run.engine.group, run.engine.strategy
    versions = {"python": platform.python_version(), "torch": torch.__version__, "engine and callbacks": _sources()}
    check_equal(group, "versions", versions)
    check_equal(group, "models", {name: _parameter_form(strategy, p) for name, p in run.module.named_parameters()})


def watch_differences(run: Run) -> None:
    """Compare, from here on, with each agreement of the ranks and each save what must be the same on all of them; the first agreement comes before
    the first step.

    Under a pipeline, where ranks have different parameters and groups, nothing is compared.
    """
    engine = run.engine
    if engine.group.world_size > 1 and not engine.strategy.pipelined:
        differences = RankDifferences(engine.group, engine.strategy, [run.module], run.optimizer_set.optimizers)
        run.control.agreement.compared = engine.checkpoint_writer.compared = differences


def compare_ranks(run: Run) -> None:
    """Compare parameters and optimizers' settings over all ranks with an equal part of the model.

    Raises:
        CheckError: ranks differ; raised on all ranks, with the differences.
    """
    group, strategy = run.engine.loss_group, run.engine.strategy
    parameters = run.module.named_parameters()
    check_equal(group, "parameters", {name: _parameter_fingerprint(strategy, p) for name, p in parameters})
    check_equal(
        group,
        "optimizers",
        {
            f"optimizer {i}, group {j}": comparable(g)
            for i, o in enumerate(run.optimizers)
            for j, g in enumerate(o.param_groups)
        },
    )


def with_first_batch_compared(run: Run, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield ``micro_batches``. Before the first one, compare its structure over the ranks, and check that gathering returns its tensors unchanged.

    Raises:
        CheckError: the structure differs between the ranks, or a tensor came back changed.
    """
    for batch, share in micro_batches:
        group = run.engine.loss_group
        tensors = leaves(batch)
        forms = {
            f"tensor {i}": f"{t.dtype}, [batch{''.join(f', {n}' for n in t.shape[1:])}], {t.device.type}"
            for i, t in enumerate(tensors)
        }
        check_equal(group, "first batches", {"structure": type(batch).__name__, "tensors": len(tensors)} | forms)
        for index, tensor in enumerate(tensors):
            _round_trip(group, index, tensor)
        yield batch, share
        break
    yield from micro_batches


def _round_trip(group: Group, index: int, tensor: Tensor) -> None:
    """Gather ``tensor`` over the ranks, and check that each rank's part came back unchanged; ``index``: in the batch."""
    length = torch.tensor([len(tensor) if tensor.ndim else 1])
    lengths = gather(group, length).tolist()
    received = gather(group, tensor).split(lengths)[group.rank]
    is_unchanged = gather_json(group, fingerprint(received.reshape(tensor.shape)) == fingerprint(tensor))
    if not all(is_unchanged):
        raise CheckError(
            f"check=True: tensor {index} of the first batch did not come back unchanged from rank {is_unchanged.index(False)}"
        )


def _sources() -> str:
    """A checksum of this library's source files: ranks with different versions may call different collectives."""
    total, root = 0, Path(__file__).parents[2]
    for path in sorted(path for package in ("engine", "callbacks") for path in (root / package).rglob("*.py")):
        total = zlib.crc32(path.read_bytes(), total)
    return f"checksum {total:08x}"


def _parameter_form(strategy: Strategy, parameter: Tensor) -> str:
    """The dtype and the full shape, as text."""
    is_lazy = isinstance(parameter, nn.UninitializedParameter)
    return f"{parameter.dtype}, {'not known yet' if is_lazy else list(strategy.whole_shape(parameter))}"


def _parameter_fingerprint(strategy: Strategy, parameter: Tensor) -> str:
    """The dtype, the full shape and, if this rank has all values, a checksum of them, as text."""
    if is_sharded(parameter) or isinstance(parameter, nn.UninitializedParameter) or parameter.is_meta:
        return _parameter_form(strategy, parameter)
    return fingerprint(parameter)
