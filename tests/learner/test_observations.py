"""What an environment says is read by the model. That it is no part of the loss: `objectives.groups`."""

import dataclasses

import numpy as np
import pytest

from asyncgrpo.types import Completion, Group, Observation
from asyncgrpo.wire.codec import pack_group, unpack_group
from tests.learner.helpers import random_groups
from tests.learner.test_batching import history, packed


def with_observations(group: Group, seed: int) -> Group:
    """The group with observations before, between and behind the tokens of its completions; some have none."""
    rng = np.random.default_rng(seed)

    def observed(completion: Completion) -> Completion:
        places = [at for at in range(len(completion.token_ids) + 1) if rng.random() < 0.4]
        said = tuple(Observation(at, rng.integers(0, 260, rng.integers(1, 5)).astype(np.int32)) for at in places)
        return dataclasses.replace(completion, observations=said)

    rollouts = (dataclasses.replace(one, completion=observed(one.completion)) for one in group.rollouts)
    return dataclasses.replace(group, rollouts=tuple(rollouts))


GROUPS = [with_observations(group, seed) for seed, group in enumerate(random_groups(6, 4))]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_each_sampled_token_is_predicted_once_and_after_all_that_the_model_had_read(share_prompts, world):
    found = {}
    for rank in range(world):
        step = packed(GROUPS, rank=rank, world=world, budget=48, share_prompts=share_prompts)
        for batch in step.trained:
            assert len(batch.token_ids) <= 48, "rows have room for observations"
            assert len(batch.targets) == len(batch.read_at) == len(batch.behaviour_logprobs)
            for number, completion in enumerate(batch.rollouts.tolist()):
                start, end = batch.cu_seqlens[number : number + 2].tolist()
                read = [history(batch, int(batch.read_at[n])) for n in range(start, end)]
                assert step.rollouts.keys[completion] not in found
                found[step.rollouts.keys[completion]] = read, batch.targets[start:end].tolist()
    for group in GROUPS:
        for one in group.rollouts:
            completion, said = one.completion, {o.at: o.token_ids.tolist() for o in one.completion.observations}
            read, targets = found.pop((group.group_id, completion.index))
            assert targets == completion.token_ids.tolist()
            seen = list(group.prompt.token_ids)
            for index, token in enumerate(targets):
                seen += said.get(index, [])
                assert read[index] == (seen, list(range(len(seen))))
                seen = [*seen, token]
    assert found == {}


def test_a_group_with_observations_travels_as_it_is():
    for group in GROUPS:
        message, payload = pack_group(group)
        assert message.num_observed == sum(len(o.token_ids) for r in group.rollouts for o in r.completion.observations)
        again = unpack_group(message, payload)
        for mine, theirs in zip(group.rollouts, again.rollouts, strict=True):
            assert mine.completion.all_token_ids.tolist() == theirs.completion.all_token_ids.tolist()
            assert mine.completion.token_ids.tolist() == theirs.completion.token_ids.tolist()
            assert [o.at for o in mine.completion.observations] == [o.at for o in theirs.completion.observations]
            assert [t.tolist() for t in mine.completion.turns] == [t.tolist() for t in theirs.completion.turns]


def test_turns_are_the_sampled_tokens_between_observations():
    said = (Observation(2, np.array([7, 8], np.int32)), Observation(3, np.array([9], np.int32)))
    completion = Completion(0, np.arange(4, dtype=np.int32), np.zeros(4, np.float32), (), "stop", said)
    assert [turn.tolist() for turn in completion.turns] == [[0, 1], [2], [3]]
    assert completion.all_token_ids.tolist() == [0, 1, 7, 8, 2, 9, 3]
    assert completion.sampled_at.tolist() == [0, 1, 4, 6]
