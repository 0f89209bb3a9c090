"""Converts Accelerate's configuration file to settings of this library, with notes on keys without a meaning here and a list of refused keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.compat.accelerate import config_strategies as strategies
from engine.compat.key_file import KeyFile, flag
from engine.config import yaml_text

MACHINES = {
    "NO": "auto",
    "MULTI_CPU": "cpu",
    "MULTI_GPU": "cuda",
    "MULTI_XPU": "xpu",
    "MULTI_NPU": "npu",
    "MULTI_HPU": "hpu",
    "FSDP": "gpu",
    "DEEPSPEED": "gpu",
    "MEGATRON_LM": "gpu",
    "TP": "gpu",
}
"""``distributed_type`` with a counterpart -> our setting ``accelerator``."""
_CLOUD = ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env")
_SECTIONS = (
    *("dynamo_config", "tp_config", "fp8_config", "deepspeed_config"),
    *("fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config"),
)


def default_path(environ: Mapping[str, str]) -> Path:
    """The path where Accelerate looks for its configuration file by default."""
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = Path(environ.get("HF_HOME") or cache / "huggingface").expanduser() / "accelerate"
    files = [folder / name for name in ("default_config.yaml", "default_config.json") if (folder / name).is_file()]
    return files[0] if files else folder / "default_config.yaml"


def read(path: Path) -> KeyFile:
    """Read Accelerate's configuration file; return settings, notes and refusals.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a configuration file of Accelerate.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {path}: give the file that 'accelerate config' has written, --from-accelerate PATH"
        )
    origin = f"file {path}"
    node = yaml_text.compose(yaml_text.read_file(path), origin, lines=True)
    values = None if node is None else yaml_text.construct(node)
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise ValueError(
            f"{origin}: has no 'distributed_type', which every file of Accelerate has; is it the right file?"
        )
    return convert(values, origin, yaml_text.origins_of_keys(node, origin, lines=True))


