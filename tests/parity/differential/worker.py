"""Ranks that train one case after the other, forked from a process that has imported the library."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import socket
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

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


def rank(address: str, number: str) -> None:
    """Be the rank of that number: answer at the socket ``address`` until the other side is gone."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # where it stands, when it hangs
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as lines:
            lines.write(json.dumps({"rank": int(number), "pid": os.getpid()}) + "\n")
            lines.flush()
            for line in lines:
                try:
                    answer: dict[str, Any] = {"found": job(json.loads(line))}
                except BaseException:
                    answer = {"error": traceback.format_exc()}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()
    os._exit(0)


def _end_with(parent: int) -> None:
    """A rank that waits in a collective does not see that nobody listens to it any more."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
