"""The state of the objects that one engine has prepared, and the checkpoints of a user's own training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from engine.checkpoint.content import Content, trained_by
from engine.checkpoint.resume import (
    Loaded,
    Resume,
    check_optimizers,
    check_samples,
    configure,
    describe,
    fitting,
    load_scheduler,
    opening,
    rebase,
)
from engine.checkpoint.retention import CheckpointFolder
from engine.checkpoint.storage_paths import split_path
from engine.checkpoint.writer import CheckpointWriter
from engine.distributed.collectives import all_or_none
from engine.prepared import Prepared
from engine.step.optimizers import counters
from engine.step.precision import Scaler
from engine.utils.log import logger
from engine.utils.seed import capture, restore


class EngineSnapshot:
    """Collects the state of the objects that an engine has prepared, and restores it in a fixed order of steps.

    A run uses the subclass :class:`engine.loop.run_snapshot.RunSnapshot`, which overrides the module, optimizers, schedulers, positions and streams
    to save, replaces ``restore_weights``, ``check_counts``, ``check`` and ``restore_place``, and extends the other steps by the run's own state.

    Args:
        scaler: what :meth:`engine.strategies.base.Strategy.scaler` returned.
    """

    def __init__(self, prepared: Prepared, scaler: Scaler | None) -> None:
        self._prepared, self._scaler = prepared, scaler

    @property
    def module(self) -> nn.Module:
        """The module whose parameter names the checkpoint uses."""
        return self._prepared.whole_module()

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers to save."""
        return self._prepared.optimizers

    @property
    def schedulers(self) -> list[Any]:
        """The learning rate schedulers to save."""
        return [scheduler.scheduler for scheduler in self._prepared.schedulers]

    # -- collecting -----------------------------------------------------------------------------------------------------------------------

    def content(self, facts: Mapping[str, Any], left_out: Sequence[nn.Module] = ()) -> Content:
        """Collect what this rank contributes to a checkpoint now.

        Args:
            facts: small JSON values for the manifest.
            left_out: prepared models whose weights are saved elsewhere.
        """
        return self._collected(self._prepared.without(left_out), self.shared(), facts)

    def _collected(self, model: nn.Module, shared: dict[str, Any], facts: Mapping[str, Any]) -> Content:
        strategy, module = self._prepared.strategy, self.module
        return Content(
            model=strategy.model_parts(model),
            optimizers={str(i): strategy.optimizer_parts(o, module) for i, o in enumerate(self.optimizers)},
            shared=shared,
            of_rank=self.of_rank(),
            facts=facts,
            parts_differ=strategy.parts_differ,
            changed_by_steps=trained_by(self.optimizers),
        )

    def shared(self) -> dict[str, Any]:
        """The state that all ranks share, in the form of :mod:`engine.checkpoint.state_forms`."""
        return {
            "seed": self._prepared.seed,
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "window": self._prepared.window.weights.agreement.state_dict(),
            "registered": [item.state_dict() for item in self._prepared.registered],
            "loaders": self.positions(),
            "kinds": describe(self.optimizers, self.schedulers),
        }

    def of_rank(self) -> dict[str, Any]:
        """The state that belongs to this rank alone."""
        return {"place": self.place(), "rng": capture(), "streams": self.streams()}

    def place(self) -> list[int]:
        """The number of ranks that see different data, this rank's index among them, and 1 if its losses count, else 0."""
        group = self._prepared.strategy.data_group
        return [group.world_size, group.rank, int(self._prepared.strategy.is_counted)]

    def positions(self) -> list[dict[str, Any]]:
        """The loaders' positions in their data."""
        states = [{**loader.state_dict(), "samples": loader.samples} for loader in self._prepared.loaders]
        return [{name: value for name, value in state.items() if name != "stream"} for state in states]

    def streams(self) -> list[Any]:
        """By loader, the state that it needs in addition to its position, as streams do; ``None``: the position is enough."""
        return [loader.state_dict()["stream"] for loader in self._prepared.loaders]

    # -- restoring ------------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def restoring(self, loaded: Loaded, how: Resume, left_out: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Restore an open checkpoint; all ranks enter this together.

        Optimizers, schedulers and the state of each rank are restored only after the block, in which hooks of a run may add parameter groups. Random
        number states come last, because restoring something else may draw random numbers.

        Args:
            left_out: prepared models whose weights are loaded elsewhere.

        Raises:
            ValueError: the checkpoint does not fit the prepared objects; the message names the object.
        """
        self.restore_weights(loaded, how.strict, left_out)
        self.restore_seed(loaded)
        all_or_none(self._prepared.group, partial(self.check_counts, loaded))  # raises on all ranks if it does on one
        self.restore_shared(loaded)
        yield
        all_or_none(self._prepared.group, partial(self.check, loaded, how))
        if how.optimizer:
            self.restore_optimizers(loaded, how)
        self.restore_rank(loaded)

    def restore_weights(self, loaded: Loaded, strict: bool, left_out: Sequence[nn.Module] = ()) -> None:
        """Load the models' weights. ``strict``, ``left_out``: as in :meth:`restoring`."""
        report = self._prepared.strategy.load_model(self._prepared.without(left_out), loaded.source, strict)
        if report:
            logger.warning("%s fits in part: %s", loaded.path, report)

    def restore_seed(self, loaded: Loaded) -> None:
        """Restore the seed of the data order."""
        if loaded.shared["seed"] is not None:
            self._prepared.seed = loaded.shared["seed"]

    def restore_shared(self, loaded: Loaded) -> None:
        """Restore the loss scaler, the accumulation window and the registered objects.

        Raises:
            ValueError: the number of registered objects differs.
        """
        shared = loaded.shared
        if self._scaler is not None and shared["scaler"]:
            loaded.load_into("the loss scaler", self._scaler.load_state_dict, shared["scaler"])
        if shared.get("window") is not None:
            loaded.load_into("the window", self._prepared.window.weights.agreement.load_state_dict, shared["window"])
        loaded.load_into("objects that are registered", self._restore_registered, shared["registered"])

    def _restore_registered(self, states: list[Any]) -> None:
        """Restore the objects of ``register_for_checkpointing``, which must be as many as were saved."""
        registered = self._prepared.registered
        if len(states) != len(registered):
            raise ValueError(
                f"the checkpoint has {len(states)} object(s) of register_for_checkpointing, and {len(registered)} are registered: "
                "register the same ones before loading"
            )
        for item, state in zip(registered, states, strict=True):
            item.load_state_dict(state)

    def check_counts(self, loaded: Loaded) -> None:
        """Check that as many optimizers, schedulers and loaders were prepared as the checkpoint has."""
        prepared, shared, source = self._prepared, loaded.shared, loaded.source
        counts = (len(self.optimizers), len(self.schedulers), len(prepared.loaders))
        # A run saves the position of its training loader alone; it goes to the first loader, and any others start from the beginning.
        loaders = max(counts[2], 1) if loaded.saved_by_run else len(shared["loaders"])
        saved = (len(source.optim), len(shared["schedulers"]), loaders)
        if saved != counts:
            raise ValueError(
                f"{loaded.path} has (optimizers, schedulers, loaders) = {saved}, and {counts} were prepared: prepare the same objects before loading"
            )

    def check(self, loaded: Loaded, how: Resume) -> None:
        """Check that the optimizers, the schedulers and the data match the checkpoint's."""
        check_optimizers(loaded, self.optimizers, self.schedulers, how)
        for loader, state in zip(self._prepared.loaders, loaded.shared["loaders"], strict=False):
            if state["position"]:
                check_samples(loaded.path, state.get("samples"), loader.samples, state["position"], how.strict)

    def restore_optimizers(self, loaded: Loaded, how: Resume) -> None:
        """Restore optimizers and schedulers, after :meth:`check`."""
        source, module, strategy = loaded.source, self.module, self._prepared.strategy
        configured_groups = self.hyperparameters()
        for index, optimizer in enumerate(self.optimizers):
            state = source.optim[str(index)]
            if not how.strict:
                shapes = {name: strategy.whole_shape(parameter) for name, parameter in module.named_parameters()}
                state = fitting(state, strategy.optimizer_parts(optimizer, module), shapes, source)
            load = partial(strategy.load_optimizer, optimizer, module, source=source)
            loaded.load_into(f"optimizer {index} ({type(optimizer).__name__})", load, state)
        for index, state in enumerate(loaded.shared["schedulers"]):
            load_scheduler(loaded, index, self.schedulers[index], state)
        if how.hyperparameters == "configured":
            for optimizer, groups in zip(self.optimizers, configured_groups, strict=True):
                configure(optimizer, groups)
            for scheduler in self.schedulers:
                rebase(scheduler)

    def hyperparameters(self) -> list[list[dict[str, Any]]]:
        """The current hyperparameters of each optimizer's parameter groups."""
        return [
            [{k: v for k, v in group.items() if k not in {"params", *counters(o)}} for group in o.param_groups]
            for o in self.optimizers
        ]

    def restore_rank(self, loaded: Loaded) -> None:
        """Restore the position in the data and, if the ranks are the same as before, the random number states."""
        same_place = loaded.of_same_place(self.place())
        self.restore_place(loaded, same_place)
        if same_place is not None:
            loaded.load_into("random generators", restore, same_place["rng"])

    def restore_place(self, loaded: Loaded, same_place: Any) -> None:
        """Restore each loader's position in its data; ``same_place``: this rank's saved state, ``None`` if the ranks are not the same as before."""
        prepared, shared = self._prepared, loaded.shared
        rank_state = loaded.of_rank(0) if same_place is None else same_place
        # A converted checkpoint has no rank's state.
        streams = [None] * len(shared["loaders"]) if rank_state is None else rank_state["streams"]
        for loader, state, stream in zip(prepared.loaders, shared["loaders"], streams, strict=False):
            loader.reseed(prepared.seed, state.get("order"))
            loader.load_state_dict({**state, "stream": stream})


