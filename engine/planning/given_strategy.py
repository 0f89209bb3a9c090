"""The strategy that a user has given to a search: tried first, as it is; candidates of its kind keep its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from engine import strategies
from engine.config.name_and_options import Named
from engine.engine import Engine
from engine.planning.candidates import Layout, written
from engine.strategies.base import Strategy
from engine.strategies.ddp import DDP
from engine.strategies.fsdp import FSDP
from engine.strategies.mesh_parallel import MeshParallel

_KINDS: dict[str, type[Strategy]] = {"ddp": DDP, "fsdp": FSDP, "mesh": MeshParallel}
"""Whose options a search knows, by the name that a candidate has."""
_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


@dataclass(frozen=True)
class Given:
    """What a user asked for."""

    asked: Any
    """As the setting has it: a name, a :class:`Named`, or an object."""
    strategy: Strategy
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its options other than degrees that are not the defaults, if its class is one that a search knows."""

    @property
    def known(self) -> bool:
        """Whether its class is one that a search knows: a subclass may do anything."""
        return type(self.strategy) in _KINDS.values()

    @property
    def plan(self) -> bool:
        """Whether it brings a plan for tensor parallel, so that the model needs none."""
        return self.options.get("plan") is not None

    def layout(self, engine: Engine | None, world_size: int) -> Layout:
        """As it is.

        Args:
            engine: that has it, in a simulated job; ``None``: it is refused there.
            world_size: ranks.
        """
        asked = self.asked.as_dict() if isinstance(self.asked, Named) else self.asked
        if engine is None:
            return Layout(asked, world_size, 1, given=True, bounded=False)
        sizes = {name: size for name, size in engine.strategy.axes.items() if size > 1}
        shards = 1
        for name, size in sizes.items():
            shards *= size if name != "dp_replicate" else 1
        return Layout(
            asked,
            engine.data_group.world_size,
            shards,
            offloaded=bool(getattr(engine.strategy, "cpu_offload", False)),
            given=True,
            bounded=self.known,
            sizes=tuple(sizes.items()),
        )

    def keeping(self, layout: Layout) -> Layout:
        """``layout`` with the options that its class has too."""
        name = layout.strategy if isinstance(layout.strategy, str) else layout.strategy["name"]
        kind = _KINDS.get(name)
        if kind is None or not self.options:
            return layout
        possible = {each.name for each in fields(kind) if each.init}
        kept = {key: value for key, value in self.options.items() if key in possible}
        if not kept:
            return layout
        degrees: dict[str, Any] = {} if isinstance(layout.strategy, str) else layout.strategy
        changed: Any = {**degrees, "name": name, **kept}
        if isinstance(self.asked, Strategy):
            del changed["name"]
            changed = kind(**changed)
        sizes = tuple((key, value) for key, value in degrees.items() if key in _DEGREES)
        offloaded = layout.offloaded or bool(kept.get("cpu_offload"))
        return replace(layout, strategy=changed, offloaded=offloaded, sizes=sizes)

    def notes(self) -> list[str]:
        """What the search does with it."""
        told = written(self.asked.as_dict() if isinstance(self.asked, Named) else self.asked)
        if not self.known:
            return [
                f"strategy={told} was given and is tried first, with other micro-batches too; its own settings are not varied"
            ]
        kept = f"; others keep {', '.join(self.options)} where they have it" if self.options else ""
        return [f"strategy={told} was given and is tried first; degrees are varied{kept}"]


def given(asked: Any, origin: str, world_size: int) -> Given | None:
    """The strategy of the settings; ``None``: nobody asked for one."""
    if origin == "default" or asked == "auto":
        return None
    found = strategies.get(asked, world_size)
    options = {}
    if type(found) in _KINDS.values():
        options = {
            each.name: getattr(found, each.name)
            for each in fields(found)
            if each.init and each.name not in _DEGREES and getattr(found, each.name) != each.default
        }
    return Given(asked, found, options)


def layouts_with(first: Layout, wanted: Given, others: list[Layout]) -> list[Layout]:
    """The given one, and others that are not the same with other words."""

    def same(each: Layout) -> tuple[Any, ...]:
        return each.data_ranks, each.shards, each.degree("tp"), each.degree("pp"), each.offloaded

    kept = [wanted.keeping(each) for each in others]
    kinds = {"ddp": ("ddp",), "fsdp": ("fsdp", "mesh"), "mesh": ("fsdp", "mesh")}
    own = next((name for name, kind in _KINDS.items() if type(wanted.strategy) is kind), None)

    def doubles(before: Layout, after: Layout) -> bool:
        name = before.strategy if isinstance(before.strategy, str) else before.strategy["name"]
        alike = name in kinds.get(own, ()) if own else before.strategy == first.strategy
        return alike and same(after) == same(first)

    return [first, *(new for old, new in zip(others, kept, strict=True) if not doubles(old, new))]
