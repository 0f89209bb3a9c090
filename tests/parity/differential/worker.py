"""A rank that trains one case after the other: JSON lines in on stdin, JSON lines out on the file descriptor that it was given."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from . import library, loop
from .cases import Case


def job(given: dict[str, Any]) -> dict[Any, Any]:
    """One run of a case on this rank."""
    case, root = Case(**given["case"]), Path(given["root"])
    if "orders" in given:
        return library.random_orders(case)
    part, parts = given["part"], given["parts"]
    name = case.second if part else case.strategy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.door == "engine":
            found = loop.Own(case, name).run(root, part, parts)
        else:
            found = library.fit(case, name, root, part, parts)
    return dataclasses.asdict(found)


def main(out: int) -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # where it stands, when it hangs
    with os.fdopen(out, "w") as answers, contextlib.redirect_stdout(sys.stderr):
        answers.write("{}\n")
        answers.flush()
        for line in sys.stdin:
            given = json.loads(line)
            try:
                answer = {"found": job(given)}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
