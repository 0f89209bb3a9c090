"""Thinning keeps peaks; packing keeps values."""

from __future__ import annotations

import base64
import gzip

import numpy as np

from callbacks.report.curves import Curve, Packed, Points, share


def curve(values):
    steps = np.arange(1.0, len(values) + 1)
    return Curve(steps, steps / 2, np.asarray(values, dtype=np.float64))


def test_a_step_has_the_value_that_was_recorded_last():
    points = Points()
    for step, value in ((3, 1.0), (1, 2.0), (3, 5.0), (2, 4.0)):
        points.add(np.array([float(step)]), np.array([float(step)]), np.array([value]))
    assert points.curve({}) == Curve(np.array([1.0, 2, 3]), np.zeros(3), np.array([2.0, 4, 5]))


def test_thinned_curves_keep_both_ends_and_every_lone_peak():
    generator = np.random.default_rng(0)
    values = generator.normal(size=100_000)
    peaks = [0, 17, 4_321, 50_000, 99_998]
    values[peaks] = [90, -70, 80, -60, 99]
    values[60_000:60_050] = np.nan
    thin = curve(values).thinned(1000)
    assert len(thin) <= 1000
    kept = dict(zip(thin.steps.tolist(), thin.values.tolist(), strict=True))
    assert all(kept[peak + 1] == values[peak] for peak in peaks)
    assert {1.0, 100_000.0} <= kept.keys()
    assert (np.diff(thin.steps) > 0).all()
    assert np.array_equal(thin.values, values[thin.steps.astype(int) - 1], equal_nan=True)
    assert np.array_equal(thin.seconds, thin.steps / 2)


def test_a_short_curve_stays_whole_and_only_nan_is_no_error():
    short = curve([1.0, np.nan, 3.0])
    assert short.thinned(3) is short
    assert 2 <= len(curve([np.nan] * 100).thinned(10)) <= 10


def test_long_curves_share_what_short_ones_leave():
    curves = [curve(np.zeros(length)) for length in (10, 1000, 2000)]
    assert share(curves, 10_000) == 2000
    assert share(curves, 1010) == 500
    assert share([], 10) == 0


def test_equal_arrays_are_stored_once_and_float32_overflow_is_no_infinity():
    packed = Packed()
    first = packed.add_increasing(np.array([1.0, 2.0, 2.0**24 + 1]))
    other = packed.add(np.array([1e300, np.inf, np.nan]))
    assert packed.add_increasing(np.array([1.0, 2.0, 2.0**24 + 1])) == first == [0, 3, 8]
    assert packed.add_increasing(np.array([1.0, 2.0, 2.0**24])) == [40, 3, 4]
    raw = gzip.decompress(base64.b64decode(packed.text()))
    found = np.frombuffer(raw, "<f4", other[1], other[0])
    assert np.isfinite(found[0])
    assert np.isposinf(found[1])
    assert np.isnan(found[2])
    assert other[0] % 8 == 0
