"""Micro-batches hold every sampled token once, after exactly the tokens that it was sampled after."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncgrpo.learner.packing import Shaping, StepBatch, pack
from asyncgrpo.types import Completion, Group, KeptTokens, Observation, PolicyVersion, VersionSpan
from asyncgrpo.wire.codec import pack_group, unpack_group
from tests.algorithms import oracle_advantages
from tests.learner.helpers import OLDER, VERSION, changed, make_group, random_groups


def with_observations(group: Group, seed: int) -> Group:
    """The group with observations before, between and behind the tokens of its completions; some have none."""
    rng = np.random.default_rng(seed)

    def observed(completion: Completion) -> Completion:
        places = [at for at in range(len(completion.token_ids) + 1) if rng.random() < 0.4]
        said = tuple(Observation(at, rng.integers(0, 260, rng.integers(1, 5)).astype(np.int32)) for at in places)
        return replace(completion, observations=said)

    rollouts = (replace(one, completion=observed(one.completion)) for one in group.rollouts)
    return replace(group, rollouts=tuple(rollouts))


def with_kept_tokens(group: Group) -> Group:
    """All completions but the first know two tokens that were kept at each place."""
    for index, one in enumerate(rollout.completion for rollout in group.rollouts[1:]):
        ids = np.stack([one.token_ids, one.token_ids + 1000], 1).ravel()
        group = changed(group, index + 1, kept=KeptTokens(ids, np.full(len(one.token_ids), 2, np.int32)))
    return group


GROUPS = [
    *(with_kept_tokens(with_observations(group, seed)) for seed, group in enumerate(random_groups(7, 4))),
    make_group(7, [1.0, 0.0, None, 0.5], [[], [9], [1, 2], [3, 4, 5]], prompt=(8,)),
    make_group(8, [1.0, 1.0], [[6, 7], [8]], prompt=range(20)),
]
"""With observations and kept tokens, an empty completion, one-token completions, an unusable one, a prompt of one token, and a
group without signal."""


def packed(groups=GROUPS, *, rank=0, world=1, budget=64, version=VERSION, **options):
    return pack(groups, version, rank=rank, world=world, tokens_per_microbatch=budget, **options)


def history(batch, position: int) -> tuple[list[int], list[int]]:
    """Tokens that the one at `position` of the row attends to, and their positions in their sequence."""
    for (first, last), bounds in batch.segments.families:
        for start, end in itertools.pairwise(bounds):
            if start <= position < end:
                seen = [*range(first, last), *range(start, position + 1)]
                return batch.token_ids[seen].tolist(), batch.position_ids[seen].tolist()
    raise AssertionError("segments cover the row")


def read(step) -> dict:
    """(group_id, index) of every answer in a rank's micro-batches to what is there for each of its tokens."""
    found = {}
    for batch in step.trained:
        bounds = itertools.pairwise(batch.cu_seqlens.tolist())
        columns = (batch.targets, batch.mask, batch.behaviour_logprobs, batch.advantages, batch.versions)
        kept = [[]] * len(batch.targets)
        if batch.kept is not None:
            kept = [ids.tolist() for ids in batch.kept.ids.tensor_split(batch.kept.ends[:-1])]
        columns = [*(column.tolist() for column in (*columns, batch.is_current)), kept]
        for completion, in_group, (start, end) in zip(batch.rollouts, batch.tokens_in_group, bounds, strict=True):
            tokens = []
            for n in range(start, end):
                seen, positions = history(batch, int(batch.read_at[n]))
                assert positions == list(range(len(positions)))
                tokens.append((seen, *(column[n] for column in columns)))
            key = step.rollouts.keys[completion]
            assert key not in found, "no completion is there twice"
            found[key] = (tokens, int(in_group))
    return found


