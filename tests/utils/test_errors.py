"""The nearest legal name."""

from __future__ import annotations

import pytest

from engine.utils.errors import nearest


@pytest.mark.parametrize(
    ("name", "choices", "found"),
    [
        ("ddpp", ("single", "ddp", "fsdp"), "ddp"),
        ("FSDP2", ("ddp", "fsdp"), "fsdp"),
        ("reshard", ("dp_shard", "reshard_after_forward"), "reshard_after_forward"),  # the beginning of a long name
        ("max", ("max_epochs", "max_steps"), "max_steps"),  # the beginning of two: the closer one
        ("dpp", ("single", "ddp", "fsdp", "tp", "pp"), "ddp"),  # one letter wrong, and the first one right
        ("ddp2", ("ddp", "pp"), "ddp"),
        ("nothing", ("ddp", "fsdp"), None),
        ("profiler", ("compile", "precision"), None),
    ],
)
def test_nearest(name: str, choices: tuple[str, ...], found: str | None) -> None:
    assert nearest(name, choices) == ("" if found is None else f"; did you mean {found!r}?")
