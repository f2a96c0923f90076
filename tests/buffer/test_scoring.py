"""What the buffer makes of rewards that fail: who is paused gets no lease, nobody pays for it, and it is said."""

import pytest

from asyncgrpo.buffer.fleet import NEVER_WORKED_CALLS, NEVER_WORKED_S, RewardMonitor
from asyncgrpo.types import Prompt, RewardHealth
from asyncgrpo.wire.rollouts import (
    REWARDS_PAUSED,
    LeaseFailed,
    RequestEval,
    RewardFailed,
    Serving,
    Take,
    Trained,
    Waiting,
)
from tests.buffer.test_buffer import deliver, v
from tests.buffer.test_incarnations import PAYLOAD, Served

PAUSED = RewardHealth(worked=3, failed=9, failing_s=5.0, probe_in_s=4.0, last="exception: my_reward.py:12: OSError: no")
WELL = RewardHealth(worked=5)


def at_work(*names: str, window: int = 4, **settings) -> Served:
    served = Served(**settings)
    served.hear("learner", Trained(version=v(0)))
    for name in names:
        served.join(name, window=window)
        report(served, name, WELL)
    return served


def report(served: Served, name: str, health: RewardHealth) -> list[tuple[str, str]]:
    return served.hear(name, Serving(generator_id=name, version=v(0), rewards=health))


def give_back(served: Served, name: str, lease_id: str) -> None:
    served.hear(name, LeaseFailed(generator_id=name, lease_id=lease_id, reason=REWARDS_PAUSED, tokens=2))


def test_where_one_is_paused_one_that_works_goes_on():
    served = at_work("a", "b", window=2)
    held = [entry.lease.lease_id for entry in served.buffer._entries.values() if entry.holder == "a"]
    report(served, "a", PAUSED)
    for lease_id in held:
        give_back(served, "a", lease_id)
    assert held and {entry.holder for entry in served.buffer._entries.values()} == {"b"}


@pytest.mark.parametrize("how", ["given back", "out of time"])
def test_an_outage_costs_a_prompt_or_an_evaluation_no_attempt(how: str):
    served = at_work("g", window=1, max_attempts=1, lease_timeout_s=10.0)
    prompt_index = served.oldest_lease().prompt_index
    for _ in range(5):
        lease = served.oldest_lease()
        assert lease.prompt_index == prompt_index
        report(served, "g", PAUSED)
        if how == "given back":
            give_back(served, "g", lease.lease_id)
        else:
            served.pass_time(11.0)
            report(served, "g", PAUSED)
        assert served.buffer.oldest_lease() is None
        report(served, "g", WELL)
    outcomes = served.buffer.outcomes
    assert outcomes["requeued"] == 5 and outcomes["leased"] == 6
    assert not any(name.startswith("dropped") and count for name, count in outcomes.items())
    served = at_work("g", held_out=(Prompt(prompt_id="eval/0", token_ids=(1,)),))
    served.hear("learner", RequestEval(step=0))
    for _ in range(5):
        (lease_id,) = served.service._evaluations._leased
        report(served, "g", PAUSED)
        give_back(served, "g", lease_id)
        report(served, "g", WELL)
    assert served.service._evaluations.in_flight, "nor does an evaluation pay for it"


def test_a_prompt_that_alone_is_never_scored_uses_up_its_attempts():
    served = at_work("g", window=1, max_attempts=2)
    prompt_index = served.oldest_lease().prompt_index
    for _ in range(2):
        lease = served.oldest_lease()
        assert lease.prompt_index == prompt_index
        served.hear("g", deliver(lease, 0, scores=(None, None)), PAYLOAD)
    assert served.buffer.outcomes["dropped_unscored"] == 1 and served.oldest_lease().prompt_index != prompt_index


def waiting(served: Served) -> Waiting:
    served.now_s += 2.0
    served.hear("g", Serving(generator_id="g", version=v(0), rewards=served.service._rewards._health["g"]))
    (message,) = [message for _, message in served.lines.sent if isinstance(message, Waiting)]
    return message


