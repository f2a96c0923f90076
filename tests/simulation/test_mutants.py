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
    0: "behind_counts_as_current checkpoint_names_no_step inherited_without_sync step_trains_all torn_end_stays",
    1: "cursor_at_issue fire_and_forget no_fencing "
    "slots_of_the_largest_bound slots_whatever_is_served unbounded_resend version_at_completion version_restarts",
    2: "forget_dedup",
    3: "granted_twice_worked_twice outage_charges_prompts",
    4: "aborted_in_silence evicted_without_refill released_lease_delivers stale_dropped_in_silence",
    5: "requeue_forgets_attempt silent_one_delivers slot_leak_on_failure",
    6: "quarantine_forgotten",
    7: "endless_poison",
    8: "first_finished given_back_is_charged",
    9: "pause_is_for_the_learner recovered_is_issued_too retired_too_early",
    10: "bound_not_written bound_of_now failed_sync_forgotten",
    11: "retired_without_sync",
    12: "ack_before_keep cancelled_lease_accepted taken_is_trained",
    14: "no_lease_expiry",
    15: "fewer_than_a_batch",
    17: "manifest_after_step",
    18: "groups_of_lost_weights_kept",
    22: "evaluation_asked_for_once",
    24: "leases_while_blocked",
    44: "raised_whatever_it_does",
    46: "batch_by_age snapshot_before_sync",
    48: "bound_starts_anew",
    49: "no_check_at_take",
    50: "ack_before_durable",
    95: "evaluation_of_another_start",
    175: "order_decided_anew stale_for_ever",
    315: "recovered_under_the_bound_of_now",
    433: "lag_from_newest_token",
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
