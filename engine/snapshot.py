"""Checkpoints of everything that one engine has prepared, and of registered objects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from engine.checkpoint.resume import Loaded, check_optimizers, check_samples, describe, fitting, load_scheduler, opening
from engine.checkpoint.storage import split
from engine.checkpoint.writer import Content, Saver, stepped
from engine.distributed.all_or_none import together
from engine.prepared import Prepared
from engine.step.precision import Scaler
from engine.utils.log import logger
from engine.utils.seed import capture, restore


class EngineSnapshot:
    """Saves the objects that an engine has prepared, and restores them."""

    def __init__(self, prepared: Prepared, scaler: Scaler | None) -> None:
        self._prepared, self._scaler = prepared, scaler
        self._saver: Saver | None = None

    def register(self, objects: Sequence[Any]) -> None:
        """As :meth:`engine.Engine.register_for_checkpointing`."""
        for item in objects:
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise TypeError(
                    f"register_for_checkpointing got {type(item).__name__}: it needs state_dict() and load_state_dict(state)"
                )
        self._prepared.registered += objects

    def save(
        self, output_dir: str | Path, wait: bool, facts: dict[str, Any], left_out: Sequence[nn.Module] = ()
    ) -> Path | str:
        """As :meth:`engine.Engine.save_state`; ``left_out``: prepared models whose weights somebody else saves."""
        prepared = self._prepared
        prepared.stepper.settle()
        location, name = split(output_dir)
        if self._saver is None:
            self._saver = Saver(prepared.group, location.root)
        elif self._saver.location.root != location.root:
            self.wait()
            self._saver.location = location
        path = self._saver.save(name, self._content(facts, left_out), asynchronous=not wait)
        if not wait:
            prepared.stepper.before_step(self._saver.hold)
        return path

    def hold(self) -> None:
        """Wait until tensors may change, because the checkpoint in progress has its copies."""
        if self._saver is not None:
            self._saver.hold()

    def wait(self) -> None:
        """Wait for the checkpoint in progress.

        Raises:
            RuntimeError: it could not be written.
        """
        if self._saver is not None:
            self._saver.wait()

    def load(self, input_dir: str | Path, strict: bool, left_out: Sequence[nn.Module] = ()) -> dict[str, Any]:
        """As :meth:`engine.Engine.load_state`; ``left_out``: prepared models whose weights somebody else loads."""
        self.wait()
        prepared, strategy = self._prepared, self._prepared.strategy
        location, _ = split(input_dir)
        with opening(prepared.group, location, str(input_dir)) as loaded:
            source, module, shared = loaded.source, prepared.whole_module(), loaded.shared
            if report := strategy.load_model(prepared.without(left_out), source, strict):
                logger.warning("%s fits in part: %s", input_dir, report)
            together(prepared.group, partial(self._check, loaded, strict))
            for index, optimizer in enumerate(prepared.optimizers):
                state = source.optim[str(index)]
                if not strict:
                    state = fitting(state, strategy.optimizer_parts(optimizer, module), module, source)
                take = partial(strategy.load_optimizer, optimizer, module, source=source)
                loaded.give(f"optimizer {index} ({type(optimizer).__name__})", take, state)
            for index, state in enumerate(shared["schedulers"]):
                load_scheduler(loaded, index, prepared.schedulers[index].scheduler, state)
            own = loaded.own(self.position_among_ranks())
            self._load_positions(loaded, own)
            self.load_shared(loaded)
            if left := [name for name in ("callbacks", "datamodule", "user") if shared.get(name)]:
                logger.warning("%s was saved by a run; your own loop does not use its %s", input_dir, ", ".join(left))
            if own is not None:
                loaded.give("random generators", restore, own["rng"])
            return loaded.manifest

    # -- also in checkpoints of runs ------------------------------------------------------------------------------------------------------

    def shared(self, optimizers: Sequence[Any], schedulers: Sequence[Any], loaders: Sequence[Any]) -> dict[str, Any]:
        """The state in every checkpoint that is the same on all ranks, in the form of :mod:`engine.checkpoint.snapshot`.

        Args:
            optimizers: only their classes are kept here; their states are saved by rank.
            schedulers: each has the learning rate scheduler as ``scheduler``.
            loaders: their positions in the data are saved.
        """
        return {
            "seed": self._prepared.seed,
            "schedulers": [each.scheduler.state_dict() for each in schedulers],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "window": self._prepared.window.state_dict(),
            "registered": [item.state_dict() for item in self._prepared.registered],
            "loaders": list(loaders),
            "kinds": describe(optimizers, [each.scheduler for each in schedulers]),
        }

    def load_shared(self, loaded: Loaded) -> None:
        """Restore :meth:`shared`, except for the seed, the schedulers and the loaders.

        Raises:
            ValueError: other objects are registered.
        """
        shared = loaded.shared
        if self._scaler is not None and shared["scaler"]:
            loaded.give("the loss scaler", self._scaler.load_state_dict, shared["scaler"])
        if shared.get("window") is not None:
            loaded.give("the window", self._prepared.window.load_state_dict, shared["window"])
        loaded.give("objects that are registered", self._load_registered, shared["registered"])

    def own(self, streams: Sequence[Any]) -> dict[str, Any]:
        """The state in every checkpoint that belongs to this rank alone."""
        return {"place": self.position_among_ranks(), "rng": capture(), "streams": list(streams)}

    def position_among_ranks(self) -> list[int]:
        """This rank's index among those that see different data, and whether it saves for its data."""
        group = self._prepared.strategy.data_group
        return [group.world_size, group.rank, int(self._prepared.strategy.speaks)]

    # -- parts of the above ---------------------------------------------------------------------------------------------------------------

    def _content(self, facts: dict[str, Any], left_out: Sequence[nn.Module]) -> Content:
        prepared, strategy = self._prepared, self._prepared.strategy
        module = prepared.whole_module()
        loaders = [{**loader.state_dict(), "samples": loader.samples} for loader in prepared.loaders]
        positions = [{name: value for name, value in state.items() if name != "stream"} for state in loaders]
        return Content(
            model=strategy.model_parts(prepared.without(left_out)),
            optim={str(i): strategy.optimizer_parts(o, module) for i, o in enumerate(prepared.optimizers)},
            shared=self.shared(prepared.optimizers, prepared.schedulers, positions),
            own=self.own([state["stream"] for state in loaders]),
            facts=facts,
            partial=strategy.parts_differ,
            stepped=stepped(prepared.optimizers),
        )

    def _check(self, loaded: Loaded, strict: bool) -> None:
        """Check that the optimizers, the schedulers and the data are those of the checkpoint."""
        prepared, shared, source = self._prepared, loaded.shared, loaded.source
        here = (len(prepared.optimizers), len(prepared.schedulers), len(prepared.loaders))
        of_run = "state" in shared  # its one loader is the training data's; others are read from their start
        known = max(here[2], 1) if of_run else len(shared["loaders"])
        found = (len(source.optim), len(shared["schedulers"]), known)
        if found != here:
            raise ValueError(
                f"{loaded.path} has (optimizers, schedulers, loaders) = {found}, and {here} were prepared: prepare the same objects before loading"
            )
        check_optimizers(loaded, prepared.optimizers, [each.scheduler for each in prepared.schedulers])
        for loader, state in zip(prepared.loaders, shared["loaders"], strict=False):
            if state["position"]:
                check_samples(loaded.path, state.get("samples"), loader.samples, state["position"], strict)

    def _load_positions(self, loaded: Loaded, own: Any) -> None:
        """Restore each loader's position in its data."""
        prepared, shared = self._prepared, loaded.shared
        known = loaded.of_rank(0) if own is None else own
        streams = (
            [None] * len(shared["loaders"]) if known is None else known["streams"]
        )  # a converted checkpoint has none
        if shared["seed"] is not None:
            prepared.seed = shared["seed"]
        for loader, state, stream in zip(prepared.loaders, shared["loaders"], streams, strict=False):
            loader.reseed(prepared.seed, state.get("order"))
            loader.load_state_dict({**state, "stream": stream})

    def _load_registered(self, states: list[Any]) -> None:
        if len(states) != len(self._prepared.registered):
            raise ValueError(
                f"the checkpoint has {len(states)} object(s) of register_for_checkpointing, and {len(self._prepared.registered)} are registered: "
                "register the same ones before loading"
            )
        for item, state in zip(self._prepared.registered, states, strict=True):
            item.load_state_dict(state)
