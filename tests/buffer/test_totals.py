"""What a batch tells of the buffer beside its groups: how full it was, how long groups waited, how busy generators were."""

from asyncgrpo import metrics
from asyncgrpo.buffer.admission import AutoLag
from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.types import GeneratorSeconds, Sampling
from asyncgrpo.wire import PROTOCOL, Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import Batch, Grant, Register, Serving, Take, Trained
from tests.buffer.test_buffer import deliver, prompts, v
from tests.buffer.test_service_journal import Line
from tests.test_metrics import value


class Process:
    """A buffer, generators with places for four groups each, a learner, and time by hand."""

    def __init__(self, admission: str = "eager", max_lag: int = 1, generators: int = 2) -> None:
        self.line, self.now_s, self.leases = Line(), 100.0, []
        config = BufferConfig(prompts_per_step=2, max_lag=max_lag, admission=admission)
        source = PromptSource(prompts(40), seed=0, shuffle=False, epochs=1)
        self.buffer = Buffer(config, AlgorithmConfig(group_size=2), source, Sampling(), seed=0, lineage=1)
        self.service = BufferService(self.line, self.buffer, Evaluations((), Sampling(), 0, 60.0))  # type: ignore[arg-type]
        self.hear(Trained(version=v(0)), peer="learner")
        for name in map(str, range(generators)):
            self.hear(Register(protocol=PROTOCOL, generator_id=name, incarnation="i", window=4), peer=name)
            self.hear(Serving(generator_id=name, version=v(0)), peer=name)

    def hear(self, message: Message, payload: bytes = b"", peer: str = "learner") -> None:
        self.service.turn((peer, encode(message, payload)), self.now_s)
        self.leases += [grant.lease for grant in self.line.of(Grant)]

    def wait(self, seconds: float) -> None:
        for _ in range(round(10 * seconds)):
            self.now_s += 0.1
            self.service.turn(None, self.now_s)

    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.hear(deliver(self.leases.pop(0), 0), bytes(16), peer="0")

    def take(self, step: int = 0) -> dict[str, float]:
        self.hear(Take(step=step, version=v(step)))
        (batch,) = self.line.of(Batch)
        return batch.counters


def test_a_batch_tells_for_how_long_its_groups_waited_ready():
    process = Process()
    before = value("group_ready_seconds_sum"), value("group_ready_seconds_count")
    process.deliver(1)
    process.wait(3.0)
    process.deliver(1)
    process.wait(1.0)
    assert round(process.take()["now_ready_seconds"], 6) == (4.0 + 1.0) / 2
    assert round(value("group_ready_seconds_sum") - before[0], 6) == 5.0
    assert value("group_ready_seconds_count") - before[1] == 2


def test_a_group_of_an_earlier_start_has_waited_for_an_unknown_time():
    process = Process()
    entry = process.buffer._entries[process.leases[0].group_id]
    process.deliver(2)
    entry.ready_at_s = None
    process.wait(2.0)
    assert round(process.take()["now_ready_seconds"], 6) == 2.0


def test_a_batch_tells_the_bound_in_force_and_what_was_under_way_against_what_was_wanted():
    process = Process("fresh", max_lag=3)
    process.deliver(5)
    told = process.take()
    assert (told["now_max_lag"], told["now_slots"]) == (3, 8)
    assert told["now_under_way"] == 8 and "now_wanted" not in told, "it begins as eager does"
    process.hear(Trained(version=v(1)))
    told = process.take(1)  # three groups are in flight, three ready
    assert (told["now_wanted"], told["now_under_way"]) == (process.buffer.wanted, 6) == (3 + 2, 6)
    process = Process("eager")
    process.deliver(2)
    assert "now_wanted" not in process.take()


def test_what_is_wanted_is_never_more_than_there_are_slots():
    buffer = Process("fresh", max_lag=2).buffer
    for _ in range(2):
        buffer._admission.batch_requested(in_flight=20, ready=2, now_s=0.0, slots=100)
        buffer._admission.batch_taken(0.0)
    assert buffer.wanted == 6 == buffer.num_slots


def test_a_batch_tells_how_many_groups_were_in_flight_on_average_since_the_one_before():
    process = Process(max_lag=3)  # 8 slots, and 8 places at two generators
    process.wait(1.0)
    process.deliver(4)
    process.wait(3.0)
    told = process.take()
    assert (told["now_in_touch"], told["now_places"]) == (2, 8)
    assert abs(told["now_in_flight"] - (8 * 1.0 + 4 * 3.0) / 4) < 0.2
    process.hear(Trained(version=v(1)))
    process.wait(1.0)
    assert abs(process.take(1)["now_in_flight"] - 4) < 0.2, "what was before the last batch does not count again"


def test_a_batch_tells_what_the_generators_did_since_the_one_before():
    process = Process(max_lag=3, generators=0)

    def beat(name: str, **seconds: float) -> None:
        process.hear(Serving(generator_id=name, version=v(0), seconds=GeneratorSeconds(**seconds)), peer=name)

    for name in ("0", "1"):
        process.hear(Register(protocol=PROTOCOL, generator_id=name, incarnation="i", window=4), peer=name)
    beat("0", generate=5.0, idle=100.0)  # it has lived on while the buffer was started again
    beat("1", generate=2.0, reward=6.0)
    beat("0", generate=9.0, weights=0.5, idle=101.0)
    beat("1", generate=2.5, reward=9.0)
    process.deliver(4)
    told = process.take()
    assert [told[f"now_{what}"] for what in ("generate", "reward", "weights", "idle")] == [4.5, 3.0, 0.5, 1.0]
    process.hear(Trained(version=v(1)))
    beat("1", generate=3.0, reward=9.5)
    process.hear(Register(protocol=PROTOCOL, generator_id="0", incarnation="j", window=4), peer="0")
    beat("0", generate=0.5, idle=0.25)  # a new process counts anew
    beat("0", generate=1.0, idle=1.25)
    told = process.take(1)
    assert [told[f"now_{what}"] for what in ("generate", "reward", "weights", "idle")] == [1.0, 0.5, 0.0, 1.0]


def test_metrics_show_the_bound_the_slots_and_what_is_wanted():
    process = Process("fresh", max_lag=3)
    for _ in range(2):
        process.buffer._admission.batch_requested(in_flight=3, ready=2, now_s=0.0, slots=100)
        process.buffer._admission.batch_taken(0.0)
    process.wait(0.2)
    assert (value("max_lag_steps"), value("buffer_slots"), value("groups_wanted")) == (3, 8, 5)
    assert value("generator_places") == 8
    Process("eager", max_lag=1).wait(0.2)
    assert (value("max_lag_steps"), value("buffer_slots"), value("groups_wanted")) == (1, 4, 4)


def test_a_bound_that_changed_is_told_from_the_next_batch_on():
    process = Process(max_lag=3)
    process.buffer._auto = AutoLag(32, max_lag=5)
    process.deliver(2)
    told = process.take()
    process.wait(0.2)
    assert (told["now_max_lag"], told["now_slots"]) == (5, 12) == (value("max_lag_steps"), value("buffer_slots"))


def test_lags_are_counted_exactly_and_so_is_how_many_were_at_the_bound():
    names = {f"{lag}.0" for lag in range(33)}
    (family,) = metrics.group_lag_steps.collect()
    assert names <= {sample.labels.get("le") for sample in family.samples}
    process = Process(max_lag=1)
    before = value("groups_at_bound_total")
    process.deliver(4)
    process.take()
    assert value("groups_at_bound_total") == before
    process.hear(Trained(version=v(1)))
    process.take(1)
    assert value("groups_at_bound_total") == before + 2
