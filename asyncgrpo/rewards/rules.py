"""The built-in rewards: which rule scores which `data_source`, and where it runs.

Rules that compare text or look at its shape are quick and cannot hang: they run in this process.
Mathematics and the scorers of reasoning-gym can hang, so they run in worker processes (`maths.py`); code is run in a
sandbox (`code.py`). A source is matched by its whole name or by a prefix that no letter follows: `openai/gsm8k_zh` counts as
`openai/gsm8k`, but `mathqa` does not count as `math`.

The final answer of a completion is the text in `<answer>…</answer>`, in `\\boxed{}` or after the last `Answer:` or `答案是`;
without such a mark it is the last line that is not empty.
"""

import contextlib
import json
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from asyncgrpo.config.schema import RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards import maths
from asyncgrpo.rewards.base import Reward, Sampled, failed, scores_of_call
from asyncgrpo.rewards.code import CodeReward
from asyncgrpo.rewards.maths import GYM_SOURCE, check_gym_source, last_boxed, tagged
from asyncgrpo.rewards.pool import PoolReward
from asyncgrpo.types import Prompt, Score

TextRule = Callable[[str, Any], Any]
"""`rule(completion_text, ground_truth)` gives the score, or a dict with `score` and named parts."""

# -- against the ground truth ------------------------------------------------------------------------------------------


def exact_match(completion_text: str, ground_truth: Any) -> float:
    """1.0 if the completion equals the ground truth; white space around them does not count."""
    return float(any(completion_text.strip() == gold.strip() for gold in _golds(ground_truth)))


def text_match(completion_text: str, ground_truth: Any) -> float:
    """1.0 if the completion gives the ground truth, or one of a list; case, punctuation and articles do not count.

    The text in `<answer>…</answer>`, in `\\boxed{}` or after the last `Answer:` or `答案是` must equal it. Without such a
    mark it must occur as whole words in the last line that is not empty.
    """
    golds = {gold: normalise(gold) for gold in _golds(ground_truth)}
    marked = _marked(completion_text)
    if marked is not None:
        return float(normalise(marked) in golds.values())
    last = _last_line(completion_text)
    line = normalise(last)

    def occurs(gold: str, plain: str) -> bool:
        if plain in _ARTICLES:  # the answer A, as it is written: any sentence may have an article
            return gold.strip() in re.findall(r"\w+", last)
        is_chinese = re.search(r"[\u2e80-\u9fff]", plain)  # without spaces, so that it may occur at any place
        return plain in line if is_chinese else f" {plain} " in f" {line} "

    return float(any(occurs(*gold) for gold in golds.items()))


def label_match(completion_text: str, ground_truth: Any) -> float:
    """1.0 if the label equals the ground truth. The label is marked as for `text_match`, or is the last line."""
    return float(normalise(_final(completion_text)) in [normalise(gold) for gold in _golds(ground_truth)])


def token_f1(completion_text: str, ground_truth: Any) -> float:
    """The F1 of the final answer's words against those of the ground truth, or the best of a list, as SQuAD counts it.

    Words are normalised as for `text_match`; in Chinese each character is one.
    """
    words = _words(_final(completion_text))
    return max(_f1(words, _words(gold)) for gold in _golds(ground_truth))


def demo_score(completion_text: str, ground_truth: Any) -> float:
    """Score a completion of the demo's tasks from 0 to 1; 1 only for the exact text.

    Half of the score is for right characters in their places. The rest rewards what a model learns before: digits (0.1),
    and the right digits in any place (0.4). All are shares of the longer text, so that too much text costs as much as too
    little.
    """
    size = max(len(completion_text), len(ground_truth), 1)
    in_place = sum(a == b for a, b in zip(completion_text, ground_truth, strict=False))
    anywhere = (Counter(completion_text) & Counter(ground_truth)).total()
    digits = sum(character in "0123456789" for character in completion_text[: len(ground_truth)])
    return (5 * in_place + 4 * anywhere + digits) / (10 * size)


def _words(text: str) -> list[str]:
    return re.findall(r"[\u2e80-\u9fff]|[^\s\u2e80-\u9fff]+", normalise(text))


def _f1(words: list[str], gold: list[str]) -> float:
    common = (Counter(words) & Counter(gold)).total()
    return 2 * common / (len(words) + len(gold)) if common else 0.0


_ARTICLES = ("a", "an", "the")
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
    found = (find(text) for find in (tagged, last_boxed))
    marked = next((answer for answer in found if answer is not None), None)
    return marked if marked is not None else next(reversed(_ANNOUNCED.findall(text)), None)


