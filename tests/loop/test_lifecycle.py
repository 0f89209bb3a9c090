"""Torch's switches: on during a run, and afterwards as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones

from engine.config.settings import Settings
from engine.utils import cuda


def now() -> tuple[bool, ...]:
    return (
        *(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        *(torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()),
    )


class Looks(Weight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = now()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("settings", "inside"),
    [
        ({}, (False, False, None, False)),
        ({"deterministic": True}, (True, False, False, False)),
        ({"deterministic": "warn", "benchmark": True}, (True, True, True, False)),
        ({"benchmark": True}, (False, False, True, False)),
        ({"benchmark": False, "detect_anomaly": True}, (False, False, False, True)),
    ],
)
def test_what_holds_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool, settings: Any, inside: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    outside, module = now(), Looks()
    fit(tmp_path, **settings).run(module, ones(1))
    assert module.seen == tuple(before if each is None else each for each in inside)
    assert now() == outside


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_an_anomaly_is_an_error_and_the_switch_is_put_back(tmp_path: Path) -> None:
    class Breaks(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.w * 0).sqrt().sum() * 0  # the gradient is 0 * inf

    with pytest.raises(RuntimeError, match=r"SqrtBackward0.* returned nan values"):
        fit(tmp_path, detect_anomaly=True).run(Breaks(), ones(1))
    assert not torch.is_anomaly_enabled()
    fit(tmp_path).run(Breaks(), ones(1))


PRODUCTS = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
"""What ``torch.set_float32_matmul_precision`` makes of the GPU's and the CPU's setting."""


@pytest.fixture
def untouched() -> Iterator[None]:
    before = cuda.products()
    yield
    cuda.set_products(before)
    assert cuda.products() == before


def parts() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def common() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "torch refuses to say"


class Multiplies(Weight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.found = common(), parts()
        if batch_idx == 1:
            raise ValueError("stop")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("wanted", ["highest", "high", "medium"])
@pytest.mark.parametrize(
    "users",
    [
        lambda: None,
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ],
    ids=["none", "common", "part", "allow_tf32"],
)
def test_products_of_float32_during_a_run_only(
    tmp_path: Path, untouched: None, users: Callable[[], None], wanted: str
) -> None:
    users()
    before = common(), parts()
    plain, module = Multiplies(), Multiplies()
    fit(tmp_path).run(plain, ones(1))
    assert plain.found == before
    fit(tmp_path, matmul_precision=wanted).run(module, ones(1))
    assert module.found == (wanted, PRODUCTS[wanted])
    assert (common(), parts()) == before
    with pytest.raises(ValueError, match="stop"):
        fit(tmp_path, matmul_precision=wanted).run(module, ones(2))
    assert (common(), parts()) == before


def test_the_fastest_algorithm_is_not_deterministic() -> None:
    with pytest.raises(ValueError, match="benchmark=True and deterministic=True"):
        Settings(benchmark=True, deterministic=True)
