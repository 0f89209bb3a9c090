"""Where the agents of a job meet: torch's rendezvous over a TCP store, with calls that cannot hang an agent when the network does."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from engine.distributed import address, stores
from engine.distributed.stores import LOCAL
from engine.launch.job import Job, LaunchError

STORE_S = 10.0
"""How long one exchange with the store may take once the machines have met (s)."""
PROBE_S = 3.0
"""How long a program on a busy port gets to answer as a store does (s)."""
WATCH_S = 0.5
"""How often an agent looks whether machines wait to join, or ranks have failed elsewhere (s)."""

SILENT_S = 4.0
"""A store that has given no answer for so long is not waited for when all is over (s)."""

T = TypeVar("T")


def bounded(call: Callable[[], T], limit_s: float, what: str) -> T:
    """The result of ``call``, made in a thread of its own: over a dead link torch's store can hang where no signal reaches it.

    Raises:
        RendezvousTimeoutError: ``limit_s`` have passed.
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
    """A rendezvous that is asked by a thread of its own while ranks run: an agent must see its ranks' ends whatever the network does."""

    local = LOCAL
    """What the other machines call this one."""
    address: str | None = LOCAL
    """This machine's address towards them."""
    limit_s = 600.0
    """How long the meeting may take (s)."""
    failed_elsewhere = False
    """The agent of another machine has told that a rank of its own failed in this round."""
    cause = ""
    """What that agent tells of it."""
    _waiting = 0
    _rounds = 0
    _answered = 0.0
    _over: threading.Event | None = None

    @property
    def cause_key(self) -> str:
        """Where, in the round's store, an agent tells the cause of a failure."""
        raise NotImplementedError

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents: the next round. Raises what torch's does, at the latest some seconds after the join timeout."""
        self._stop_asking()
        found = bounded(
            super().next_rendezvous,  # type: ignore[safe-super]
            self.limit_s + 3 * STORE_S,
            "the meeting of the machines",
        )
        self._rounds += 1
        self._answered = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._keep_asking, args=(self._over, found.store), name="fit-waiting", daemon=True).start()
        return found

    def num_nodes_waiting(self) -> int:
        """How many machines waited to join at the last look."""
        return self._waiting

    @property
    def met(self) -> bool:
        """Whether the machines have met at least once."""
        return self._rounds > 0

    @property
    def reachable(self) -> bool:
        """Whether the store has answered lately."""
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
            # A store that cannot be reached says nothing about the ranks: they are watched on, and a restart will tell. A connection
            # that the other side has closed is another thing: the agent that served it has ended, and its ranks with it.
            try:
                waiting = super().num_nodes_waiting()  # type: ignore[safe-super]
                failed = store.check([self.cause_key])
                self._answered = time.monotonic()
                broken_since = 0.0
                if failed and not over.is_set():
                    self.cause = store.get(self.cause_key).decode()  # now: the store may end with the agent that serves it
                if not over.is_set():
                    self._waiting, self.failed_elsewhere = waiting, failed
            except Exception as error:
                if isinstance(error, dist.DistNetworkError) or isinstance(error.__cause__, dist.DistNetworkError):
                    broken_since = broken_since or time.monotonic()
                    if time.monotonic() - broken_since > SILENT_S / 2 and not over.is_set():
                        self.failed_elsewhere = True


class Dynamic(Watched, DynamicRendezvousHandler):
    """Machines come and go; each round has a store of its own."""

    cause_key = "fit/cause"

    def next_rendezvous(self) -> RendezvousInfo:
        """As above. Also tells where rank 0 is in each round anew: torch tells it once, and a machine that joins later waits for ever."""
        self._bootstrap_store_info = None
        return super().next_rendezvous()


class Static(Watched, StaticTCPRendezvous):
    """Numbered machines; all rounds share one store."""

    @property
    def cause_key(self) -> str:
        return f"fit/cause/{self._rounds}"