def _final(text: str) -> str:
    """The final answer that the completion marks, else its last line."""
    marked = _marked(text)
    return _last_line(text) if marked is None else marked


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def normalise(text: str) -> str:
    """Normalise to lower case, composed characters, no punctuation, no English articles and single spaces.

    The minus of a number stays. A text of nothing but articles or punctuation keeps them, such as the answer A.
    """
    text = re.sub(r"(?<!\w)-(?=\d)", "\N{MINUS SIGN}", unicodedata.normalize("NFKC", text).casefold())
    words = "".join(" " if unicodedata.category(character)[0] in "PC" else character for character in text).split()
    return " ".join(word for word in words if word not in _ARTICLES) or " ".join(words) or text.strip()


# -- the shape of a completion -----------------------------------------------------------------------------------------


_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer_format(completion: Sampled) -> float:
    """1.0 for `<think>…</think><answer>…</answer>` and nothing else, each tag once and an answer inside; else 0.0.

    White space around the parts does not count. The first `<think>` may be missing, because many chat templates write it.
    """
    thought, answer = _after_thought(completion.text)
    inner = answer.removeprefix("<answer>").removesuffix("</answer>")
    has_tags = len(answer) == len(inner) + len("<answer></answer>")
    return float(has_tags and bool(inner.strip()) and not any(tag in thought or tag in inner for tag in _TAGS))


def think_format(completion: Sampled) -> float:
    """1.0 for `<think>…</think>`, each tag once, and any text after it; else 0.0. `<think>` may be missing, as above."""
    thought, answer = _after_thought(completion.text)
    return float(bool(answer) and not any(tag in thought or tag in answer for tag in _TAGS[:2]))


def _after_thought(text: str) -> tuple[str, str]:
    """The text between the think tags, and what follows them: nothing where the thought does not end."""
    thought, _, answer = text.strip().removeprefix("<think>").partition("</think>")
    return thought, answer.strip()


def boxed_format(completion: Sampled) -> float:
    r"""1.0 if the completion has an answer in `\boxed{}`; else 0.0."""
    return float(bool(last_boxed(completion.text)))


def length(completion: Sampled) -> float:
    """Thousands of tokens of the completion: with a negative weight, a price for every token."""
    return len(completion.token_ids) / 1000


# -- by source ---------------------------------------------------------------------------------------------------------


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
    "hiyouga/geometry3k",
)
CODE_SOURCES = ("code", "code_generation", "codecontests", "apps", "codeforces", "taco")


def qa(score: Literal["match", "f1"]) -> TextRule:
    """Return the rule for questions. Its score is one of its parts `match` and `f1`."""

    def rule(completion_text: str, ground_truth: Any) -> dict[str, float]:
        parts = {"match": text_match(completion_text, ground_truth), "f1": token_f1(completion_text, ground_truth)}
        return parts | {"score": parts[score]}

    return rule


QA_SOURCES = ("qa", "trivia", "searchR1")
TEXT_RULES: dict[str, TextRule] = dict.fromkeys(QA_SOURCES, qa("match")) | {
    "classification": label_match,
    "exact_match": exact_match,
    "demo": demo_score,
}
SHAPE_RULES: dict[str, Callable[[Sampled], float]] = {
    "format": think_answer_format,
    "think_format": think_format,
    "boxed_format": boxed_format,
    "length": length,
}
"""Rules that need no ground truth. No source has them; a configuration names them."""

OTHERS = ("judge", "model")
"""Built-in rewards that are not rules: `build.build_reward` makes them."""


