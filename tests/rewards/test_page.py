"""The examples of docs/rewards.md are right, and its tables name every built-in reward."""

import re
from pathlib import Path

import pytest

from asyncgrpo.config.schema import CodeRewardConfig, RewardConfig
from asyncgrpo.rewards.base import score_one
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.rules import CODE_SOURCES, MATHS_SOURCES, SHAPE_RULES, TEXT_RULES
from tests.rewards.conftest import prompt

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (?:`([^`]+)`)? ?\| ([\d.]+) \|$", PAGE, re.MULTILINE)


async def test_every_example_has_its_score():
    assert len(EXAMPLES) == 10
    code = CodeRewardConfig(unsafe=True)  # the code is ours
    rewards = {
        name: build_reward(RewardConfig(function=name, timeout_s=30, code=code))
        for name in {row[0] for row in EXAMPLES}
    }
    for name, completion, truth, score in EXAMPLES:
        assert (await score_one(rewards[name], prompt(answer=truth, source="any"), completion)).value == float(score)
    for reward in rewards.values():
        await reward.close()


@pytest.mark.parametrize("name", [*MATHS_SOURCES, *CODE_SOURCES, *TEXT_RULES, *SHAPE_RULES])
def test_every_built_in_reward_is_in_a_table(name):
    assert re.search(rf"^\|[^|]*`{re.escape(name)}`", PAGE, re.MULTILINE)
