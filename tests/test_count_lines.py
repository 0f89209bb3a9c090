from __future__ import annotations

from count_lines import PACKAGE, code_lines, core_strategies, counted

TEXT = '''"""A module.

Of two lines."""

import os  # a comment


class A:
    """Its docstring."""

    x = 1
    """Of a field."""

    def f(self):
        # a reason
        text = """not a
        docstring"""
        return (
            text
        )
'''


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert code_lines(TEXT) == 9


def test_the_core_is_a_part_of_the_whole() -> None:
    core, whole = counted()
    assert 1000 < core < whole
    names = {path.stem for path in core_strategies()}
    assert {"base", "ddp", "fsdp"} <= names
    assert not {"deepspeed", "pipeline"} & names
    assert all(path.parent == PACKAGE / "strategies" for path in core_strategies())
