"""The known devices and the machines that they are in: memory, speed and links, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_GIB = 2**30
_TERA = 1e12
DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")
"""Keys of :attr:`Hardware.peaks`. ``tf32`` is for products of float32 matrices with ``matmul_precision="high"``."""
SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    **{name: name for name in DTYPES},
}
"""The dtype that each name on the command line stands for."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two ranks."""

    bandwidth: float
    """Bytes a second of one device in one direction, as the vendor states it."""
    latency: float
    """Seconds of one step of a ring collective."""
    kinds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Kind of collective (such as ``"reduce_scatter"``) -> its measured bandwidth and latency, where they differ from the link's."""

    def for_kind(self, kind: str) -> Link:
        """The link as it was measured with the collective ``kind``; the link itself if that was not measured."""
        return Link(*self.kinds[kind]) if kind in self.kinds else self


@dataclass(frozen=True, slots=True)
class Reached:
    """The share of the vendor's numbers that a well-written training reaches; 1 where the numbers were measured."""

    compute: float = 0.7
    """Share of the dense peak that products of large matrices reach: with cuBLAS 0.6 to 0.8 on an A100 or H100 at its power limit."""
    memory: float = 0.8
    """Share of the memory bandwidth that element-wise operations reach (STREAM: 0.85 to 0.9)."""
    links: float = 0.8
    """Share of a link's bandwidth that collectives of large tensors reach (``busbw`` of nccl-tests on DGX A100 and H100: 0.75 to 0.85)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, and the links between several."""

    name: str
    memory: int
    """Total bytes as ``torch.cuda.mem_get_info`` reports them, a little less than the vendor states; an out-of-memory error names the same number."""
    peaks: Mapping[str, float]
    """Dense (without sparsity) floating point operations a second of matrix products, by :data:`DTYPES`."""
    bandwidth: float
    """Bytes a second to and from the device's memory."""
    within: Link
    """Link between two devices of a node."""
    between: Link
    """Link between devices of two nodes: the share of the network cards' bandwidth that one device has for itself."""
    per_node: int
    """Devices of a node, unless ``--nodes`` says otherwise."""
    caching: bool = True
    """Whether torch's caching allocator, which rounds sizes up, manages the memory: true on GPUs."""
    reserved: int = _GIB // 2
    """Bytes that the driver's context and the kernels take in addition to torch's allocator."""
    dispatch: float = 5e-6
    """Seconds that the host needs to launch one operation: a lower bound of each operation's time in eager mode."""
    dtensor: float = 50e-6
    """Additional seconds that the host needs for an operation on a ``DTensor``, to derive the operation on the local tensor: 30 to 70 us on a
    server."""
    to_host: float = 32e9
    """Bytes a second between the device's and the host's memory, in one direction: PCIe 4.0 with 16 lanes, unless the source says more."""
    host_memory: float = 50e9
    """Bytes a second of the host's memory for each device, assumed: 400 GB/s for 8."""
    is_host: bool = False
    """Whether the device is the host's own processor, which then launches operations, computes them and sends data, one after another."""
    reached: Reached = Reached()
    source: str = ""
    notes: tuple[str, ...] = field(default=())
    """Assumptions beyond the source."""

    def peak(self, dtype: str, tf32: bool = False) -> float:
        """Peak operations a second for a dtype of torch (such as ``"bfloat16"``). Dtypes that the device lacks, and integers, run at the rate of
        float32."""
        name = "float8" if dtype.startswith("float8") else dtype
        if name == "float32" and tf32:
            name = "tf32"
        return self.peaks.get(name, self.peaks["float32"])


def _tera(fp32: float, **by_dtype: float) -> dict[str, float]:
    return {SHORT[name]: value * _TERA for name, value in {"fp32": fp32, **by_dtype}.items()}


# Latency of a step: NCCL's own model (src/graph/tuning.cc, ring, LL128): 1.9 us over NVLink, 2.5 us over PCIe, 4 us over the network.
def _nvlink(gigabytes: float) -> Link:
    return Link(gigabytes * 1e9, 1.9e-6)


def _pcie(gigabytes: float) -> Link:
    return Link(gigabytes * 1e9, 2.5e-6)


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
        to_host=64e9,
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
        to_host=64e9,
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
        to_host=64e9,
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
        to_host=64e9,
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
        to_host=64e9,
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
        to_host=16e9,
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
        to_host=16e9,
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
        is_host=True,
        source="assumed: 16 cores with AVX2, two channels of DDR4-3200, gloo over the loopback; fit plan --measure measures this machine",
    ),
)
DEVICES: dict[str, Hardware] = {hardware.name: hardware for hardware in _TABLE}
"""Devices by the name that ``--device`` takes."""
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
