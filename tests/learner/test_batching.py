import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncgrpo.learner.batching import pack, spread
from asyncgrpo.types import VersionSpan
from tests.learner.helpers import OLDER, VERSION, make_group, random_groups

GROUPS = random_groups(7, 4)
COLUMNS = ("token_ids", "position_ids", "mask", "behaviour_logprobs", "advantages", "is_current")


def packed(groups=GROUPS, *, rank=0, world=1, budget=64, **options):
    return pack(groups, VERSION, rank=rank, world=world, tokens_per_microbatch=budget, **options)


def sequences(step):
    """Every packed sequence of a rank as a tuple of its tokens, each the values of COLUMNS."""
    for batch in (*step.trained, *step.silent):
        columns = (getattr(batch, name).tolist() for name in COLUMNS)
        rows = list(zip(*columns, strict=True))
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            if any(sampled for _, _, sampled, *_ in rows[start:end]):
                yield tuple(rows[start:end])


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("skip_silent", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 40])
@pytest.mark.parametrize("budget", [1, 30, 64, 100_000])
def test_every_token_is_trained_once_and_ranks_run_equally_often(world, budget, padded, skip_silent):
    shares = [
        packed(rank=rank, world=world, budget=budget, padded=padded, skip_silent=skip_silent) for rank in range(world)
    ]
    expected = []
    for group in GROUPS:
        for rollout in group.rollouts:
            completion, prompt = rollout.completion, group.prompt.token_ids
            advantage = np.float32(shares[0].advantages[group.group_id, completion.index])
            current = completion.spans[0].version == VERSION
            rows = [(token, i, False, 0.0, 0.0, False) for i, token in enumerate(prompt)]
            for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                rows.append((token, len(prompt) + i, True, logprob, advantage, current))
            expected.append(tuple(rows))
    assert sorted(s for share in shares for s in sequences(share)) == sorted(expected)
    assert len({len(share.trained) for share in shares}) == len({len(share.silent) for share in shares}) == 1
    assert {share.num_tokens for share in shares} == {sum(g.num_tokens for g in GROUPS)}
    for batch in (b for share in shares for b in share.trained + share.silent):
        lengths = batch.lengths
        cost = len(lengths) * lengths.max() if padded else lengths.sum()
        assert cost <= budget or len(lengths) == 1
        assert not batch.mask[batch.cu_seqlens[:-1].long()].any()


def test_the_plan_is_the_same_every_time():
    first, second = packed(world=2), packed(world=2)
    assert [b.token_ids.tolist() for b in first.trained] == [b.token_ids.tolist() for b in second.trained]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_get_about_equal_work(world):
    lengths = np.random.default_rng(0).integers(10, 200, 300).tolist()
    bins = spread(lengths, world, 4096, padded=True)
    areas = [[len(b) * max(lengths[i] for i in b) for b in rank] for rank in bins]
    for same_turn in zip(*areas, strict=True):
        assert max(same_turn) <= 4096 and min(same_turn) > 0.7 * max(same_turn)
    assert sum(map(sum, areas)) < 1.15 * sum(lengths), "rectangles of sorted sequences waste little"


def test_there_are_no_more_microbatches_than_the_budget_needs():
    bins = spread([10] * 32, 2, 80, padded=True)
    assert [[len(b) for b in rank] for rank in bins] == [[8, 8], [8, 8]]


def test_answers_without_score_or_aborted_or_without_logprobs_are_left_out_and_counted():
    group = make_group(0, [1.0, None, 0.0, 1.0, 1.0], [[1], [2], [3], [4], [5]])
    aborted, broken = group.rollouts[3], group.rollouts[4]
    rollouts = [*group.rollouts[:3]]
    for rollout, change in ((aborted, {"finish_reason": "abort"}), (broken, {"logprobs": np.float32([math.nan])})):
        rollouts.append(replace(rollout, completion=replace(rollout.completion, **change)))
    step = packed([replace(group, rollouts=tuple(rollouts))])
    assert (step.num_answers, step.num_unusable, step.num_tokens) == (2, 3, 2)
    assert step.advantages.keys() == {("g0", 0), ("g0", 2)}
    assert step.advantages["g0", 0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))
    assert sorted(t for s in sequences(step) for t, *_ in s if t not in (5, 6, 7)) == [1, 3]


def test_an_empty_answer_takes_part_in_the_statistics_but_has_nothing_to_train():
    step = packed([make_group(0, [1.0, 0.0], [[], [9, 9]])])
    assert (step.num_answers, step.num_tokens, len(list(sequences(step)))) == (2, 2, 1)
    assert step.advantages["g0", 0] > 0


def test_groups_without_signal_are_counted_and_can_be_set_apart():
    groups = [make_group(0, [1.0, 1.0], [[1], [2]]), make_group(1, [1.0, 0.0], [[3], [4]]), make_group(2, [1.0], [[5]])]
    step = packed(groups, skip_silent=True)
    assert step.zero_signal_groups == 2
    assert [b.mask.sum().item() for b in step.trained] == [2] and sum(b.mask.sum().item() for b in step.silent) == 3
    assert not packed(groups).silent


def test_a_step_without_answers_still_has_one_empty_microbatch_for_every_rank():
    for rank in range(2):
        step = packed([], rank=rank, world=2)
        assert len(step.trained) == 1 and not step.trained[0].mask.any() and step.num_tokens == 0


def test_each_token_knows_whether_the_present_weights_sampled_all_of_its_answer():
    group = make_group(0, [1.0, 0.0], [[1, 2, 3], [4, 5]])
    first, second = group.rollouts
    spans = (VersionSpan(OLDER, 0, 2), VersionSpan(VERSION, 2, 3))
    mixed = replace(group, rollouts=(replace(first, completion=replace(first.completion, spans=spans)), second))
    current = {t: c for s in sequences(packed([mixed])) for t, _, sampled, _, _, c in s if sampled}
    assert current == {1: False, 2: False, 3: False, 4: True, 5: True}


def test_moving_a_batch_keeps_every_field():
    batch = packed().trained[0]
    moved = batch.to(torch.device("cpu"))
    assert all(torch.equal(getattr(moved, name), getattr(batch, name)) for name in batch.__dataclass_fields__)
