"""The entropy bonus counts by the groups that are not hopeless: beside no signal it makes noise of what the model knows."""

import torch

from tests.learner.helpers import VERSION, learner, make_group

TEXTS = [[1, 2], [3], [4, 5, 6], [7, 8]]
HOPELESS = [make_group(number, [0.0] * 4, TEXTS) for number in (1, 2, 3)]
TEACHES = make_group(0, [0.0, 1.0, 0.0, 0.0], TEXTS)


def gradient(path, groups, **algorithm) -> torch.Tensor:
    """Of the loss of one step by all parameters."""
    ours = learner(path, algorithm={"group_size": 4, "aggregation": "prompt-mean"} | algorithm)
    batch, precomputed = ours._precompute(ours._pack(groups, VERSION))
    ours._accumulate(batch, precomputed, VERSION)
    return torch.cat([parameter.grad.full_tensor().flatten() for parameter in ours.parameters])


def test_a_step_in_which_every_group_is_hopeless_moves_nothing(path):
    """With a reward of 0 or 1 these are the first steps of many tasks. AdamW makes a whole step of the smallest gradient."""
    assert gradient(path, HOPELESS, entropy_coef=0.5).count_nonzero() == 0


def test_beside_three_hopeless_groups_one_with_a_signal_has_a_fourth_of_the_bonus(path):
    groups = [TEACHES, *HOPELESS]
    without, small, large = (gradient(path, groups, entropy_coef=coef) for coef in (0.0, 0.1, 0.4))
    torch.testing.assert_close(large - without, 4 * (small - without), rtol=1e-3, atol=1e-6)
    alone = gradient(path, [TEACHES], entropy_coef=0.1) - gradient(path, [TEACHES])
    torch.testing.assert_close(small - without, alone / 4, rtol=1e-3, atol=1e-6)


def test_solved_groups_do_not_lower_it(path):
    """What they do to a step is a matter of the learning rate (`learner.full_lr_signal`)."""
    solved = [TEACHES, *(make_group(number, [1.0] * 4, TEXTS) for number in (1, 2, 3))]
    bonus, alone = (gradient(path, groups, entropy_coef=0.1) - gradient(path, groups) for groups in (solved, [TEACHES]))
    torch.testing.assert_close(bonus, alone, rtol=1e-3, atol=1e-6)


def test_with_a_critic_every_group_teaches_and_the_bonus_is_whole(path):
    critic = {"advantage": "gae"}
    bonus = gradient(path, HOPELESS, entropy_coef=0.5, **critic) - gradient(path, HOPELESS, **critic)
    assert bonus.abs().max() > 1e-4
