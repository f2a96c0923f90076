"""Mistakes planted in the product's own text, each with the few tests that must notice it.

`tests/simulation/mutants.py` does so for the rollout plane. A mistake is a line of a function that reads otherwise. The
function stays the object that it is and only its code changes, so whoever imported it by name has the mistake too.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from types import FunctionType


@dataclass(frozen=True)
class Mutant:
    place: str
    """`module:function`, below `asyncgrpo`."""
    right: str
    """As it is there, once."""
    wrong: str
    tests: str
    """A file of tests, and perhaps `::` and the name of one of them, below `tests`."""


TABLE = """
# what a batch is made of
a completion has the version of its first token: learner.packing:_versions
    span.version.number) -> completion.spans[0].version.number)
    learner/test_batching.py::test_each_token_knows_whose_weights_sampled_it
a completion that began under other weights is current: learner.packing:_is_current
    all( -> any(
    learner/test_batching.py::test_each_token_knows_whose_weights_sampled_it
the first token after a shared prompt is read from itself: learner.packing:_Layout.add
    prefix[1] - 1 -> prefix[1]
    learner/test_batching.py::test_every_token_is_trained_once_after_its_history_and_ranks_run_equally_often
completions that are only compared with count in the denominators: learner.packing:pack
    rollouts.lengths * rollouts.is_trained) -> rollouts.lengths)
    learner/test_batching.py::test_completions_that_were_cut_can_be_compared_with_and_not_trained
what an environment said is no part of a completion's length: learner.packing:read_rollouts
    lengths + torch.tensor(read, dtype=torch.int64) -> lengths
    learner/test_batching.py::test_what_was_read_between_turns_counts_towards_the_length_at_which_a_completion_is_cut
an aborted completion is trained: learner.packing:_reward
    completion.finish_reason == "abort" -> False
    learner/test_batching.py::test_completions_without_score_or_aborted_or_without_logprobs_are_left_out_and_counted
a rank without a row runs no micro-batch: learner.packing:rows_for_ranks
    rows += [[] for _ in range(wanted - len(rows))] -> pass
    learner/test_packing.py::test_every_answer_is_in_one_row_within_the_budget_and_ranks_run_equally_often
a divided group loses what did not fit: learner.packing:_divide
    insort(left, Piece(size - taken, group, kept)) -> pass
    learner/test_packing.py::test_every_answer_is_in_one_row_within_the_budget_and_ranks_run_equally_often
# objective and head
the correction looks at the policy of now, not at the anchor: learner.objective:MicrobatchObjective._terms
    (policy if settings.anchor == "behaviour" else anchor) -> policy
    learner/test_objective.py::test_updates_of_one_step_share_its_anchor
the KL to the behaviour policy is taken to the anchor: learner.objective:MicrobatchObjective._terms
    kl_penalty(policy, tokens.behaviour, kind="k2") -> kl_penalty(policy, anchor, kind="k2")
    learner/test_objective.py::test_loss_and_gradient_are_those_of_one_answer_at_a_time\
[kl to the behaviour policy, anchor proximal]
every update has the learning rate of the first one's signal: learner.learner:Learner.step
    signal_share=batch.signal_share -> signal_share=batches[0].signal_share
    learner/test_learner.py::test_the_learning_rate_of_each_update_follows_the_signal_of_its_own_groups
the sample share is that of the anchor: learner.objective:MicrobatchObjective.report
    log_age = at_start - tokens.behaviour -> log_age = terms.log_rho
    learner/test_learner.py::test_sample_shares_compare_the_weights_at_the_start_with_those_that_sampled
a KL in the reward comes after the advantages: learner.objective:precompute
    rollouts.advantages(settings.advantage, rewards) -> rollouts.advantages(settings.advantage)
    learner/test_objective.py::test_loss_and_gradient_are_those_of_one_answer_at_a_time[kl k1 in the reward]
the gradient of the entropy forgets the entropy: learner.head:_grad_logits
    log_p.add_(scores.entropy[:, None]) -> log_p
    learner/test_head.py::test_values_and_gradients_are_those_of_the_plain_formula
the gradient forgets the temperature: learner.head:_grad_logits
    (gradients.logprobs / temperature) -> gradients.logprobs
    learner/test_head.py::test_values_and_gradients_are_those_of_the_plain_formula