class EngineCheckpoints:
    """The checkpoints of a user's own training loop; implements :meth:`engine.Engine.save_state` and :meth:`~engine.Engine.load_state`."""

    def __init__(self, prepared: Prepared, snapshot: EngineSnapshot, writer: CheckpointWriter) -> None:
        self._prepared, self._snapshot, self._writer = prepared, snapshot, writer
        self._folder: CheckpointFolder | None = None  # where the latest save went

    def save(
        self, output_dir: str | Path, wait: bool, facts: dict[str, Any], left_out: Sequence[nn.Module] = ()
    ) -> Path | str:
        """Save as :meth:`engine.Engine.save_state` does; ``left_out``: prepared models whose weights are saved elsewhere."""
        stepper = self._prepared.stepper
        stepper.await_verdicts()
        storage, name = split_path(output_dir)
        if self._folder is None or self._folder.storage.root != storage.root:
            self.wait()
            self._folder = CheckpointFolder(self._prepared.group, storage)
        path = self._writer.save(self._folder, name, self._snapshot.content(facts, left_out), asynchronous=not wait)
        if not wait:
            stepper.before_step(self._writer.hold)
        return path

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete.

        Raises:
            RuntimeError: it could not be written.
        """
        if self._folder is not None:
            self._writer.wait(self._folder)

    def load(self, input_dir: str | Path, strict: bool, left_out: Sequence[nn.Module] = ()) -> dict[str, Any]:
        """Load as :meth:`engine.Engine.load_state` does; ``left_out``: prepared models whose weights are loaded elsewhere."""
        self.wait()
        storage, _ = split_path(input_dir)
        with opening(self._prepared.group, storage, str(input_dir)) as loaded:
            with self._snapshot.restoring(loaded, Resume(input_dir, strict=strict), left_out):
                if unused := [name for name in ("callbacks", "datamodule", "user") if loaded.shared.get(name)]:
                    names = ", ".join(unused)
                    logger.warning("%s was saved by a run; your own loop does not use its %s", input_dir, names)
            return loaded.manifest
