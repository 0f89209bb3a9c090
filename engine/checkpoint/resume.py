"""Choose the checkpoint to resume from, open it on all ranks together, and check that optimizers and schedulers can continue from it.

:mod:`engine.loop.run_resume` restores a run from it, :mod:`engine.engine_snapshot` the objects that an ``Engine`` has prepared.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.catalog import ALIASES, by_score
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.local_storage import Opened
from engine.checkpoint.manifest import FOLDERS, RANK, SHARED, TRAINED
from engine.checkpoint.reader import Source
from engine.checkpoint.state_forms import (
    OWN_FORM,
    SHARED_FORM,
    Fields,
    cannot_replace,
    checked_form,
    own_form,
    shared_form,
)
from engine.checkpoint.storage import Storage
from engine.checkpoint.storage_paths import split_path
from engine.checkpoint.tensor_files import Stored
from engine.distributed.collectives import all_or_none, gather_json
from engine.distributed.group import Group
from engine.utils.garbage import uncollected
from engine.utils.log import logger
from engine.utils.text import terminal_text

NAMES = ("last", "auto", "best")
"""The names that ``resume=`` and ``checkpoint=`` accept in place of a path or URL."""
_POSSIBLE = "'last', 'auto', 'best', or the path or URL of a checkpoint or a run's folder"

_ELSEWHERE = (
    "If the run saved elsewhere, with another root_dir, another name or ModelCheckpoint(dirpath=...), give that again"
)


@dataclass(frozen=True)
class Resume:
    """The checkpoint that ``Fit.run(resume=...)`` continues from, and the parts of it to load. A plain name or path means the defaults."""

    path: str | Path = "last"
    """The checkpoint. ``"last"``: the newest one of the newest run in ``root_dir``, or of those with the ``name``; ``"auto"``: like ``"last"``,
    or a new run if there is none, but a run that has stopped early trains on under other limits only; ``"best"``: by the score that
    ``ModelCheckpoint(monitor=...)`` saved with it; or a checkpoint's path or URL, or a run's folder."""
    weights_only: bool = False
    """Load parameters and buffers only, with what the module and the data module have saved beside them, and start a new run at step 0."""
    optimizer: bool = True
    """``False``: optimizers and schedulers start fresh; counters and data position continue."""
    strict: bool = True
    """``False``: parameters that only the model or only the checkpoint has, or whose shapes differ, are left out and named in a warning."""
    hyperparameters: str = "checkpoint"
    """``"configured"``: learning rates, weight decays and other hyperparameters are those of ``configure_optimizers`` rather than the
    saved ones; a learning rate that a schedule has changed is changed by the same factor. Optimizer states and schedules continue; a schedule
    whose settings differ, such as its length, continues at its step with the rates of a run that had the configured ones from its start."""
    weights: str | None = None
    """With ``weights_only``: the weights to start with, ``"trained"`` or a name such as ``"ema"`` under which a callback saved others; by default
    the weights with which the checkpoint's score was measured. A run that continues always has the trained ones."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise TypeError(f"{self.path!r} ({type(self.path).__name__}) is not a checkpoint: give {_POSSIBLE}")
        if self.hyperparameters not in ("checkpoint", "configured"):
            raise ValueError(
                f"Resume(hyperparameters={self.hyperparameters!r}) is unknown; possible: 'checkpoint', 'configured'"
            )
        if self.weights is not None and not self.weights_only:
            why = "the optimizer's state belongs to the trained weights"
            raise ValueError(f"Resume(weights={self.weights!r}) needs weights_only=True: {why}")


