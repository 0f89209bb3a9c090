from __future__ import annotations

import subprocess
import sys

import pytest

import callbacks


def test_every_public_name_resolves():
    for name in callbacks.__all__:
        assert getattr(callbacks, name).__name__ == name
        assert name in dir(callbacks)


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(AttributeError, match=r"'ModelCheckpoints'; it has .*ModelCheckpoint"):
        callbacks.ModelCheckpoints  # noqa: B018


def test_the_package_imports_nothing_until_it_is_used():
    code = "import sys, callbacks; assert not {'torch', 'rich', 'engine'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_only_the_progress_bar_needs_rich():
    code = "import sys; from callbacks import *; assert not [m for m in sys.modules if m == 'rich'], 'rich was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
