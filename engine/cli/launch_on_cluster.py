"""``fit launch --slurm`` and ``--ray``: a cluster starts the processes. Imports no torch: a login node may have none."""

from __future__ import annotations

import argparse
import os

from engine.cli.options import launch
from engine.launch import ray, slurm
from engine.launch.job import LaunchError


def run(options: argparse.Namespace) -> int:
    """Submit the job to SLURM, or run it on Ray and wait for its end.

    Returns:
        The status of :func:`engine.launch.slurm.main` or :func:`engine.launch.ray.main`. What they refuse ends the process with status 2.
    """
    try:
        return slurm.main(options, os.environ) if options.slurm else ray.main(options, os.environ)
    except LaunchError as error:
        launch().error(str(error))
