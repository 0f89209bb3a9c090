"""The checkpoints of one run: their folder, which were saved, and the events that hooks have yet to get."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from engine.checkpoint.content import Content
from engine.checkpoint.manifest import SCORED_WITH, TRAINED
from engine.checkpoint.one_file import check_local, pack_folder
from engine.checkpoint.retention import CheckpointFolder
from engine.checkpoint.run_folder import RunFolder
from engine.checkpoint.storage import Storage
from engine.checkpoint.storage_paths import name_of, split_path, storage_of
from engine.checkpoint.writer import CheckpointWriter, SaveRequest
from engine.distributed.agreement import Agreement
from engine.distributed.collectives import gather_json
from engine.loop.state import TrainState
from engine.utils.paths import expanded

UNKNOWN = object()
"""The root for checkpoints while no callback has said yet where it saves."""


class RunCheckpoints:
    """The checkpoints of one run. This class calls no hooks; :class:`engine.Run` and the loops do.

    Args:
        writer: the engine's writer, which writes the checkpoints.
        agreement: is notified of events, if there are hooks for them (:attr:`have_listeners`).
    """

    run_folder: RunFolder
    """The run's folder, locked while the run is in progress."""
    best: Path | str | None = None
    last: Path | str | None = None
    loaded_from: Path | str | None = None
    """The checkpoint that the run resumed from or loaded weights from."""
    have_listeners = False
    """Whether hooks want the events of checkpoints."""
    training_began = False
    """Whether the training has begun. From then on a save first calls the hooks for earlier checkpoints, because it may remove these."""
    saved: tuple[tuple[int, int, int, int], str] | None = None
    """The position (step, epoch, batch, validated step) and the name of the latest saved checkpoint."""
    saved_in: CheckpointFolder
    """The folder of the latest saved checkpoint; the main folder before the first one."""

    def __init__(self, writer: CheckpointWriter, agreement: Agreement) -> None:
        self._writer, self._group, self._agreement = writer, writer.group, agreement
        self._folder: CheckpointFolder | None = None
        self._further: dict[str, CheckpointFolder] = {}
        self._main_root: object = UNKNOWN
        self._positions: dict[str, tuple[tuple[int, int, int, int], str]] = {}
        self.scores: dict[tuple[str, str], float | None] = {}
        """By folder and name, the scores of the checkpoints for which the hooks have not been called yet."""

    # -- the checkpoint folder ------------------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> CheckpointFolder:
        """The main folder of the run's checkpoints: the one by which the run is resumed, and in which names are looked up.

        Raises:
            RuntimeError: the run has none yet.
        """
        if self._folder is None:
            raise RuntimeError("the run has no checkpoint folder yet: it has one from setup on")
        return self._folder

    @property
    def folders(self) -> list[CheckpointFolder]:
        """The folders of the run's checkpoints, the main one first."""
        return [self.folder, *self._further.values()]

    def live_in(self, run_folder: RunFolder, root: object) -> None:
        """Save checkpoints from now on in the checkpoint folder of ``run_folder``, which is under ``root``."""
        self.run_folder, self._main_root = run_folder, root
        self.keep_in(run_folder.checkpoints)

    def keep_in(self, location: Path | str) -> None:
        """Save checkpoints from now on in ``location``, a folder or a URL."""
        self._folder = self.saved_in = self._new_folder(location)

    def _new_folder(self, location: Path | str) -> CheckpointFolder:
        return CheckpointFolder(self._group, storage_of(location), self._agreement if self.have_listeners else None)

    def choose(self, root: str | Path | None, max_failures: int) -> None:
        """Choose the root of the run's folders and its checkpoints, and the number of failed saves in a row that is an error; see
        :meth:`engine.Run.checkpoints_at`."""
        if self._main_root is UNKNOWN:  # no callback says beforehand where it saves
            self._main_root = root
        if root == self._main_root:
            location = self.run_folder.choose_root(root)
            if str(location) != self.folder.storage.root:
                self.keep_in(location)
        elif str(root) not in self._further:
            folder = self._new_folder(self.run_folder.further_root(root))
            self._further[str(root)] = next(
                (present for present in self.folders if present.storage.is_same(folder.storage)), folder
            )
        self.folder_at(root).max_failures = max_failures

    def folder_at(self, root: str | Path | None) -> CheckpointFolder:
        """The folder that was chosen for ``root``."""
        return self.folder if root == self._main_root else self._further[str(root)]

    def folder_of(self, storage: Storage) -> CheckpointFolder:
        """The folder with this ``storage``, which is that of one of :attr:`folders`."""
        return next(folder for folder in self.folders if folder.storage is storage)

    def path(self, name: str) -> Path | str:
        """The path of the checkpoint called ``name``."""
        return self.folder.storage.path(name)

    def names(self, folder: CheckpointFolder) -> set[str]:
        """The names of the complete checkpoints in ``folder``, as rank 0 sees them; all ranks call this together."""
        names: list[str] = gather_json(self._group, list(folder.storage.manifests()) if self._group.is_main else None)[
            0
        ]
        return set(names)

    def written_names(self, folder: CheckpointFolder) -> set[str]:
        """The names of the checkpoints in ``folder`` with a manifest, which may be damaged, as rank 0 sees them; all ranks call this together."""
        names: list[str] = gather_json(
            self._group, list(folder.storage.written_names()) if self._group.is_main else None
        )[0]
        return set(names)

    def damaged_of(self, names: Sequence[str], folder: CheckpointFolder) -> set[str]:
        """The ones of ``names`` that are no complete checkpoints in ``folder``, as rank 0 sees them; all ranks call this together."""
        is_main, storage = self._group.is_main, folder.storage
        damaged: list[str] = gather_json(
            self._group, [name for name in names if not storage.is_complete(name)] if is_main else None
        )[0]
        return set(damaged)

    @property
    def continue_in_place(self) -> bool:
        """Whether the run has resumed from a checkpoint in its own checkpoint folder."""
        return self.last is not None and split_path(self.last)[0].is_same(self.folder.storage)

    def best_weights(self) -> str | None:
        """The name of the weights with which the best checkpoint's score was measured, from its manifest; all ranks call this together.

        ``None``: no checkpoint has a score, or the best one cannot be read.
        """
        if self.best is None:
            return None
        name: str | None = None
        if self._group.is_main:
            with suppress(OSError, ValueError):
                storage, checkpoint = split_path(self.best)
                name = str(storage.manifest(checkpoint).get(SCORED_WITH, TRAINED))
        weights: str | None = gather_json(self._group, name)[0]
        return weights

    # -- saving ---------------------------------------------------------------------------------------------------------------------------

    def saved_as(self, state: TrainState, name: str | None, folder: CheckpointFolder) -> str | None:
        """The name of the checkpoint in ``folder`` that already has this position; ``None``: there is none, it was lost, or another ``name`` is asked
        for."""
        if folder.storage.root not in self._positions:
            return None
        position, saved_name = self._positions[folder.storage.root]
        is_same_position = position == state.resume_point() or (state.in_window and position[0] == state.step)
        return saved_name if is_same_position and saved_name not in folder.lost and name in (None, saved_name) else None

    def save(self, request: SaveRequest, content: Content, state: TrainState, folder: CheckpointFolder) -> Path | str:
        """Write ``content``, collected at the position ``state``, into ``folder``; errors: see
        :meth:`engine.checkpoint.writer.CheckpointWriter.save`."""
        path = self._writer.save(folder, content, request)
        name = name_of(path)
        self.saved, self.saved_in = (state.resume_point(), name), folder
        self._positions[folder.storage.root] = self.saved
        if self.have_listeners:
            self.scores[folder.storage.root, name] = None if request.score is None else request.score["value"]
        return path

    def save_at(self, where: Path | str, content: Content, *, one_file: bool) -> Path | str:
        """Write ``content`` to ``where``: a folder at a path or a URL, or with ``one_file`` a file at a path; all ranks call this together.

        Raises:
            ValueError: ``one_file`` at a URL.
        """
        if not one_file:
            return self._save_folder(where, content)
        check_local(where)
        file = Path(expanded(where)).absolute()
        file.parent.mkdir(parents=True, exist_ok=True)
        folder = file.with_name(f".{file.name}.folder")
        self._save_folder(folder, content)
        if self._group.is_main:
            pack_folder(folder, file)
            shutil.rmtree(folder)
        self._group.barrier()
        return file

    def _save_folder(self, where: Path | str, content: Content) -> Path | str:
        storage, name = split_path(where)
        folder = CheckpointFolder(self._group, storage)
        return self._writer.save(folder, content, SaveRequest(name))

    def wait(self) -> None:
        """Wait for the checkpoint in progress.

        Raises:
            RuntimeError: too many consecutive writes failed.
        """
        for folder in dict.fromkeys((self.saved_in, *self.folders)):
            self._writer.wait(folder)

    def close(self, failed: bool) -> None:
        """Wait for the checkpoint in progress (only briefly if the run has ``failed``), and free the writer's buffers."""
        if self._folder is not None:
            self._writer.close(self.saved_in, failed)

    # -- events ---------------------------------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterator[tuple[str, Path | str, float | None]]:
        """Yield ``"saved"`` or ``"removed"``, path and score of each checkpoint that the main process has completed or deleted since the last call;
        all ranks call this together."""
        self._agreement.news = False
        folders = [] if self._folder is None else self.folders
        events_of_rank = []
        for index, folder in enumerate(folders):
            events = folder.events
            events_of_rank += [(index, *events.popleft()) for _ in range(len(events))]
        for index, event, name in gather_json(self._group, events_of_rank)[0]:
            storage = folders[index].storage
            yield event, storage.path(name), self.scores.pop((storage.root, name), None) if event == "saved" else None
