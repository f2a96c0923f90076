"""Which faults a seed brings, and how hard: every seed enables its own subset (swarm testing), so that rare faults meet.

Faults stop at `until_s`. From then on the run must finish.
"""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

OF_COMPLETIONS = ("answer_aborts", "answer_hangs", "killer_prompt")
"""Drawn from a stream of their own: a seed that has none of them is the run that it was without them."""
KINDS = (
    "drop", "duplicate", "delay", "corrupt", "cut", "freeze", "slow_node", "generator_crash", "engine_failure",
    "generator_twice", "learner_crash", "buffer_crash", "driver_crash", "drain", "clock_jump", "bad_reward", "weights_cut",
    "learner_line", "generators_live_on", "power_cut", "disk_full", "disk_error", "disk_death", "bit_flip",
)  # fmt: skip


@dataclass(frozen=True)
class Faults:
    """Rates are per virtual second, shares per message."""

    until_s: float
    kinds: frozenset[str] = frozenset()
    share: dict[str, float] = field(default_factory=dict)
    rate: dict[str, float] = field(default_factory=dict)


def draw_of_completions(seed: int) -> dict[str, float]:
    """What befalls single completions and prompts in the run of a seed: the share of completions of each kind."""
    rng = random.Random(f"answers {seed}")
    if rng.random() < 0.5:
        return {}
    most = {"answer_aborts": 0.15, "answer_hangs": 0.1, "killer_prompt": 1.0}
    return {kind: most[kind] * rng.uniform(0.2, 1.0) for kind in OF_COMPLETIONS if rng.random() < 0.5}


class Outage(NamedTuple):
    since_s: float
    until_s: float
    generator: str
    """The only one that meets it; empty: all do."""


def draw_of_rewards(seed: int, until_s: float) -> tuple[Outage, ...]:
    """When the rewards of a seed are down, from a stream of their own. They may outlast the other faults by a minute."""
    rng = random.Random(f"rewards {seed}")
    if rng.random() < 0.6:
        return ()
    outages = []
    for _ in range(rng.randint(1, 4)):
        since_s = rng.uniform(0.0, until_s)
        seconds = rng.choice((3.0, 20.0, 60.0, 150.0)) * rng.random()
        outages.append(Outage(since_s, min(since_s + seconds, until_s + 60.0), rng.choice(("", "", "generator-0"))))
    return tuple(outages)


class Command(NamedTuple):
    at_s: float
    what: str
    """`pause`, `resume`, `bound`, `window`, `leave` or `checkpoint`."""
    number: int = 0
    """The bound, or the groups in flight; of the generator that leaves, its turn among those that are there."""


def draw_of_commands(seed: int, until_s: float) -> tuple[Command, ...]:
    """What a person asks of the run of a seed, from a stream of their own. No pause outlasts the faults."""
    rng = random.Random(f"person {seed}")
    if rng.random() < 0.6 or not until_s:
        return ()
    kinds = rng.sample(("pause", "bound", "window", "leave", "checkpoint"), rng.randint(1, 5))
    commands = [Command(until_s, "resume")]
    for _ in range(rng.randint(1, 8)):
        at_s, what = rng.uniform(0.0, until_s), rng.choice(kinds)
        number = rng.randint(0, 6) if what == "bound" else rng.randint(1, 4)
        commands.append(Command(at_s, what, number))
        if what == "pause":
            commands.append(Command(rng.uniform(at_s, until_s), "resume"))
    return tuple(commands)


def draw(rng: random.Random) -> Faults:
    """The faults of one seed."""
    likely = rng.choice((0.15, 0.35, 0.6))
    kinds = frozenset(kind for kind in KINDS if rng.random() < likely)
    on_messages = {
        "drop": 0.2,
        "duplicate": 0.2,
        "delay": 0.3,
        "corrupt": 0.05,
        "bad_reward": 0.1,
        "learner_line": 0.02,
    }
    per_second = {
        "cut": 0.03, "freeze": 0.03, "generator_crash": 0.03, "engine_failure": 0.02, "generator_twice": 0.02,
        "learner_crash": 0.02, "buffer_crash": 0.01, "driver_crash": 0.01, "drain": 0.01, "clock_jump": 0.02,
        "weights_cut": 0.03, "power_cut": 0.015, "disk_full": 0.02, "disk_error": 0.03, "disk_death": 0.02,
        "bit_flip": 0.02,
    }  # fmt: skip
    return Faults(
        until_s=rng.uniform(20.0, 120.0),
        kinds=kinds,
        share={kind: most * rng.random() for kind, most in on_messages.items() if kind in kinds},
        rate={kind: most * rng.uniform(0.3, 2.0) for kind, most in per_second.items() if kind in kinds},
    )
