r"""The rule for mathematics: 1.0 if the final answer equals the ground truth, else 0.0. It runs inside a worker.

The final answer is the first of these that the completion has:

    gsm8k                 the number after the last `####`, the last `\boxed{}`, the free text
    all other sources     the last `\boxed{}`, the number after the last `####`, the free text

In free text, math-verify searches the last 4,000 characters for what follows "final answer is" or "answer", else for the
last LaTeX or plain expression. Equality is math-verify's too: `1/2` is `0.5` and `50\%`, `x=5` is `5`, `1,234` is
`1234`, units are dropped; roundings are not equal. Text that is no mathematics is compared as text.

math-verify's own timers are off: when one fires, a hard comparison looks like a wrong answer. The pool's deadline names
it as a timeout instead.
"""

import logging
import re
import resource
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.worker import Call

TAIL = 4_000
"""Characters of free text that are searched for an answer."""

MAX_MEMORY = 4 << 30
"""Bytes of address space of a worker, so that a tower of powers cannot take the machine's memory before its deadline."""

_HASH = re.compile(
    r"####[ ]*(?P<number>[-+−]?[$€£¥]?[ ]?\d[\d,]*(?:\.\d+)?(?:/\d+)?[ ]?%?)(?:[ ]*[^\W\d]+)?[.。]?[ ]*$", re.MULTILINE
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CHINESE = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]+")
_FULL_WIDTH = str.maketrans("０１２３４５６７８９％＋－−＝／．（）", "0123456789%+--=/.()")
_SPACE = r"(?:\s|\\[ ,;:!])+"
_THOUSANDS = re.compile(rf"(?<=\d){_SPACE}(?=\d{{3}}(?!\d))")
_MIXED = re.compile(rf"(?<=\d){_SPACE}(\d+)/(\d+)(?!\d)")
_APART = re.compile(rf"(?<=\d){_SPACE}(?=\d+(?![\d/]))")


def load_maths(_: str = "") -> Callable[[Call], float]:
    """Bound this process's memory, import math-verify and use it once, so that the first call is as quick as others."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MAX_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the timers that we turn off on purpose
    score_maths(Call(data_source="math", completion_text="the answer is $\\frac{1}{2}$", ground_truth="0.5"))
    return score_maths


def score_maths(call: Call) -> float:
    """1.0 if the final answer of the completion equals the ground truth, or one of a list of them; else 0.0.

    Raises:
        RewardError: the row has no ground truth.
    """
    prefers_hash = "gsm8k" in call.data_source.lower()
    golds = call.ground_truth if isinstance(call.ground_truth, list) else [call.ground_truth]
    final = final_answer(call.completion_text, prefers_hash)
    answer = _parse_free(call.completion_text) if final is None else _parse_whole(final)
    return float(any(_equal(_gold_text(gold, prefers_hash), final, answer) for gold in golds))


def final_answer(text: str, prefers_hash: bool) -> str | None:
    """The final answer that the text marks, or None."""
    finders = (_after_hash, last_boxed) if prefers_hash else (last_boxed, _after_hash)
    return next((found for find in finders if (found := find(text)) is not None), None)


def _after_hash(text: str) -> str | None:
    found = [match["number"] for match in _HASH.finditer(text)]
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{}` whose braces close, or None."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[match.end() : end].strip()
    return None


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
    """Replace Chinese characters and stops by spaces, so that the numbers between them are words of their own."""
    return _CHINESE.sub(" ", text.translate(_FULL_WIDTH).replace("答案", " answer "))
