"""The built-in rewards: which rule scores which `data_source`, and where it runs.

Text rules (`text.py`) and the caller's extra rules are quick string functions that cannot hang: they run in this process.
Mathematics and the scorers of reasoning-gym can hang, so they run in worker processes (`maths.py`, `gym.py`); code is run in a
sandbox (`code.py`). A source is matched
by its whole name or by a prefix that no letter follows: `openai/gsm8k_zh` counts as `openai/gsm8k`, but `mathqa` does not
count as `math`.
"""

import contextlib
import difflib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards import maths, text
from asyncgrpo.rewards.base import Sampled, failed, score_of_call
from asyncgrpo.rewards.code import CodeReward, CodeSettings
from asyncgrpo.rewards.gym import GYM_SOURCE, check_gym_source
from asyncgrpo.rewards.maths import FORMAT_SCORE
from asyncgrpo.rewards.pool import Pool
from asyncgrpo.rewards.text import (
    boxed_format,
    exact_match,
    label_match,
    length,
    text_match,
    think_answer_format,
    think_format,
    token_f1,
)
from asyncgrpo.rewards.user import score_each
from asyncgrpo.types import Prompt, Score

TextRule = Callable[[str, Any], Any]
"""`rule(completion_text, ground_truth)` gives the score, or a dict with `score` and named parts."""

BY_SOURCE = "data_source"
"""The built-in reward that is the rule for each row's `data_source`."""
MATHS_SOURCES = (
    "math_reasoning",
    "gsm8k",
    "openai/gsm8k",
    "math",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "aime",
    "numina",
)
CODE_SOURCES = ("code", "code_generation", "codecontests", "apps", "codeforces", "taco")


def qa(score: Literal["match", "f1"]) -> TextRule:
    """The rule for questions. Its score is one of its parts `match` and `f1`."""

    def rule(completion_text: str, ground_truth: Any) -> dict[str, float]:
        parts = {"match": text_match(completion_text, ground_truth), "f1": token_f1(completion_text, ground_truth)}
        return parts | {"score": parts[score]}

    return rule


QA_SOURCES = ("qa", "trivia", "searchR1")
TEXT_RULES: dict[str, TextRule] = dict.fromkeys(QA_SOURCES, qa("match")) | {
    "classification": label_match,
    "exact_match": exact_match,
}
SHAPE_RULES: dict[str, Callable[[Sampled], float]] = {
    "format": think_answer_format,
    "think_format": think_format,
    "boxed_format": boxed_format,
    "length": length,
}
"""Rules that need no ground truth. No source has them; a configuration names them."""

OTHERS = ("judge", "model")
"""Built-in rewards that are no rules: `rewards.build_reward` makes them."""


