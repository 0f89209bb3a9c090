"""Which checkpoint a run goes on from, and how it is opened by all ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.form import own_form, shared_form
from engine.checkpoint.overview import by_score
from engine.checkpoint.places import Place, split
from engine.checkpoint.source import Source
from engine.checkpoint.store import FOLDERS, RANK, SHARED, Opened
from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.errors import nearest
from engine.log import logger
from engine.saving import together

NAMES = ("last", "auto", "best")
"""What ``resume=`` and ``checkpoint=`` take besides paths and URLs."""


@dataclass(frozen=True)
class Resume:
    """What ``Fit.run(resume=...)`` goes on from, and how much of it is taken. A plain name or path means the same with the defaults."""

    path: str | Path = "last"
    """``"last"`` (the newest checkpoint of the newest run in ``root_dir``), ``"auto"`` (the same, if there is one), ``"best"`` (by the score
    that ``ModelCheckpoint(monitor=...)`` saved with it), a checkpoint's path or URL, or a run's folder."""
    weights_only: bool = False
    """Take parameters and buffers, and begin a new run at step 0."""
    optimizer: bool = True
    """``False``: optimizers and schedulers begin anew; counters and data position go on."""
    strict: bool = True
    """``False``: parameters that only one side has, or that have other shapes, are left out and named in a warning."""
    hyperparameters: str = "checkpoint"
    """``"configured"``: learning rates, weight decays and the like are those of ``configure_optimizers`` rather than the saved ones; a
    learning rate that a schedule has changed is changed by the same factor. Optimizer states and schedules go on."""

    def __post_init__(self) -> None:
        if self.hyperparameters not in ("checkpoint", "configured"):
            raise ValueError(f"Resume(hyperparameters={self.hyperparameters!r}) is unknown; possible: 'checkpoint', 'configured'")


class Loaded:
    """A checkpoint that all ranks have opened and checked."""

    def __init__(self, opened: Opened, path: Path | str, group: Group) -> None:
        self._opened, self.path, self._group = opened, path, group
        self.manifest = opened.manifest

    @cached_property
    def source(self) -> Source:
        """Its models and optimizers."""
        return Source(self._opened)

    @property
    def shared(self) -> Any:
        """What is the same on all ranks."""
        return shared_form(self._opened.tree(SHARED))

    def of_rank(self, rank: int) -> Any:
        """The state of one of the ranks that saved."""
        return own_form(self._opened.tree(RANK.format(rank)))

    def own(self, place: Any) -> Any:
        """This rank's state, if all ranks are where they were; else ``None``, on all ranks.

        Args:
            place: where this rank is (JSON); its state has it under ``"place"``.
        """
        same = self.manifest["world_size"] == self._group.world_size
        state = self.of_rank(self._group.rank) if same else None
        return state if all(gather_json(self._group, state is not None and state["place"] == place)) else None

    def every(self) -> list[Any]:
        """The states of all ranks that saved; none of a checkpoint that was converted."""
        found = (self.of_rank(rank) for rank in range(self.manifest["world_size"]))
        return [state for state in found if state is not None]


@contextmanager
def opening(group: Group, place: Place, wanted: str, folders: tuple[str, ...] = FOLDERS, argument: str = "resume") -> Iterator[Loaded]:
    """Open the checkpoint that ``wanted`` means, on all ranks; they share the work of checking it.

    Args:
        place: where the names ``"last"``, ``"auto"`` and ``"best"`` are looked for. A damaged one is reported and passed over.
        folders: those that will be read.
        argument: the name of the user's argument that ``wanted`` was given as, for messages.

    Raises:
        FileNotFoundError: there is none.
        DamagedCheckpoint: the one whose path was given is damaged.
    """
    named = wanted in NAMES
    if named:
        candidates = gather_json(group, _ranked(place, wanted) if group.is_main else None)[0]
        where = place
    else:
        where, name = split(wanted)
        candidates = [name]
    for name in candidates:
        try:
            opened, damage = _open(group, where, name, folders)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{argument}={wanted!r}: {error}{'' if named else nearest(wanted, NAMES)}") from error
        if opened is not None:
            with opened:
                yield Loaded(opened, where.path(name), group)
            return
        if not named:
            raise DamagedCheckpoint(damage)
        if group.is_main:
            logger.error("%s; the checkpoint before it is taken", damage)
    what = "no complete checkpoint" if not candidates else "no checkpoint that is not damaged"
    raise FileNotFoundError(f"{argument}={wanted!r}: {what}{' with a score' if wanted == 'best' else ''} in {place.root}")


def name_of(path: str | Path) -> str:
    """The name of a checkpoint, from its path or URL."""
    return str(path).rstrip("/").rpartition("/")[2]


def fitting(saved: dict[str, Any], own: dict[str, Any], module: nn.Module, source: Source) -> dict[str, Any]:
    """What of an optimizer's saved state is of parameters that it has, with the shapes that they have; the rest begins anew.

    Args:
        own: the optimizer's present state, by names.
    """
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    names = {name for group in own["param_groups"] for name in group["params"]}
    entries = {n: e for n, e in saved["state"].items() if n in names and n in source and source.stored(n).shape == shapes.get(n)}
    same = len(saved["param_groups"]) == len(own["param_groups"])
    pairs = zip(saved["param_groups"] if same else own["param_groups"], own["param_groups"], strict=True)
    return {**saved, "state": entries, "param_groups": [{**group, "params": mine["params"]} for group, mine in pairs]}


def _ranked(place: Place, wanted: str) -> list[str]:
    """Names of complete checkpoints, the wanted one first."""
    manifests = place.manifests()
    return by_score(manifests) if wanted == "best" else list(reversed(manifests))


def _open(group: Group, place: Place, name: str, folders: tuple[str, ...]) -> tuple[Opened | None, str]:
    """The checkpoint; ``None`` and the reason, the same on all ranks, when it is damaged."""
    found: Opened | None = None

    def work() -> str | None:
        nonlocal found
        share = (group.rank, group.world_size) if place.shared else (0, 1)
        try:
            found = Opened(place.fetch(name), share, folders)
        except DamagedCheckpoint as error:
            return str(error)
        return None

    try:
        damage = next((text for text in together(group, work) if text is not None), None)
    except BaseException:
        _close(found)
        raise
    if damage is None:
        return found, ""
    _close(found)
    return None, damage


def _close(opened: Opened | None) -> None:
    if opened is not None:
        with suppress(OSError):
            opened.close()
