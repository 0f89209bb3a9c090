"""``logger_for``: loggers by the names of their trackers."""

from __future__ import annotations

import pytest

from callbacks import MLflowLogger, TensorBoardLogger
from callbacks.loggers import TRACKERS, logger_for


def test_the_project_goes_where_the_tracker_has_such_names() -> None:
    logger = logger_for("mlflow", "digits", run_name="one")
    assert isinstance(logger, MLflowLogger)
    assert (logger.experiment_name, logger.run_name) == ("digits", "one")
    chosen = logger_for("mlflow", "digits", experiment_name="other")
    assert isinstance(chosen, MLflowLogger)
    assert chosen.experiment_name == "other"
    assert type(logger_for("tensorboard", "digits")) is TensorBoardLogger


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"'comet' is unknown; possible: {', '.join(TRACKERS)}"):
        logger_for("comet")
