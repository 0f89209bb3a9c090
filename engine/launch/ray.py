"""``fit launch --ray``: runs the script as the workers of a Ray Train job, which Ray places, connects and restarts."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from engine.config.resolve import resolve
from engine.launch.job import LaunchError, command_of, config_variables

_PLACED = ("auto", "cpu", "gpu", "cuda")
"""Values of ``accelerator`` that work with Ray: its GPUs are CUDA's, with NCCL as their back end."""


@dataclass(frozen=True)
class RayJob:
    """A job for a Ray cluster."""

    script: str
    """The path of the script, or the name of a module."""
    arguments: tuple[str, ...]
    is_module: bool
    directory: str
    """The directory in which the script runs on every machine: the current one of the command."""
    nproc: str = "auto"
    """Number of ranks on all machines together; ``"auto"`` and ``"gpu"``: one for each GPU of the cluster."""
    accelerator: str = "auto"
    max_restarts: int = 0
    address: str | None = None
    """The cluster's address; ``None``: start a cluster on this machine for this job."""
    storage: str = "runs/logs"
    """The directory in which Ray stores its files of the job."""
    variables: Mapping[str, str] | None = None
    """Environment variables of the ranks."""


def main(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the job that the options of ``fit launch`` describe until it ends.

    Returns:
        0: all ranks succeeded; 1: one failed more often than it may be restarted, or the cluster is unreachable or too small;
        130: Ctrl-C; 143: SIGTERM.

    Raises:
        LaunchError: Ray is not installed, or an option is invalid.
    """
    command_of(options)  # checks that the script exists
    variables = {name: value for name, value in environ.items() if name.startswith("FIT_")} | config_variables(
        options.config, environ
    )
    try:
        accelerator = resolve({}, {**environ, **variables}).settings.accelerator
    except (ValueError, TypeError, OSError) as error:
        raise LaunchError(f"the settings are invalid on every rank: {error}") from error
    if options.nproc not in (None, "auto", "gpu") and not (options.nproc.isdigit() and int(options.nproc)):
        raise LaunchError(f"--nproc {options.nproc!r} with --ray: a number, auto or gpu is needed")
    if not str(options.max_restarts or "0").isdigit():
        raise LaunchError(f"--max-restarts {options.max_restarts!r}: a whole number is needed")
    if importlib.util.find_spec("ray") is None:
        raise LaunchError('--ray: Ray is not installed; install it with: pip install "fit-trainer[ray]"')
    return run(
        RayJob(
            options.script,
            tuple(options.args),
            options.module,
            os.getcwd(),
            nproc=options.nproc or "auto",
            accelerator=accelerator,
            max_restarts=int(options.max_restarts or 0),
            address=options.ray_address or environ.get("RAY_ADDRESS") or None,
            storage=str(Path(options.log_dir or "runs/logs").absolute()),
            variables=variables,
        )
    )


def run(job: RayJob) -> int:
    """Run ``job`` on its cluster, and return the exit status as :func:`main` does. A cluster that existed before keeps running."""
    import ray
    import ray.exceptions
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    signals: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        raise SystemExit

    try:
        _connect(job)
        signal.signal(signal.SIGTERM, end)  # in place of Ray's own
        workers, gpus = _size(job, ray.cluster_resources())
        print(f"fit launch: {workers} rank(s) on Ray{', one GPU each' if gpus else ''}", file=sys.stderr)
        trainer = TorchTrainer(
            _rank,
            train_loop_config={"job": job},
            # CPU tensors need gloo beside NCCL: the library's flags, and scripts that compute on the CPU.
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
            run_config=RunConfig(
                name=f"ray-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
                storage_path=job.storage,
                failure_config=FailureConfig(max_failures=job.max_restarts),
            ),
        )
        trainer.fit()
    except TrainingFailedError as error:
        print(f"fit launch: {error}", file=sys.stderr)  # the message has the tracebacks of the ranks that failed
        return 1
    except LaunchError as error:
        print(f"fit launch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit:  # `end` raised it, but Ray may have replaced it by one with status 1
        if not signals:
            raise
        return 128 + signals[0]
    finally:
        ray.shutdown()
    return 0


def _connect(job: RayJob) -> None:
    """Connect to the job's cluster, or start one on this machine."""
    import ray

    # Ray's own processes report their progress at INFO and WARNING; the ranks restore their level.
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "logging_config": ray.LoggingConfig(log_level="ERROR")}
    environment = {"env_vars": dict(job.variables or {})}
    try:
        if job.address is None:
            cores = os.cpu_count() or 1
            workers = int(job.nproc) if job.nproc.isdigit() else 1
            ray.init(
                address="local", num_cpus=max(cores, workers), include_dashboard=False, runtime_env=environment, **quiet
            )
        else:
            ray.init(address=job.address, runtime_env=environment, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(f"Ray's cluster {job.address or 'on this machine'!r} cannot be reached: {error}") from error


def _size(job: RayJob, resources: Mapping[str, float]) -> tuple[int, bool]:
    """The number of ranks on a cluster with these resources, and whether each rank has a GPU."""
    cores, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    if job.accelerator not in _PLACED:
        raise LaunchError(
            f"accelerator={job.accelerator!r} with --ray: Ray's GPUs are CUDA's; possible: {', '.join(_PLACED)}. Start the ranks with fit launch"
        )
    wants_gpu = job.accelerator in ("cuda", "gpu") or job.nproc == "gpu" or (job.accelerator == "auto" and gpus > 0)
    workers = int(job.nproc) if job.nproc.isdigit() else gpus if wants_gpu else 1
    available, resource = (gpus, "GPU(s)") if wants_gpu else (cores, "core(s)")
    if workers > available or workers == 0:
        raise LaunchError(
            f"--nproc {job.nproc}: Ray's cluster has {available} {resource} for the ranks, and each needs one. Ask for fewer, add machines"
            f"{', or train on the CPU (FIT_ACCELERATOR=cpu)' if wants_gpu else ''}"
        )
    return workers, wants_gpu


def _rank(config: dict[str, Any]) -> None:
    """Run the script from its first line as one worker, in the process group that Ray has created."""
    job: RayJob = config["job"]
    logging.getLogger().setLevel(logging.WARNING)
    if not Path(job.directory).is_dir():
        raise RuntimeError(
            f"{job.directory} is not on {socket.gethostname()}: the script must be in a directory that all machines share"
        )
    os.chdir(job.directory)
    sys.argv = [job.script, *job.arguments]
    sys.path.insert(0, job.directory if job.is_module else str(Path(job.script).absolute().parent))
    try:
        if job.is_module:
            runpy.run_module(job.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(job.script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{job.script} ended with exit status {end.code}") from end
