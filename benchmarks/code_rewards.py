"""How many programs the sandbox of code rewards runs in a second, on this machine: one at a time, and one on each core.

    python -m benchmarks.code_rewards --runs 5
    python -m benchmarks.code_rewards --runs 5 --function      what a trivial function of a user costs

Each run scores completions with one test each (`print(int(input()) ** 2)`), through the reward workers as a generator does.
It counts all of it: starting bubblewrap and Python, running, comparing. Workers are started before the clock is. With
`--function` the completions, 768 of them, are scored by a function that compares two texts, each with a call of its own.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from asyncgrpo.config.schema import CodeRewardConfig, RewardConfig
from asyncgrpo.rewards.base import Reward, Sampled
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.sandbox import why_not_isolated
from asyncgrpo.types import Prompt
from benchmarks.measuring import line, show

PROMPT = Prompt(prompt_id="0", token_ids=(1,), answer={"inputs": ["3"], "outputs": ["9"]}, source="code")
PLAIN = Prompt(prompt_id="0", token_ids=(1,), answer="9", source="exact_match")
FUNCTION_COMPLETIONS = 768
COMPLETION = Sampled("```python\nprint(int(input()) ** 2)\n```")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--completions", type=int, default=100, help="of each run")
    parser.add_argument("--unsafe", action="store_true", help="also where bubblewrap cannot run")
    parser.add_argument("--function", action="store_true", help="a trivial function instead of programs")
    arguments = parser.parse_args(argv)
    if arguments.function:
        return show_function(arguments.runs)
    isolated = why_not_isolated() is None
    for workers in dict.fromkeys((1, os.cpu_count() or 1)):
        rates = asyncio.run(executions_a_second(workers, arguments.runs, arguments.completions, arguments.unsafe))
        about = {"workers": workers, "completions": arguments.completions, "bubblewrap": isolated}
        show(line("code rewards: executions", rates, "1/s", seed=0, **about))


def show_function(runs: int) -> None:
    """Show what a completion costs that a function scores, and the same of a rule in the generator's own process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward.py"
        path.write_text(
            "def compute_score(solution_str, ground_truth, **_):\n    return float(solution_str == ground_truth)\n"
        )
        for function, workers in ((str(path), 1), (str(path), 2), ("exact_match", 1)):
            config = RewardConfig(workers=workers, function=function)
            rates = asyncio.run(a_second(build_reward(config), PLAIN, Sampled("9"), runs, FUNCTION_COMPLETIONS))
            about = {"function": Path(function).name, "workers": workers, "completions": FUNCTION_COMPLETIONS}
            show(line("rewards: time of a completion", [1e6 / rate for rate in rates], "us", seed=0, **about))


async def executions_a_second(workers: int, runs: int, completions: int, unsafe: bool) -> list[float]:
    """The rate of each run, after one that is not counted."""
    reward = build_reward(RewardConfig(workers=workers, timeout_s=60, code=CodeRewardConfig(unsafe=unsafe)))
    reward.check_sources({"code"})
    return await a_second(reward, PROMPT, COMPLETION, runs, completions)


async def a_second(reward: Reward, prompt: Prompt, completion: Sampled, runs: int, completions: int) -> list[float]:
    """The rate of each run, after one that is not counted."""
    rates = []
    for number in range(-1, runs):
        started = time.perf_counter()
        scores = await reward.score(prompt, [completion] * completions)
        assert all(score.value == 1.0 for score in scores), scores
        if number >= 0:
            rates.append(completions / (time.perf_counter() - started))
    await reward.close()
    return rates


if __name__ == "__main__":
    main()