class Loaded:
    """A checkpoint that all ranks have opened and checked."""

    def __init__(self, opened: Opened, storage: Storage, name: str, group: Group) -> None:
        self.opened, self._group = opened, group
        self.name, self.path = name, storage.path(name)
        self.passed: Sequence[str] = ()
        """Names of newer checkpoints that were skipped because they are damaged."""
        self.manifest = opened.manifest

    @cached_property
    def source(self) -> Source:
        """The checkpoint's models and optimizers, with the trained weights."""
        with uncollected():  # a thousand parameters are described by 50,000 small objects
            return Source(self.opened, TRAINED)

    @cached_property
    def shared(self) -> Fields:
        """The state that all ranks share."""
        return checked_form(f"{self.path}: {SHARED}.json", shared_form(self.opened.tree(SHARED)), SHARED_FORM)

    def shared_or_nothing(self) -> Fields:
        """The state that all ranks share; empty if the checkpoint has weights only."""
        return self.shared if self.opened.tree(SHARED) is not None else Fields(self.path, {})

    @property
    def saved_by_run(self) -> bool:
        """True if a run saved it, rather than a loop with ``Engine``."""
        return "state" in self.shared

    def of_rank(self, rank: int) -> Fields | None:
        """The own state of one of the ranks that saved; ``None`` in a converted checkpoint."""
        stem = RANK.format(rank)
        state = self.opened.tree(stem)
        return None if state is None else checked_form(f"{self.path}: {stem}.json", own_form(state), OWN_FORM)

    def check(self, folders: Sequence[str]) -> None:
        """Read and check everything in ``folders`` for which no module is needed.

        Raises:
            DamagedCheckpoint: a value has the wrong form.
        """
        if "model" in folders:
            _ = self.source
        if "state" in folders:
            _ = self.shared
            if self._group.rank < self.manifest["world_size"]:
                self.of_rank(self._group.rank)

    def load_into(self, what: str, take: Callable[[Any], Any], state: Any) -> None:
        """Load a saved state by calling ``take(state)``.

        Args:
            what: the object that takes the state, for messages.

        Raises:
            ValueError: a general error of ``take``, such as a missing key, with the object's name. More specific errors pass through.
        """
        try:
            take(state)
        except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"{self.path}: the saved state does not fit {what}: {type(error).__name__}: {terminal_text(error)}"
            ) from error

    def of_same_rank(self, data_rank: Sequence[int]) -> Fields | None:
        """This rank's saved state if every rank is the same one as when it saved; else ``None``, on all ranks. A collective.

        Args:
            data_rank: which rank this is among those that see different data, in the form of the state's ``"place"``.
        """
        same_world = self.manifest["world_size"] == self._group.world_size
        state = self.of_rank(self._group.rank) if same_world else None
        return state if all(gather_json(self._group, state is not None and state["place"] == data_rank)) else None

    def of_all_ranks(self) -> list[Any]:
        """The own states of all ranks that saved; empty for a converted checkpoint."""
        states = (self.of_rank(rank) for rank in range(self.manifest["world_size"]))
        return [state for state in states if state is not None]


@contextmanager
def opening(
    group: Group,
    storage: Storage,
    checkpoint: str,
    folders: tuple[str, ...] = FOLDERS,
    argument: str = "resume",
    report: Callable[..., None] = logger.error,
) -> Iterator[Loaded]:
    """Open a checkpoint on all ranks, which share the work of verifying it. With a name, unusable checkpoints are reported and skipped.

    Args:
        checkpoint: a path or URL, or one of :data:`NAMES`.
        storage: the folder in which a name is looked up.
        folders: the folders of the checkpoint that will be read.
        argument: the name of the user's argument, for messages.
        report: called with a message (in the form of a logger's method) about each skipped checkpoint.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        DamagedCheckpoint: the checkpoint at the path cannot be used, or none of the named ones can; the message has the reasons.
    """
    named = checkpoint in NAMES
    chosen_storage, name = (storage, "") if named else split_path(checkpoint)
    candidates, unusable = all_or_none(
        group, partial(_complete_checkpoints, storage, checkpoint) if named and group.is_main else lambda: [[name], {}]
    )[0]
    reasons = [f"{chosen_storage.path(name)}: {why}" for name, why in unusable.items()]
    passed: list[str] = []
    for name in candidates:
        try:
            loaded, damage = _open(group, chosen_storage, name, folders)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{argument}={checkpoint!r}: {error}{_remedy(argument, checkpoint)}") from error
        if loaded is not None:
            for reason in reasons if group.is_main else ():
                report("%s; using %s", reason, name)
            loaded.passed = passed
            with loaded.opened:
                yield loaded
            return
        if not named:
            raise DamagedCheckpoint(damage)
        reasons.append(damage)
        passed.append(name)
    problem = f"no complete checkpoint{' with a score' if checkpoint == 'best' else ''} in {storage.root}"
    if not reasons and "://" not in storage.root and not os.path.exists(storage.root):
        problem += ", which does not exist"
    if not reasons:
        remedy = "ModelCheckpoint(monitor=...) saves some" if checkpoint == "best" else _ELSEWHERE
        new = ", or resume='auto' to start a new one" if (argument, checkpoint) == ("resume", "last") else ""
        raise FileNotFoundError(
            f"{argument}={checkpoint!r}: {problem}. {remedy}. Give the path of a checkpoint to use that of another run{new}"
        )
    listed = "".join(f"\n  {reason}" for reason in reasons)
    raise DamagedCheckpoint(
        f"{argument}={checkpoint!r}: {problem} can be used; these exist:{listed}\n"
        "Repair them, give the path of another one, or move them away to start from step 0"
    )


