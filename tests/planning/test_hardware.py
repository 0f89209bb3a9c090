"""Devices by name and by description, their links, and that every number has a source."""

from __future__ import annotations

import pytest

from callbacks.throughput_monitor import known_peak
from engine.planning.device_table import ALIASES, DEVICES, DTYPES, Link, Reached
from engine.planning.devices import hardware, linked, rate

# What torch's device names are, for the table of the throughput monitor.
NAMES = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "h200": "NVIDIA H200",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "mi300x": "AMD Instinct MI300X",
    "mi250x": "AMD Instinct MI250X",
    "l40s": "NVIDIA L40S",
    "t4": "Tesla T4",
    "v100": "Tesla V100-SXM2-32GB",
    "rtx4090": "NVIDIA GeForce RTX 4090",
}


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_is_complete(name: str) -> None:
    device = DEVICES[name]
    assert device.source
    assert "float32" in device.peaks
    assert set(device.peaks) <= set(DTYPES)
    assert 2**33 < device.memory < 2**38
    assert device.between.bandwidth <= device.within.bandwidth
    assert device.between.latency >= 0 < device.within.latency


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_those_of_the_throughput_monitor(name: str) -> None:
    kinds = {"float64": "fp64", "float32": "fp32", "tf32": "tf32", "float16": "fp16", "bfloat16": "bf16"}
    for dtype, kind in kinds.items():
        if (known := known_peak(NAMES[name], kind)) is not None:
            assert DEVICES[name].peaks[dtype] == pytest.approx(known, rel=0.01)


def test_the_data_sheets_numbers() -> None:
    h100 = hardware("h100")
    assert h100.peak("bfloat16") == 989.4e12
    assert h100.peak("float32") == 67e12
    assert h100.peak("float32", tf32=True) == 494.7e12
    assert h100.peak("float8_e4m3fn") == 1978.9e12
    assert h100.bandwidth == 3.35e12
    assert (h100.within.bandwidth, h100.between.bandwidth) == (450e9, 50e9)
    assert hardware("t4").peak("bfloat16") == 8.1e12  # it has none: computed at the rate of float32
    assert hardware("V100").peak("int64") == 15.7e12


def test_aliases_are_devices() -> None:
    assert set(ALIASES.values()) <= set(DEVICES)
    assert hardware("A100") is DEVICES["a100-80gb"]
    assert hardware("RTX 4090") is DEVICES["rtx4090"]


def test_a_device_by_its_numbers() -> None:
    found = hardware("80GiB,1e15,3e12")
    assert (found.memory, found.bandwidth) == (80 * 2**30, 3e12)
    assert {found.peak(dtype) for dtype in DTYPES} == {1e15}
    assert found.reached == Reached()
    found = hardware("measured:8GB, bf16=2e14, fp32=1e13, 1e11")
    assert (found.memory, found.peak("bfloat16"), found.peak("float32")) == (8 * 10**9, 2e14, 1e13)
    assert found.peak("float16") == 1e13
    assert found.reached == Reached(1.0, 1.0, 1.0)
    host = hardware("measured:cpu,16GiB,fp32=6e10,host=2e-6,2e10")
    assert (host.caching, host.reserved, host.per_node) == (False, 0, 1)  # as of the CPU
    assert (host.memory, host.peak("float32"), host.dispatch, host.bandwidth) == (16 * 2**30, 6e10, 2e-6, 2e10)
    assert host.is_host
    assert hardware("measured:cpu,16GiB,fp32=6e10,host=2e-6,dtensor=3e-5,2e10").dtensor == 3e-5
    small = hardware("h100,96GB")
    assert (small.memory, small.bandwidth) == (96 * 10**9, 3.35e12)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("h10", "did you mean 'h100'"),
        ("mi300", "did you mean 'mi300x'"),
        ("tpu", "possible: h100"),
        ("80GiB,1e15", "memory, operations a second and bytes a second"),
        ("80Gib2,1e15,3e12", "'80Gib2' is not a size"),
        ("80GiB,fast,3e12", "'fast' is not a positive number of operations a second"),
        ("80GiB,-1,3e12", "'-1' is not a positive number"),
        ("80GiB,1e15,nan", "'nan' is not a positive number of bytes a second"),
        ("80GiB,bf17=1e15,3e12", "unknown dtype 'bf17'; did you mean 'bf16'"),
        ("80GiB,1e15,2e15,3e12", "name their dtypes"),
        ("h100,1e15,3e12", "give memory, operations a second"),
        ("80GiB,host=1e-6,3e12", "give memory, operations a second"),
        ("80GiB,3e12", "give memory, operations a second"),
        ("80GiB", "give memory, operations a second"),
        ("measured:h100", "give what was measured"),
        ("measured:h100,90GB", "give what was measured"),
    ],
)
def test_what_is_no_device(given: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^device '{given}'") as caught:
        hardware(given)
    assert words in str(caught.value)


def test_links() -> None:
    h100 = hardware("h100")
    found = linked(h100, "100GB/s,80Gbit/s")
    assert (found.within.bandwidth, found.between.bandwidth) == (100e9, 10e9)
    assert (found.within.latency, found.between.latency) == (h100.within.latency, h100.between.latency)
    found = linked(h100, "measured:1e9:5e-5")
    assert found.within == found.between
    assert (found.within.bandwidth, found.within.latency, found.reached.links) == (1e9, 5e-5, 1.0)
    assert found.reached.compute == 0.7
    assert rate("2 GiB/s", "storage") == 2 * 2**30
    assert rate(5e9, "storage") == 5e9
    found = linked(h100, "measured:1e9:5e-5,reduce_scatter=5e8:1e-4,1e8:1e-3")
    assert found.within.for_kind("reduce_scatter") == Link(5e8, 1e-4)
    assert found.within.for_kind("all_gather") is found.within
    assert found.between == Link(1e8, 1e-3)
    with pytest.raises(ValueError, match="unknown kind of collective 'reduce_scater'; did you mean 'reduce_scatter'"):
        linked(h100, "1e9,reduce_scater=1e8")
    for wrong in ("1,2,3", "", "fast", "5GB/s:soon", "0"):
        with pytest.raises(ValueError, match=f"^network '{wrong}': .*(give|positive|bandwidth)"):
            linked(h100, wrong)
