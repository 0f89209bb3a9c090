"""Where a run is planned: ranks over nodes, and a device with other memory and links."""

from __future__ import annotations

from typing import Any

import pytest

from engine.planning.devices import cluster_of, machines_for


def test_a_cluster() -> None:
    found = cluster_of(16, device="h100", network="100GB/s,10GB/s", memory_limit="64GiB")
    assert (found.world_size, found.nodes, found.ranks_per_node) == (16, 2, 8)
    assert found.device.memory == 64 * 2**30
    assert (found.device.within.bandwidth, found.device.between.bandwidth) == (100e9, 10e9)
    assert cluster_of(16, 4, found.device).device is found.device


def test_nodes() -> None:
    assert machines_for(16, None, 8) == 2
    assert machines_for(4, None, 8) == 1
    assert machines_for(16, 4, 8) == 4
    assert machines_for(12, None, 8) == 2  # six ranks on each


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world_size": 0}, "world_size=0 must be at least 1"),
        ({"world_size": -4}, "world_size=-4 must be at least 1"),
        ({"world_size": 10**6}, "world_size=1000000: a plan takes at most 131072 ranks"),
        ({"world_size": 8, "nodes": 0}, "nodes=0 must be at least 1"),
        ({"world_size": 8, "nodes": 3}, "world_size=8 ranks do not divide evenly over nodes=3"),
        ({"world_size": 8, "nodes": 16}, "world_size=8 ranks do not divide evenly over nodes=16"),
        ({"world_size": 17}, "3 nodes of up to 8 devices: give the number of nodes"),
        ({"world_size": 8, "memory_limit": "lots"}, "memory limit 'lots' is not a size above 0"),
        ({"world_size": 8, "memory_limit": 0}, "memory limit 0 is not a size above 0"),
    ],
)
def test_what_is_no_cluster(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cluster_of(**arguments)


@pytest.mark.parametrize("wrong", [8.0, "8", True, None])
def test_ranks_are_whole_numbers(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"world_size=.* must be an int"):
        cluster_of(wrong)


def test_a_network_is_text() -> None:
    with pytest.raises(TypeError, match="network 5: give text, such as '450GB/s,50GB/s'"):
        cluster_of(8, network=5)  # type: ignore[arg-type]
