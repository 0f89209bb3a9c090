from __future__ import annotations

import pytest

from engine.distributed.environments.slurm import expand_counts, first_node


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("vm", "vm"),
        ("vm,vm-2", "vm"),
        ("node[001-003,007],gpu1", "node001"),
        ("n[9-11]", "n9"),
        ("n[098-101]", "n098"),
        ("rack[1-2]node[08,10]", "rack1node08"),
        ("a[1-2]-ib,b.example.org", "a1-ib"),
    ],
)
def test_the_first_name(text: str, name: str) -> None:
    assert first_node(text) == name


@pytest.mark.parametrize(
    "text", ["", ",a", "a[1", "a]1", "a[x]", "a[1-]", "a[]", "a b", "[1-2]", "[" * 100_000, "," * 100_000]
)
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of nodes") as caught:
        first_node(text)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text", ["n[0-99999999999]", "n" + "[0-9]" * 100, "n[1-2]" * 10_000, "n[0" + ",0" * 50_000 + "]"]
)
def test_short_texts_for_many_names_take_no_time(text: str) -> None:
    assert first_node(text).startswith("n")


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
    for text in ("", "2(3)", "x", "1,", "-1", "1(x99999999999)", "1(x999999999)", "1(x900000),1(x900000)", "9" * 5000):
        with pytest.raises(ValueError, match="is not a list of counts"):
            expand_counts(text)
