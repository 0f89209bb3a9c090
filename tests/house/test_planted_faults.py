"""Every line of the library that a planted fault replaces is there. Runs before all other tests."""

from __future__ import annotations

from pathlib import Path

from figures import ROOT, Tree, planted_faults


def test_the_lines_that_planted_faults_replace_are_there() -> None:
    assert planted_faults(Tree(ROOT)).places == ()


def test_a_line_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "step.py").write_text("loss = 1\nloss = 1\nstep = 2\n")
    (tmp_path / "tests").mkdir()
    lines = ("step = 2", "moved = 3", "loss = 1")
    faults = "\n".join(f'Fault("what", "engine/step.py", "{line}\\n", "")' for line in lines)
    (tmp_path / "tests" / "faults.py").write_text(faults + '\nFault("what", "engine/gone.py", "x", "y")\n')
    assert planted_faults(Tree(tmp_path)).places == (
        "tests/faults.py:2 engine/step.py: 0 times: moved = 3",
        "tests/faults.py:3 engine/step.py: 2 times: loss = 1",
        "tests/faults.py:4 engine/gone.py: 0 times: x",
    )