def convert(values: Mapping[str, Any], origin: str, origins: Mapping[str, str] | None = None) -> KeyFile:
    """Convert values with the keys of Accelerate's configuration file to settings, notes and refusals.

    Args:
        origin: the source of the values, for messages.
        origins: the source (file and line) of each key, if known.
    """
    file = KeyFile(values, origin, origins or {})
    kind = str(file.take_value("distributed_type"))
    if file.take_value("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        file.refuse("compute_environment", "jobs of a cloud service are not started from here")
    if kind not in MACHINES:
        file.refuse("distributed_type", f"has no counterpart; possible: {', '.join(MACHINES)}")
    _processes(file, kind)
    _precision(file)
    _compile(file)
    strategies.convert(file, kind)
    _convert_remaining(file)
    file.finish(_SECTIONS)
    return file


def _processes(file: KeyFile, kind: str) -> None:
    """Set the accelerator and the devices, and build the command for the launcher, which sets what differs between machines."""
    cpu = flag(file.take_value("use_cpu", False)) or kind == "MULTI_CPU"
    file.set("accelerator", "cpu" if cpu else MACHINES.get(kind, "auto"))
    count, machines = (
        file.take_value("num_processes", 1 if kind == "NO" else -1),
        int(file.take_value("num_machines", 1)),
    )
    if kind == "NO" and count not in (1, -1):
        file.note("num_processes", "Accelerate starts one process for distributed_type: NO")
        count = 1
    ids = _gpu_ids(file)
    per_machine = max(int(count) // machines, 1)
    if ids is not None and count != -1 and len(ids) != per_machine:
        file.refuse(
            "gpu_ids", f"names {len(ids)} devices for {per_machine} processes on a machine; make the numbers equal"
        )
    port, address = file.take_value("main_process_port"), file.take_value("main_process_ip")
    file.take_value("machine_rank")
    words = ["fit launch"]
    if count != -1:
        words.append(f"--nproc {per_machine}")
    else:
        file.note("num_processes", "is given to the launcher: fit launch --nproc N")
    if machines > 1:
        words += [f"--nnodes {machines}", f"--rdzv {address or 'HOST'}:{port or 29500}"]
        file.notes.append(
            f"num_machines: {machines}, main_process_ip: {address}, main_process_port: {port}: the launcher's, in the line above"
        )
        file.note("machine_rank", "is found at the rendezvous; the same line is run on every machine")
        if count != -1:
            file.notes.append(f"num_processes: {count}: the launcher's, {per_machine} on each machine")
    elif count != -1:
        file.set("devices", ids if ids is not None else per_machine)
        if address or port:
            file.notes.append(
                f"main_process_ip: {address}, main_process_port: {port}: on one machine a free port is found"
            )
    if machines > 1 and ids is not None:
        file.set("devices", ids)
    file.launch = " ".join([*words, "script.py"])


def _gpu_ids(file: KeyFile) -> list[int] | None:
    value = file.take_value("gpu_ids")
    if value is None or value == "all" or file.settings.get("accelerator") == "cpu":
        return None
    try:
        return [int(part) for part in str(value).split(",")]
    except ValueError:
        file.refuse("gpu_ids", "is not a list of device indices")
        return None


def _precision(file: KeyFile) -> None:
    """Set ``precision`` from ``mixed_precision``, or the older key ``fp16``."""
    name = file.take_value("mixed_precision")
    if "fp16" in file.values and name is None:
        name = "fp16" if flag(file.take_value("fp16")) else None
    if name is not None and str(name).lower() not in ("no", "fp16", "bf16", "fp8") and name is not False:
        file.refuse("mixed_precision", "is unknown; possible: no, fp16, bf16, fp8")
        return
    if name is None or name is False or name == "no":  # YAML's "no" without quotes is false
        file.drop("fp8_config")
        return
    if str(name).lower() != "fp8":
        file.set("precision", {"fp16": "16-mixed", "bf16": "bf16-mixed"}[str(name).lower()])
        file.drop("fp8_config")
        return
    file.set("precision", _fp8(file.section("fp8_config", "fp8_")))


_OTHER_BACKENDS = (
    *("optimization_level", "opt_level"),
    *(
        "use_autocast_during_eval",
        "margin",
        "interval",
        "override_linear_precision",
        "fp8_format",
        "use_mxfp8_block_scaling",
    ),
    *("amax_history_len", "amax_history_length", "amax_compute_algo", "amax_compute_algorithm"),
)
"""Keys of the fp8 backends MS-AMP and Transformer Engine."""


def _fp8(part: Any) -> Any:
    """The value of ``precision`` for the section ``fp8_config``."""
    backend = str(part.take_value("backend", "AO")).upper()
    options: dict[str, Any] = {"name": "fp8-mixed"}
    if backend == "AO":
        gather = part.take_value("enable_fsdp_float8_all_gather")
        if gather is not None:
            options["all_gather"] = flag(gather)
        part.note("pad_inner_dim", "layers whose sizes are not divisible by 16 stay in bf16, as in Accelerate")
        part.remark(
            "Accelerate leaves the first and the last linear layer in bf16; name such layers in precision.ignore"
        )
    else:
        part.refuse("backend", "has no counterpart; possible: AO (torchao)")
    part.drop_rest(*_OTHER_BACKENDS)
    return options if len(options) > 1 else "fp8-mixed"


def _compile(file: KeyFile) -> None:
    """Set ``compile`` from ``dynamo_config``, or the older key ``dynamo_backend``."""
    if "dynamo_backend" in file.values:  # the key of older versions
        backend = str(file.take_value("dynamo_backend")).lower()
        part = None
    else:
        part = file.section("dynamo_config", "dynamo_")
        backend = str(part.take_value("backend", "no")).lower()
    if backend in ("no", "false"):
        file.drop("dynamo_config")
        return
    options: dict[str, Any] = {"backend": backend, "dynamic": False}
    if part is not None:
        options["dynamic"] = flag(part.take_value("use_dynamic", False))
        if (mode := part.take_value("mode")) not in (None, "default"):
            options["mode"] = mode
        if flag(part.take_value("use_fullgraph", False)):
            options["fullgraph"] = True
        if flag(part.take_value("use_regional_compilation", False)):
            options["blocks"] = True
    file.set("compile", options)


def _convert_remaining(file: KeyFile) -> None:
    """Convert the keys about accumulation, debugging, rendezvous and MPI, and note or refuse those for TPUs."""
    steps = file.take_value("gradient_accumulation_steps")
    if steps not in (None, "auto"):
        file.set("accumulate_grad_batches", int(steps))
    if flag(file.take_value("debug", False)):
        file.set("debug", True)
    for key in ("rdzv_backend", "same_network"):
        if int(file.take_value("num_machines", 1)) > 1:
            file.note(key, "the rendezvous of 'fit launch' needs no choice")
        file.take_value(key)
    if flag(file.take_value("enable_cpu_affinity", False)):
        file.notes.append(
            "enable_cpu_affinity: true: bind processes with the launcher or with numactl; it changes no result"
        )
    if file.take_value("main_training_function", "main") != "main":
        file.notes.append("main_training_function: for TPUs only")
    if file.take_value("downcast_bf16", False) not in (False, "no", "false"):
        file.notes.append("downcast_bf16: for TPUs only")
    for key in _CLOUD:
        value = file.take_value(key)
        if value not in (None, False, "", [], [""]):
            file.refuse(key, "is for TPUs, which are not supported")
    mpi = file.section("mpirun_config", "mpirun_")
    if mpi.values:
        host = mpi.take_value("hostfile")
        file.notes.append(
            f"mpirun_config: start the processes with mpirun --hostfile {host} -n N python script.py; they are recognised"
        )
        mpi.drop_rest("ccl")
