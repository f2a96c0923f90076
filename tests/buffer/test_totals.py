"""What a batch reports of the buffer beside its groups: how full it was, how long groups waited, how busy generators were."""

from asyncgrpo import metrics
from asyncgrpo.buffer.admission import AutoLag
from asyncgrpo.buffer.buffer import State
from asyncgrpo.types import GeneratorSeconds
from asyncgrpo.wire.rollouts import Batch, Register, Serving, Take, Trained
from tests.buffer.test_buffer import deliver, v
from tests.buffer.test_incarnations import PAYLOAD, Served
from tests.test_metrics import value


def begun(max_lag: int = 1, generators: int = 2) -> Served:
    """Generators with places for four groups each, at work for a learner whose steps train two."""
    served = Served(count=40, per_step=2, max_lag=max_lag, is_eager=False, shuffle=False)
    served.hear("learner", Trained(version=v(0)))
    for name in map(str, range(generators)):
        served.join(name, window=4)
    return served


def answer(served: Served, count: int) -> None:
    """Deliver the groups that were leased first."""
    leased = [entry.lease for entry in served.buffer._entries.values() if entry.state is State.LEASED]
    for lease in leased[:count]:
        served.hear("0", deliver(lease, 0), PAYLOAD)


def take(served: Served, step: int = 0) -> dict[str, float]:
    served.hear("learner", Take(version=v(step)))
    (batch,) = [message for _, message in served.lines.sent if isinstance(message, Batch)]
    return batch.counters


def test_a_batch_tells_for_how_long_its_groups_waited_ready():
    served = begun()
    before = value("group_ready_seconds_sum"), value("group_ready_seconds_count")
    answer(served, 1)
    served.pass_time(3.0)
    answer(served, 1)
    served.pass_time(1.0)
    assert round(take(served)["now_ready_seconds"], 6) == (4.0 + 1.0) / 2
    assert round(value("group_ready_seconds_sum") - before[0], 6) == 5.0
    assert value("group_ready_seconds_count") - before[1] == 2
    served = begun()
    answer(served, 2)
    next(iter(served.buffer._entries.values())).ready_at_s = None  # it is of an earlier start
    served.pass_time(2.0)
    assert round(take(served)["now_ready_seconds"], 6) == 2.0


def test_a_batch_tells_the_bound_in_force_and_what_was_under_way_against_what_was_wanted():
    served = begun(max_lag=3)
    answer(served, 5)
    told = take(served)
    assert (told["now_max_lag"], told["now_slots"]) == (3, 8)
    assert told["now_under_way"] == told["now_wanted"] == 8, "at the start all slots are wanted"
    served.hear("learner", Trained(version=v(1)))
    served.buffer._auto = AutoLag(32, max_lag=5)
    told = take(served, 1)  # three groups are in flight, three ready
    assert (told["now_wanted"], told["now_under_way"]) == (served.buffer.wanted, 6) == (6, 6)
    assert (told["now_max_lag"], told["now_slots"]) == (5, 12), "the bound has changed"
    served.pass_time(0.2)
    assert [value(name) for name in ("max_lag_steps", "buffer_slots", "groups_wanted")] == [5, 12, 6]
    assert value("generator_places") == 8


def test_a_batch_tells_how_many_groups_were_in_flight_on_average_since_the_one_before():
    served = begun(max_lag=3)  # 8 slots, and 8 places at two generators
    served.pass_time(1.0)
    answer(served, 4)
    served.pass_time(3.0)
    told = take(served)
    assert (told["now_in_touch"], told["now_places"]) == (2, 8)
    assert abs(told["now_in_flight"] - (8 * 1.0 + 4 * 3.0) / 4) < 0.2
    served.hear("learner", Trained(version=v(1)))
    served.pass_time(1.0)
    assert abs(take(served, 1)["now_in_flight"] - 4) < 0.2, "what was before the last batch does not count again"


def test_a_place_that_is_filled_again_at_once_counts_as_taken():
    served = begun(max_lag=3, generators=0)
    served.join("0", window=1)
    for _ in range(4):
        served.now_s += 0.2
        answer(served, 1)
    assert abs(take(served)["now_in_flight"] - 1.0) < 0.2


def test_a_batch_tells_what_the_generators_did_since_the_one_before():
    served = begun(max_lag=3, generators=0)

    def register(name: str, incarnation: str) -> None:
        served.hear(name, Register(generator_id=name, incarnation=incarnation, window=4))

    def beat(name: str, **seconds: float) -> None:
        served.hear(name, Serving(generator_id=name, version=v(0), seconds=GeneratorSeconds(**seconds)))

    def told(step: int) -> list[float]:
        counters = take(served, step)
        return [counters[f"now_{what}"] for what in ("generate", "reward", "weights", "idle")]

    register("0", "i")
    register("1", "i")
    beat("0", generate=5.0, idle=100.0)  # it has lived on while the buffer was started again
    beat("1", generate=2.0, reward=6.0)
    beat("0", generate=9.0, weights=0.5, idle=101.0)
    beat("1", generate=2.5, reward=9.0)
    answer(served, 4)
    assert told(0) == [4.5, 3.0, 0.5, 1.0]
    served.hear("learner", Trained(version=v(1)))
    beat("1", generate=3.0, reward=9.5)
    register("0", "j")
    beat("0", generate=0.5, idle=0.25)  # a new process counts anew
    beat("0", generate=1.0, idle=1.25)
    assert told(1) == [1.0, 0.5, 0.0, 1.0]


def test_lags_are_counted_exactly_and_so_is_how_many_were_at_the_bound():
    (family,) = metrics.group_lag_steps.collect()
    assert {f"{lag}.0" for lag in range(33)} <= {sample.labels.get("le") for sample in family.samples}
    served = begun(max_lag=1)
    before = value("groups_at_bound_total")
    answer(served, 4)
    take(served)
    assert value("groups_at_bound_total") == before
    served.hear("learner", Trained(version=v(1)))
    take(served, 1)
    assert value("groups_at_bound_total") == before + 2
