"""What a device tells about itself. Modules of devices that this machine lacks are pretended."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import FP8, Device
from engine.distributed.environment import Environment
from engine.distributed.group import Group
from engine.transforms import float8
from engine.utils import accelerator

GPU, APPLE = torch.device("cuda", 3), torch.device("mps", 0)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a device's module in place; tensors on the device lie on the CPU."""

    def has(device: torch.device, lacks: tuple[torch.dtype, ...] = (), **functions: Any) -> None:
        owner = SimpleNamespace(**functions)
        monkeypatch.setattr(torch, device.type, owner)
        monkeypatch.setattr(torch, "get_device_module", lambda _: owner)
        ones = torch.ones

        def on_the_cpu(*size: Any, device: Any = None, dtype: Any = None, **options: Any) -> torch.Tensor:
            if dtype in lacks:
                raise TypeError(
                    f"Cannot convert a MPS Tensor to {dtype} dtype as the MPS framework doesn't support it."
                )
            return ones(*size, dtype=dtype, **options)

        monkeypatch.setattr(torch, "ones", on_the_cpu)
        for probe in (accelerator.computes_in, accelerator.has_fp8):
            probe.cache_clear()

    yield has
    for probe in (accelerator.computes_in, accelerator.has_fp8):
        probe.cache_clear()


def test_a_gpu(pretend: Any) -> None:
    asked = []
    pretend(
        GPU,
        get_device_name=lambda device: "AMD Instinct MI300X",
        memory_allocated=lambda device: asked.append(device) or 5,
        max_memory_allocated=lambda: 7,
        utilization=lambda device: 93,
        get_device_properties=lambda device: SimpleNamespace(
            total_memory=192 * 2**30, major=9, minor=4, gcnArchName="gfx942"
        ),
    )
    device = Device(GPU)
    assert (device.name, device.utilization()) == ("AMD Instinct MI300X", 93.0)
    assert device.described() == "AMD Instinct MI300X, 192.0 GiB, gfx942"
    assert device.memory() == {
        "allocated": 5,
        "max_allocated": 7,
    }  # one function without an index, and one that is missing
    assert asked == [GPU]
    assert accelerator.name(GPU) == "cuda:3 (AMD Instinct MI300X)"


def test_an_apple_gpu(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3")
    pretend(
        APPLE, (torch.float64,), current_allocated_memory=lambda: 11, driver_allocated_memory=lambda: 12, __name__="mps"
    )
    device = Device(APPLE)
    assert (device.float64, device.wide) == (False, torch.float32)
    assert accelerator.name(APPLE) == "mps:0 (Apple M3)"
    assert device.memory() == {"allocated": 11, "reserved": 12}
    assert (device.utilization(), device.allocations) == (None, None)


def test_a_cpu() -> None:
    device = Device(torch.device("cpu"))
    assert not device.is_accelerator
    assert (device.name, device.memory(), device.wide) == ("cpu", {}, torch.float64)


@pytest.mark.parametrize(
    ("formats", "there"),
    [((torch.float8_e4m3fn,), True), ((torch.float8_e4m3fnuz,), True), ((), False)],
    ids=["H100", "gfx942", "gfx90a"],
)
def test_fp8_is_there_where_torchs_product_is(
    pretend: Any, monkeypatch: pytest.MonkeyPatch, formats: tuple[torch.dtype, ...], there: bool
) -> None:
    def product(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        if a.dtype not in formats:
            raise RuntimeError(
                "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
            )
        return (a.float() @ b.float()).to(options["out_dtype"])

    pretend(GPU, get_device_name=lambda device: "AMD Instinct MI210")
    monkeypatch.setattr(torch, "_scaled_mm", product)
    assert accelerator.has_fp8(GPU) is there
    group = Group(Environment("single"), GPU)
    if there:
        assert not float8._emulated(FP8(), group)
    else:
        assert float8._emulated(FP8(), group)
        with pytest.raises(ValueError, match=re.escape("FP8(emulate=False): cuda:3 (AMD Instinct MI210) has no fp8")):
            float8._emulated(FP8(emulate=False), group)


def test_the_real_product_takes_these_arguments() -> None:
    """A CPU computes it, if not in 8 bits."""
    ones, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    product = torch._scaled_mm(ones, ones.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    assert (product == 16).all()
    assert not accelerator.has_fp8(torch.device("cpu"))
