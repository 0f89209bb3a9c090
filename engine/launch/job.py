"""The job of ``fit launch``: it is read from the options and torchrun's variables, and checked before anything starts."""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.config.resolve import SECTIONS, resolve
from engine.utils.errors import nearest


class LaunchError(ValueError):
    """The job cannot be started as requested. The message says what was requested, what was found and what to do."""


@dataclass(frozen=True)
class Job:
    """A job as this machine's agent sees it. Created by :func:`make_job`."""

    command: tuple[str, ...]
    """Program and arguments of each rank."""
    nproc: int = 1
    """Number of ranks on this machine."""
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    """This machine's number; ``None``: machines are numbered in the order of their addresses."""
    endpoint: tuple[str, int] | None = None
    """Host and port of the rendezvous; ``None``: there is only one machine, which uses any free port."""
    run_id: str | None = None
    """The job's name, if one was given."""
    max_restarts: int = 0
    grace_s: float = 120.0
    """Time (s) that ranks get to save after SIGTERM or Ctrl-C."""
    dead_after_s: int = 10
    """Silence (s) after which a machine counts as lost."""
    join_wait_s: int = 5
    """Time (s) that an elastic job with enough machines waits for more."""
    join_timeout_s: int = 600
    """Time (s) within which enough machines must have joined."""
    log_dir: Path = Path("runs/logs")
    show: frozenset[int] | None = None
    """The ranks whose output is shown; ``None``: all."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks, besides torchrun's."""

    @property
    def name(self) -> str:
        """The job's name at the rendezvous of several machines."""
        return self.run_id or "fit"

    @property
    def elastic(self) -> bool:
        """Whether the number of machines may change."""
        return self.min_nodes < self.max_nodes


