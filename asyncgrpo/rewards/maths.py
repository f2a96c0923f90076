r"""The rules that run inside a worker, because they can hang: mathematics, and rows of reasoning-gym.

A row of mathematics scores 1.0 if the final answer equals the ground truth, else 0.0. For `gsm8k` a wrong answer that is marked
by `####` or `\boxed{}` has `reward.format_score`, and the score has the parts `correct` and `format`.

The final answer is the first of these that the completion has:

    gsm8k                 the number after the last `####`, the last `\boxed{}`, the free text
    all other sources     the last `\boxed{}`, the number after the last `####`, the free text

In free text, math-verify searches the last 4,000 characters for what follows "final answer is" or "answer", else for the
last LaTeX or plain expression. Equality is math-verify's too: `1/2` is `0.5` and `50\%`, `x=5` is `5`, `1,234` is
`1234`, units are dropped; roundings are not equal. Text that is not mathematics is compared as text.

math-verify's own timers are off: when one fires, a hard comparison looks like a wrong answer. The pool's deadline names
it as a timeout instead.

A row of reasoning-gym names its task (`data/sources.py`); the worker makes the task again, and its own `score_answer` scores the
text in the last `<answer>…</answer>`, without it the whole completion.
"""

import functools
import json
import logging
import re
import resource
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.pool import Call
from asyncgrpo.types import Prompt

TAIL = 4_000
"""Characters of free text that are searched for an answer."""

MAX_MEMORY = 4 << 30
"""Bytes of address space of a worker, so that a tower of powers cannot take the machine's memory before its deadline."""

_HASH = re.compile(
    r"####[ ]*(?P<number>[-+−]?[$€£¥]?[ ]?\d[\d,]*(?:\.\d+)?(?:/\d+)?[ ]?%?)(?:[ ]*[^\W\d]+)?[.。]?[ ]*$", re.MULTILINE
)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_CHINESE = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]+")
_SPELT = str.maketrans("０１２３４５６７８９％＋－−＝／．（）", "0123456789%+--=/.()") | {ord("°"): r"^\circ"}
_SPELT |= {ord(one): f" {unicodedata.normalize('NFKC', one)}".replace("⁄", "/") for one in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_SPELT[ord("∞")] = r"\infty "
_POWER = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[^\W\d]))")
_SPACE = r"(?:\s|\\[ ,;:!])+"
_THOUSANDS = re.compile(rf"(?<=\d){_SPACE}(?=\d{{3}}(?!\d))")
_MIXED = re.compile(rf"(?<=\d){_SPACE}(\d+)/(\d+)(?!\d)")
_APART = re.compile(rf"(?<=\d){_SPACE}(?=\d+(?![\d/]))")


def load_maths(format_score: float) -> Callable[[Call], float | dict[str, float]]:
    """Bound this process's memory, import math-verify and use it once, so that the first call is as quick as others."""
    bound_memory()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the timers that we turn off on purpose
    half = Prompt(prompt_id="", token_ids=(), source="math", answer="0.5")
    score_maths(Call(prompt=half, completions=("the answer is $\\frac{1}{2}$",)))
    return functools.partial(score_maths, format_score=format_score)


def bound_memory() -> None:
    """Bound the address space of this process to `MAX_MEMORY`."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MAX_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def score_maths(call: Call, *, format_score: float = 0.1) -> float | dict[str, float]:
    """1.0 if the final answer of the completion equals the ground truth, or one of a list of them; else 0.0.

    For `gsm8k` a dict, whose `score` of a wrong answer in the right format is `format_score`.

    Raises:
        RewardError: the row has no ground truth.
    """
    prefers_hash = "gsm8k" in call.prompt.source.lower()
    golds = call.prompt.answer if isinstance(call.prompt.answer, list) else [call.prompt.answer]
    final = final_answer(call.completion_text, prefers_hash)
    answer = _parse_free(call.completion_text) if final is None else _parse_whole(final)
    correct = any(_equal(_gold_text(gold, prefers_hash), final, answer) for gold in golds)
    if not prefers_hash:
        return float(correct)
    score = 1.0 if correct else format_score * (final is not None)
    return {"score": score, "correct": float(correct), "format": float(final is not None)}


def final_answer(text: str, prefers_hash: bool) -> str | None:
    """The final answer that the text marks, or None."""
    finders = (_after_hash, last_boxed) if prefers_hash else (last_boxed, _after_hash)
    return next((found for find in finders if (found := find(text)) is not None), None)


def vote(completion_text: str, prefers_hash: bool) -> str:
    """The final answer as one spelling, for a vote among completions; of one that marks none the last line."""
    final = final_answer(completion_text, prefers_hash)
    return _tidy(final if final is not None else completion_text.strip().rpartition("\n")[2])


def _after_hash(text: str) -> str | None:
    found = [match["number"] for match in _HASH.finditer(text)]
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}` whose braces close, or None."""
    opened: list[int | None] = []  # where the content of each open brace begins, if that is boxed
    found: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):  # once, because a text may repeat `\boxed{` without end
        if match[0] != "}":
            opened.append(match.end() if match[0] != "{" else None)
        elif opened and (start := opened.pop()) is not None and (found is None or start > found[0]):
            found = start, match.start()
    return None if found is None else text[found[0] : found[1]].strip()