def test_the_learner_hears_why_it_waits_and_when_the_next_probe_is():
    served = at_work("g")
    served.hear("learner", Take(version=v(0)))
    report(served, "g", PAUSED)
    assert waiting(served) == Waiting(
        what="rewards (paused at g, probing again in 4 s; the last call failed with exception: my_reward.py:12: "
        "OSError: no)"
    )
    report(served, "g", WELL)
    assert waiting(served).what.startswith("groups:")
    served = at_work()
    served.join("g")
    served.hear("learner", Take(version=v(0)))
    report(served, "g", RewardHealth(failed=40, failing_s=40.0, probe_in_s=1.0, last="exception: no"))
    in_vain = "the reward never worked: 40 of 40 calls failed, the last with exception: no"
    assert waiting(served).hopeless == in_vain


@pytest.mark.parametrize(
    ("health", "has_worked", "is_hopeless"),
    [
        (RewardHealth(failed=NEVER_WORKED_CALLS, failing_s=NEVER_WORKED_S, last="timeout: no"), False, True),
        (RewardHealth(failed=NEVER_WORKED_CALLS, failing_s=NEVER_WORKED_S - 1, last="timeout: no"), False, False),
        (RewardHealth(failed=NEVER_WORKED_CALLS - 1, failing_s=NEVER_WORKED_S, last="timeout: no"), False, False),
        (RewardHealth(worked=1, failed=900, failing_s=900.0, last="timeout: no"), False, False),
        (RewardHealth(failed=900, failing_s=900.0, last="timeout: no"), True, False),
    ],
)
def test_a_reward_that_never_worked_is_said_to_be_hopeless(health: RewardHealth, has_worked: bool, is_hopeless: bool):
    monitor = RewardMonitor("reward function f.py", has_worked=has_worked, emit=lambda event, **fields: None)
    monitor.update("g", health, 0.0)
    sentence = (
        f"reward function f.py never worked: {health.failed} of {health.failed} calls failed, the last with timeout: no"
    )
    assert monitor.fatal_reason == (sentence if is_hopeless else "")
    monitor.update("other", RewardHealth(worked=1), 0.0)
    assert not monitor.fatal_reason, "one generator whose calls work keeps the run going"


def test_pauses_and_ends_of_pauses_are_events():
    events: list[tuple] = []
    monitor = RewardMonitor("f", has_worked=True, emit=lambda event, **fields: events.append((event, *fields.values())))
    for now_s, probe_in_s in ((0.0, 1.0), (0.5, 0.5), (1.5, 2.0), (2.5, 1.0)):
        monitor.update("g", RewardHealth(failing_s=1.0, probe_in_s=probe_in_s, last="no"), now_s)
    assert monitor.is_paused("g") and not monitor.is_paused("h")
    monitor.update("g", WELL, 12.0)
    monitor.update("g", PAUSED, 20.0)
    monitor.forget("g", 21.0)
    assert not monitor.is_paused("g") and monitor.describe_pause() is None
    assert events == [
        ("rewards_paused", "g", "no", 1.0),
        ("rewards_paused", "g", "no", 2.0),
        ("rewards_resumed", "g", 12.0),
        ("rewards_paused", "g", PAUSED.last, 4.0),
        ("rewards_resumed", "g", 1.0),
    ]


def test_events_wait_for_the_learner_which_may_be_rewriting_their_file():
    served = at_work("g", count=400, window=1, lease_timeout_s=10.0, max_attempts=1)
    lease = served.oldest_lease()
    served.hear("g", LeaseFailed(generator_id="g", lease_id=lease.lease_id, reason="failed", detail="too long"))
    assert served.events == []
    served.hear("learner", Take(version=v(0)))
    for _ in range(12):
        served.pass_time(11.0)
        report(served, "g", WELL)
    told = [(event, fields["reason"], fields["count"]) for event, fields in served.events]
    assert told == [("lease_failed", *one) for one in (("failed", 1), ("lease_timeout", 1), ("lease_timeout", 10))]
    assert served.events[0][1]["detail"] == "too long" and "not completed in time" in served.events[1][1]["detail"]


def test_failures_of_rewards_are_events_if_a_generator_of_the_run_reports_them():
    served = at_work("g")
    served.hear("learner", Take(version=v(0)))
    for peer in ("g", "stranger"):
        served.hear(peer, RewardFailed(generator_id=peer, failure="timeout", detail="x" * 60_000, count=10))
    assert served.events == [("reward_failed", {"actor": "g", "failure": "timeout", "detail": "x" * 500, "count": 10})]
