"""``fit launch`` on machines where it starts the processes itself."""

from __future__ import annotations

import argparse

from engine.launch import agent


def run(options: argparse.Namespace) -> int:
    """Start a script, a module or a program as the ranks of ``options.job``, and wait for its end.

    Returns:
        0 when all ranks succeeded; 1 when one failed, or the job could not be set up; 130 after Ctrl-C and 143 after SIGTERM (128 + the
        signal's number).
    """
    return agent.run(options.job)