def _remedy(argument: str, checkpoint: str) -> str:
    """End the message of the error for a path without a checkpoint by what to give instead."""
    parent, _, name = checkpoint.rstrip("/").rpartition("/")
    if not parent:
        return f"; give {_POSSIBLE}"
    return (
        f"; the {name} one of {parent} is Fit(root_dir={parent!r}) with {argument}={name!r}" if name in ALIASES else ""
    )


_OPTIONAL_HYPERPARAMETERS = frozenset(
    ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "decoupled_weight_decay", "initial_lr")
)
"""Hyperparameters that select an implementation, or that variants of one method lack: a checkpoint of another class need not have them."""
_IMPLEMENTATIONS = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Hyperparameters that select an implementation: they change no result."""


_ENTRY_OF_FLAG = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""Flags of torch's optimizers under which the state of each parameter has one entry more."""


def _entries_of_flags(optimizer: Any, group: Mapping[str, Any]) -> dict[str, str]:
    """The entries that a step of one of torch's optimizers reads because of a flag of the group, by flag."""
    entries = {
        **_ENTRY_OF_FLAG,
        **({"momentum": "momentum_buffer"} if isinstance(optimizer, torch.optim.RMSprop) else {}),
    }
    return {flag: entry for flag, entry in entries.items() if group.get(flag)}


def check_optimizer(loaded: Loaded, index: int, optimizer: Any, configured: bool) -> None:
    """Check that an optimizer can continue from the checkpoint's state.

    Args:
        configured: it keeps its own hyperparameters, rather than take the saved ones.

    Raises:
        ValueError: the state is of another kind of optimizer: hyperparameters are missing or have other types; the message names them.
    """
    saved, kinds = loaded.source.optim[str(index)], loaded.shared.get("kinds", {}).get("optimizers", [])
    kind, class_name = kinds[index] if index < len(kinds) else None, type(optimizer).__name__
    is_torch = type(optimizer).__module__.startswith("torch.optim.")
    for group, current in zip(saved["param_groups"], optimizer.param_groups, strict=False):
        # Another package's class fills in what its earlier release did not have. A user adds names of his own to groups.
        needed = current.keys() if kind != class_name else optimizer.defaults.keys() if is_torch else set()
        missing = sorted((current.keys() & needed) - group.keys() - {"params"} - _OPTIONAL_HYPERPARAMETERS)
        missing += sorted(
            name
            for name, value in current.items()
            if name != "params" and name in group and cannot_replace(group[name], value)
        )
        if missing:
            raise ValueError(
                f"{loaded.path} has the state of {terminal_text(kind or 'another optimizer')} for optimizer {index}, which is {class_name}: no "
                f"usable {', '.join(missing)} is saved. Give the optimizer that was saved, or start it fresh with Resume(path, optimizer=False)"
            )
    if is_torch:
        _check_torch(loaded, index, optimizer, saved)
        if configured:
            _check_flags(loaded, optimizer, saved)
    if kind not in (None, class_name):
        logger.warning("%s: optimizer %d was %s, and its state continues in %s", loaded.path, index, kind, class_name)


def _check_torch(loaded: Loaded, index: int, optimizer: Any, saved: Any) -> None:
    """Check what torch's optimizers assume: valid hyperparameters, and for all parameters the same state entries, those of flags included."""
    parameters = inspect.signature(type(optimizer)).parameters
    for group in saved["param_groups"]:
        hyperparameters = {
            name: value for name, value in group.items() if name in parameters and type(value) in (int, float, tuple)
        }
        loaded.load_into(
            f"optimizer {index}",
            lambda values: type(optimizer)([torch.zeros(1, requires_grad=True)], **values),
            hyperparameters,
        )
        kinds: dict[int, Any] = {}
        for name in group["params"]:
            entry = saved["state"].get(name)
            if entry:
                if absent := _entries_of_flags(optimizer, group).values() - entry.keys():
                    raise DamagedCheckpoint(f"{loaded.path}: optim/optim.json has no {min(absent)!r} for {name!r}")
                shape = {key: isinstance(value, Stored) for key, value in entry.items()}
                # Adafactor has other entries for matrices (rows, columns) than for vectors.
                dims = len(loaded.source.stored(str(name)).shape) if isinstance(optimizer, torch.optim.Adafactor) else 0
                if kinds.setdefault(dims, shape) != shape:
                    raise DamagedCheckpoint(
                        f"{loaded.path}: optim/optim.json has different entries for {name!r} than for other parameters"
                    )