def tagged(text: str) -> str | None:
    """Return the text in the last `<answer>…</answer>`; the tags are read once, however many there are."""
    start, found = None, None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            start = tag.end() if start is None else start
        elif start is not None:
            start, found = None, text[start : tag.start()]
    return found


def _gold_text(gold: Any, prefers_hash: bool) -> str:
    if isinstance(gold, float):
        gold = format(Decimal(repr(gold)), "f")  # never 1e-05, where LaTeX sees Euler's e
    text = "" if gold is None else str(gold).strip()
    if not text:
        raise RewardError("the row has no ground truth")
    marked = final_answer(text, prefers_hash)  # some data sets give the whole solution
    return text if marked is None else marked


def _equal(gold: str, final: str | None, answer: list[Any]) -> bool:
    from math_verify import verify

    if final is not None and _tidy(final) == _tidy(gold):
        return True
    return verify(_parse_whole(gold), answer, timeout_seconds=None)


def _parse_free(text: str) -> list[Any]:
    """Find the final answer in prose and parse it; an empty list if there is none."""
    from math_verify import parse

    return parse(_spaced(text[-TAIL:]), parsing_timeout=None)


def _parse_whole(text: str) -> list[Any]:
    """Parse all of `text` as one LaTeX expression."""
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(f"\\boxed{{{_tidy(text)}}}", extraction_config=config, parsing_timeout=None)


def _tidy(text: str) -> str:
    """One expression without Chinese units and trailing stops. Numbers with only a space between them stay apart.

    Otherwise math-verify would read `40 2` as a mixed number, and add: it would equal 42.
    """
    text = _spaced(text).strip().strip("$").rstrip(".,").strip() or text.strip()
    return _APART.sub(", ", _THOUSANDS.sub("", _MIXED.sub(r"\\frac{\1}{\2}", text)))


def _spaced(text: str) -> str:
    """Replace Chinese characters and stops by spaces, so that the numbers between them are words of their own.

    Full-width characters, degrees, infinity, powers, roots and fractions of one character are spelt as math-verify reads them.
    """
    powers = _POWER.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    spelt = _ROOT.sub(r"\\sqrt{\1\2\3}", powers.replace("^°", "°").translate(_SPELT))
    return _CHINESE.sub(" ", spelt.replace("答案", " answer "))


# -- reasoning-gym -----------------------------------------------------------------------------------------------------

GYM_SOURCE = "reasoning-gym"
"""Prefix of the `data_source` of these rows; the name of the generator follows, after a colon."""
EVALUATING = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Generators whose scorers give the answer to Python's `eval`, by themselves or through sympy: a completion could run any
code. (reasoning-gym 0.1.25)"""


def check_gym_source(source: str, *, is_unsafe_allowed: bool) -> None:
    """Raise RewardError for a generator whose scorer would run completions as code, unless that is allowed."""
    name = source.partition(":")[2]
    if name in EVALUATING and not is_unsafe_allowed:
        raise RewardError(f"{source}: reasoning-gym runs answers as Python, as your user; allow it: --unsafe-rewards")


def load_gym() -> Callable[[Call], float]:
    """Bound this process's memory and import reasoning-gym, so that no call waits for it."""
    bound_memory()
    import reasoning_gym  # noqa: F401

    return score_gym


def score_gym(call: Call) -> float:
    """Return the score that reasoning-gym gives the answer, mostly from 0 to 1.

    Raises:
        RewardError: the row does not name its task.
    """
    match call.prompt.info.get("reasoning_gym"):
        case {"name": str(name), "parameters": dict(parameters), "index": int(index)}:
            pass
        case _:
            raise RewardError("the row does not name its task of reasoning-gym; give data.train=reasoning-gym:NAME")
    generator, task = _task(name, json.dumps(parameters), index)
    answer = tagged(call.completion_text)
    return float(generator.score_answer((call.completion_text if answer is None else answer).strip(), task))


@functools.lru_cache(maxsize=256)
def _task(name: str, parameters: str, index: int) -> tuple[Any, dict[str, Any]]:
    """A generator, and one of its tasks. The completions of a group come one after the other, so it is made once."""
    generator = _generator(name, parameters)
    return generator, generator[index]


@functools.lru_cache(maxsize=64)
def _generator(name: str, parameters: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(parameters))
