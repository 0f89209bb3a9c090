import contextlib
import threading

from engine.distributed.failures import Interrupt


class Struck(Exception):
    pass


def beside(call) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def count(number: int) -> int:
    return sum(1 for _ in range(number))


def test_it_strikes_once() -> None:
    interrupt = Interrupt(Struck)
    struck: list[bool] = []
    strikes = 0
    for _ in range(2):
        try:
            beside(lambda: struck.append(interrupt.strike())).join()
            count(1000)
        except Struck:
            strikes += 1
    interrupt.withdraw()
    assert (strikes, struck) == (1, [True, False])


def test_nothing_strikes_after_withdrawal() -> None:
    interrupt = Interrupt(Struck)
    interrupt.withdraw()
    struck: list[bool] = []
    beside(lambda: struck.append(interrupt.strike())).join()
    assert count(1000) == 1000
    assert struck == [False]
    assert interrupt.withdrawn.is_set()


def test_what_was_on_its_way_ends_in_withdraw() -> None:
    """Both come to the lock at once, many times; a strike that came later would fail the test."""
    for _ in range(300):
        interrupt, start = Interrupt(Struck), threading.Barrier(2)

        def strike(interrupt=interrupt, start=start) -> None:
            start.wait()
            interrupt.strike()

        thread = beside(strike)
        with contextlib.suppress(Struck):
            start.wait()
            interrupt.withdraw()
        interrupt.withdraw()
        thread.join()
        assert count(100) == 100


def test_it_is_armed_again_by_another_thread() -> None:
    interrupt = Interrupt(Struck)
    interrupt.withdraw()
    ready, ended, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        interrupt.arm()
        ready.set()
        try:
            while not ended.is_set():
                pass
        except Struck:
            seen.append(threading.get_ident())
        interrupt.withdraw()

    thread = beside(work)
    ready.wait()
    assert interrupt.strike()
    thread.join(60)
    ended.set()
    assert seen == [thread.ident]
