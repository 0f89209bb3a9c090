"""The rendezvous of a job's agents. It is torch's, over a TCP store, with calls that cannot hang when the network does."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from engine.distributed import addresses, stores
from engine.distributed.addresses import LOOPBACK
from engine.launch.job import Job, LaunchError
from engine.launch.output import Output, Terminal
from engine.utils.helper_threads import HelperThread, log_failure

STORE_S = 10.0
"""Timeout (s) of one exchange with the store after the rendezvous."""
PROBE_S = 3.0
"""Time (s) that a program on a busy port may take to answer like a store."""
WATCH_S = 0.5
"""Interval (s) at which an agent checks whether machines wait to join, or ranks have failed on other machines."""

SILENT_S = 4.0
"""Time (s) without an answer of the store after which the end of a job no longer waits for one."""
ELSEWHERE_S = 2.0
"""Time (s) to wait for the cause of a failure from another machine."""
END_S = 310.0
"""Time (s) that a machine whose ranks have ended waits for other machines."""
CAUSE = "cause"
"""The key in a round's store under which an agent reports a failure."""

T = TypeVar("T")


def bounded(call: Callable[[], T], limit_s: float, what: str) -> T:
    """Return ``call()``, called in another thread, because over a dead link torch's store can hang where no signal reaches it.

    Raises:
        RendezvousTimeoutError: the call took longer than ``limit_s``.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="fit-rendezvous", daemon=True)
    thread.start()
    deadline = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.05)  # signals are handled between these short waits
    if errors:
        raise errors[0]
    if not results:
        raise RendezvousTimeoutError(f"{what} did not end within {limit_s:g} s")
    return results[0]


@dataclass(frozen=True)
class Round:
    """The outcome of one meeting of the job's machines, for one attempt of its ranks."""

    machine: int
    """This machine's number."""
    machines: int
    """The number of machines."""
    first_rank: int
    """This machine's first rank."""
    world_size: int
    """The number of ranks on all machines."""
    restarts: int
    """The number of restarts so far, the same on all machines: the largest that a machine knows, since one that has just joined knows none."""
    master: tuple[str, int]
    """Address and port of the ranks' store. Each round has a new one, because a script that calls ``init_process_group()`` itself would
    otherwise find the keys of the previous ranks."""


class Meeting(ABC):
    """The place in which the agents of a job's machines meet in rounds and learn of each other's failures: :class:`OneMachine` or
    :class:`Machines`."""

    run_id: str
    """The job's name."""
    local = LOOPBACK
    """The name by which other machines reach this one."""
    address: str | None = LOOPBACK
    """The address of this machine's interface towards the other machines."""
    machines_waiting = 0
    """The number of machines that waited to join at the last check."""
    failed_elsewhere = False
    """Whether the agent of another machine has reported that one of its ranks failed in this round."""
    has_met = False
    """Whether at least one round has been completed."""

    @property
    def reachable(self) -> bool:
        """Whether the other machines have answered recently."""
        return True

    @abstractmethod
    def next_round(self, nproc: int, restarts: int) -> Round:
        """Meet the other agents for the next attempt.

        Args:
            nproc: the number of this machine's ranks.
            restarts: the number of restarts that this machine has counted.

        Raises:
            RendezvousError, torch.distributed.DistError: the machines did not meet.
        """

    @abstractmethod
    def agree_on_cause(self, report: str, is_consequence: bool) -> str:
        """Send the other agents the report on a failure here; if that is only a consequence, receive theirs. Return the report on the cause."""

    @abstractmethod
    def await_others(self) -> None:
        """Wait until the ranks of all machines have ended."""

    @abstractmethod
    def close(self) -> None:
        """End the rendezvous, so that other agents learn that the job is over."""


class OneMachine(Meeting):
    """A single machine, which needs no rendezvous. Its ranks connect through a store that only this machine reaches; nothing in it is unpickled.

    Args:
        port: port of the first round's store; 0 for any free port. The stores of later rounds always have a free port.
        run_id: the job's name; random by default, so that other users of this machine cannot guess it.
    """

    def __init__(self, port: int, run_id: str | None) -> None:
        self.run_id = run_id or secrets.token_hex(16)
        self._store = stores.serve(LOOPBACK, port, timeout=_seconds(STORE_S))

    def next_round(self, nproc: int, restarts: int) -> Round:
        if self.has_met:
            self._store = stores.serve(LOOPBACK, 0, timeout=_seconds(STORE_S))
        self.has_met = True
        return Round(0, 1, 0, nproc, restarts, (LOOPBACK, self._store.port))

    def agree_on_cause(self, report: str, is_consequence: bool) -> str:
        return report

    def await_others(self) -> None:
        pass

    def close(self) -> None:
        pass