a gradient of zero is stepped on by momentum: learner.learner:Learner._update
    skipped is None and norm.item() > 0: -> skipped is None:
    learner/test_learner.py::test_a_gradient_of_zero_moves_nothing_and_counts_for_the_schedule
a resume takes updates of no gradient for those of AdamW: learner.saving:load
    state["made"] -> state["steps"]
    learner/test_checkpoint.py::test_a_resumed_learner_goes_on_bit_for_bit[steps without a gradient]
# advantages
the standard deviation of a group has n in its denominator: algorithms.advantages:_group_std
    (scores.num_scored - 1) -> scores.num_scored
    algorithms/test_advantages.py::test_every_estimator_follows_its_formula
whitening pushes groups without signal: algorithms.advantages:_of_trained
    scores.trains -> scores.scored
    algorithms/test_advantages.py::test_every_estimator_follows_its_formula
two that share the best reward are both trained: algorithms.advantages:pass_at_k
    torch.where(is_only_best, -> torch.where(is_best,
    algorithms/test_advantages.py::test_pass_at_k_gives_nothing_where_two_share_the_best
a group is solved whatever its reward: algorithms.advantages:signal_of
    ~has_signal & (groups.min(scores) >= success) -> ~has_signal
    algorithms/test_advantages.py::test_the_share_is_of_groups_that_are_solved_or_have_a_signal
a completion that is right and too long is wrong: learner.packing:pack
    signal_of(rollouts.scores, -> signal_of(rollouts.rewards,
    learner/test_batching.py::test_one_completion_does_not_decide_what_46_groups_are
# the bound of staleness
one group more may remain than can be trained in time: buffer.admission:deadlines_are_kept
    * groups_per_step -> * groups_per_step + 1
    buffer/test_staleness.py::test_any_order_of_arrival_keeps_the_bound_and_never_stands_still
a take waits although all that remains can be trained in time: buffer.admission:deadlines_are_kept
    max(0, deadline - version) -> max(0, deadline - version - 1)
    buffer/test_staleness.py::test_any_order_of_arrival_keeps_the_bound_and_never_stands_still
# publisher and receiver
nobody compares the digests: weights.publisher:Publisher._compare_received
    if sent != received: -> if False:
    weights/test_publication.py::test_bytes_that_came_other_than_they_were_sent_are_never_swapped_to
a late receiver may meet deltas: weights.arena:Place.abandon
    if self.awaited - set(self.receivers[:1]): -> if False:
    weights/test_senders.py::test_after_a_receiver_that_may_still_write_no_deltas_come
an engine may keep its old weights: weights.publisher:Publisher._swapped
    member.loaded != loaded and -> False and
    weights/test_publication.py::test_an_engine_that_keeps_its_old_weights_is_found_out
whoever is left out is not named: weights.publisher:Publisher._drop
    self._missing[name] = member -> pass
    weights/test_publication.py::test_a_generator_that_is_gone_is_left_out_and_named
an arena is written while a generator reads it: weights.publisher:Publisher._free_slot
    if not slot.readers and -> if
    weights/test_publication.py::test_an_arena_that_is_being_read_is_not_written
memory is received into from which an engine loads: weights.arena:Place.writable
    if not slot.readers: -> if True:
    weights/test_publication.py::test_versions_that_come_faster_than_they_travel_are_skipped
# the wire
a payload is not under the digest: wire.codec:digest_of
    for part in parts: -> for part in parts[:1]:
    wire/test_codec.py::test_every_flipped_bit_is_refused
version spans may leave a gap: wire.codec:_check_header
    span.start != end or ->
    wire/test_codec.py::test_a_group_that_cannot_be_is_refused_and_named
a group by weights that are two versions ahead is believed: wire.codec:check_lease
    newest.number + 1 -> newest.number + 2
    wire/test_checks.py::test_weights_that_do_not_exist_yet_are_refused
# rewards
a prompt that no rule knows counts as an outage: rewards.breaker:Breaker._make
    s.failure not in OF_THE_PROMPT -> True
    rewards/test_breaker.py::test_a_failure_that_says_nothing_of_the_reward_is_no_outage
probes try what worked last and nothing else: rewards.breaker:Breaker._next_probe
    (self._tries_good or not self._probes) -> True
    rewards/test_breaker.py::test_probes_try_other_prompts_than_the_one_that_worked_last
# the journal
a damaged record hides those behind it: journal.history:scan
    _next_whole(data, view, offset + 1) -> len(view)
    journal/test_log.py::test_with_any_byte_flipped_the_damaged_record_is_named_and_every_other_one_is_there
damage in the middle passes for a torn end: journal.history:read_segment
    is_last and item.end == segment.num_bytes -> item.end == segment.num_bytes
    journal/test_log.py::test_a_torn_end_in_a_segment_that_is_not_the_last_is_damage
a record that the disk refused is not written again: journal.log:Journal._attempt
    self._num_written = 0 -> pass
    journal/test_log.py::test_after_a_failed_sync_everything_since_the_last_good_one_is_written_again
bodies are given up of groups that may yet be trained: journal.log:Journal._note_settled
    - set(self._unsettled.values()) ->
    journal/test_log.py::test_bodies_of_trained_and_dropped_groups_are_given_up_and_the_ledger_stays
# resume and events
a model that is nowhere else the same may be another: cluster.folder:_change
    "" if has_same_contents else refusal -> "" if has_same_contents or not are_known else refusal
    cluster/test_resume.py
a setting that an older release did not know has changed: cluster.folder:_change
    _plain(knobs()[key].default) -> None
    cluster/test_resume.py::test_a_knob_that_an_older_release_did_not_know_had_its_default
an event may have fields that nobody declared: recording.events:EventLog.write
    extra := fields.keys() - kind.fields.keys() -> extra := set()
    recording/test_events.py::test_an_unknown_event_or_a_missing_field_is_our_mistake
a resume forgets the step that it goes on from: recording.events:is_undone
    event.get("step", 0) > step -> event.get("step", 0) >= step
    recording/test_events.py::test_a_resume_drops_the_steps_that_will_be_trained_again
what a full disk refused is lost: recording.events:EventLog.write
    _unwritten += _encoder -> _unwritten = _encoder
    recording/test_events.py::test_what_a_full_disk_refuses_is_written_once_there_is_room
# what the bytes of a publication are compared and sent by
a second word has only its place in a pair as its factor: weights.digest:_on_cpu
    (two + (two >> _HALF)) -> two
    weights/test_digest.py::test_the_digest_of_a_box_is_what_the_page_says
a position in the wrong block: weights.delta:_compare
    start + block * BLOCK * size -> start
    weights/test_delta.py::test_positions_far_apart
a delta is lost before all have it: weights.publisher:Publisher._compare_newest
    any(self._deltas.leads_from(place.version) for place in far) or -> any(()) or
    weights/test_far.py::test_what_is_published_while_a_newcomer_receives_all_weights_reaches_the_others_by_deltas
deltas on a network that is faster: weights.lane:Deltas.poll
    seconds > broadcast_s -> False
    weights/test_far.py::test_comparisons_that_take_longer_than_a_broadcast_or_find_too_much_make_no_delta
"""
"""Under each mistake and its place what reads otherwise, and the tests."""


def _read(table: str) -> Iterator[tuple[str, Mutant]]:
    lines = [line.strip() for line in table.strip().splitlines() if not line.startswith("#")]
    for head, change, tests in zip(*[iter(lines)] * 3, strict=True):
        name, _, place = head.partition(": ")
        right, _, wrong = f"{change} ".partition(" -> ")
        yield name, Mutant(place, right, wrong.strip(), tests)


MUTANTS = dict(_read(TABLE))


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    function = _function(mutant.place)
    before = function.__code__
    function.__code__ = _mutated(function, mutant)
    try:
        yield
    finally:
        function.__code__ = before


def _function(place: str) -> FunctionType:
    module, names = place.split(":")
    found = reduce(getattr, names.split("."), importlib.import_module(f"asyncgrpo.{module}"))
    return inspect.unwrap(found)


def _mutated(function: FunctionType, mutant: Mutant) -> object:
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(mutant.right) == 1, f"{mutant.place} has {mutant.right!r} {text.count(mutant.right)} times"
    (definition,) = (tree := ast.parse(text.replace(mutant.right, mutant.wrong))).body
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    definition.decorator_list = []
    made: dict[str, FunctionType] = {}
    exec(compile(tree, inspect.getfile(function), "exec"), function.__globals__, made)
    return made[definition.name].__code__
