"""What an environment said. That the model reads it: `test_batching`; that it is no part of the loss: `objectives.groups`."""

import dataclasses

import numpy as np

from asyncgrpo.types import Completion, Group, Observation
from asyncgrpo.wire.codec import pack_group, unpack_group
from tests.learner.helpers import random_groups


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
