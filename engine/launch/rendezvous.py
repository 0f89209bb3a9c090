"""The rendezvous of a job's agents: torch's, over a TCP store, with calls that cannot hang when the network does."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from engine.distributed import address, stores
from engine.distributed.stores import LOCAL
from engine.launch.job import Job, LaunchError

STORE_S = 10.0
"""Timeout (s) of one exchange with the store after the rendezvous."""
PROBE_S = 3.0
"""How long a program on a busy port may take to answer like a store (s)."""
WATCH_S = 0.5
"""How often an agent checks whether machines wait to join, or ranks have failed elsewhere (s)."""

SILENT_S = 4.0
"""At the end, a store that has not answered for so long (s) is not waited for."""

T = TypeVar("T")


def bounded(call: Callable[[], T], limit_s: float, what: str) -> T:
    """The result of ``call``, run in a separate thread: over a dead link torch's store can hang where no signal reaches it.

    Raises:
        RendezvousTimeoutError: it took longer than ``limit_s``.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="fit-rendezvous", daemon=True)
    thread.start()
    deadline = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.05)  # in slices: a signal is handled between them
    if failed:
        raise failed[0]
    if not done:
        raise RendezvousTimeoutError(f"{what} did not end within {limit_s:g} s")
    return done[0]


class Watched(RendezvousHandler):
    """A rendezvous that a separate thread polls while ranks run: an agent must notice its ranks' exits even if the network hangs."""

    local = LOCAL
    """This machine's name for the other machines."""
    address: str | None = LOCAL
    """This machine's address towards them."""
    limit_s = 600.0
    """How long the rendezvous may take (s)."""
    failed_elsewhere = False
    """The agent of another machine has reported that one of its ranks failed in this round."""
    cause = ""
    """That agent's report."""
    _waiting = 0
    _rounds = 0
    _answered = 0.0
    _over: threading.Event | None = None

    @property
    def cause_key(self) -> str:
        """The key in the round's store under which an agent reports the cause of a failure."""
        raise NotImplementedError

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the other agents in the next round. Raises torch's errors, at the latest some seconds after the join timeout."""
        self._stop_asking()
        found = bounded(
            super().next_rendezvous,  # type: ignore[safe-super]
            self.limit_s + 3 * STORE_S,
            "the rendezvous of the machines",
        )
        self._rounds += 1
        self._answered = time.monotonic()
        self._over = threading.Event()
        threading.Thread(
            target=self._keep_asking, args=(self._over, found.store), name="fit-waiting", daemon=True
        ).start()
        return found

    def num_nodes_waiting(self) -> int:
        """How many machines waited to join at the last check."""
        return self._waiting

    @property
    def met(self) -> bool:
        """Whether there was at least one complete round."""
        return self._rounds > 0

    @property
    def reachable(self) -> bool:
        """Whether the store has answered recently."""
        return time.monotonic() - self._answered < SILENT_S

    def shutdown(self) -> bool:
        """Close the rendezvous for all machines, if it can still be reached."""
        if not self.reachable:
            return False
        self._stop_asking()
        try:
            return bounded(super().shutdown, STORE_S / 2, "closing the rendezvous")  # type: ignore[safe-super]
        except (RendezvousTimeoutError, dist.DistError):
            return False

    def _stop_asking(self) -> None:
        if self._over is not None:
            self._over.set()
        self._waiting, self.failed_elsewhere, self.cause = 0, False, ""

    def _keep_asking(self, over: threading.Event, store: dist.Store) -> None:
        broken_since = 0.0
        while not over.wait(WATCH_S):
            # An unreachable store says nothing about the ranks: keep monitoring them, and a restart will show. A connection closed by
            # the other side is different: the agent that served it has ended, and its ranks with it.
            try:
                waiting = super().num_nodes_waiting()  # type: ignore[safe-super]
                failed = store.check([self.cause_key])
                self._answered = time.monotonic()
                broken_since = 0.0
                if failed and not over.is_set():
                    self.cause = store.get(
                        self.cause_key
                    ).decode()  # read it now: the store may end with the agent that serves it
                if not over.is_set():
                    self._waiting, self.failed_elsewhere = waiting, failed
            except Exception as error:
                if isinstance(error, dist.DistNetworkError) or isinstance(error.__cause__, dist.DistNetworkError):
                    broken_since = broken_since or time.monotonic()
                    if time.monotonic() - broken_since > SILENT_S / 2 and not over.is_set():
                        self.failed_elsewhere = True


