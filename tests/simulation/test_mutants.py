"""Every planted mistake is found within few seeds, and the product without one passes the same seeds."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.simulation.checker import Violation
from tests.simulation.mutants import MUTANTS, SHOWN_UNDER, planted
from tests.simulation.schedules import failure_of
from tests.simulation.world import World

SEEDS = 600
FOUND_BY: dict[int, str] = {
    0: "checkpoint_names_no_step evaluation_asked_for_once groups_of_lost_weights_kept silent_one_delivers "
    "step_trains_all torn_end_stays",
    1: "behind_counts_as_current cursor_at_issue fire_and_forget retired_without_sync slots_of_the_largest_bound "
    "slots_whatever_is_served unbounded_resend version_restarts",
    3: "granted_twice_worked_twice outage_charges_prompts",
    4: "aborted_in_silence evicted_without_refill forget_dedup released_lease_delivers stale_dropped_in_silence "
    "version_at_completion",
    5: "requeue_forgets_attempt slot_leak_on_failure",
    6: "no_fencing quarantine_forgotten",
    7: "endless_poison no_lease_expiry raised_whatever_it_does",
    8: "first_finished given_back_is_charged",
    9: "pause_is_for_the_learner recovered_is_issued_too retired_too_early",
    10: "ack_before_durable bound_not_written bound_of_now failed_sync_forgotten recovered_under_the_bound_of_now",
    12: "ack_before_keep cancelled_lease_accepted taken_is_trained",
    13: "leases_while_blocked",
    15: "fewer_than_a_batch",
    17: "manifest_after_step",
    46: "batch_by_age snapshot_before_sync",
    48: "bound_starts_anew",
    49: "no_check_at_take",
    56: "inherited_without_sync",
    155: "evaluation_of_another_start",
    175: "order_decided_anew",
    243: "lag_from_newest_token",
    310: "stale_for_ever",
}
"""Seeds, and the mutants that each found when this was written. They are tried first: the product may have changed since."""
SEED_OF = {name: seed for seed, names in FOUND_BY.items() for name in names.split()}


def find(seeds: Iterable[int], settings: dict[str, Any]) -> tuple[int, Exception] | None:
    for seed in seeds:
        failure = failure_of(World(seed, **settings))
        if failure is not None:
            return seed, failure
    return None


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_mistake_is_found(name: str):
    with planted(name):
        found = find([SEED_OF[name], *range(SEEDS)], SHOWN_UNDER.get(name, {}))
    assert found is not None, f"{name} lives through {SEEDS} seeds"
    assert isinstance(found[1], Violation | AssertionError), (
        f"{name} is not the mistake that it was meant to be: {found}"
    )
