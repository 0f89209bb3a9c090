"""Checkpoints of an ``Accelerator``: numbered, with hooks before saving and loading, and with the positions of padded loaders."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from engine.compat.accelerate.padded_shards import BatchSamplerShard
from engine.distributed.collectives import broadcast_object
from engine.engine import Engine
from engine.utils.paths import expanded


class Checkpoints:
    """Saves and loads the checkpoints of one engine.

    Args:
        naming: an object with the attributes ``project_dir``, ``automatic_checkpoint_naming``, ``total_limit`` and ``iteration``.
    """

    def __init__(self, engine: Engine, naming: Any) -> None:
        self.engine, self.naming = engine, naming
        self.before_save: OrderedDict[int, Any] = OrderedDict()
        self.before_load: OrderedDict[int, Any] = OrderedDict()
        self.padded_loaders: list[Any] = []

    @staticmethod
    def hook(hooks: OrderedDict[int, Any], hook: Callable[..., None]) -> RemovableHandle:
        """Add a hook, and return a handle that can remove it."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    # -- padded loaders ----------------------------------------------------------------------------------------

    def following(self, loader: Any) -> Any:
        """Include this loader's position in checkpoints; return the loader."""
        if not self.padded_loaders:
            self.engine.register_for_checkpointing(self)
        self.padded_loaders.append(loader)
        return loader

    def forget(self) -> None:
        """Stop including the positions of loaders in checkpoints."""
        self.padded_loaders.clear()

    def state_dict(self) -> dict[str, Any]:
        """The loaders' positions."""
        return {"loaders": [loader.state_dict() for loader in self.padded_loaders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loaders' positions."""
        for loader, position in zip(self.padded_loaders, state["loaders"], strict=True):
            loader.load_state_dict(position)

    @contextlib.contextmanager
    def evened(self, even_batches: bool) -> Iterator[None]:
        """Let ``even_batches`` decide, in this block, whether the last global batch of map-style datasets is padded."""
        shards = [
            loader.batch_sampler
            for loader in self.padded_loaders
            if isinstance(loader.batch_sampler, BatchSamplerShard)
        ]
        if len(shards) < len(self.padded_loaders):
            warnings.warn("even_batches is only supported for map-style datasets; streams are filled up", stacklevel=5)
        before = [shard.even_batches for shard in shards]
        try:
            for shard in shards:
                shard.even_batches = even_batches
            yield
        finally:
            for shard, value in zip(shards, before, strict=True):
                shard.even_batches = value

    # -- saving and loading -----------------------------------------------------------------------------------------------------

    def save(self, output_dir: Any, wait: bool = True, facts: dict[str, Any] | None = None) -> Any:
        """Save a checkpoint into ``output_dir``, or into the next numbered folder; see :meth:`engine.Engine.save_state`."""
        engine, project = self.engine, self.naming
        folder = Path(self._next() if project.automatic_checkpoint_naming else expanded(output_dir))
        hooks_folder, left_out = folder.with_name(f".{folder.name}.hooks"), []
        if self.before_save:
            weights = [engine.get_state_dict(model) for model in engine.models]
            remaining = list(weights)
            hooks_folder.mkdir(parents=True, exist_ok=True)
            for hook in self.before_save.values():
                hook(list(engine.models), remaining, str(hooks_folder))
            kept_ids = {id(state_dict) for state_dict in remaining}
            removed = broadcast_object(
                engine.group, [i for i, state_dict in enumerate(weights) if id(state_dict) not in kept_ids]
            )
            left_out = [engine.models[i] for i in removed]
        path = engine.loop_checkpoints.save(folder, wait or bool(self.before_save), facts or {}, left_out)
        if self.before_save:  # the hooks' files are moved into the checkpoint, beside those that its manifest lists
            engine.wait_for_everyone()
            if engine.is_main_process:
                shutil.copytree(hooks_folder, path, dirs_exist_ok=True)
                shutil.rmtree(hooks_folder)
            engine.wait_for_everyone()
        project.iteration += 1
        return path

    def _next(self) -> Path:
        """Return the path of the next numbered folder, and delete the oldest checkpoints beyond ``total_limit``."""
        engine, project = self.engine, self.naming
        folder = self._project() / f"checkpoint_{project.iteration}"
        if broadcast_object(engine.group, folder.exists()):
            raise ValueError(f"{folder} exists: set the project's iteration to the number to continue with")
        older = self._numbered()
        if project.total_limit is not None and engine.is_main_process:
            for old_checkpoint in older[: max(0, len(older) + 1 - project.total_limit)]:
                shutil.rmtree(old_checkpoint)
        return folder

    def _project(self) -> Path:
        if self.naming.project_dir is None:
            raise ValueError("automatic_checkpoint_naming needs a folder: give project_dir")
        return Path(expanded(self.naming.project_dir)) / "checkpoints"

    def _numbered(self) -> list[Path]:
        """The numbered checkpoints, oldest first."""
        checkpoints = [
            path for path in self._project().glob("checkpoint_*") if path.name.removeprefix("checkpoint_").isdecimal()
        ]
        return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint_")))

    def load(self, input_dir: Any, strict: bool, within_epochs: bool) -> dict[str, Any]:
        """Load a checkpoint; see :meth:`engine.Engine.load_state`. Unless ``within_epochs``, all loaders restart their epoch."""
        engine = self.engine
        if input_dir is None:
            numbered = self._numbered() if self.naming.automatic_checkpoint_naming else []
            if not numbered:
                raise ValueError(
                    "load_state() without a folder needs automatic_checkpoint_naming, and a checkpoint in project_dir"
                )
            input_dir = numbered[-1]
        remaining = list(engine.models)
        for hook in self.before_load.values():
            hook(remaining, str(input_dir))
        left_out = [
            model for model in engine.models if not any(model is remaining_model for remaining_model in remaining)
        ]
        manifest = engine.loop_checkpoints.load(input_dir, strict, left_out)
        for loader in engine.prepared.loaders:
            if loader.length is not None and loader.skipped >= loader.length:  # saved after an epoch's last batch
                loader.resume(loader.epoch + 1, 0)
        if not within_epochs:
            for loader in (*engine.prepared.loaders, *self.padded_loaders):
                loader.restart()
        return dict(manifest)
