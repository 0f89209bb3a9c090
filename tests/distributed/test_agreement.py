import time

import pytest
from support.internals import group_of_one
from support.ranks import run_ranks

from engine.distributed.agreement import MAX_INTERVAL, Agreement, Stopwatch

SCRIPT = """
import math, os
from datetime import timedelta
import torch
from engine.distributed.agreement import Agreement, Stopwatch
from engine.distributed.environments import detect
from engine.distributed.join import join

group = join(detect(os.environ), torch.device("cpu"), timeout=timedelta(seconds=30))
r = group.rank

def first(step_s, wish, calls=400):
    agreement = Agreement(group, Stopwatch())
    answers = [agreement.poll(wish(i), step_s) for i in range(calls)]
    return [answers.index(True) if True in answers else None, agreement.interval, sum(answers)]

out = {
    "first step": first(0.001, lambda i: r == 1 and i == 0),
    "fast": first(0.0001, lambda i: r == 1 and i == 100),
    "0.02 s on the slower": first(0.02 if r else 0.001, lambda i: r == 0 and i == 5, 30),
    "slow": first(5.0, lambda i: r == 1 and i == 7, 10),
    "never": first(0.001, lambda i: False),
    "odd durations": first([math.nan, math.inf][r], lambda i: r == 0 and i == 2, 10),
    "zero": first(0.0, lambda i: r == 0 and i == 2, 10),
    "negative": first(-1.0, lambda i: r == 0 and i == 2, 10),
}
agreement = Agreement(group, Stopwatch())
out["now"] = [agreement.agree_now(r == 1), agreement.agree_now(False), agreement.agree_now(True)]
agreement = Agreement(group, Stopwatch())
agreement.poll(False, 0.001)
agreement.poll(r == 1, 0.001)
out["now takes a pending wish"] = [agreement.agree_now(False), agreement.agree_now(False)]

def posted(wish):
    # An agreement with a check that was begun, in which rank 1 has this wish, and not read yet.
    agreement = Agreement(group, Stopwatch())
    for i in range(5):
        assert not agreement.poll(wish if r == 1 and i == 4 else 0, 0.001)
    return agreement

agreement = posted(2)
out["now reads a check that was begun"] = [agreement.agree_now(False), agreement.level, agreement.agree_now(False)]
agreement = posted(3)
agreement.restart()
out["so does a restart"] = [agreement.poll(0, 0.001), agreement.level, agreement.poll(0, 0.001)]
agreement = posted(0)
agreement.poll(int(r == 1), 0.001)
out["a wish after it began waits for the next"] = [[agreement.poll(0, 0.001) for _ in range(17)].index(True)]
agreement = Agreement(group, Stopwatch())
if r == 1:
    agreement.notify()
heard = []
for i in range(3):
    agreement.poll(0, 5.0)
    heard.append(agreement.news)
    agreement.news = False
out["news"] = heard
report(out)
"""


@pytest.fixture(scope="module")
def results():
    return [ran.value for ran in run_ranks(SCRIPT, 2)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("first step", [0, MAX_INTERVAL, 1]),
        # Checks begin after calls 0, 4, 20, 84, 340: the interval grows fourfold. All but the first are read one call later.
        ("fast", [341, MAX_INTERVAL, 1]),
        ("0.02 s on the slower", [21, 25, 1]),  # checks begin after calls 0, 4, 20; then 0.5 s / 0.02 s
        ("slow", [7, 1, 1]),
        ("never", [None, MAX_INTERVAL, 0]),
        ("odd durations", [2, 1, 1]),
        ("zero", [2, 1, 1]),
        ("negative", [2, 1, 1]),
        ("now", [True, False, True]),
        ("now takes a pending wish", [True, False]),
        ("now reads a check that was begun", [True, 2, False]),
        ("so does a restart", [True, 3, False]),
        ("a wish after it began waits for the next", [15]),  # begun 16 calls after call 4, read at call 21
        ("news", [True, False, False]),
    ],
)
def test_ranks_agree_at_the_same_call(results, name, expected):
    assert results[0][name] == results[1][name] == expected


def test_alone_the_wish_is_the_answer_at_once_and_costs_nothing():
    agreement = Agreement(group_of_one(), Stopwatch())
    assert agreement.poll(True, 0.1) is True
    assert agreement.poll(False, 0.1) is False
    assert agreement.agree_now(True) is True
    agreement.notify()
    assert agreement.news
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(10_000):
            agreement.poll(False, 0.001)
        best = min(best, time.perf_counter() - begun)
    assert best / 10_000 < 1e-6  # 0.1 us on an idle machine; the bound leaves room for a busy one
