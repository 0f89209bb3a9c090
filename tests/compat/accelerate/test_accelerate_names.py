"""The table of Accelerate's names has the arguments that ``Accelerator`` has."""

from __future__ import annotations

import inspect

import accelerate as theirs
import pytest

from engine.compat.accelerate.names import ACCELERATOR
from engine.interop import accelerate as ours


@pytest.mark.parametrize("cls", [theirs.Accelerator, ours.Accelerator])
def test_arguments_and_their_defaults(cls: type) -> None:
    parameters = {name: each.default for name, each in inspect.signature(cls).parameters.items() if name != "rules"}
    parameters["split_batches"] = None  # an object of Accelerate's own that says that nothing was given
    assert list(ACCELERATOR)[: len(parameters)] == list(parameters)
    assert {name: ACCELERATOR[name].usual for name in parameters} == parameters


def test_every_argument_has_an_answer() -> None:
    assert [name for name, row in ACCELERATOR.items() if not (row.setting or row.instead or row.engine)] == []