def _check_flags(loaded: Loaded, optimizer: Any, saved: Any) -> None:
    """Check that the saved state has the entries that flags of the configured hyperparameters need."""
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=False):
        entries = [entry for name in saved_group["params"] if (entry := saved["state"].get(name))]
        for flag, key in _entries_of_flags(optimizer, group).items():
            if any(key not in entry for entry in entries):
                raise ValueError(
                    f"{loaded.path} was saved with {flag}={saved_group.get(flag)} and has no {key!r}, which {type(optimizer).__name__} needs with "
                    f"the configured {flag}={group[flag]}. Configure the saved value, or start the optimizer fresh with "
                    "Resume(path, optimizer=False)"
                )


def check_scheduler(loaded: Loaded, index: int, scheduler: Any, state: Any) -> None:
    """Check that a scheduler can continue from a saved state.

    Raises:
        ValueError: the state is of another kind of scheduler, or would overwrite attributes that no state has.
    """
    kinds, class_name = loaded.shared.get("kinds", {}).get("schedulers", []), type(scheduler).__name__
    kind = kinds[index] if index < len(kinds) else None
    current = scheduler.state_dict()
    differing = (
        {name for name in current.keys() ^ state.keys() if not str(name).startswith("_")} if kind is None else set()
    )
    unusable = {
        str(name)
        for name in state.keys() - current.keys()
        if str(name) == "optimizer" or callable(getattr(type(scheduler), str(name), None))
    }
    # Lists are not compared by length: the list of rates grows with the parameter groups.
    unusable |= {
        str(name)
        for name in state.keys() & current.keys()
        if type(current[name]) in (int, float) and cannot_replace(state[name], current[name])
    }
    unusable |= {
        str(name)
        for name in state.keys() & current.keys()
        if type(current[name]) is list and not isinstance(state[name], (list, tuple))
    }
    if kind not in (None, class_name) or differing or unusable:
        saved_kind = (
            f"another scheduler ({kind})"
            if kind not in (None, class_name)
            else f"no {class_name} (see {', '.join(sorted(map(str, differing | unusable)))})"
        )
        raise ValueError(
            f"{loaded.path} has the state of {terminal_text(saved_kind)} for scheduler {index}, which is {class_name}: give the saved scheduler, or "
            "start optimizers and schedulers fresh with Resume(path, optimizer=False)"
        )


def check_optimizers(loaded: Loaded, optimizers: Sequence[Any], schedulers: Sequence[Any], how: Resume) -> None:
    """Check that optimizers and schedulers can continue from the checkpoint, with the errors of :func:`check_optimizer` and
    :func:`check_scheduler`."""
    schedules = loaded.shared["schedulers"]
    if len(loaded.source.optim) != len(optimizers) or len(schedules) != len(schedulers):
        raise ValueError(
            f"{loaded.path} has {len(loaded.source.optim)} optimizer(s) and {len(schedules)} scheduler(s), configure_optimizers returned "
            f"{len(optimizers)} and {len(schedulers)}; Resume(path, optimizer=False) starts them fresh"
        )
    for index, optimizer in enumerate(optimizers):
        check_optimizer(loaded, index, optimizer, how.hyperparameters == "configured")
    for index, state in enumerate(schedules):
        check_scheduler(loaded, index, schedulers[index], state)


def load_scheduler(loaded: Loaded, index: int, scheduler: Any, state: Any) -> None:
    """Load a scheduler's state, which :func:`check_scheduler` has accepted."""
    loaded.load_into(f"scheduler {index} ({type(scheduler).__name__})", scheduler.load_state_dict, state)


def check_samples(
    path: Path | str, saved: Mapping[str, Any], samples: int | None, plan: int | None, strict: bool
) -> None:
    """Check that the data still has the number of samples (or ready batches), and the packing, on which the order of the started epoch depends.

    Args:
        saved: the entries of the loader in the checkpoint.
        samples, plan: these entries now.

    Raises:
        ValueError: the data has another length, or other rows or batches; with ``strict=False`` a warning is logged instead.
    """
    if None not in (saved.get("samples"), samples) and saved["samples"] != samples:
        difference = f"of the {saved['samples']} samples or batches of an epoch, and the data now has {samples}"
    elif None not in (saved.get("plan"), plan) and saved["plan"] != plan and saved["position"] < (samples or 0):
        difference = "of an epoch whose documents were packed into other rows or batches (other lengths, or other arguments of Packed or TokenBudget)"
    else:
        return
    message = (
        f"{path} was saved at {saved['position']} {difference}: some would be left out or repeated. Finish the epoch with the data "
        "that it started with"
    )
    if strict:
        raise ValueError(f"{message}, or continue anyway with Resume(path, strict=False)")
    logger.warning("%s", message)