class RuleReward(Reward):
    """Scores by a rule, in worker processes where the rule could hang."""

    def __init__(self, config: RewardConfig, name: str = BY_SOURCE) -> None:
        """
        Args:
            name: the rule for all rows, whatever their source; `BY_SOURCE`: each row's own.
        Raises:
            RewardError: no rule has this name.
        """
        self._config, self._name = config, name
        self._text_rules = TEXT_RULES | dict.fromkeys(QA_SOURCES, qa(config.qa_score))
        pool = partial(PoolReward, workers=config.num_workers, timeout_s=config.timeout_s)
        self._by_rule: dict[str, Reward] = {
            "maths": pool("asyncgrpo.rewards.maths:load_maths", {"format_score": config.format_score}),
            "gym": pool("asyncgrpo.rewards.maths:load_gym"),
            "code": CodeReward(config),
        }
        self.owns = [*self._by_rule.values()]
        if name != BY_SOURCE and name not in SHAPE_RULES and self._rule(name) is None:
            known = [BY_SOURCE, *SHAPE_RULES, *OTHERS, *filter(str.isidentifier, self.known_sources)]
            raise RewardError(
                f"reward.function: {name} is not built in; there are {', '.join(known)}; your own is FILE.py or FILE.py:NAME"
            )
        self.about = "by data_source" if name == BY_SOURCE else f"{name}, built in"

    @property
    def known_sources(self) -> list[str]:
        """The names with which `data_source` may begin."""
        return sorted({*self._text_rules, *MATHS_SOURCES, *CODE_SOURCES, GYM_SOURCE})

    def check_sources(self, sources: set[str]) -> None:
        """Raise RewardError if one of `sources` has no rule, with those that have one; or if code cannot be run here."""
        if self._name in SHAPE_RULES:
            return
        rules = {source: self._rule(source) for source in (sources if self._name == BY_SOURCE else {self._name})}
        if unknown := sorted(source for source, rule in rules.items() if rule is None):
            raise RewardError(self._complaint(", ".join(map(repr, unknown))))
        if "code" in rules.values():
            self._by_rule["code"].check_sources(sources)
        for source, rule in rules.items():
            if rule == "gym":
                check_gym_source(source, is_unsafe_allowed=self._config.code.unsafe)

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        if self._name in SHAPE_RULES:
            shape_rule = SHAPE_RULES[self._name]
            return [_timed(shape_rule, one) for one in completions]
        if self._name != BY_SOURCE:
            prompt = msgspec.structs.replace(prompt, source=self._name)
        rule = self._rule(prompt.source)
        if rule is None:
            return [failed("unknown_source", self._complaint(repr(prompt.source))) for _ in completions]
        if rule in self._by_rule:
            return await self._by_rule[rule].score(prompt, completions)
        text_rule = self._text_rules[rule]
        return [_timed(text_rule, one.text, prompt.answer) for one in completions]

    def _rule(self, source: str) -> str | None:
        """`maths`, `code`, `gym`, the name of a text rule, or None. A rule under exactly this name comes before prefixes."""
        if source in self._text_rules:
            return source
        for rule, names in (("maths", MATHS_SOURCES), ("code", CODE_SOURCES), ("gym", (GYM_SOURCE,))):
            if _is_under(source, names):
                return rule
        return max((name for name in TEXT_RULES if _is_under(source, [name])), key=len, default=None)

    def _complaint(self, sources: str) -> str:
        return f"no reward rule for data_source {sources}; known: {', '.join(self.known_sources)}; or --reward-func"


def vote_of(completion_text: str, source: str) -> str:
    """The final answer of a completion, spelt alike where it is alike: what completions to one prompt vote for.

    It is taken out of the text as the rule for `source` does. Where no rule has one, it is what the completion marks as
    its answer, or else the whole text.
    """
    if _is_under(source, MATHS_SOURCES):
        return maths.vote(completion_text, "gsm8k" in source.lower())
    if (marked := _marked(completion_text)) is not None:
        return normalise(marked)
    is_short = _is_under(source, (*QA_SOURCES, "classification"))
    return normalise(_last_line(completion_text)) if is_short else completion_text.strip()


_SOLUTIONS = ("solution", "solutions", "canonical_solution", "reference_solution")
"""Columns of a row of code that hold code which passes its tests."""


def reference_of(prompt: Prompt) -> tuple[str, str]:
    """A completion that is right, and words for what it is where it is not the ground truth itself.

    The ground truth of code is its tests: right is the solution that the row has beside them. Where it has none, the
    completion does nothing, which shows no more than that the tests can be run.
    """
    answer = prompt.answer
    if _is_under(prompt.source, CODE_SOURCES):
        for column in _SOLUTIONS:
            code = _first(prompt.info.get(column))
            if isinstance(code, str) and code.strip() and prompt.info[column] != answer:
                return code if "```" in code else f"```python\n{code}\n```", f"the row's {column}"
        return "pass", "the ground truth is tests, and the row has no " + ", ".join(_SOLUTIONS)
    if isinstance(answer, dict) and "target" in answer:  # as Search-R1 writes it
        answer = answer["target"]
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
    (score,) = scores_of_call(lambda: rule(*arguments))
    return msgspec.structs.replace(score, seconds=time.perf_counter() - started)


def _is_under(source: str, names: Iterable[str]) -> bool:
    """Return True if `source` is one of these names, or begins with one that no letter follows."""
    begun = [name for name in names if source.casefold().startswith(name.casefold())]
    return any(not source[len(name) : len(name) + 1].isalpha() for name in begun)