def expected(groups, advantages: dict) -> dict:
    """The same, written down from the groups."""
    found = {}
    for group in groups:
        in_group = sum(
            len(r.completion.token_ids) for r in group.rollouts if (group.group_id, r.completion.index) in advantages
        )
        for rollout in group.rollouts:
            completion, key = rollout.completion, (group.group_id, rollout.completion.index)
            read = [*group.prompt.token_ids, *completion.all_token_ids.tolist()]
            if key not in advantages or not len(completion.token_ids):
                continue
            version = completion.spans[0].version
            a = float(np.float32(advantages[key]))
            tokens = []
            for at, logprob in zip(completion.sampled_at.tolist(), completion.logprobs.tolist(), strict=True):
                seen, token = read[: at + len(group.prompt.token_ids)], read[at + len(group.prompt.token_ids)]
                kept = [token, token + 1000] if completion.kept is not None else []
                tokens.append((seen, token, True, logprob, a, version.number, version == VERSION, kept))
            found[key] = (tokens, in_group)
    return found


def by_key(step) -> dict:
    return dict(zip(step.rollouts.keys, step.advantages.tolist(), strict=True))


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 40])
@pytest.mark.parametrize("budget", [1, 30, 64, 100_000])
def test_every_token_is_trained_once_after_its_history_and_ranks_run_equally_often(world, budget, share_prompts, skips):
    options = {"world": world, "budget": budget, "share_prompts": share_prompts, "skip_zero_advantage": skips}
    shares = [packed(rank=rank, **options) for rank in range(world)]
    first = shares[0]
    found = [read(share) for share in shares]
    assert sum(map(len, found)) == len(set().union(*found)), "no two ranks train the same completion"
    everything = expected(GROUPS, by_key(first))
    run = {k: v for k, v in everything.items() if by_key(first)[k] != 0 or not skips}
    assert {k: v for share in found for k, v in share.items()} == run
    assert (len(run) < len(everything)) == skips
    assert len({len(share.trained) for share in shares}) == 1
    for share in shares:
        assert by_key(share) == by_key(first), "ranks agree without talking"
        counts = (share.num_tokens, share.num_completions, share.num_groups, share.zero_signal_groups)
        assert counts == (sum(g.num_tokens for g in GROUPS) - 2, 7 * 4 + 3 + 2, 9, first.zero_signal_groups)
        assert share.not_run.mask.numel() == sum(len(everything[k][0]) for k in everything.keys() - run.keys())
        for batch in share.trained:
            assert len(batch.token_ids) <= budget or len(batch.rollouts) <= 1
            assert batch.segments.queries[-1] == len(batch.token_ids) == len(batch.position_ids)


def test_a_shared_prompt_is_run_once_and_the_last_token_of_a_completion_never():
    group = make_group(0, [1.0, 0.0, 0.5], [[1], [2, 3], [4, 5, 6]], prompt=(7, 8))
    (batch,) = packed([group]).trained
    assert sorted(batch.token_ids.tolist()) == [2, 4, 5, 7, 8]
    assert batch.token_ids[:2].tolist() == [7, 8] and batch.position_ids.tolist()[:2] == [0, 1]
    (batch,) = packed([group], share_prompts=False).trained
    assert sorted(batch.token_ids.tolist()) == [2, 4, 5, *[7] * 3, *[8] * 3]
    assert batch.segments.key_positions is None, "nothing is shared, so keys are the row itself"
    alone = make_group(1, [1.0], [[1, 2]], prompt=(7, 8))
    assert packed([alone]).trained[0].segments.key_positions is None, "nor by a completion that is alone"
    (batch,) = packed([changed(alone, 0, observations=(said(1, 2), said(2, 3)))]).trained
    assert batch.token_ids.tolist() == [7, 8, 1, 2, 2], "nor is what was said behind the last token"


def test_completions_without_score_or_aborted_or_without_logprobs_are_left_out_and_counted():
    group = make_group(0, [1.0, None, 0.0, 1.0, 1.0], [[1], [2], [3], [4], [5]])
    group = changed(changed(group, 3, finish_reason="abort"), 4, logprobs=np.float32([math.nan]))
    step = packed([group])
    assert (step.num_completions, step.num_tokens) == (2, 2)
    assert step.rollouts.num_malformed == 1
    assert by_key(step).keys() == {("g0", 0), ("g0", 2)}
    assert by_key(step)["g0", 0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))
    assert sorted(t for batch in step.trained for t in batch.targets.tolist()) == [1, 3]


