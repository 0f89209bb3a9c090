"""``OnExceptionCheckpoint``: saves the last complete step when a training fails."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from engine.compat.checked_arguments import checking_arguments
from engine.compat.lightning.callback import Callback
from engine.utils.log import logger
from engine.utils.paths import expanded


class SavesOnException(Callback):
    """The file ``dirpath/filename.ckpt`` has the last complete step of a training that an exception has ended; a training that ends by itself deletes
    it. With several ranks, and within an optimizer step, nothing can be saved, which a warning says."""

    FILE_EXTENSION = ".ckpt"

    @checking_arguments()
    def __init__(self, dirpath: str | PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ValueError("OnExceptionCheckpoint(filename=''): give a name")
        self.dirpath, self.filename = dirpath, filename

    @property
    def ckpt_path(self) -> str:
        """The path of the file."""
        return str(Path(expanded(self.dirpath)) / (self.filename + self.FILE_EXTENSION))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        run = trainer.run
        if run.stage != "fit" or run.optimization is None:
            return
        if run.world_size > 1 or run.stepping:
            why = "saving needs all ranks, and one may be gone" if run.world_size > 1 else "the error is within a step"
            logger.warning("OnExceptionCheckpoint: nothing is saved, since %s", why)
            return
        run.save_checkpoint_at(Path(self.ckpt_path).absolute(), one_file=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.run.exception is None and trainer.is_global_zero:
            Path(self.ckpt_path).unlink(missing_ok=True)
