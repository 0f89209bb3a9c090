"""What a device tells about itself. Modules of devices that this machine lacks are pretended."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.internals import group_of_one

from engine import FP8, Device
from engine.cli import env
from engine.transforms import float8
from engine.utils import accelerator, device_names

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
    group = group_of_one(GPU)
    if there:
        assert not float8._emulated(FP8(), group)
    else:
        assert float8._emulated(FP8(), group)
        with pytest.raises(ValueError, match=re.escape("FP8(emulate=False): cuda:3 (AMD Instinct MI210) has no fp8")):
            float8._emulated(FP8(emulate=False), group)


def test_a_cpu_has_no_fp8() -> None:
    """It computes the product (``test_torch_private.py``), if not in 8 bits."""
    assert not accelerator.has_fp8(torch.device("cpu"))


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A processor that offers AMX, as Linux describes it."""
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 amx_bf16 avx512_fp16 amx_tile amx_int8\n")
    monkeypatch.setattr(device_names, "_CPUINFO", tmp_path / "cpuinfo")
    return monkeypatch


def test_a_product_that_ends_a_process_is_tried_in_another_one(amx: pytest.MonkeyPatch) -> None:
    assert not device_names.bf16_ends_the_process()  # no AMX here: the child computes it
    amx.setattr(device_names, "_BF16_PRODUCT", "raise SystemExit(4)")
    assert not device_names.bf16_ends_the_process()
    amx.setattr(device_names, "_BF16_PRODUCT", KILLED)
    assert device_names.bf16_ends_the_process()


def test_a_torch_beside_the_run_is_not_imported(amx: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("open('ran', 'w')")
    amx.chdir(tmp_path)
    assert not device_names.bf16_ends_the_process()
    assert not (tmp_path / "ran").exists()


def test_fit_env_names_the_remedy_and_computes_no_such_product(amx: pytest.MonkeyPatch) -> None:
    amx.setattr(device_names, "_BF16_PRODUCT", KILLED)
    amx.setattr(accelerator, "capabilities", None)  # would be an error
    amx.setattr(accelerator, "present", lambda: None)
    report = env.collect({})
    assert report["hints"] == [device_names.BF16_REMEDY]
    assert "hint: matrix products in bf16 end a process on this CPU (SIGILL)" in env.as_text(report)
    assert not {"cpu has", "cpu lacks"} & set(report["devices"])


def test_without_amx_no_process_is_started(amx: pytest.MonkeyPatch, tmp_path: Path) -> None:
    amx.setattr(device_names, "_BF16_PRODUCT", KILLED)
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 avx512_bf16\n")
    assert not device_names.bf16_ends_the_process()
    amx.setattr(device_names, "_CPUINFO", tmp_path / "none")  # not Linux
    assert not device_names.bf16_ends_the_process()