class RuleReward:
    """Scores by a rule. Mathematics has `workers` processes, and `timeout_s` for a call."""

    takes_groups = False

    def __init__(
        self,
        *,
        timeout_s: float,
        workers: int | Literal["auto"],
        name: str = BY_SOURCE,
        format_score: float = FORMAT_SCORE,
        qa_score: Literal["match", "f1"] = "match",
        code: CodeSettings = CodeSettings(),  # noqa: B008 - frozen
        extra_rules: dict[str, TextRule] | None = None,
    ) -> None:
        """
        Args:
            name: the rule for all rows, whatever their source; `BY_SOURCE`: each row's own.
            format_score: of `gsm8k`, for a wrong answer in the right format.
            qa_score: of `qa`.
            code: how code is run and scored.
            extra_rules: by exact `data_source`, beside the built-in ones.
        Raises:
            RewardError: there is no rule of this name.
        """
        self._name = name
        self._text_rules = TEXT_RULES | dict.fromkeys(QA_SOURCES, qa(qa_score)) | (extra_rules or {})
        self._maths = Pool(
            "asyncgrpo.rewards.maths:load_maths", repr(format_score), workers=workers, timeout_s=timeout_s
        )
        self._gym = Pool("asyncgrpo.rewards.gym:load_gym", workers=workers, timeout_s=timeout_s)
        self._code = CodeReward(code, workers=workers)
        self._runs_unsafe_code = code.unsafe
        if name != BY_SOURCE and name not in SHAPE_RULES and self._rule(name) is None:
            raise RewardError(self._no_such_name())
        self.about = "by data_source" if name == BY_SOURCE else f"{name}, built in"

    @property
    def known_sources(self) -> list[str]:
        """The names with which `data_source` may begin."""
        return sorted({*self._text_rules, *MATHS_SOURCES, *CODE_SOURCES, GYM_SOURCE})

    def check_sources(self, sources: set[str]) -> None:
        """Raise RewardError if one of `sources` has no rule, and say which have one; or if code cannot be run here."""
        if self._name in SHAPE_RULES:
            return
        rules = {source: self._rule(source) for source in (sources if self._name == BY_SOURCE else {self._name})}
        if unknown := sorted(source for source, rule in rules.items() if rule is None):
            raise RewardError(self._complaint(", ".join(map(repr, unknown))))
        if "code" in rules.values():
            self._code.check()
        for source, rule in rules.items():
            if rule == "gym":
                check_gym_source(source, is_unsafe_allowed=self._runs_unsafe_code)

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """Score completions. See `rewards.base.Reward`."""
        if self._name in SHAPE_RULES:
            shape_rule = SHAPE_RULES[self._name]
            return [_timed(shape_rule, one) for one in completions]
        if self._name != BY_SOURCE:
            prompt = msgspec.structs.replace(prompt, source=self._name)
        rule = self._rule(prompt.source)
        if rule is None:
            return [failed("unknown_source", self._complaint(repr(prompt.source))) for _ in completions]
        if rule == "maths":
            return await score_each(self._maths, prompt, completions)
        if rule == "gym":
            return await score_each(self._gym, prompt, completions)
        if rule == "code":
            return await self._code.score(prompt, completions)
        text_rule = self._text_rules[rule]
        return [_timed(text_rule, one.text, prompt.answer) for one in completions]

    def withdraw(self) -> None:
        """See `rewards.base.ConfiguredReward`."""
        for one in (self._maths, self._gym, self._code):
            one.withdraw()

    async def close(self) -> None:
        """End every worker process."""
        await self._maths.close()
        await self._gym.close()
        await self._code.close()

    def _rule(self, source: str) -> str | None:
        """`maths`, `code`, `gym`, the name of a text rule, or None. A rule under exactly this name comes before prefixes."""
        if source in self._text_rules:
            return source
        if any(_is_under(source, name) for name in MATHS_SOURCES):
            return "maths"
        if any(_is_under(source, name) for name in CODE_SOURCES):
            return "code"
        if _is_under(source, GYM_SOURCE):
            return "gym"
        return max((name for name in TEXT_RULES if _is_under(source, name)), key=len, default=None)

    def _complaint(self, sources: str) -> str:
        return f"no reward rule for data_source {sources}; known: {', '.join(self.known_sources)}; or --reward-func"

    def _no_such_name(self) -> str:
        known = [BY_SOURCE, *SHAPE_RULES, *OTHERS, *(name for name in self.known_sources if name.isidentifier())]
        close = difflib.get_close_matches(self._name, known, n=1)
        return (
            f"reward.function: {self._name} is no built-in reward; "
            + (f"did you mean {close[0]}? " if close else "")
            + f"there are {', '.join(known)}; a function of your own is FILE.py or FILE.py:NAME"
        )


def vote_of(completion_text: str, source: str) -> str:
    """The final answer of a completion, spelt alike where it is alike: what completions to one prompt vote for.

    It is taken out of the text as the rule for `source` does. Where no rule has one, it is what the completion marks as
    its answer, or else the whole text.
    """
    if any(_is_under(source, name) for name in MATHS_SOURCES):
        return maths.vote(completion_text, "gsm8k" in source.lower())
    is_short = any(_is_under(source, name) for name in (*QA_SOURCES, "classification"))
    return text.vote(completion_text, whole=not is_short)


_SOLUTIONS = ("solution", "solutions", "canonical_solution", "reference_solution")
"""Columns of a row of code that hold code which passes its tests."""


def reference_of(prompt: Prompt) -> tuple[str, str]:
    """A completion that is right, and words for what it is where it is not the ground truth itself.

    The ground truth of code is its tests: right is the solution that the row has beside them. Where it has none, the
    completion does nothing, which shows no more than that the tests can be run.
    """
    answer = prompt.answer
    if any(_is_under(prompt.source, name) for name in CODE_SOURCES):
        for column in _SOLUTIONS:
            code = _first(prompt.info.get(column))
            if isinstance(code, str) and code.strip() and prompt.info[column] != answer:
                return code if "```" in code else f"```python\n{code}\n```", f"the row's {column}"
        return "pass", "the ground truth is tests, and the row has no " + ", ".join(_SOLUTIONS)
    if answer is None or answer == []:
        return "", "the row has no ground truth"
    if isinstance(answer, list):
        return str(answer[0]), f"the first of {len(answer)} right answers"
    return str(answer), ""


def _first(value: Any) -> Any:
    """The first of a list, or of a list that is written as JSON; another value itself."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return value[0] if isinstance(value, list) and value else value


def _timed(rule: Callable[..., Any], *arguments: Any) -> Score:
    started = time.perf_counter()
    score = score_of_call(lambda: rule(*arguments))
    return msgspec.structs.replace(score, seconds=time.perf_counter() - started)


def _is_under(source: str, name: str) -> bool:
    return source.casefold().startswith(name.casefold()) and not source[len(name) : len(name) + 1].isalpha()
