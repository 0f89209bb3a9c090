"""One order for what the ranks run in a forward pass."""

from __future__ import annotations

import pytest

from engine.strategies.merged_steps import MergedSteps


def merged(expected: str, *ranks: str) -> list[str]:
    """The steps of a first pass and of later ones, if the ranks run these. ``A`` begins a block, ``a`` ends it; blocks between bars are in a list."""
    paths = {number(step): [i, j] for i, part in enumerate(expected.split("|")) for j, step in enumerate(part)}
    merge = MergedSteps([number(step) for step in expected if step != "|"], paths, len(ranks))
    left = [[number(step) for step in own] for own in ranks]
    while (chosen := merge.add([own[0] if own else None for own in left])) is not None:
        for own in left:
            if own and own[0] == chosen:
                own.pop(0)
    if any(left):
        return ["none"]
    return ["".join(chr(65 + n) if n >= 0 else chr(97 + ~n) for n in steps) for steps in (merge.steps, merge.order())]


def number(step: str) -> int:
    return ord(step) - 65 if step.isupper() else ~(ord(step) - 97)


@pytest.mark.parametrize(
    ("expected", "ranks", "steps"),
    [
        ("AaBbCc", ["AaBbCc", "AaBbCc"], ["AaBbCc", "AaBbCc"]),
        ("AaBbCc", ["AaCc", "AaBbCc"], ["AaBbCc", "AaBbCc"]),
        ("AaBb", ["AaBb", "BbAa"], ["AaBbAa", "AaBbAa"]),  # opposite orders
        ("AaBbCcDd", ["AaBbAaDd", "AaBbAaCcDd"], ["AaBbAaCcDd", "AaBbAaCcDd"]),  # a block twice, then one on one rank
        ("AaBb", ["AaAaAaBb", "AaBb"], ["AaAaAaBb", "AaAaAaBb"]),  # loops of different lengths
        ("AaCcBb", ["AaCc", "AaBbCc"], ["AaCcBbCc", "AaBbCc"]),  # a place of C at which it came too early
        ("AaBbCcDd", ["DdCcAa", "DdAa"], ["DdAaCcAa", "DdBbCcAaBb"]),  # no rank runs B: it comes after A or before C
        ("AaBbCc", ["AaBbAaBb"], ["AaBbAaBb", "AaBbCcAaBbCc"]),  # in each round of a loop
        ("AaBb|CcDd|EeFf", ["FfDdAaBb", "FfDdAaBb"], ["FfDdAaBb", "EeFfCcDdAaBb"]),  # beside those of its list
        ("AaBbCc|Dd|EeFf", ["AaDd", "AaDd"], ["AaDd", "AaBbCcDdEeFf"]),  # a list of which no rank runs a block
        ("AaBbCc", ["BbCcBbCc"], ["BbCcBbCc", "AaBbCcAaBbCc"]),
        ("ABbCcaDd", ["ACca", "Dd"], ["ACcaDd", "ABbCcaDd"]),  # within the block that has it
        ("ABbCca", ["ABba", "ACca", "A"], ["ABbCca", "ABbCca"]),
        ("AaBb", ["ABba", "BAab"], ["none"]),  # each runs inside of the other
    ],
)
def test_the_order_has_the_steps_of_each_rank(expected: str, ranks: list[str], steps: list[str]) -> None:
    assert merged(expected, *ranks) == steps
