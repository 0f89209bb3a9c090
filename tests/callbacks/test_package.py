from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import callbacks
from engine import Callback


def test_every_public_name_resolves():
    for name in callbacks.__all__:
        assert getattr(callbacks, name).__name__ == name
        assert name in dir(callbacks)


def test_every_callback_has_a_row_in_the_readme():
    rows = Path(callbacks.__file__).with_name("README.md").read_text()
    exported = {name: getattr(callbacks, name) for name in callbacks.__all__}
    ours = [name for name, value in exported.items() if isinstance(value, type) and issubclass(value, Callback)]
    assert [name for name in ours if f"\n| `{name}` |" not in rows] == []


def test_loggers_are_in_their_own_package_too():
    from callbacks import loggers

    for name in loggers.__all__:
        assert getattr(loggers, name).__name__ == name
        assert getattr(callbacks, name, getattr(loggers, name)) is getattr(loggers, name)
    with pytest.raises(AttributeError, match=r"'CometLogger'; it has .*CSVLogger"):
        loggers.CometLogger  # noqa: B018


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(AttributeError, match=r"'ModelCheckpoints'; it has .*ModelCheckpoint"):
        callbacks.ModelCheckpoints  # noqa: B018


def test_the_package_imports_nothing_until_it_is_used():
    code = "import sys, callbacks; assert not {'torch', 'rich', 'engine.fit'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_only_the_progress_bar_needs_rich():
    code = (
        "import sys; from callbacks import *; assert not [m for m in sys.modules if m == 'rich'], 'rich was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_engine_callbacks_gives_the_same_classes():
    from engine import callbacks as second

    assert sorted(second.__all__) == sorted(callbacks.__all__)
    assert all(getattr(second, name) is getattr(callbacks, name) for name in callbacks.__all__)
    with pytest.raises(AttributeError, match="'ModelCheckpoints'; it has"):
        second.ModelCheckpoints  # noqa: B018


SHADOWED = """
import pickle, sys
from engine.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint
import engine, callbacks
assert callbacks.MINE == 1 and not hasattr(callbacks, "EarlyStopping")
assert engine.callbacks.EarlyStopping is EarlyStopping and issubclass(EarlyStopping, engine.Callback)
assert pickle.loads(pickle.dumps(CSVLogger(name="x.csv"))).name == "x.csv"
if len(sys.argv) == 1:
    import subprocess
    data = pickle.dumps(EarlyStopping("loss", patience=7))
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).patience)"
    subprocess.run([sys.executable, "-c", code, data.hex()], check=True, timeout=300)
"""


def test_a_users_own_callbacks_py_is_no_obstacle(tmp_path):
    (tmp_path / "callbacks.py").write_text("MINE = 1\n")
    (tmp_path / "script.py").write_text(SHADOWED)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=300, capture_output=True, text=True
    )
    assert done.stdout.strip() == "7"


def test_fit_run_finds_our_callbacks_beside_a_users_own(tmp_path):
    (tmp_path / "callbacks.py").write_text("MINE = 1\n")
    code = (
        "from engine.cli.class_paths import CALLBACKS, importable_here, load; from engine import Callback; importable_here();"
        "print(load('EarlyStopping', 'the callback', Callback, CALLBACKS).__name__, load('callbacks:MINE', 'it', Callback, CALLBACKS))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300, capture_output=True, text=True
    )
    assert done.stdout.split() == ["EarlyStopping", "1"]
