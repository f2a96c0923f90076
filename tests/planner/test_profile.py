"""A profile is read as it was written, and its fits find what data was made with."""

import msgspec
import numpy as np
import pytest

from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.plan import DecodeCurve, LearnerTimes, read_profile, write_profile
from tests.planner.profiles import SAME, long_tail, profile


def test_a_profile_is_read_as_it_was_written(tmp_path):
    made = profile(lengths=long_tail(), decode=DecodeCurve.fit([(1.0, 0.1), (8.0, 0.2)]), kv_completions=7)
    write_profile(made, tmp_path / "below" / "profile.json")
    assert read_profile(tmp_path / "below" / "profile.json") == made


def test_what_is_no_profile_is_refused_with_its_file_and_its_key(tmp_path):
    path = tmp_path / "mine.json"
    with pytest.raises(ConfigError, match=r"mine.json cannot be read .*asyncgrpo tune"):
        read_profile(path)
    for change, said in (({"publish_s": -1}, "publish_s"), ({"speed": 3}, "speed"), ({"format": 1}, "format 1, this")):
        path.write_bytes(msgspec.json.encode(msgspec.to_builtins(profile()) | change))
        with pytest.raises(ConfigError, match=f"mine.json.*{said}"):
            read_profile(path)


def test_the_curve_is_the_line_through_the_points():
    curve = DecodeCurve.fit([(b, 0.02 + 0.0005 * b) for b in (1.0, 4.0, 16.0, 64.0)])
    assert (curve.base_s, curve.per_completion_s) == pytest.approx((0.02, 0.0005))
    assert curve.residual < 1e-9 and curve.knee == pytest.approx(120)
    assert curve.is_near(90) and not curve.is_near(100)
    assert curve.rate(curve.knee) == pytest.approx(0.75 / 0.0005), "three quarters of the most there is"


def test_neither_part_of_a_curve_is_negative_and_one_load_leaves_open_which_part_is_its_own():
    curve = DecodeCurve.fit([(10.0, 0.04), (12.0, 0.04)])
    assert (curve.token_seconds(11.0), curve.base_s) == pytest.approx((0.04, 0.02))
    falling = DecodeCurve.fit([(1.0, 0.03), (8.0, 0.02)])
    assert falling.per_completion_s == 0 and 0.02 < falling.base_s < 0.03
    through_less_than_nothing = DecodeCurve.fit([(1.0, 0.001), (8.0, 0.02)])
    assert through_less_than_nothing.base_s == 0 and through_less_than_nothing.per_completion_s > 0


def test_the_learner_s_line_is_found_at_two_sizes_and_goes_through_zero_at_one():
    two = LearnerTimes.fit([(100.0, 1.5), (400.0, 3.0)])
    assert (two.base_s, two.rank_s_per_token) == pytest.approx((1.0, 0.005))
    assert two.seconds(800.0, ranks=2) == pytest.approx(3.0)
    assert LearnerTimes.fit([(100.0, 1.0), (101.0, 1.0)]).base_s == 0


def test_draws_have_the_mean_the_tail_and_the_likeness_of_the_measured_groups():
    lengths = long_tail()
    measured = np.array(lengths.groups)
    assert lengths.mean == pytest.approx(measured.mean(), rel=0.05)
    assert lengths.longest_of(1, 4) == pytest.approx(measured.max(axis=1).mean(), rel=0.05)
    assert lengths.longest_of(1, 8) > lengths.longest_of(1, 4)
    drawn = lengths.sample(3, 4)
    assert all(sorted(row) in np.sort(measured, axis=1).tolist() for row in drawn.tolist()), "whole groups"
    assert SAME.spread(16) == pytest.approx(1.0)