class Dynamic(Watched, DynamicRendezvousHandler):
    """An elastic job; each round has its own store."""

    cause_key = "fit/cause"

    def next_rendezvous(self) -> RendezvousInfo:
        """As above. Also publishes rank 0's address in each round: torch does so once, and a machine that joins later would wait forever."""
        self._bootstrap_store_info = None
        return super().next_rendezvous()


class Static(Watched, StaticTCPRendezvous):
    """Numbered machines. Their agents share one store, in which the first machine publishes the ranks' store of a later round."""

    _ranks_store: dist.Store | None = None

    @property
    def cause_key(self) -> str:
        return f"fit/cause/{self._rounds}"

    def next_rendezvous(self) -> RendezvousInfo:
        """As above. The first round's ranks use the agents' store, whose port the user has chosen; a later one's would find their keys in it."""
        agents = super().next_rendezvous()
        if self._rounds == 1:
            return agents
        info = bounded(
            lambda: self._serve_round(dist.PrefixStore(f"fit/round/{self._rounds}", agents.store)),
            self.limit_s + STORE_S,
            "the publication of the ranks' store",
        )
        return RendezvousInfo(agents.store, agents.rank, agents.world_size, info)

    def _serve_round(self, published: dist.Store) -> RendezvousStoreInfo:
        port = None
        if self.rank == 0:
            self._ranks_store = dist.TCPStore(
                self.master_addr, 0, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=self.timeout
            )
            port = self._ranks_store.port
        return RendezvousStoreInfo.build(self.rank, published, self.master_addr, port)


class Alone(Watched):
    """One machine without a rendezvous. Its ranks connect through a store that only this machine reaches, and nothing in it is unpickled.

    Each round has a new store: a script that calls ``init_process_group()`` itself would find the keys of the ranks before.

    Args:
        port: of the first round's store; 0: any that is free. Later rounds use any.
        run_id: the job's name, the prefix of the store's keys; random by default, so that other users of this machine cannot guess them.
    """

    cause_key = "fit/cause"

    def __init__(self, port: int, run_id: str | None, limit_s: float) -> None:
        self.limit_s = limit_s
        self._run_id = run_id or secrets.token_hex(16)
        self._store = stores.serve(LOCAL, port, timeout=_seconds(STORE_S))

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round, at once."""
        if self._rounds:
            self._store = stores.serve(LOCAL, 0, timeout=_seconds(STORE_S))
        self._rounds += 1
        part = dist.PrefixStore(f"{self._run_id}/{self._rounds}", self._store)
        return RendezvousInfo(part, 0, 1, RendezvousStoreInfo(LOCAL, self._store.port))

    @property
    def reachable(self) -> bool:
        """Always: the store is this process's own."""
        return True

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the same store."""
        return True

    def get_backend(self) -> str:
        """The name that torch's agent reports."""
        return "alone"

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def is_closed(self) -> bool:
        """Never: no other agent can close it."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: there are no other agents."""

    def shutdown(self) -> bool:
        """Nothing to do: there are no other agents."""
        return True


