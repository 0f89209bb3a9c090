"""Random generators: the same seed gives the same numbers, and states come back exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from engine.checkpoint.json_tree import pack, unpack
from engine.utils.seed import capture, isolated, restore, seed_everything


def draw() -> tuple[Any, ...]:
    # Odd numbers of normal variates: python and numpy keep the second of a pair.
    return (
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(),
        numpy.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_the_seed_decides_every_number() -> None:
    assert seed_everything(7) == 7
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_lightnings_argument_changes_nothing() -> None:
    assert seed_everything(7, workers=True) == 7
    first = draw()
    seed_everything(7, workers=False)
    assert draw() == first


def test_the_numbers_are_those_of_each_library() -> None:
    seed_everything(3)
    torch_alone = torch.Generator().manual_seed(3)
    assert random.random() == random.Random(3).random()
    assert numpy.random.rand() == numpy.random.RandomState(3).rand()
    assert torch.rand(1).item() == torch.rand(1, generator=torch_alone).item()


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**32, ValueError), (True, TypeError), ("1", TypeError), (1.0, TypeError)]
)
def test_wrong_seeds(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="give an int from 0 to 4294967295"):
        seed_everything(seed)


def test_a_state_comes_back_through_a_checkpoint() -> None:
    seed_everything(1)
    draw()
    value, tensors = pack(capture())
    expected = draw()
    seed_everything(2)
    restore(unpack(json.loads(json.dumps(value, allow_nan=False)), tensors))
    assert draw() == expected


class Generator:
    """Stands for a device's module."""

    def __init__(self) -> None:
        self.state = torch.tensor([7], dtype=torch.uint8)
        self.used = False

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.used

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Generator]:
    def machine(kind: str) -> Generator:
        owner = Generator()
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: SimpleNamespace(type=kind)
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device=None: owner)
        return owner

    return machine


def test_the_accelerators_generator_is_in_the_state_once_it_is_used(on: Callable[[str], Generator]) -> None:
    owner = on("xpu")
    assert "device" not in capture()
    owner.used = True
    value, tensors = pack(capture())
    owner.state = torch.tensor([8], dtype=torch.uint8)
    restore(unpack(json.loads(json.dumps(value)), tensors))
    assert owner.state.tolist() == [7]
    other = on("mps")  # another kind of device, whose numbers are others anyway
    other.state = torch.tensor([9], dtype=torch.uint8)
    restore(unpack(json.loads(json.dumps(value)), tensors))
    assert other.state.tolist() == [9]


def test_older_checkpoints_have_cudas_generator_under_its_name(on: Callable[[str], Generator]) -> None:
    old = capture() | {"cuda": torch.tensor([5], dtype=torch.uint8)}
    owner = on("cuda")
    restore(old)
    assert owner.state.tolist() == [5]
    owner = on("mps")
    restore(old)
    assert owner.state.tolist() == [7]


def test_a_state_is_a_copy() -> None:
    state = capture()
    expected = draw()
    draw()
    for _ in range(2):
        restore(state)
        assert draw() == expected


def test_a_wrong_state_is_refused() -> None:
    with pytest.raises(ValueError, match="not a state of random generators"):
        restore({"python": 3})


def test_nothing_leaks_out_of_a_block() -> None:
    seed_everything(5)
    expected = draw()
    seed_everything(5)
    with isolated():
        seed_everything(99)
        draw()
    assert draw() == expected


def test_nothing_leaks_out_of_a_block_that_fails() -> None:
    seed_everything(5)
    expected = draw()
    seed_everything(5)

    def fail() -> None:
        with isolated():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draw() == expected
