from __future__ import annotations

import pytest

from engine.distributed.environments.nodelist import expand_counts, expand_nodelist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("vm", ["vm"]),
        ("vm,vm-2", ["vm", "vm-2"]),
        ("node[001-003,007],gpu1", ["node001", "node002", "node003", "node007", "gpu1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]node[08,10]", ["rack1node08", "rack1node10", "rack2node08", "rack2node10"]),
        ("a[1-2]-ib,b.example.org", ["a1-ib", "a2-ib", "b.example.org"]),
    ],
)
def test_names(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "a,", "a[1", "a]1", "a[3-1]", "a[x]", "a[1-]", "a[]", "a b", "[1-2]"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of nodes"):
        expand_nodelist(text)


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
    for text in ("", "2(3)", "x", "1,", "-1"):
        with pytest.raises(ValueError, match="is not a list of counts"):
            expand_counts(text)
