"""Seconds of a collective: latency and bandwidth, within a node and between nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.planning.device_table import Hardware
from engine.planning.rank_trace import Collective

START_S = 10e-6
"""Of every collective: NCCL's own model (src/graph/tuning.cc, ring, LL128)."""
ASSUMPTIONS = (
    f"a collective takes {START_S * 1e6:.0f} us to start, a latency for each step of its ring, and its bytes over what is reached of the bandwidth",
    "rings: an all-reduce moves 2(n-1)/n of its bytes through each device, a gather, a scatter and an all-to-all (n-1)/n, a broadcast all of them",
    "an all-reduce between devices takes the faster of a ring and a double binary tree, whose latency grows with log2 of the nodes",
    "in a group on several nodes the slower of the links within a node and of all network cards of its members in a node sets the pace",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a group lie on nodes."""

    ranks: int
    nodes: int
    fewest: int
    """Members on the node that has the fewest of them."""


def layout(ranks: tuple[int, ...], ranks_per_node: int) -> Layout:
    """Of these ranks: neighbouring ranks share a node, as every launcher numbers them."""
    there = Counter(rank // ranks_per_node for rank in ranks)
    return Layout(len(ranks), len(there), min(there.values(), default=0))


def pace(where: Layout, device: Hardware, kind: str) -> float:
    """Bytes a second through each member of a group, as the links are stated."""
    within = device.within.of(kind).bandwidth if where.ranks > where.nodes else float("inf")
    between = device.between.of(kind).bandwidth * where.fewest if where.nodes > 1 else float("inf")
    return min(within, between)


def seconds(each: Collective, device: Hardware, ranks_per_node: int) -> float:
    """Of all calls of ``each``, one after another, with nothing else on the links."""
    where = layout(each.ranks, ranks_per_node)
    if each.kind in ("send", "recv"):
        return _point_to_point(each, device, ranks_per_node)
    if where.ranks < 2 or not each.count:
        return 0.0
    n, size = where.ranks, each.bytes / each.count
    speed = pace(where, device, each.kind) * device.reached.links
    share = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(each.kind, (n - 1) / n)
    rounds = 2 if each.kind == "all_reduce" else 1
    one = START_S + rounds * _ring(where, device, each.kind) + share * size / speed
    if each.kind == "all_reduce" and not device.is_host:
        one = min(one, START_S + 2 * _tree(where, device) + 2 * size / speed)
    return each.count * one


def _ring(where: Layout, device: Hardware, kind: str) -> float:
    """Latency of one way around: most steps stay within a node."""
    across = where.nodes - 1 if where.nodes > 1 else 0
    return (where.ranks - 1 - across) * device.within.of(kind).latency + across * device.between.of(kind).latency


def _tree(where: Layout, device: Hardware) -> float:
    members = -(-where.ranks // where.nodes)
    return (members - 1) * device.within.latency + (where.nodes - 1).bit_length() * device.between.latency


def _point_to_point(each: Collective, device: Hardware, ranks_per_node: int) -> float:
    """To or from neighbours on the axis: within a node only if the whole axis is."""
    where = layout(each.ranks, ranks_per_node)
    link = (device.within if where.nodes == 1 else device.between).of(each.kind)
    return each.count * (START_S + link.latency) + each.bytes / (link.bandwidth * device.reached.links)
