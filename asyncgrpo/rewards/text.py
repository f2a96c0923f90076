"""Rules that compare text or look at its shape. They are quick and cannot hang, so no worker process is needed.

The final answer of a completion is the text in `<answer>…</answer>`, in `\\boxed{}` or after the last `Answer:` or `答案是`;
without such a mark it is the last line that is not empty.
"""

import re
import unicodedata
from collections import Counter
from typing import Any

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled
from asyncgrpo.rewards.maths import last_boxed

# -- against the ground truth ------------------------------------------------------------------------------------------


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


def token_f1(completion_text: str, ground_truth: Any) -> float:
    """The F1 of the final answer's words against those of the ground truth, or the best of a list, as SQuAD counts it.

    Words are normalised as for `text_match`; in Chinese each character is one.
    """
    marked = _marked(completion_text)
    words = _words(_last_line(completion_text) if marked is None else marked)
    return max(_f1(words, _words(gold)) for gold in _golds(ground_truth))


def vote(completion_text: str, *, whole: bool) -> str:
    """The answer as one spelling, for a vote among completions; of one that marks none the last line, or the whole text."""
    marked = _marked(completion_text)
    if marked is not None:
        return normalise(marked)
    return completion_text.strip() if whole else normalise(_last_line(completion_text))


def _words(text: str) -> list[str]:
    return re.findall(r"[\u2e80-\u9fff]|[^\s\u2e80-\u9fff]+", normalise(text))


def _f1(words: list[str], gold: list[str]) -> float:
    common = (Counter(words) & Counter(gold)).total()
    return 2 * common / (len(words) + len(gold)) if common else 0.0


_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
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
    if (inside := tagged(text)) is not None:
        return inside
    if (boxed := last_boxed(text)) is not None:
        return boxed
    announced = _ANNOUNCED.findall(text)
    return str(announced[-1]) if announced else None


def tagged(text: str) -> str | None:
    """The text in the last `<answer>…</answer>`; the tags are read once, however many there are."""
    start, found = None, None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            start = tag.end() if start is None else start
        elif start is not None:
            start, found = None, text[start : tag.start()]
    return found


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
