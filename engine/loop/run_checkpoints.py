"""What a run puts into a checkpoint, and how it goes on from one."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.files import printable
from engine.checkpoint.json_tree import pack
from engine.checkpoint.manifest import FOLDERS
from engine.checkpoint.resume import (
    Loaded,
    Resume,
    check_optimizers,
    check_samples,
    configure,
    fitting,
    load_scheduler,
    name_of,
    opening,
    rebase,
)
from engine.checkpoint.run_folder import RunFolder
from engine.checkpoint.storage import same, split
from engine.checkpoint.writer import Content, Saver, stepped, together
from engine.config.duration import Every
from engine.config.masked import Config, without_secrets
from engine.config.settings import Settings
from engine.data.datamodule import DataModule
from engine.data.prepared_loader import PreparedLoader
from engine.distributed.collectives import gather_json
from engine.engine import Engine
from engine.loop.callback_states import load_states, states
from engine.loop.hook_calls import Hooked, Hooks
from engine.loop.own_loop_counters import state_of_loop
from engine.loop.result import Times, TrainState
from engine.metrics.recorder import Recorder, named
from engine.metrics.torchmetrics_states import load_metric_states, metric_states
from engine.module import TrainModule
from engine.step.optimizers import Modes, Schedule, counters
from engine.utils.log import logger
from engine.utils.seed import restore


class Checkpoints:
    """The part of :class:`engine.Run` that saves and loads."""

    settings: Settings
    pulse = 0
    """Signs of life beside the training's batches: batches of evaluation, and saves."""
    config: Config
    """The settings as plain JSON values, for loggers and checkpoints: name -> ``value`` and ``origin``, secrets as ``"***"``."""
    engine: Engine
    module: TrainModule
    callbacks: tuple[Hooked, ...]
    hooks: Hooks
    state: TrainState
    times: Times
    metrics: dict[str, float]
    recorder: Recorder
    optimizers: list[Any]
    modes: Modes
    schedulers: list[Schedule]
    datamodule: DataModule | None
    train_loader: PreparedLoader | None
    num_train_batches: int | None
    window_at: Callable[[int], int]
    val_every: Every
    saver: Saver
    last_checkpoint: Path | str | None
    _started: float
    _elapsed_before: float
    home: RunFolder
    """Which folder this run has, while it is going on."""
    _saved: tuple[tuple[int, int, int, int], str] | None = None
    _chosen: str | None = None
    _stream_state: Any = None
    """The state of the training data's stream, until its loader takes it."""

    def clock(self) -> float:
        """Seconds of training by this rank's own clock."""
        return self._elapsed_before + time.monotonic() - self._started

    # -- saving -----------------------------------------------------------------------------------------------------------------

    def checkpoints_at(self, root: str | Path | None, max_failures: int = 1) -> None:
        """Keep checkpoints in ``root``, a directory or a URL that fsspec knows (in a numbered folder of it, when another run has ``root``), rather
        than in ``checkpoints`` of the run's folder. All ranks call this together, in ``setup``.

        Args:
            root: what the callback has as ``checkpoints_in``.
            max_failures: so many failures of asynchronous saves in a row are an error.

        Raises:
            ValueError: another place was chosen already.
        """
        place = self.home.keep(root)
        if self._chosen is not None and str(place) != self._chosen:
            raise ValueError(f"checkpoints are to be kept in {self._chosen} and in {place}: give one dirpath to all ModelCheckpoints of a run")
        if str(place) != self.saver.place.root:
            self.saver = Saver(self.engine.group, place)
        self._chosen, self.saver.max_failures = str(place), max_failures

    def checkpoint_path(self, name: str) -> Path | str:
        """Where the checkpoint of that name is."""
        return self.saver.place.path(name)

    @property
    def continues_in_place(self) -> bool:
        """Whether this run goes on from a checkpoint of its own folder."""
        return self.last_checkpoint is not None and same(split(self.last_checkpoint)[0], self.saver.place)

    def checkpoint_names(self) -> set[str]:
        """The complete checkpoints of this run's folder, as rank 0 sees them; all ranks call this together."""
        found: list[str] = gather_json(self.engine.group, list(self.saver.place.manifests()) if self.engine.is_main_process else None)[0]
        return set(found)

    def save_checkpoint(
        self,
        name: str | None = None,
        *,
        score: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        tolerant: bool = False,
        remove: Sequence[str] = (),
    ) -> Path | str:
        """Save everything that the run needs to go on; all ranks call this together. A place in the run that is saved already is not saved again.

        Args:
            name: of its directory; by default ``step=00000120``.
            score: ``{"monitor": name, "mode": "min", "value": number}``: what ``resume="best"`` compares.
            asynchronous: return as soon as the training may go on; see :meth:`wait_for_checkpoint`.
            tolerant: a failure to write is logged, unless it is the last of ``max_failures`` in a row (:meth:`checkpoints_at`).
            remove: names of checkpoints that are to go when this one is complete.

        Returns:
            Where it is, or will be.

        Raises:
            TypeError: something that cannot be stored, named by its place in the state.
            OSError: it cannot be written (and neither ``asynchronous`` nor ``tolerant``).
        """
        began = time.perf_counter()
        self.home.announce()
        self.engine.settle()
        state = self.state
        # The end of an epoch and the start of the next are one place. Inside of a window the state at its start is what counts.
        key = (state.step, state.epoch + state.epoch_done, 0 if state.epoch_done else state.whole_batches, state.validated_step)
        if self._saved is not None and (key == self._saved[0] or (state.batch_idx != state.whole_batches and self._saved[0][0] == state.step)):
            known = self._saved[1]
            if known not in self.saver.lost and name in (None, known):
                self.saver.discard(remove)
                return self.saver.place.path(known)
        name = f"step={state.step:08d}" if name is None else name
        unchanging = self.module.automatic_optimization and not self.modes.switched
        with self.modes.evaluating():
            content = self.content(score)
            content.shared["postponed"] += remove  # a job that is killed before it has removed them leaves that to the next one
            path = self.saver.save(name, content, asynchronous=asynchronous, tolerant=tolerant, remove=remove, unchanging=unchanging)
        self._saved = (key, name_of(path))
        if asynchronous:
            self.engine.before_step(self.saver.hold)
        self.times.checkpoint += time.perf_counter() - began
        self.pulse += 1
        return path

    def wait_for_checkpoint(self) -> set[str]:
        """Wait until the checkpoint on its way is complete; all ranks call this together.

        Returns:
            The names of those that could not be written.

        Raises:
            RuntimeError: too many could not be written, one after another.
        """
        began = time.perf_counter()
        self.saver.wait()
        self.times.checkpoint += time.perf_counter() - began
        self.pulse += 1
        return self.saver.lost

    def remove_checkpoint(self, path: Path | str) -> None:
        """Delete a checkpoint; every rank may call this, the main process does it."""
        self.saver.remove([name_of(path)])

    def content(self, score: Mapping[str, Any] | None = None) -> Content:
        """Everything that a checkpoint of this moment holds, as this rank has it."""
        shared, strategy = self.state_dict(), self.engine.strategy
        for hook in self.hooks.on_save_checkpoint:
            hook(self, self.module, shared["user"])
        shared["callbacks"] = states(self.callbacks)
        facts = {
            "counters": {"epoch": self.state.epoch, "step": self.state.step, "batch_idx": self.state.batch_idx},
            "metrics": dict(self.metrics),
            "module": f"{type(self.module).__module__}:{type(self.module).__qualname__}",
            "hparams": without_secrets(_readable(self.module.hparams)),
            "config": self.config,
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        }
        return Content(
            model=strategy.model_parts(self.module),
            optim={str(i): strategy.optimizer_parts(o, self.module) for i, o in enumerate(self.optimizers)},
            shared=shared,
            own={
                **self.engine.snapshot.own([self._stream()]),
                "recorder": self.recorder.state_dict(),
                "metrics": metric_states(self.module),
                "logged": self.recorder.logged_metrics(),
            },
            facts=facts if score is None else {**facts, "score": dict(score)},
            partial=strategy.parts_differ,
            stepped=stepped(self.optimizers),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything about the run that is the same on all ranks, but for parameters and optimizers."""
        state, order = self.state, None if self.train_loader is None else self.train_loader.order
        samples = None if self.train_loader is None else self.train_loader.samples
        loader = {"epoch": state.epoch + state.epoch_done, "position": 0 if state.epoch_done else state.position, "samples": samples}
        return {
            **self.engine.snapshot.shared(self.optimizers, self.schedulers, [loader if order is None else {**loader, "order": order}]),
            "state": asdict(state),
            "metrics": dict(self.metrics),
            "elapsed_s": self.clock(),
            "val_every": self.val_every.state_dict(),
            "datamodule": None if self.datamodule is None else self.datamodule.state_dict(),
            "hparams": _storable(self.module.hparams),
            "hparams_name": self.module.hparams_name,
            "postponed": list(self.saver.postponed),
            "user": {},
        }

    def _stream(self) -> Any:
        """The state of training data that a position says too little of; ``None`` for other data."""
        if self.train_loader is None:
            return None
        if self.state.epoch_done:
            return self.train_loader.carried()
        return self.train_loader.state(self.state.position)

    def take_stream(self) -> Any:
        """What the training data's loader needs besides the position, once after a resume."""
        state, self._stream_state = self._stream_state, None
        return state

    # -- loading ----------------------------------------------------------------------------------------------------------------

    def resume(self, wanted: str | Path | Resume) -> None:
        """Go on from a checkpoint: parameters, optimizers, schedulers, counters, data position, random numbers, callbacks.

        Raises:
            FileNotFoundError: there is none (but for ``"auto"``).
            DamagedCheckpoint: it cannot be used, or (for a name such as ``"auto"``) none of those that are there.
            ValueError: it does not fit the module or its optimizers.
        """
        how = wanted if isinstance(wanted, Resume) else Resume(wanted)
        where, what = self.home.source(str(how.path))
        self.home.named = self.saver.place.root  # from now on
        try:
            with opening(self.engine.group, where, what, FOLDERS[:1] if how.weights_only else FOLDERS) as loaded:  # the first is the model's
                self.saver.kept = {loaded.name, *loaded.passed}
                if how.weights_only:
                    self._load_weights(loaded, how.strict)
                else:
                    self._go_on(loaded, how)
        except FileNotFoundError:
            if str(how.path) != "auto":
                raise

    def reseed(self, seed: int, order: str | None) -> None:
        """Take over another run's data order."""
        self.engine.seed = seed
        if self.train_loader is not None:
            self.train_loader.reseed(seed, order)

    def load_weights(self, wanted: str | Path | None, strict: bool = True) -> None:
        """Take only the parameters and buffers of a checkpoint."""
        if wanted is not None:
            with opening(self.engine.group, *self.home.source(str(wanted)), ("model",), "checkpoint") as loaded:
                self._load_weights(loaded, strict)

    def _load_weights(self, loaded: Loaded, strict: bool) -> None:
        report = self.engine.strategy.load_model(self.module, loaded.source, strict and self.module.strict_loading)
        if report:
            logger.warning("%s fits in part: %s", loaded.path, report)

    def _go_on(self, loaded: Loaded, how: Resume) -> None:
        shared = loaded.shared
        self.saver.take_over(shared.get("postponed", []), loaded.path)
        self._load_weights(loaded, how.strict)
        if shared["seed"] is not None:
            self.reseed(shared["seed"], shared["loaders"][0].get("order") if shared["loaders"] else None)
        self.engine.snapshot.load_shared(loaded)
        if "state" in shared:
            self._go_on_with_run(loaded, shared)
        else:
            self.state = self._state_of_loop(loaded, shared["loaders"])
        together(self.engine.group, partial(self._check_loaded, loaded, how))  # hooks have added the parameter groups that the training had added
        if how.optimizer:
            self._load_optimizers(loaded, shared["schedulers"], how)
        self._load_own(loaded)
        self.last_checkpoint = loaded.path
        if self.engine.is_main_process:
            logger.info("resumed from %s: epoch %d, step %d", loaded.path, self.state.epoch, self.state.step)

    def _go_on_with_run(self, loaded: Loaded, shared: Any) -> None:
        """What a run has saved, and a loop of one's own has not."""
        loaded.give("the counters", self._take_counters, shared["state"])
        # A window that an error cut short is run again as a whole.
        self.state.batches -= self.state.batch_idx - self.state.whole_batches
        self.state.batch_idx = self.state.whole_batches
        self.metrics.update(shared["metrics"])
        self._elapsed_before = shared["elapsed_s"]
        loaded.give("val_every", self.val_every.load_state_dict, shared["val_every"])
        if self.datamodule is not None and shared["datamodule"] is not None:
            loaded.give(type(self.datamodule).__name__, self.datamodule.load_state_dict, shared["datamodule"])
        elif shared["datamodule"]:
            logger.warning("%s has the state of a DataModule, and this run has none: it is lost to this run", loaded.path)
        loaded.give("the callbacks", lambda states: load_states(self.callbacks, states, loaded.path, loaded.give), shared["callbacks"])
        for hook in self.hooks.on_load_checkpoint:
            hook(self, self.module, shared["user"])
        if shared["user"] and not self.hooks.on_load_checkpoint:
            names = printable(", ".join(map(str, shared["user"])))
            logger.warning(
                "%s has entries of on_save_checkpoint (%s), and nothing here has on_load_checkpoint: they are not read", loaded.path, names
            )

    def _take_counters(self, values: Mapping[str, Any]) -> None:
        self.state = TrainState(**values)

    def _state_of_loop(self, loaded: Loaded, loaders: list[Any]) -> TrainState:
        """Where the run stands that goes on from a loop of one's own."""
        window = self.engine.accumulate_grad_batches = self.window_at(loaders[0]["epoch"] if loaders else 0)
        assert self.train_loader is not None
        stride = self.train_loader.stride // window
        return state_of_loop(loaded.path, loaders, loaded.manifest, self.num_train_batches, self.window_at, stride)

    def _load_own(self, loaded: Loaded) -> None:
        """What each rank has of its own. Ranks of another number, or with other parts in the model, share out what the saving ones had gathered;
        their random numbers are those of a new run."""
        own = loaded.own(self.engine.snapshot.place_among_ranks())
        if own is not None:
            loaded.give("random generators", restore, own["rng"])
        known = own or loaded.of_rank(0)
        if known is not None and "recorder" not in known:  # of a loop of one's own
            rows = []
        elif own is not None:
            rows = [own]
        elif self.engine.data_group.rank == 0:
            rows = [row for row in loaded.every() if row["place"][-1]]
        else:
            rows = []
        loaded.give("the logged values", self.recorder.load_state_dicts, [row["recorder"] for row in rows])
        loaded.give("the metrics", partial(load_metric_states, self.module), [row["metrics"] for row in rows])
        if known is not None:  # a converted checkpoint has none
            # Under a pipeline only ranks of the last stage have logged metrics; the last rank is one of them.
            last = loaded.of_rank(loaded.manifest["world_size"] - 1)
            if last is not None and "logged" in last:
                logged = [row["logged"] for row in rows] or [named(last["logged"])]
                loaded.give("the logged metrics", self.recorder.load_logged_metrics, logged)
            self._stream_state = next(iter(known["streams"]), None)

    def _check_loaded(self, loaded: Loaded, how: Resume) -> None:
        """Whether the data, the optimizers and the schedulers are those of the checkpoint."""
        loaders = loaded.shared["loaders"]
        if self.train_loader is not None and self.state.position and not self.state.epoch_done and loaders:
            check_samples(loaded.path, loaders[0].get("samples"), self.train_loader.samples, self.state.position, how.strict)
        if how.optimizer:
            check_optimizers(loaded, self.optimizers, [each.scheduler for each in self.schedulers])

    def _load_optimizers(self, loaded: Loaded, schedules: list[Any], how: Resume) -> None:
        source = loaded.source
        given = [[{k: v for k, v in group.items() if k not in {"params", *counters(o)}} for group in o.param_groups] for o in self.optimizers]
        for index, optimizer in enumerate(self.optimizers):
            state = source.optim[str(index)]
            if not how.strict:
                state = fitting(state, self.engine.strategy.optimizer_parts(optimizer, self.module), self.module, source)
            take = partial(self.engine.strategy.load_optimizer, optimizer, self.module, source=source)
            loaded.give(f"optimizer {index} ({type(optimizer).__name__})", take, state)
            optimizer._opt_called = self.state.step > 0  # else torch warns of a scheduler that steps first, at an epoch's end
        for index, state in enumerate(schedules):
            load_scheduler(loaded, index, self.schedulers[index].scheduler, state)
        if how.hyperparameters == "configured":
            for optimizer, groups in zip(self.optimizers, given, strict=True):
                configure(optimizer, groups)
            for schedule in self.schedulers:
                rebase(schedule.scheduler)


def _storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of hyperparameters a checkpoint can hold; a network or a function among them is given again when the module is made."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(TypeError):
            pack(value)
            found[name] = value
    return found


def _readable(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``values`` JSON can say; the rest as text."""
    plain = (str, int, float, bool, type(None))
    return {str(k): v if isinstance(v, plain) else repr(v)[:200] for k, v in values.items()}