NOTHING = {
    "no group": [],
    "no score": [make_group(0, [None, None], [[1], [2]])],
    "no token": [make_group(0, [1.0, 0.0], [[], []])],
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_step_of_nothing_still_has_one_empty_microbatch_for_every_rank(case):
    for rank in range(2):
        step = packed(NOTHING[case], rank=rank, world=2)
        assert step.num_tokens == step.num_groups == 0
        assert step.num_completions == (2 if case == "no token" else 0)
        (batch,) = step.trained
        assert len(batch.token_ids) == 1, "a model can run it"
        assert batch.mask.shape == batch.targets.shape == batch.advantages.shape == batch.versions.shape == (0,)


def test_each_token_knows_whose_weights_sampled_it():
    group = make_group(0, [1.0, 0.0], [[1, 2, 3], [4, 5]])
    mixed = changed(group, 0, spans=(VersionSpan(OLDER, 0, 2), VersionSpan(VERSION, 2, 3)))
    (batch,) = packed([mixed]).trained
    columns = (batch.targets.tolist(), batch.versions.tolist(), batch.is_current.tolist())
    seen = {token: rest for token, *rest in zip(*columns, strict=True)}
    assert seen == {1: [2, False], 2: [2, False], 3: [3, False], 4: [3, True], 5: [3, True]}
    elsewhere = packed([mixed], version=PolicyVersion(VERSION.lineage + 1, VERSION.number))
    assert not elsewhere.trained[0].is_current.any(), "the same number of another lineage is another version"


def cut_at(limit: int):
    """Two groups, some of whose completions were cut at `limit` tokens."""
    group = make_group(0, [1.0, 0.0, 0.5], [[1] * limit, [2, 3], [4] * limit], prompt=(5,))
    group = changed(changed(group, 0, finish_reason="length"), 2, finish_reason="length")
    return [group, make_group(1, [1.0, 0.0], [[6], [7]])]


def test_completions_that_were_cut_can_be_compared_with_and_not_trained():
    step = packed(cut_at(4), shaping=Shaping(truncated="mask"))
    kept = packed(cut_at(4))
    assert by_key(step) == by_key(kept), "they count in the statistics"
    assert (step.num_tokens, step.num_completions, step.num_groups) == (4, 3, 2)
    assert (kept.num_tokens, kept.num_completions) == (12, 5)
    tokens = {key: [m for _, _, m, *_ in rows] for key, (rows, _) in read(step).items()}
    assert tokens == {("g0", 0): [False] * 4, ("g0", 1): [True] * 2, ("g0", 2): [False] * 4} | {
        ("g1", i): [True] for i in range(2)
    }
    assert {in_group for key, (_, in_group) in read(step).items() if key[0] == "g0"} == {2}
    all_cut = changed(cut_at(4)[0], 1, finish_reason="length")
    nothing = packed([all_cut], shaping=Shaping("mask"))
    assert (nothing.num_tokens, nothing.num_completions, nothing.num_groups) == (0, 0, 0)


def test_completions_that_were_cut_can_be_worth_nothing():
    step = packed(cut_at(4), shaping=Shaping(truncated="zero"))
    assert step.rollouts.rewards.tolist() == [0, 0, 0, 1, 0]
    assert step.zero_signal_groups == 1 and step.num_tokens == 12


def test_long_completions_lose_reward_over_the_overlong_buffer():
    group = make_group(0, [1.0, 1.0, 1.0, 1.0], [[1] * n for n in (4, 6, 8, 11)])
    step = packed([group], shaping=Shaping("keep", longest=10, overlong_buffer=5, overlong_factor=0.5))
    assert step.rollouts.rewards.tolist() == pytest.approx([1.0, 0.9, 0.7, 0.5])
    expected = oracle_advantages.estimate("grpo", [1.0, 0.9, 0.7, 0.5], [0] * 4, [4, 6, 8, 11], [math.nan] * 4)
    assert step.advantages.tolist() == pytest.approx(expected)
    assert packed([group]).zero_signal_groups == 1
    assert packed([group], advantage="gae").zero_signal_groups == 0
    assert packed([make_group(0, [1.0, 1.0, 0.0], [[1]] * 3)], group_size=2, advantage="remax").zero_signal_groups == 0


def test_what_was_read_between_turns_counts_towards_the_length_at_which_a_completion_is_cut():
    """Cut at 100 tokens: 40 sampled and 60 said, behind the first turn or before it."""
    group = make_group(0, [1.0, 1.0, 1.0, 1.0], [[1] * n for n in (40, 40, 30, 40)])
    group = changed(group, 0, observations=(said(10, 25), said(20, 35)), finish_reason="length")
    group = changed(group, 1, observations=(said(0, 60),), finish_reason="length")
    group = changed(group, 2, observations=(said(30, 60),))
    shaping = Shaping(longest=100, overlong_buffer=20, overlong_factor=0.5)
    assert packed([group], shaping=shaping).rollouts.rewards.tolist() == pytest.approx([0.5, 0.5, 0.75, 1.0])
    # An agent's first call may begin unlike that of the others: then the rest of its prompt is read before any token.
    of_agents = packed([group], shaping=shaping._replace(is_agent=True)).rollouts
    assert of_agents.rewards.tolist() == pytest.approx([0.5, 1.0, 0.75, 1.0])


def said(at: int, length: int) -> Observation:
    return Observation(at, np.full(length, 2, np.int32))


def test_greedy_completions_are_baselines_and_nothing_else():
    first = make_group(0, [1.0, 0.0, 0.25], [[1], [2, 2], [3, 3, 3]])
    second = make_group(1, [1.0, 0.0, None], [[4], [5], [6]])
    step = packed([first, second], group_size=2, advantage="remax")
    assert step.rollouts.keys == (("g0", 0), ("g0", 1), ("g1", 0), ("g1", 1))
    assert step.advantages.tolist() == [0.75, -0.25, 0.0, 0.0], "without a baseline nothing is learned"
    assert (step.num_tokens, step.num_completions) == (5, 4)
    assert not any({3, 6} & set(batch.targets.tolist()) for batch in step.trained)
    plain = packed([first, second], group_size=2, advantage="dr_grpo")
    assert plain.advantages.tolist() == [0.5, -0.5, 0.5, -0.5], "nor do they take part in a group's statistics"
    baselines = plain.rollouts.baseline_rewards
    assert baselines[:2].tolist() == [0.25, 0.25] and baselines[2:].isnan().all()
    for shaping in (Shaping("zero"), Shaping(longest=3, overlong_buffer=2)):
        cut = make_group(2, [1.0, 1.0, 1.0], [[1, 2, 3]] * 3)
        for index in range(3):
            cut = changed(cut, index, finish_reason="length")
        step = packed([cut], group_size=2, advantage="remax", shaping=shaping)
        assert step.advantages.tolist() == [0.0, 0.0], "a baseline is shaped like what is compared with it"


@pytest.mark.parametrize(
    ("reward", "logprob", "malformed"),
    [(1.0, x, 1) for x in (math.nan, -math.inf, math.inf, 0.1, -3.4e38)] + [(x, -1.0, 0) for x in (math.inf, math.nan)],
)
def test_a_number_that_cannot_be_leaves_its_completion_out_and_is_counted(reward, logprob, malformed):
    group = changed(make_group(0, [1.0, 0.0, reward], [[1], [2], [3, 3]]), 2, logprobs=np.float32([-1.0, logprob]))
    step = packed([group])
    assert (step.num_completions, step.rollouts.num_malformed) == (2, malformed)
    assert step.advantages.tolist() == packed([make_group(0, [1.0, 0.0], [[1], [2]])]).advantages.tolist()
    for odd in (0.0, 1e-3, -700.0):  # by rounding or by chance
        step = packed([changed(make_group(0, [1.0, 0.0], [[1], [2]]), 1, logprobs=np.float32([odd]))])
        assert (step.num_completions, step.rollouts.num_malformed) == (2, 0)


def test_what_was_said_and_what_was_kept_travel_with_a_group():
    sent = [pack_group(group) for group in GROUPS]
    assert read(packed([unpack_group(*one) for one in sent])) == read(packed())
    said = [sum(len(o.token_ids) for r in group.rollouts for o in r.completion.observations) for group in GROUPS]
    assert [message.num_observed for message, _ in sent] == said and sum(said) > 0


def test_a_batch_is_moved_whole():
    for share_prompts in (True, False):
        away = packed(share_prompts=share_prompts).trained[0].to(torch.device("meta"))
        tensors = [getattr(away, name) for name in set(away.__dataclass_fields__) - {"segments", "pictured", "kept"}]
        tensors = [tensor for tensor in [*tensors, away.kept.ids] if tensor is not None]
        tensors += [away.segments.queries, away.segments.keys]
        tensors += [away.segments.key_positions] if share_prompts else []
        assert all(tensor.is_meta for tensor in tensors)


# -- which groups count as solved and which as hopeless: by their own rewards, whatever else is in the batch -----------

LONGEST, FULL = 8, Shaping(longest=8, overlong_buffer=4, overlong_factor=2.0)
SHORT, LONG = 3, LONGEST
FEW = math.sqrt(2 / 48)
"""Factor of the learning rate where 2 of 48 groups have a signal and the others are solved."""


def with_46_others(
    others: float, *mixed: float, shaping: Shaping = FULL, long: int = 0, lengths: int = SHORT, **options
) -> StepBatch:
    """46 groups of one reward, one group of 1 and 0, and one of the rewards `mixed`, of which `long` are cut at the end."""
    rewards = [[others] * 4] * 46 + [[1.0, 0.0, 0.0, 1.0], list(mixed)]
    groups = []
    for number, of_group in enumerate(rewards):
        sizes = [LONG if number == 47 and index < long else lengths for index in range(4)]
        groups.append(make_group(number, of_group, [range(size) for size in sizes]))
    return pack(groups, None, rank=0, world=1, tokens_per_microbatch=4096, shaping=shaping, **options)


SOLVED_OR_HOPELESS = {
    "wrong": (lambda: with_46_others(0.0, 0, 1, 0, 1), 1.0, 2 / 48),
    "wrong, one of -1e6": (lambda: with_46_others(0.0, -1e6, 1, 0, 1), 1.0, 2 / 48),
    "wrong, one full overlong penalty": (lambda: with_46_others(0.0, 0, 1, 0, 1, long=1), 1.0, 2 / 48),
    "wrong, all of one group cut": (lambda: with_46_others(0.0, 0, 1, 0, 1, long=4), 1.0, 2 / 48),
    "wrong at 0.1": (lambda: with_46_others(0.1, 0, 1, 0, 1), 1.0, 2 / 48),
    "right": (lambda: with_46_others(1.0, 0, 1, 0, 1), FEW, 1.0),
    "right, one of 1e6": (lambda: with_46_others(1.0, 0, 1e6, 0, 1), FEW, 1.0),
    "right, one full overlong penalty": (lambda: with_46_others(1.0, 0, 1, 0, 1, long=1), FEW, 1.0),
    "right, and all are cut": (lambda: with_46_others(1.0, 0, 1, 0, 1, lengths=LONG), FEW, 1.0),
    "right, and cut completions count 0": (lambda: with_46_others(1.0, 0, 1, 0, 1, shaping=Shaping("zero")), FEW, 1.0),
}


@pytest.mark.parametrize("case", SOLVED_OR_HOPELESS)
def test_one_completion_does_not_decide_what_46_groups_are(case):
    make, lr_factor, entropy_factor = SOLVED_OR_HOPELESS[case]
    batch = make()
    assert min(1.0, math.sqrt(batch.signal_share)) == pytest.approx(lr_factor)
    assert batch.bonus_share == pytest.approx(entropy_factor)