class Alone(Watched):
    """One machine: nobody is met. Its ranks find each other in a store that only this machine reaches, and nothing in it is unpickled.

    Args:
        port: of the store; 0: any that is free.
        run_id: the job's name, by which the store's keys begin; drawn at random by default, so that nobody else on this machine guesses them.
    """

    cause_key = "fit/cause"

    def __init__(self, port: int, run_id: str | None, limit_s: float) -> None:
        self.limit_s = limit_s
        self._run_id = run_id or secrets.token_hex(16)
        self._store = stores.serve(LOCAL, port, timeout=_seconds(STORE_S))

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round, at once."""
        self._rounds += 1
        part = dist.PrefixStore(f"{self._run_id}/{self._rounds}", self._store)
        return RendezvousInfo(part, 0, 1, RendezvousStoreInfo(LOCAL, self._store.port))

    @property
    def reachable(self) -> bool:
        """Always: the store is this process's own."""
        return True

    @property
    def use_agent_store(self) -> bool:
        """The ranks meet in the same store."""
        return True

    def get_backend(self) -> str:
        """The name that torch's agent reports."""
        return "alone"

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def is_closed(self) -> bool:
        """Never: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Nobody else has to know."""

    def shutdown(self) -> bool:
        """Nobody else has to know."""
        return True


def handler(job: Job, say: Callable[[str], None]) -> Watched:
    """The rendezvous of ``job``, served from this machine when its address is this machine's (and nobody serves it yet).

    Args:
        say: told when there is something to wait for.

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
        # Many machines have their own name at a loopback address; the others know it by the name.
        own, local = address.outward(), host
    if job.node_rank is None:
        found: Watched = _dynamic(job, _served(job, host, port) if address.is_own(host) else _reached(job, host, port), local)
    else:
        if job.node_rank == 0 and not address.is_free(port):
            raise LaunchError(_busy(f"{host}:{port}", "another program holds it"))
        found = Static(host, port, job.node_rank, job.max_nodes, job.name, job.join_timeout_s)
        found.limit_s = job.join_timeout_s
    found.local, found.address = local, own
    return found


def _towards(job: Job, host: str, port: int, say: Callable[[str], None]) -> str:
    """This machine's address towards the rendezvous, whose name may become known a while after this machine's start."""
    deadline, told = time.monotonic() + job.join_timeout_s, False
    while True:
        try:
            return address.towards(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"--rdzv {host}:{port}: this machine did not find it within {job.join_timeout_s} s ({error}). "
                    "Is the name right, and does a route lead there?"
                ) from error
            if not told:
                say(f"--rdzv {host}:{port} is not known here yet ({error}); it is awaited for {job.join_timeout_s} s")
                told = True
        time.sleep(0.5)


def _served(job: Job, host: str, port: int) -> dist.Store:
    """The store at an address of this machine: ours, or that of another agent of this job here."""
    if address.is_free(port):
        with contextlib.suppress(dist.DistError):  # another agent was faster
            return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=_seconds(STORE_S))
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
        raise LaunchError(_busy(where, "a program holds it that is no rendezvous")) from error
    if store is None:
        raise LaunchError(_busy(where, f"a job that is not called {job.name!r} meets there"))
    store.set_timeout(_seconds(STORE_S))
    return store


def _reached(job: Job, host: str, port: int) -> dist.Store:
    def connect() -> dist.TCPStore:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_seconds(job.join_timeout_s))

    try:
        store = bounded(connect, job.join_timeout_s + STORE_S, "the connection")
    except (dist.DistError, RendezvousTimeoutError) as error:
        raise LaunchError(
            f"--rdzv {host}:{port}: nobody answered there within {job.join_timeout_s} s. Is fit launch running on that machine, "
            f"and does a firewall let port {port} through?"
        ) from error
    store.set_timeout(_seconds(STORE_S))
    return store


def _busy(where: str, why: str) -> str:
    return (
        f"--rdzv {where}: the port is busy: {why}. Choose another port (the same on all machines), or leave --rdzv out on a single machine"
    )


def _dynamic(job: Job, store: dist.Store, local: str) -> Dynamic:
    # Silent for this long in all: a heartbeat may be late several times.
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
