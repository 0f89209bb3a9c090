"""A plugin for pytest (``-p support.no_pickle``): whatever reads a pickle fails."""

from __future__ import annotations

import pickle
from typing import Any, NoReturn

import torch


def refused(*arguments: Any, **options: Any) -> NoReturn:
    raise AssertionError("a pickle was read")


for owner, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
    setattr(owner, name, refused)
