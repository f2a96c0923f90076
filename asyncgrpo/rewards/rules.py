"""The rules by `data_source`: which rule scores which source, and where it runs.

Text rules (`qa`, `trivia`, `classification`, `exact_match`) and the caller's extra rules are quick string functions that
cannot hang: they run in this process. Mathematics can hang, so it runs in worker processes (`maths.py`). A source is
matched by its whole name or by a prefix that no letter follows: `openai/gsm8k_zh` counts as `openai/gsm8k`, but `mathqa`
does not count as `math`.
"""

import re
import time
import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import failed, score_of_call
from asyncgrpo.rewards.maths import last_boxed
from asyncgrpo.rewards.pool import Pool
from asyncgrpo.rewards.user import call_of
from asyncgrpo.types import Prompt, Score

TextRule = Callable[[str, Any], float]
"""`rule(completion_text, ground_truth)` gives the score."""

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
_NO_CODE = "code is not scored yet, because that needs a sandbox; give a function of your own with --reward-func"


class RuleReward:
    """Scores by the rule for the prompt's source. Mathematics has `workers` processes, and `timeout_s` for a call."""

    def __init__(self, *, timeout_s: float, workers: int, extra_rules: dict[str, TextRule] | None = None) -> None:
        self._text_rules = TEXT_RULES | (extra_rules or {})
        self._maths = Pool("asyncgrpo.rewards.maths:load_maths", workers=workers, timeout_s=timeout_s)

    @property
    def known_sources(self) -> list[str]:
        """The names with which `data_source` may begin."""
        return sorted({*self._text_rules, *MATHS_SOURCES})

    def check_sources(self, sources: set[str]) -> None:
        """Raise RewardError if one of `sources` has no rule; the message lists those that have one."""
        unknown = sorted(source for source in sources if self._rule(source) is None)
        if unknown:
            raise RewardError(self._complaint(", ".join(map(repr, unknown)), any_code=any(map(_is_code, unknown))))

    async def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Score one completion. See `rewards.base.Reward`."""
        rule = self._rule(prompt.source)
        if rule is None:
            complaint = self._complaint(repr(prompt.source), any_code=_is_code(prompt.source))
            return failed("unknown_source", complaint)
        if rule == "maths":
            return await self._maths.call(call_of(prompt, completion_text))
        text_rule = self._text_rules[rule]
        started = time.perf_counter()
        score = score_of_call(lambda: text_rule(completion_text, prompt.answer))
        return msgspec.structs.replace(score, seconds=time.perf_counter() - started)

    async def close(self) -> None:
        """End every worker process."""
        await self._maths.close()

    def _rule(self, source: str) -> str | None:
        """`maths`, the name of a text rule, or None. A rule under exactly this name comes before prefixes."""
        if source in self._text_rules:
            return source
        if any(_is_under(source, name) for name in MATHS_SOURCES):
            return "maths"
        return max((name for name in TEXT_RULES if _is_under(source, name)), key=len, default=None)

    def _complaint(self, sources: str, *, any_code: bool) -> str:
        reason = f" ({_NO_CODE})" if any_code else ""
        known = ", ".join(self.known_sources)
        return f"no reward rule for data_source {sources}{reason}; known: {known}; or --reward-func"


def _is_code(source: str) -> bool:
    return any(_is_under(source, name) for name in CODE_SOURCES)


def _is_under(source: str, name: str) -> bool:
    return source.casefold().startswith(name.casefold()) and not source[len(name) : len(name) + 1].isalpha()


def exact_match(completion_text: str, ground_truth: Any) -> float:
    """1.0 if the completion equals the ground truth; white space around them does not count."""
    return float(any(completion_text.strip() == gold.strip() for gold in _golds(ground_truth)))


def text_match(completion_text: str, ground_truth: Any) -> float:
    """1.0 if the completion gives the ground truth, or one of a list; case, punctuation and articles do not count.

    The text in `<answer>…</answer>`, in `\\boxed{}` or after the last `Answer:` or `答案是` must equal it. Without such a
    mark it must occur as whole words in the last line that is not empty.
    """
    golds = [normalise(gold) for gold in _golds(ground_truth)]
    marked = _marked(completion_text)
    if marked is not None:
        return float(normalise(marked) in golds)
    line = normalise(_last_line(completion_text))
    return float(any(_occurs(gold, line) for gold in golds if gold))


def label_match(completion_text: str, ground_truth: Any) -> float:
    """1.0 if the label equals the ground truth. The label is marked as for `text_match`, or is the last line."""
    marked = _marked(completion_text)
    label = normalise(_last_line(completion_text) if marked is None else marked)
    return float(label in [normalise(gold) for gold in _golds(ground_truth)])


TEXT_RULES: dict[str, TextRule] = {
    "qa": text_match,
    "trivia": text_match,
    "searchR1": text_match,
    "classification": label_match,
    "exact_match": exact_match,
}

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_ANNOUNCED = re.compile(
    r"(?:answer|label|category|class|答案|标签|类别|分类)\**\s*(?:[:：]|[是为]\s*[:：]?)\**[ \t]*(\S.*)",
    re.IGNORECASE,
)


def _golds(ground_truth: Any) -> list[str]:
    """The correct texts: one, a list of them, or Search-R1's `{"target": [...]}`. Raises RewardError without any."""
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target")
    golds = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    texts = [str(gold) for gold in golds if gold is not None and str(gold).strip()]
    if not texts:
        raise RewardError("the row has no ground truth")
    return texts


def _marked(text: str) -> str | None:
    """The final answer that the completion marks, or None."""
    if tagged := _TAGGED.findall(text):
        return str(tagged[-1])
    if (boxed := last_boxed(text)) is not None:
        return boxed
    announced = _ANNOUNCED.findall(text)
    return str(announced[-1]) if announced else None


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def normalise(text: str) -> str:
    """Normalise to lower case, composed characters, no punctuation, no English articles and single spaces."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(" " if unicodedata.category(character)[0] in "PC" else character for character in text)
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def _occurs(gold: str, line: str) -> bool:
    """Whether `gold` occurs in `line` as whole words; in Chinese, which has no spaces, at any place."""
    if re.search(r"[\u2e80-\u9fff]", gold):
        return gold in line
    return f" {gold} " in f" {line} "