def make_job(options: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """Create the job from the ``options`` of ``fit launch`` and torchrun's variables in ``environ``.

    Raises:
        LaunchError: a value or combination is invalid, the script is missing, the configuration is invalid, or there are more
            processes than GPUs.
    """
    read = _Reader(options, environ)
    command = command_of(options)
    min_nodes, max_nodes = nodes_of(*read("nnodes", "PET_NNODES", "1"))
    restarts = _whole_number(*read("max_restarts", "PET_MAX_RESTARTS", "0"), minimum=0)
    node_rank, endpoint = _rendezvous(read, min_nodes, max_nodes)
    for name in ("grace", "dead_after", "join_wait", "join_timeout"):
        if getattr(options, name) <= 0:
            raise LaunchError(f"--{name.replace('_', '-')} {getattr(options, name):g}: it must be more than 0 seconds")
    variables = config_variables(options.config, environ)
    accelerator = _accelerator({**environ, **variables})
    nproc = _processes(*read("nproc", "PET_NPROC_PER_NODE", "auto"), accelerator)
    return Job(
        command=command,
        nproc=nproc,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=node_rank,
        endpoint=endpoint,
        run_id=read("rdzv_id", "PET_RDZV_ID", "")[1] or None,
        max_restarts=restarts,
        grace_s=options.grace,
        dead_after_s=options.dead_after,
        join_wait_s=options.join_wait,
        join_timeout_s=options.join_timeout,
        log_dir=_log_dir(options.log_dir),
        show=_ranks_to_show(options.show),
        variables=variables
        if "OMP_NUM_THREADS" in environ
        else {**variables, "OMP_NUM_THREADS": str(max(1, cores() // nproc))},
    )


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Reader:
    """Reads options: returns the name for messages and the value of the option, or else of torchrun's variable, or else the default."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self.options, self.environ = options, environ

    def __call__(self, option: str, variable: str, default: str) -> tuple[str, str]:
        value = getattr(self.options, option)
        if value is not None:
            return f"--{option.replace('_', '-')}", str(value)
        return variable, self.environ.get(variable) or default


def _whole_number(name: str, text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise LaunchError(f"{name} {text!r}: a whole number is needed") from None
    if value < minimum:
        raise LaunchError(f"{name} {value}: it must be at least {minimum}")
    return value


def nodes_of(name: str, text: str) -> tuple[int, int]:
    """The smallest and the largest number of machines, from ``N`` or ``MIN:MAX``; ``name``: the option's name in errors.

    Raises:
        LaunchError: ``text`` is neither, or MIN is larger than MAX.
    """
    low, colon, high = text.partition(":")
    min_nodes, max_nodes = _whole_number(name, low, 1), _whole_number(name, high if colon else low, 1)
    if min_nodes > max_nodes:
        raise LaunchError(f"{name} {text!r}: MIN:MAX with MIN > MAX; did you mean {high}:{low}?")
    return min_nodes, max_nodes


def _rendezvous(read: _Reader, min_nodes: int, max_nodes: int) -> tuple[int | None, tuple[str, int] | None]:
    """This machine's number, if it is fixed, and the address of the rendezvous, if one is needed."""
    endpoint = _endpoint(read)
    name, text = read("node_rank", "PET_NODE_RANK", "")
    node_rank = _whole_number(name, text, 0) if text else None
    if node_rank is not None and node_rank >= max_nodes:
        raise LaunchError(
            f"{name} {node_rank}: the machines are numbered 0 to {max_nodes - 1} ({_option_or_variable(read, 'nnodes', 'PET_NNODES', '1')})"
        )
    if node_rank is not None and min_nodes < max_nodes:
        raise LaunchError(
            f"{name} {node_rank} with --nnodes {min_nodes}:{max_nodes}: an elastic job's machines have no fixed numbers; leave it out"
        )
    if endpoint is None and max_nodes > 1:
        raise LaunchError(
            f"{_option_or_variable(read, 'nnodes', 'PET_NNODES', '1')}: several machines need a common address: --rdzv HOST:PORT, "
            "a port of one of them, the same on all"
        )
    return (None, endpoint) if max_nodes == 1 else (node_rank, endpoint)


def _option_or_variable(read: _Reader, option: str, variable: str, default: str) -> str:
    """The setting as the user wrote it, for messages: ``--nnodes 2`` or ``PET_NNODES=2``."""
    name, text = read(option, variable, default)
    return f"{name}{' ' if name.startswith('-') else '='}{text}"


def _endpoint(read: _Reader) -> tuple[str, int] | None:
    """The address of the rendezvous, if one is given."""
    environ = read.environ
    address, port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT")
    name, text = read("rdzv", "PET_RDZV_ENDPOINT", "")
    backend = environ.get("PET_RDZV_BACKEND") or "c10d"
    if name == "PET_RDZV_ENDPOINT" and backend not in ("c10d", "static"):
        raise LaunchError(
            f"PET_RDZV_BACKEND={backend!r}: only c10d and static are known here; use torchrun for others, or unset it"
        )
    if text:
        endpoint = _host_and_port(name, text)
        if (
            name == "PET_RDZV_ENDPOINT"
            and address
            and (address, port or str(endpoint[1])) != (endpoint[0], str(endpoint[1]))
        ):
            raise LaunchError(
                f"PET_RDZV_ENDPOINT={text!r} and PET_MASTER_ADDR={address!r}, PET_MASTER_PORT={port!r} name different addresses; "
                "unset one, or give --rdzv HOST:PORT"
            )
        return endpoint
    if address:
        return _host_and_port("PET_MASTER_ADDR and PET_MASTER_PORT", f"{address}:{port or 29500}")
    if port:
        raise LaunchError(f"PET_MASTER_PORT={port!r} without PET_MASTER_ADDR: set both, or give --rdzv HOST:PORT")
    return None


def _host_and_port(name: str, text: str) -> tuple[str, int]:
    match = re.fullmatch(r"\[?([^\[\]]+?)\]?(?::(\d+))?", text)
    if match is None or (":" in match[1] and not text.startswith("[")):
        raise LaunchError(f"{name} {text!r}: HOST:PORT is needed, or [IPv6]:PORT")
    port = int(match[2] or 29400)
    if not 0 < port < 65536:
        raise LaunchError(f"{name} {text!r}: a port is a number from 1 to 65535")
    return match[1], port


def _processes(name: str, text: str, accelerator: str) -> int:
    """The number of ranks on this machine."""
    if text == "cpu":
        return cores()
    if text not in ("auto", "gpu"):
        try:
            int(text)
        except ValueError:
            raise LaunchError(
                f"{name} {text!r}: a number, auto, gpu or cpu is needed{nearest(text, ('auto', 'gpu', 'cpu'))}"
            ) from None
        return check_devices(name, _whole_number(name, text, 1), gpus(), accelerator)
    devices = gpus() if accelerator != "cpu" or text == "gpu" else 0
    if text == "gpu" and not devices:
        raise LaunchError(
            f"{name} gpu: torch sees no GPU on this machine (see fit env); give a number to train on the CPU"
        )
    return devices or 1


def check_devices(name: str, nproc: int, devices: int, accelerator: str) -> int:
    """Return ``nproc``, or raise ``LaunchError`` if there are GPUs, but too few: each rank needs its own, unless it computes on the CPU."""
    if devices and nproc > devices and accelerator != "cpu":
        raise LaunchError(
            f"{name} {nproc}: torch sees {devices} GPU(s) on this machine, and each process needs its own. Use --nproc gpu, or train on the CPU "
            "(accelerator: cpu in the configuration, or FIT_ACCELERATOR=cpu)"
        )
    return nproc


def gpus() -> int:
    """The number of the accelerator's devices that torch sees; does not initialise them."""
    import torch

    return torch.accelerator.device_count()


def _accelerator(environ: Mapping[str, str]) -> str:
    try:
        return resolve({}, environ, sections=SECTIONS).settings.accelerator
    except (ValueError, TypeError, OSError) as error:
        raise LaunchError(f"the settings are invalid on every rank: {error}") from error


def config_variables(path: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that tells the ranks the configuration file; nothing without one.

    Raises:
        LaunchError: the file does not exist.
    """
    if path is None:
        return {}
    if not path.is_file():
        raise LaunchError(f"--config {path}: there is no such file (working directory: {Path.cwd()})")
    return {"FIT_CONFIG": str(path.resolve())}


def command_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The command line of each rank.

    Raises:
        LaunchError: the script does not exist.
    """
    if options.no_python:
        return options.script, *options.args
    if options.module:
        return sys.executable, "-u", "-m", options.script, *options.args
    script = Path(options.script)
    if not script.exists():
        beside = [path.name for path in script.parent.glob("*.py")] if script.parent.is_dir() else []
        raise LaunchError(
            f"there is no script {options.script!r}{nearest(script.name, beside)} (working directory: {Path.cwd()}); a module needs -m"
        )
    return sys.executable, "-u", options.script, *options.args


def _log_dir(parent: Path | None) -> Path:
    return (parent or Path("runs/logs")) / f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"


def _ranks_to_show(text: str) -> frozenset[int] | None:
    if text == "all":
        return None
    if text == "none":
        return frozenset()
    return frozenset(_whole_number("--show", number, 0) for number in text.split(","))