def handler(job: Job, say: Callable[[str], None]) -> Watched:
    """The rendezvous of ``job``, served from this machine if the address is this machine's (and no other agent serves it yet).

    Args:
        say: called with a message when there is something to wait for.

    Raises:
        LaunchError: the port is busy, or the address cannot be reached.
    """
    host, port = job.endpoint or (LOCAL, 0)
    if job.max_nodes == 1:
        if not address.is_own(host):
            say(f"--rdzv {host}:{port} is not needed for one machine: its ranks meet at {LOCAL}:{port}")
        try:
            return Alone(port, job.run_id, job.join_timeout_s)
        except dist.DistError as error:
            raise LaunchError(_busy(f"{host}:{port}", "another program or job holds it")) from error
    local = _towards(job, host, port, say)
    own: str | None = local
    if address.is_loopback(local) and not address.is_loopback(host):
        # Many machines resolve their own name to a loopback address; the others resolve it to the real one.
        own, local = address.outward(), host
    if job.node_rank is None:
        found: Watched = _dynamic(
            job, _served(job, host, port) if address.is_own(host) else _reached(job, host, port), local
        )
    else:
        if job.node_rank == 0 and not address.is_free(port):
            raise LaunchError(_busy(f"{host}:{port}", "another program holds it"))
        found = Static(host, port, job.node_rank, job.max_nodes, job.name, job.join_timeout_s)
        found.limit_s = job.join_timeout_s
    found.local, found.address = local, own
    return found


def _towards(job: Job, host: str, port: int, say: Callable[[str], None]) -> str:
    """This machine's address towards the rendezvous, whose name may become resolvable only some time after this machine's start."""
    deadline, told = time.monotonic() + job.join_timeout_s, False
    while True:
        try:
            return address.towards(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"--rdzv {host}:{port}: this machine did not find it within {job.join_timeout_s} s ({error}). "
                    "Is the name right, and is there a route to it?"
                ) from error
            if not told:
                say(f"--rdzv {host}:{port} cannot be resolved yet ({error}); waiting up to {job.join_timeout_s} s")
                told = True
        time.sleep(0.5)


def _served(job: Job, host: str, port: int) -> dist.Store:
    """The store at an address of this machine: ours, or another agent's of the same job."""
    if address.is_free(port):
        with contextlib.suppress(dist.DistError):  # another agent was faster
            return dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=_seconds(STORE_S)
            )
    where = f"{host}:{port}"

    def find() -> dist.TCPStore | None:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_seconds(PROBE_S))
        deadline = time.monotonic() + PROBE_S
        while not store.check([f"torch.rendezvous.{job.name}"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return store

    try:
        store = bounded(find, 2 * PROBE_S, "the answer of a store")
    except (dist.DistError, RendezvousTimeoutError) as error:
        raise LaunchError(_busy(where, "a program that is not a rendezvous holds it")) from error
    if store is None:
        raise LaunchError(_busy(where, f"a job with another name than {job.name!r} uses it"))
    store.set_timeout(_seconds(STORE_S))
    return store


def _reached(job: Job, host: str, port: int) -> dist.Store:
    def connect() -> dist.TCPStore:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_seconds(job.join_timeout_s))

    try:
        store = bounded(connect, job.join_timeout_s + STORE_S, "the connection")
    except (dist.DistError, RendezvousTimeoutError) as error:
        raise LaunchError(
            f"--rdzv {host}:{port}: no answer within {job.join_timeout_s} s. Is fit launch running on that machine, "
            f"and does a firewall let port {port} through?"
        ) from error
    store.set_timeout(_seconds(STORE_S))
    return store


def _busy(where: str, why: str) -> str:
    return f"--rdzv {where}: the port is busy: {why}. Choose another port (the same on all machines), or leave --rdzv out on a single machine"


def _dynamic(job: Job, store: dist.Store, local: str) -> Dynamic:
    # The total time of silence: several heartbeats may be late.
    interval = max(1, job.dead_after_s // 5)
    times: dict[str, Any] = {"join": _seconds(job.join_timeout_s), "last_call": _seconds(job.join_wait_s)}
    dynamic: Dynamic = Dynamic.from_backend(
        job.name,
        store,
        C10dRendezvousBackend(store, job.name),
        job.min_nodes,
        job.max_nodes,
        local,
        RendezvousTimeout(**times),
        keep_alive_interval=interval,
        keep_alive_max_attempt=max(1, job.dead_after_s // interval),
    )
    dynamic.limit_s = job.join_timeout_s
    return dynamic


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)