def configure(optimizer: Any, hyperparameters: list[dict[str, Any]]) -> None:
    """Set each parameter group's ``hyperparameters``. The factor by which a schedule has changed the learning rate is applied to the new one."""
    for group, values in zip(optimizer.param_groups, hyperparameters, strict=True):
        scheduled_lr, initial_lr = group["lr"], group.get("initial_lr")
        group.update(values)
        if initial_lr:
            group["lr"] = values.get("initial_lr", values["lr"]) * (scheduled_lr / initial_lr)


def replaced_hyperparameters(optimizer: Any, hyperparameters: list[dict[str, Any]], scheduled: bool) -> list[str]:
    """The hyperparameters that a checkpoint has replaced, as ``"lr=0.01 (configured: 0.001)"``, each once.

    A learning rate is compared by its initial value; if it has none and is ``scheduled``, not at all. So is the momentum that a schedule changes.

    Args:
        hyperparameters: those of each group before the checkpoint was loaded.
    """
    texts: dict[str, None] = {}
    for group, values in zip(optimizer.param_groups, hyperparameters, strict=False):
        changed_by_steps = {"lr"} if scheduled or "initial_lr" in values else set()
        changed_by_steps |= {"momentum", "betas"} if "max_momentum" in values else set()
        for name in values.keys() & group.keys() - changed_by_steps - _IMPLEMENTATIONS:
            restored, value = _number_text(group[name]), _number_text(values[name])
            if None not in (restored, value) and restored != value:
                texts[f"{name.removeprefix('initial_')}={restored} (configured: {value})"] = None
    return sorted(texts)


def _number_text(value: Any) -> str | None:
    """A number, a flag, or several, as text; ``None`` for anything else."""
    if isinstance(value, (tuple, list)):
        texts = [_number_text(item) for item in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return str(value) if isinstance(value, bool) else f"{value:.6g}" if isinstance(value, (int, float)) else None


def rebase(scheduler: Any) -> None:
    """Make a scheduler compute its schedule from its optimizer's current learning rates."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
        scheduler._last_lr = [group["lr"] for group in groups]


def fitting(
    saved: dict[str, Any], current: dict[str, Any], shapes: Mapping[str, torch.Size], source: Source
) -> dict[str, Any]:
    """The part of a saved optimizer state whose parameters the optimizer has, in the same shapes; other parameters start fresh.

    Args:
        current: the optimizer's current state, by names of parameters.
        shapes: the whole shapes of the module's parameters by name.
    """
    names = {name for group in current["param_groups"] for name in group["params"]}
    entries = {
        n: e
        for n, e in saved["state"].items()
        if n in names and n in source and source.stored(n).shape == shapes.get(n)
    }
    same_groups = len(saved["param_groups"]) == len(current["param_groups"])
    pairs = zip(saved["param_groups"] if same_groups else current["param_groups"], current["param_groups"], strict=True)
    return {
        **saved,
        "state": entries,
        "param_groups": [{**group, "params": current_group["params"]} for group, current_group in pairs],
    }


def _complete_checkpoints(storage: Storage, checkpoint: str) -> list[Any]:
    """The names of the checkpoints to try, the one that ``checkpoint`` means first, and the reasons why others are unusable, by name."""
    manifests = storage.manifests() if checkpoint == "best" else {}
    names = by_score(manifests) if checkpoint == "best" else storage.newest_first()
    problems_by_name = storage.incomplete({*manifests, *names})
    return [names, {name: problem.reason for name, problem in problems_by_name.items() if not problem.is_leftover}]


def _open(group: Group, storage: Storage, name: str, folders: tuple[str, ...]) -> tuple[Loaded | None, str]:
    """Open a checkpoint on all ranks; if it is damaged for any, return ``None`` and the reason on all."""
    opened: Opened | None = None
    loaded: Loaded | None = None

    def work() -> str | None:
        nonlocal opened, loaded
        share = (group.rank, group.world_size) if storage.shared else (0, 1)
        try:
            opened = Opened(storage.fetch(name), share, folders)
            loaded = Loaded(opened, storage, name, group)
            loaded.check(folders)
        except DamagedCheckpoint as error:
            return str(error)
        return None

    try:
        damage = next((text for text in all_or_none(group, work) if text is not None), None)
    except BaseException:
        _close(opened)
        raise
    if damage is None:
        return loaded, ""
    _close(opened)
    return None, damage


def _close(opened: Opened | None) -> None:
    if opened is not None:
        with suppress(OSError):
            opened.close()
