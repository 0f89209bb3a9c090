"""Run functions of a test file on every rank of one job: a process group costs seconds, a function on it milliseconds."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from support.ranks import PATIENCE_S, run_ranks


def on_ranks(
    file: str, world_size: int, prefix: str = "rank_", timeout: float = PATIENCE_S, **env: str
) -> dict[str, list[Any]]:
    """What each function of ``file`` whose name begins with ``prefix`` returns (JSON) on each rank: ``{name without prefix: [by rank]}``."""
    script = f"import sys; sys.path[0] = {str(Path(__file__).parents[1])!r}\nfrom support import ranked; ranked.main(*sys.argv[1:])"
    ran = run_ranks(script, world_size, file, prefix, timeout=timeout, env=env)
    return {name: [rank.value[name] for rank in ran] for name in ran[0].value}


def main(file: str, prefix: str) -> None:
    spec = importlib.util.spec_from_file_location("ranked_functions", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    warnings.simplefilter("error")
    found = {
        name.removeprefix(prefix): function()
        for name, function in list(vars(module).items())
        if name.startswith(prefix)
    }
    Path(os.environ["TEST_REPORT"]).write_text(json.dumps(found))
    leave()


def leave() -> NoReturn:
    """End this rank after its exit handlers, without the interpreter's own shutdown: that walks all that was imported, 0.3 s of processor time.

    A test of how a process ends uses :func:`processes.run_ranks`.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
