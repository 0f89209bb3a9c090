"""Checkpoints of a loop of one's own: everything that was prepared, and objects that were registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from engine.checkpoint.export import export_tensors
from engine.checkpoint.resume import Loaded, check_optimizers, check_samples, describe, fitting, load_scheduler, opening
from engine.checkpoint.storage import split
from engine.checkpoint.writer import Content, Saver, stepped, together
from engine.data.prepared_loader import PreparedLoader
from engine.preparing import Preparing
from engine.step.window import Window
from engine.step.wrappers import PreparedScheduler
from engine.utils.log import logger
from engine.utils.seed import capture, restore


class States(Preparing):
    """The part of :class:`engine.Engine` that saves and loads. The names are Accelerate's."""

    _registered: list[Any]
    _loaders: list[PreparedLoader]
    _schedulers: list[PreparedScheduler]
    _saver: Saver | None = None
    scaler: Any
    window: Window

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects as well, with checkpoints of :class:`engine.Fit` too. In their order, the same in every run.

        Raises:
            TypeError: one has no ``state_dict`` and ``load_state_dict``.
        """
        for item in objects:
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise TypeError(f"register_for_checkpointing got {type(item).__name__}: it needs state_dict() and load_state_dict(state)")
        self._registered += objects

    def registered_states(self) -> list[Any]:
        """What the registered objects give; rank 0's are kept."""
        return [item.state_dict() for item in self._registered]

    def load_registered_states(self, states: list[Any]) -> None:
        """Put back :meth:`registered_states`.

        Raises:
            ValueError: more or fewer objects are registered.
        """
        if len(states) != len(self._registered):
            raise ValueError(
                f"the checkpoint has {len(states)} object(s) of register_for_checkpointing, and {len(self._registered)} are registered: "
                "register the same ones before loading"
            )
        for item, state in zip(self._registered, states, strict=True):
            item.load_state_dict(state)

    def save_state(self, output_dir: str | Path, *, wait: bool = True, facts: dict[str, Any] | None = None) -> Path | str:
        """Save models, optimizers, schedulers, loaders' positions, the loss scale, random numbers and registered objects; all ranks call this.

        Between two steps, not inside of a window. An older checkpoint at that place is replaced once the new one is complete.

        Args:
            output_dir: a directory that will be the checkpoint, or a URL that fsspec knows.
            wait: ``False``: return when copies are begun. The next :meth:`save_state`, :meth:`wait_for_checkpoint` and the process's end wait.
            facts: small JSON values for the manifest (counters, metrics).

        Raises:
            TypeError: something that cannot be stored, named by its place.
            OSError, RankError: it cannot be written; the earlier one is as it was.
        """
        self._stepper.settle()
        place, name = split(output_dir)
        if self._saver is None:
            self._saver = Saver(self.group, place.root)
        elif self._saver.place.root != place.root:
            self.wait_for_checkpoint()
            self._saver.place = place
        path = self._saver.save(name, self._content(facts or {}), asynchronous=not wait)
        if not wait:
            self.before_step(self._saver.hold)
        return path

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint on its way.

        Raises:
            RuntimeError: it could not be written.
        """
        if self._saver is not None:
            self._saver.wait()

    def load_state(self, input_dir: str | Path, *, strict: bool = True) -> dict[str, Any]:
        """Go on from :meth:`save_state`, at any world size and under any strategy; the same objects must be prepared. All ranks call this.

        A checkpoint of :class:`engine.Fit` is taken too: its place in the training data is that of the first loader; callbacks' states are left.

        Returns:
            The manifest: what was given as ``facts``, and the store's own entries.

        Raises:
            FileNotFoundError, DamagedCheckpoint: there is none, or it is damaged.
            ValueError: it does not fit what was prepared.
        """
        self.wait_for_checkpoint()
        place, _ = split(input_dir)
        with opening(self.group, place, str(input_dir)) as loaded:
            source, module = loaded.source, self._whole_module()
            report = self.strategy.load_model(module, source, strict)
            if report:
                logger.warning("%s fits in part: %s", input_dir, report)
            shared = loaded.shared
            together(self.group, partial(self._check_loaded, loaded, strict))
            for index, optimizer in enumerate(self._stepper.known):
                state = source.optim[str(index)]
                if not strict:
                    state = fitting(state, self.strategy.optimizer_parts(optimizer, module), module, source)
                take = partial(self.strategy.load_optimizer, optimizer, module, source=source)
                loaded.give(f"optimizer {index} ({type(optimizer).__name__})", take, state)
            for index, state in enumerate(shared["schedulers"]):
                load_scheduler(loaded, index, self._schedulers[index].scheduler, state)
            own = loaded.own(self.place_among_ranks())
            known_rank = loaded.of_rank(0) if own is None else own
            streams = [None] * len(shared["loaders"]) if known_rank is None else known_rank["streams"]  # a converted checkpoint has none
            if shared["seed"] is not None:
                self.seed = shared["seed"]
            for loader, state, stream in zip(self._loaders, shared["loaders"], streams, strict=False):
                loader.reseed(self.seed, state.get("order"))
                loader.load_state_dict({**state, "stream": stream})
            self.load_shared_state(loaded)
            if left := [name for name in ("callbacks", "datamodule", "user") if shared.get(name)]:
                logger.warning("%s was saved by a run; a loop of your own does not take its %s", input_dir, ", ".join(left))
            if own is not None:
                loaded.give("random generators", restore, own["rng"])
            return loaded.manifest

    def _check_loaded(self, loaded: Loaded, strict: bool) -> None:
        """Whether the optimizers, the schedulers and the data are those of the checkpoint."""
        shared, source = loaded.shared, loaded.source
        here = (len(self._stepper.known), len(self._schedulers), len(self._loaders))
        of_run = "state" in shared  # its one loader is the training data's; others are read from their start
        known = max(here[2], 1) if of_run else len(shared["loaders"])
        found = (len(source.optim), len(shared["schedulers"]), known)
        if found != here:
            raise ValueError(
                f"{loaded.path} has (optimizers, schedulers, loaders) = {found}, and {here} were prepared: prepare the same objects before loading"
            )
        check_optimizers(loaded, self._stepper.known, [each.scheduler for each in self._schedulers])
        for loader, state in zip(self._loaders, shared["loaders"], strict=False):
            if state["position"]:
                check_samples(loaded.path, state.get("samples"), loader.samples, state["position"], strict)

    def save_model(self, model: nn.Module, save_directory: str | Path, max_shard_size: int | str = "5GB") -> list[Path]:
        """Write a prepared model's weights as ``.safetensors`` files that ``transformers`` and ``load_file`` read; all ranks call this.

        Args:
            max_shard_size: bytes of a file, or ``"5GB"``; with several files there is ``model.safetensors.index.json`` too.

        Returns:
            The files, on the main process.
        """
        state = self.get_state_dict(model)
        return export_tensors(state, Path(save_directory), max_shard_size=max_shard_size) if self.group.is_main else []

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Whole parameters and buffers of a prepared model by name, on the main process (on others whatever is at hand); all ranks call this."""
        return self.strategy.model_state(self.unwrap_model(model))

    def before_step(self, function: Callable[[], None]) -> None:
        """Call ``function`` once, before the next optimizer step."""
        self._stepper.first = function

    def _content(self, facts: dict[str, Any]) -> Content:
        module, strategy = self._whole_module(), self.strategy
        loaders = [{**loader.state_dict(), "samples": loader.samples} for loader in self._loaders]
        places = [{name: value for name, value in state.items() if name != "stream"} for state in loaders]
        return Content(
            model=strategy.model_parts(module),
            optim={str(i): strategy.optimizer_parts(o, module) for i, o in enumerate(self._stepper.known)},
            shared=self.shared_state(self._stepper.known, self._schedulers, places),
            own=self.own_state([state["stream"] for state in loaders]),
            facts=facts,
            partial=strategy.parts_differ,
            stepped=stepped(self._stepper.known),
        )

    def shared_state(self, optimizers: Sequence[Any], schedulers: Sequence[Any], loaders: Sequence[Any]) -> dict[str, Any]:
        """What every checkpoint has of what is the same on all ranks; the form is :mod:`engine.checkpoint.snapshot`'s.

        Args:
            optimizers: their classes are kept; their states are each rank's.
            schedulers: each has the learning rate scheduler as ``scheduler``.
            loaders: their places in the data.
        """
        return {
            "seed": self.seed,
            "schedulers": [each.scheduler.state_dict() for each in schedulers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "window": self.window.state_dict(),
            "registered": self.registered_states(),
            "loaders": list(loaders),
            "kinds": describe(optimizers, [each.scheduler for each in schedulers]),
        }

    def load_shared_state(self, loaded: Loaded) -> None:
        """Put back :meth:`shared_state`, but for the seed, the schedulers and the loaders.

        Raises:
            ValueError: other objects are registered.
        """
        shared = loaded.shared
        if self.scaler is not None and shared["scaler"]:
            loaded.give("the loss scaler", self.scaler.load_state_dict, shared["scaler"])
        if shared.get("window") is not None:
            loaded.give("the window", self.window.load_state_dict, shared["window"])
        loaded.give("objects that are registered", self.load_registered_states, shared["registered"])

    def own_state(self, streams: Sequence[Any]) -> dict[str, Any]:
        """What every checkpoint has of this rank alone."""
        return {"place": self.place_among_ranks(), "rng": capture(), "streams": list(streams)}

    def place_among_ranks(self) -> list[int]:
        """Where this rank is among those that see different data, and whether it speaks for what it sees."""
        return [self.data_group.world_size, self.data_group.rank, int(self.strategy.speaks)]

    def _whole_module(self) -> nn.Module:
        """The one model that was prepared; several as members of one module."""
        models = [self.unwrap_model(model) for model in self._models]
        if len(models) == 1:
            return models[0]
        if not models:
            raise ValueError("no model was prepared: there is nothing to save or to load into")
        if self.strategy.pipelined or self.strategy.owns_step:
            raise ValueError(f"save_state of {len(models)} models under {type(self.strategy).__name__}: it takes one model")
        return nn.ModuleList(models)
