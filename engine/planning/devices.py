"""Devices and the machines that they stand in: memory, speed and links, each with its source. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.config.file_size import size_in_bytes
from engine.utils.errors import nearest

_GIB = 2**30
_TERA = 1e12
DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")
"""Keys of :attr:`Hardware.peaks`. ``tf32``: products of float32 matrices with ``matmul_precision="high"``."""
_SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    **{name: name for name in DTYPES},
}


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two ranks."""

    bandwidth: float
    """Bytes a second of one device in one direction, as the vendor states it."""
    latency: float
    """Seconds of one step of a ring."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The share of stated numbers that a well written training reaches; 1 for numbers that were measured."""

    compute: float = 0.7
    """Of the dense peak, by products of large matrices: cuBLAS reaches 0.6 to 0.8 of an A100's or H100's at their power limit."""
    memory: float = 0.8
    """Of the memory's bandwidth, by operations on each element (STREAM reaches 0.85 to 0.9)."""
    links: float = 0.8
    """Of a link's bandwidth, by collectives of large tensors (``busbw`` of nccl-tests on DGX A100 and H100: 0.75 to 0.85)."""


_MEASURED = Reached(1.0, 1.0, 1.0)
_PREFIX = "measured:"
"""Before a description: its numbers are what the machine reaches, as ``fit plan --measure`` prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, and the links between several."""

    name: str
    memory: int
    """Bytes that ``torch.cuda.mem_get_info`` reports as total, a little less than the vendor's; an out-of-memory error names the same number."""
    peaks: Mapping[str, float]
    """Dense (without sparsity) floating point operations a second of matrix products, by :data:`DTYPES`."""
    bandwidth: float
    """Bytes a second to and from the device's memory."""
    within: Link
    """Between two devices of a node."""
    between: Link
    """Between devices of two nodes: the network card's bandwidth that one device has for itself."""
    per_node: int
    """Devices of a node, unless ``--nodes`` says otherwise."""
    caching: bool = True
    """Whether torch's caching allocator rounds what is asked for: on GPUs."""
    reserved: int = _GIB // 2
    """Bytes that the driver's context and the kernels take besides torch's allocator."""
    dispatch: float = 5e-6
    """Seconds that the host needs to start one operation: a lower bound of each operation's time in eager mode."""
    reached: Reached = Reached()
    source: str = ""
    notes: tuple[str, ...] = field(default=())
    """What is assumed beyond the source."""

    def peak(self, dtype: str, tf32: bool = False) -> float:
        """Operations a second in a dtype of torch (``"bfloat16"``); what the device lacks runs at the rate of float32, and integers too."""
        name = "float8" if dtype.startswith("float8") else dtype
        if name == "float32" and tf32:
            name = "tf32"
        return self.peaks.get(name, self.peaks["float32"])


def _tera(fp32: float, **others: float) -> dict[str, float]:
    return {_SHORT[name]: value * _TERA for name, value in {"fp32": fp32, **others}.items()}


# Latency of a step: NCCL's own model (src/graph/tuning.cc, ring, LL128): 1.9 us over NVLink, 2.5 us over PCIe, 4 us over the network.
def _nvlink(giga: float) -> Link:
    return Link(giga * 1e9, 1.9e-6)


def _pcie(giga: float) -> Link:
    return Link(giga * 1e9, 2.5e-6)


def _net(gigabits: float) -> Link:
    return Link(gigabits * 1e9 / 8, 4e-6)


