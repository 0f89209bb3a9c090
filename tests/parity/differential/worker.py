"""Ranks that train one case after the other. One process imports everything and forks them: a rank starts within milliseconds."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
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


def rank(given: dict[str, Any], number: int) -> None:
    """Be the rank of that number: answer until the other side is gone."""
    os.environ.update(given["variables"][number])
    errors = os.open(given["errors"][number], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # where it stands, when it hangs
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(given["address"])
        with connection.makefile("rw") as lines:
            lines.write(json.dumps({"rank": number, "pid": os.getpid()}) + "\n")
            lines.flush()
            for line in lines:
                try:
                    answer: dict[str, Any] = {"found": job(json.loads(line))}
                except BaseException:
                    answer = {"error": traceback.format_exc()}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()


def _end_with(parent: int) -> None:
    """A rank that waits in a collective does not see that nobody listens to it any more."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Fork the ranks that lines on stdin ask for."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        given = json.loads(line)
        for number in range(len(given["variables"])):
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                status = 1
                try:
                    rank(given, number)
                    status = 0
                finally:
                    os._exit(status)


if __name__ == "__main__":
    main()