class Machines(Meeting):
    """Several machines, which meet by torch's rendezvous. A thread polls it, so that an agent notices its ranks' ends even if the network hangs.

    Args:
        handler: torch's rendezvous.
        limit_s: time (s) that the rendezvous may take.
        local: the name by which other machines reach this one.
        address: the address of this machine's interface towards the other machines.
        shared: the address of the store that all rounds share, if there is one. The first round's ranks use it, too: the user chose its port.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        limit_s: float,
        local: str,
        address: str | None,
        shared: tuple[str, int] | None = None,
    ) -> None:
        self.run_id, self.local, self.address = handler.get_run_id(), local, address
        self._handler, self._limit_s, self._shared = handler, limit_s, shared
        self._rounds = 0
        self._round: Round | None = None
        self._store: dist.Store | None = None  # the agents' store in this round
        self._ranks_store: dist.TCPStore | None = None
        self._cause = ""  # another agent's report on a failure in this round
        self._answered = 0.0  # when the agents' store last answered
        self._over = threading.Event()

    def next_round(self, nproc: int, restarts: int) -> Round:
        self._stop_watching()
        with _addresses_in_every_round():
            self._round = bounded(
                lambda: self._join(nproc, restarts),
                self._limit_s + 3 * STORE_S,
                "the rendezvous of the machines",
            )
        self.has_met = True
        self._answered = time.monotonic()
        self._over = threading.Event()
        watch = functools.partial(self._watch, self._over)
        HelperThread(watch, "fit-waiting", "machines that join or fail are noticed only when this one ends").start()
        return self._round

    @property
    def reachable(self) -> bool:
        """Whether the agents' store has answered recently."""
        return time.monotonic() - self._answered < SILENT_S

    def agree_on_cause(self, report: str, is_consequence: bool) -> str:
        if self._round is None or self._round.machines == 1:
            return report
        if is_consequence and self._cause:
            return self._cause
        try:
            if self.reachable:
                exchange = self._await_cause if is_consequence else self._publish
                return bounded(lambda: exchange(report), 2 * ELSEWHERE_S, "asking the other machines")
        except (RendezvousTimeoutError, dist.DistError):
            pass
        lost = "The rank that this one lost was on another machine, which cannot be reached."
        return f"{report}\n\n{lost}" if is_consequence else report

    def await_others(self) -> None:
        with contextlib.suppress(RendezvousTimeoutError, dist.DistError):
            bounded(self._count_until_all, END_S, "waiting for the other machines")

    def close(self) -> None:
        if not self.reachable:
            return
        self._stop_watching()
        with contextlib.suppress(RendezvousTimeoutError, dist.DistError):
            bounded(self._handler.shutdown, STORE_S / 2, "closing the rendezvous")

    def _join(self, nproc: int, restarts: int) -> Round:
        """Join the next round, and learn from each machine how many ranks it has."""
        info = self._handler.next_rendezvous()
        self._rounds += 1
        store = dist.PrefixStore(f"fit/{self._rounds}" if self._shared else "fit", info.store)
        if info.rank == 0:
            store.set("master", json.dumps(self._serve_ranks()))
        store.set(f"machine/{info.rank}", json.dumps([nproc, restarts]))
        host, port = json.loads(store.get("master"))
        rows = [json.loads(store.get(f"machine/{machine}")) for machine in range(info.world_size)]
        counts = [count for count, _ in rows]
        self._store = store
        return Round(
            info.rank,
            info.world_size,
            sum(counts[: info.rank]),
            sum(counts),
            max(machine_restarts for _, machine_restarts in rows),
            (host, port),
        )

    def _serve_ranks(self) -> tuple[str, int]:
        """Serve the store of this round's ranks; return its address."""
        if self._shared and self._rounds == 1:
            return self._shared
        self._ranks_store = dist.TCPStore(self.local, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return self.local, self._ranks_store.port

    def _stop_watching(self) -> None:
        self._over.set()
        self.machines_waiting, self.failed_elsewhere, self._cause = 0, False, ""

    def _watch(self, over: threading.Event) -> None:
        """Poll the rendezvous and the agents' store until the round is ``over``; the thread's target."""
        assert self._store is not None
        store, broken_since, is_told = self._store, 0.0, False
        while not over.wait(WATCH_S):
            # A store that does not answer says nothing about the ranks: they go on, until a restart shows whether it is gone. A connection
            # that the other side closes is different: the agent that served the store has ended, and its ranks with it.
            try:
                waiting = self._handler.num_nodes_waiting()
                failed = store.check([CAUSE])
                self._answered = time.monotonic()
                broken_since = 0.0
                if failed and not over.is_set():
                    # Read at once, because the store ends with the agent that serves it.
                    self._cause = store.get(CAUSE).decode()
                if not over.is_set():
                    self.machines_waiting, self.failed_elsewhere = waiting, failed
            except (RuntimeError, RendezvousError) as error:  # a store's errors are RuntimeErrors
                if isinstance(error, dist.DistNetworkError) or isinstance(error.__cause__, dist.DistNetworkError):
                    broken_since = broken_since or time.monotonic()
                    if time.monotonic() - broken_since > SILENT_S / 2 and not over.is_set():
                        self.failed_elsewhere = True
            except Exception as error:
                if not is_told:
                    is_told = True
                    log_failure("fit-waiting", "it goes on; machines that join or fail may be noticed late", error)

    def _publish(self, report: str) -> str:
        """Send other agents the report on a failure here."""
        assert self._store is not None
        self._store.set(CAUSE, report)
        time.sleep(2 * WATCH_S)  # this agent may serve the store, and ends soon: give others time to read the report
        return report

    def _await_cause(self, report: str) -> str:
        """Wait for another agent's report on the cause of a failure here; return it, or ``report`` with a note."""
        assert self._store is not None
        deadline = time.monotonic() + ELSEWHERE_S
        while time.monotonic() < deadline:
            if self._store.check([CAUSE]):
                return self._store.get(CAUSE).decode()
            time.sleep(0.1)
        return (
            f"{report}\n\nThe rank that this one lost was on another machine, which reported no cause: it may be gone."
        )

    def _count_until_all(self) -> None:
        """Count this machine as ended, and wait until all are."""
        # The count is polled, because a blocking wait would occupy the connection, which heartbeats need.
        assert self._store is not None
        assert self._round is not None
        ended = self._store.add("ended", 1)
        while ended < self._round.machines:
            time.sleep(0.1)
            ended = self._store.add("ended", 0)


@contextlib.contextmanager
def _addresses_in_every_round() -> Iterator[None]:
    """Let torch publish an address in every round. None is used, but by default torch does so once, and machines that join later wait for it."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    previous_value = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if previous_value is not None:
            os.environ[name] = previous_value


def meeting_of(job: Job, output: Output | Terminal) -> Meeting:
    """Create the meeting of ``job``'s machines; this machine serves it if the address is its own and no other agent serves it yet.

    Raises:
        LaunchError: the port is busy, or the address cannot be reached.
    """
    host, port = job.endpoint or (LOOPBACK, 0)
    if job.max_nodes == 1:
        if not addresses.is_own(host):
            output.write_line(
                f"--rdzv {host}:{port} is not needed for one machine: its ranks meet at {LOOPBACK}:{port}"
            )
        try:
            return OneMachine(port, job.run_id)
        except dist.DistError as error:
            raise LaunchError(_busy(f"{host}:{port}", "another program or job holds it")) from error
    local = _towards(job, host, port, output)
    outward: str | None = local
    if addresses.is_loopback(local) and not addresses.is_loopback(host):
        # Many machines resolve their own name to a loopback address, while other machines resolve it to the real one.
        outward, local = addresses.default_address(), host
    if job.node_rank is None:
        store = _served(job, host, port) if addresses.is_own(host) else _reached(job, host, port)
        return Machines(_dynamic(job, store, local), job.join_timeout_s, local, outward)
    if job.node_rank == 0 and not addresses.is_free(port):
        raise LaunchError(_busy(f"{host}:{port}", "another program holds it"))
    static = StaticTCPRendezvous(host, port, job.node_rank, job.max_nodes, job.name, job.join_timeout_s)
    return Machines(static, job.join_timeout_s, local, outward, shared=(host, port))


def _towards(job: Job, host: str, port: int, output: Output | Terminal) -> str:
    """This machine's address towards the rendezvous; waits, because a host name may become resolvable only some time after the start."""
    deadline, announced = time.monotonic() + job.join_timeout_s, False
    while True:
        try:
            return addresses.address_towards(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"--rdzv {host}:{port}: this machine did not find it within {job.join_timeout_s} s ({error}). "
                    "Is the name right, and is there a route to it?"
                ) from error
            if not announced:
                output.write_line(
                    f"--rdzv {host}:{port} cannot be resolved yet ({error}); waiting up to {job.join_timeout_s} s"
                )
                announced = True
        time.sleep(0.5)


def _served(job: Job, host: str, port: int) -> dist.Store:
    """The store at an address of this machine, which this agent serves, or another agent of the same job."""
    if addresses.is_free(port):
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
    """The store that another machine serves."""

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


def _busy(where: str, reason: str) -> str:
    return f"--rdzv {where}: the port is busy: {reason}. Choose another port (the same on all machines), or leave --rdzv out on a single machine"


def _dynamic(job: Job, store: dist.Store, local: str) -> DynamicRendezvousHandler:
    """torch's rendezvous of machines without fixed numbers."""
    # Several heartbeats may be late before `dead_after_s` has passed.
    interval = max(1, job.dead_after_s // 5)
    times: dict[str, Any] = {"join": _seconds(job.join_timeout_s), "last_call": _seconds(job.join_wait_s)}
    dynamic: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
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
    return dynamic


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)
