from __future__ import annotations

import pytest

from engine.launch.command_line import without_tool


@pytest.mark.parametrize(
    ("given", "script", "expected"),
    [
        ("train.py --lr 1", "train.py --lr 1", "train.py --lr 1"),
        ("-X dev -m train --lr 1", "/w/train.py --lr 1", "-X dev -m train --lr 1"),
        ("-m pdb train.py --lr 1", "train.py --lr 1", "train.py --lr 1"),
        ("-mpdb train.py", "train.py", "train.py"),
        ("-W error -m pdb -c continue -c q train.py --lr 1", "train.py --lr 1", "-W error train.py --lr 1"),
        ("-m pdb -m package.train --lr 1", "package.train --lr 1", "-m package.train --lr 1"),
        ("-m cProfile -o out -m train", "train", "-m train"),
        ("/bin/coverage run --data-file=x train.py -m", "train.py -m", "train.py -m"),
        ("/bin/coverage run -m package.train", "/w/package/train.py", "-m package.train"),
        ("-m trace --count --module train", "/w/train.py", "-m train"),
        ("/code/debugpy/launcher/../../debugpy --connect 1 --configure-qt none train.py a", "train.py a", "train.py a"),
        (
            "profile.py --lr 1",
            "profile.py",
            "profile.py --lr 1",
        ),  # a script of that name, which has changed its arguments
        ("/bin/mytool train.py", "train.py", "/bin/mytool train.py"),  # whatever it does is done by all ranks
        ("-m pdb train.py --lr 1", "train.py", None),
        ("-m pdb train.py --lr 1", "other.py --lr 1", None),
    ],
)
def test_a_tool_is_left_out(given: str, script: str, expected: str | None) -> None:
    assert without_tool(given.split(), script.split()) == (expected.split() if expected is not None else None)
