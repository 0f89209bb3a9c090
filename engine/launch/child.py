"""Starts a rank that dies with its agent, and replaces itself by the rank's command. Run as ``python -I -S child.py AGENT_PID COMMAND ...``.

This file imports nothing of the package, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process (SIGKILL) when ``parent`` ends, however it ends. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def main() -> None:
    """Let this process die with the agent whose process id is ``sys.argv[1]``, and replace it by the command that follows."""
    die_with_parent(int(sys.argv[1]))
    # A shell's background jobs ignore SIGINT, which a rank would inherit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"fit launch: {sys.argv[2]!r} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