_HOPPER = {"tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_AMPERE = {"tf32": 156, "fp16": 312, "bf16": 312}
_CARD_NETWORK = "between nodes: 100 Gbit/s for 8 devices, as the source does not say"

_TABLE = (
    Hardware(
        name="h100",
        memory=int(79.1 * _GIB),
        peaks=_tera(67, fp64=67, **_HOPPER),
        bandwidth=3.35e12,
        within=_nvlink(450),
        between=_net(400),
        per_node=8,
        source="NVIDIA H100 data sheet (SXM, 80 GB) and DGX H100 data sheet (8 ConnectX-7 of 400 Gbit/s)",
    ),
    Hardware(
        name="h100-pcie",
        memory=int(79.1 * _GIB),
        peaks=_tera(51, fp64=51, tf32=378, fp16=756, bf16=756, fp8=1513),
        bandwidth=2.0e12,
        within=_pcie(64),
        between=_net(12.5),
        per_node=8,
        source="NVIDIA H100 data sheet (PCIe, 80 GB)",
        notes=("no NVLink bridges", _CARD_NETWORK),
    ),
    Hardware(
        name="h200",
        memory=int(139.8 * _GIB),
        peaks=_tera(67, fp64=67, **_HOPPER),
        bandwidth=4.8e12,
        within=_nvlink(450),
        between=_net(400),
        per_node=8,
        source="NVIDIA H200 data sheet (SXM, 141 GB) and DGX H200 data sheet (8 ConnectX-7 of 400 Gbit/s)",
    ),
    Hardware(
        name="b200",
        memory=int(178.3 * _GIB),
        peaks=_tera(80, fp64=40, tf32=1100, fp16=2250, bf16=2250, fp8=4500),
        bandwidth=8.0e12,
        within=_nvlink(900),
        between=_net(400),
        per_node=8,
        source="NVIDIA Blackwell architecture brief (HGX B200) and DGX B200 data sheet (8 ConnectX-7 of 400 Gbit/s)",
    ),
    Hardware(
        name="a100-80gb",
        memory=int(79.1 * _GIB),
        peaks=_tera(19.5, fp64=19.5, **_AMPERE),
        bandwidth=2.039e12,
        within=_nvlink(300),
        between=_net(200),
        per_node=8,
        source="NVIDIA A100 data sheet (SXM, 80 GB) and DGX A100 data sheet (8 ConnectX of 200 Gbit/s)",
    ),
    Hardware(
        name="a100-40gb",
        memory=int(39.4 * _GIB),
        peaks=_tera(19.5, fp64=19.5, **_AMPERE),
        bandwidth=1.555e12,
        within=_nvlink(300),
        between=_net(200),
        per_node=8,
        source="NVIDIA A100 data sheet (SXM, 40 GB) and DGX A100 data sheet (8 ConnectX-6 of 200 Gbit/s)",
    ),
    Hardware(
        name="mi300x",
        memory=int(191.6 * _GIB),
        peaks=_tera(163.4, fp64=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9),
        bandwidth=5.3e12,
        within=_nvlink(448),
        between=_net(400),
        per_node=8,
        source="AMD Instinct MI300X data sheet and MI300X platform data sheet (7 Infinity Fabric links of 64 GB/s in each direction)",
        notes=("between nodes: one 400 Gbit/s card for each device", "latency within a node as over NVLink"),
    ),
    Hardware(
        name="mi250x",
        memory=int(63.9 * _GIB),
        peaks=_tera(47.9, fp64=47.9, fp16=191.5, bf16=191.5),
        bandwidth=1.6e12,
        within=_nvlink(50),
        between=_net(100),
        per_node=8,
        source="AMD Instinct MI250X data sheet, one of its two dies, as torch sees it; Frontier user guide (4 cards of 200 Gbit/s for 8 dies)",
        notes=("within a node: one Infinity Fabric link of 50 GB/s", "latency within a node as over NVLink"),
    ),
    Hardware(
        name="l40s",
        memory=int(44.3 * _GIB),
        peaks=_tera(91.6, tf32=183, fp16=362, bf16=362, fp8=733),
        bandwidth=864e9,
        within=_pcie(32),
        between=_net(12.5),
        per_node=8,
        source="NVIDIA L40S data sheet (PCIe 4.0)",
        notes=(_CARD_NETWORK,),
    ),
    Hardware(
        name="a10g",
        memory=int(22.0 * _GIB),
        peaks=_tera(31.5, tf32=35, fp16=70, bf16=70),
        bandwidth=600e9,
        within=_pcie(32),
        between=_net(12.5),
        per_node=8,
        source="NVIDIA A10G data sheet; AWS G5 instances (g5.48xlarge: 8 devices, 100 Gbit/s)",
    ),
    Hardware(
        name="t4",
        memory=int(14.5 * _GIB),
        peaks=_tera(8.1, fp16=65),
        bandwidth=300e9,
        within=_pcie(16),
        between=_net(12.5),
        per_node=8,
        source="NVIDIA T4 data sheet (PCIe 3.0); AWS G4 instances (g4dn.metal: 8 devices, 100 Gbit/s)",
    ),
    Hardware(
        name="v100",
        memory=int(31.7 * _GIB),
        peaks=_tera(15.7, fp64=7.8, fp16=125),
        bandwidth=900e9,
        within=_nvlink(150),
        between=_net(50),
        per_node=8,
        source="NVIDIA V100 data sheet (SXM2, 32 GB) and DGX-1 data sheet (4 cards of 100 Gbit/s for 8 devices)",
    ),
    Hardware(
        name="rtx4090",
        memory=int(23.5 * _GIB),
        peaks=_tera(82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3),
        bandwidth=1.008e12,
        within=_pcie(32),
        between=_net(12.5),
        per_node=8,
        source="NVIDIA Ada architecture white paper (fp16 with fp32 accumulation, PCIe 4.0)",
        notes=(_CARD_NETWORK,),
    ),
    Hardware(
        name="cpu",
        memory=64 * _GIB,
        peaks=_tera(1.0, fp64=0.5),
        bandwidth=50e9,
        within=Link(5e9, 50e-6),
        between=_net(10),
        per_node=1,
        caching=False,
        reserved=0,
        source="assumed: 16 cores with AVX2, two channels of DDR4-3200, gloo over the loopback; fit plan --measure measures this machine",
    ),
)
DEVICES: dict[str, Hardware] = {each.name: each for each in _TABLE}
"""By the name that ``--device`` takes."""
ALIASES = {
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "h200-sxm": "h200",
    "a100": "a100-80gb",
    "a100-80": "a100-80gb",
    "a100-40": "a100-40gb",
    "v100-32gb": "v100",
    "4090": "rtx4090",
    "rtx-4090": "rtx4090",
}


def hardware(wanted: str | Hardware) -> Hardware:
    """The device of a name of :data:`DEVICES`, or of a description.

    Args:
        wanted: ``"h100"``; ``"80GiB,1e15,3e12"``: memory, floating point operations a second (in every dtype) and bytes a second of its memory;
            ``"80GiB,bf16=1e15,fp32=6e13,3e12"``: the operations by dtype; ``"measured:8GiB,fp32=6e10,2e10"``: the numbers are what is reached, not
            stated; ``"h100,96GB"``: a known device with another memory.

    Raises:
        ValueError: neither; the message names the nearest name.
    """
    if isinstance(wanted, Hardware):
        return wanted
    given = str(wanted)
    first, *rest = (part.strip() for part in given.removeprefix(_PREFIX).split(","))
    name = first.lower().replace("_", "-").replace(" ", "-")
    found = None if given.startswith(_PREFIX) else DEVICES.get(ALIASES.get(name, name))
    if found is not None:
        if not rest:
            return found
        if len(rest) == 1:
            return replace(found, memory=_memory(rest[0], wanted), name=f"{found.name} with {rest[0]}")
        raise ValueError(f"--device {wanted!r}: after a device's name only its memory may follow, as in {name},80GiB")
    if not rest:
        names = ", ".join(DEVICES)
        raise ValueError(
            f"--device {wanted!r} is unknown{nearest(name, [*DEVICES, *ALIASES])}; possible: {names}, or memory, operations a second and "
            "bytes a second: 80GiB,1e15,3e12"
        )
    return _described(wanted, first, rest)


def _described(wanted: str, memory: str, rest: list[str]) -> Hardware:
    *speeds, bandwidth = rest
    if not speeds:
        raise ValueError(
            f"--device {wanted!r}: give memory, operations a second and bytes a second, as in 80GiB,1e15,3e12"
        )
    peaks: dict[str, float] = {}
    for each in speeds:
        dtype, equals, number = each.partition("=")
        if not equals and len(speeds) > 1:
            raise ValueError(
                f"--device {wanted!r}: with several numbers name their dtypes, as in bf16={each},fp32=6e13"
            )
        if equals and dtype not in _SHORT:
            raise ValueError(f"--device {wanted!r}: unknown dtype {dtype!r}{nearest(dtype, _SHORT)}")
        value = _number(number if equals else each, wanted, "operations a second")
        peaks |= {_SHORT[dtype]: value} if equals else dict.fromkeys(DTYPES, value)
    if "float32" not in peaks:
        peaks["float32"] = min(peaks.values())
    return Hardware(
        name=wanted,
        memory=_memory(memory, wanted),
        peaks=peaks,
        bandwidth=_number(bandwidth, wanted, "bytes a second"),
        within=DEVICES["h100"].within,
        between=DEVICES["h100"].between,
        per_node=8,
        reached=_MEASURED if wanted.startswith(_PREFIX) else Reached(),
        source="given; links between devices as those of h100, unless --network gives others",
    )


def network(text: str, device: Hardware) -> Hardware:
    """``device`` with other links.

    Args:
        text: ``"450GB/s,50GB/s"``: of one device, in one direction, within and between nodes; ``"450e9:2e-6,400Gbit/s:5e-6"``: with the seconds of a
            step of a ring. One link alone holds for both. With ``measured:`` before it, what collectives reach rather than what the vendor states.
        device: whose latencies hold where none is given.

    Raises:
        ValueError: it is not such a text.
    """
    parts = [part.strip() for part in text.removeprefix(_PREFIX).split(",")]
    if len(parts) > 2 or not all(parts):
        raise ValueError(f"--network {text!r}: give one or two links, within and between nodes: 450GB/s,50GB/s")
    links = [
        _link(part, old, text)
        for part, old in zip(parts * 2 if len(parts) == 1 else parts, (device.within, device.between), strict=False)
    ]
    reached = replace(device.reached, links=1.0 if text.startswith(_PREFIX) else Reached().links)
    return replace(device, within=links[0], between=links[1], reached=reached)


def _link(part: str, old: Link, text: str) -> Link:
    rate, colon, latency = part.partition(":")
    return Link(_rate(rate, text), _number(latency, text, "seconds") if colon else old.latency)


def _rate(text: str, whole: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)\s*([kKMGT]i?)?(B|bit|b)?(?:/s|ps)?", text.strip())
    if found is None:
        raise ValueError(f"{whole!r}: {text!r} is not a bandwidth: give bytes a second (450e9), 450GB/s, or 400Gbit/s")
    scale = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    prefix = found[2] or ""
    unit = 1024.0 ** "_KMGT".index(prefix[0].upper()) if prefix.endswith("i") else scale[prefix]
    value = _number(found[1], whole, "bytes a second") * unit
    return value / 8 if found[3] in ("bit", "b") else value


def rate(text: str, option: str) -> float:
    """Bytes a second: ``"5GB/s"``, ``"40Gbit/s"``, ``5e9``. ``option``: named in errors."""
    return _rate(text, f"{option} {text}")


def _number(text: str, whole: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{whole!r}: {text!r} is not a positive number of {what}")
    return value


def _memory(text: str, whole: str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError:
        raise ValueError(
            f"--device {whole!r}: {text!r} is not a size: give bytes, or text such as 80GiB or 80GB"
        ) from None
