"""Names and texts use the words of `docs/glossary.md`: a word that was retired is in the changelog alone.

`python -m tests.test_words` prints every place.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RETIRED = {
    "answers that are completions": r"(?:num|min|max|extra)_answers|answers?_(?:text|length|retries|total)|an answer of",
    "order of a prompt": r"next_order|by_order|give an order|prompt order \d",
    "messages": r"\bMuster|\bSayHello\b|\bFarewell|\bPulse\b|\bAssemble\b|\bBegan\b|\bHanded\b|\bMisfortune|muster",
    "health": r"\bailment|\bsuspects?\b|set_aside|Suspects|\btend\(|\.tend\b",
    "learner": r"\bforesight|\bSlopes?\b|\bslopes?\b|\bWeightVersion\b|weight versions?\b",
    "equality": r"to the (?:last )?bit\b|bit for bit",
    "malformed": r"\bspoil(?:t|ed|s)?\b|what holds there",
    "repair": r"\bmend(?:s|ed|ing)?\b",
    "building": r"\bhouses?\b|\bfloors?\b of imports|neighbours on a floor|\brooms\b",
}
ELSEWHERE = {
    "CHANGELOG.md",  # says what the words were
    "tests/test_words.py",
}


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of every tracked file that people write."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        path = ROOT / name
        if name not in ELSEWHERE and path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".sh"} and path.is_file():
            yield name, path.read_text(encoding="utf-8")


def found(words: str) -> list[str]:
    """`file:line: text` for each place with a retired word."""
    pattern = re.compile(words)
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def fragments() -> list[str]:
    """Docstrings of functions, classes and modules that open with a word that needs what stands before it."""
    opening = re.compile(r"(?:Of|The same|With|For|Until|While|Whose|As|Now|Another one|In the|On the|To the)\b[ .]")
    named = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        f"{name}: {getattr(node, 'name', 'module')}: {text.splitlines()[0]}"
        for name, source in texts()
        if name.startswith("asyncgrpo/") and name.endswith(".py")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, named) and (text := ast.get_docstring(node)) and opening.match(text)
    ]


@pytest.mark.parametrize("what", RETIRED)
def test_a_retired_word_is_nowhere(what):
    assert found(RETIRED[what]) == []


def test_docstrings_name_their_subject():
    assert fragments() == []


@pytest.mark.parametrize("what", RETIRED)
def test_the_search_finds_a_planted_word(what):
    planted = {
        "answers that are completions": "num_answers",
        "order of a prompt": "next_order",
        "messages": "Muster(epoch=1)",
        "health": "an ailment",
        "learner": "the slopes",
        "equality": "equal to the bit",
        "malformed": "a spoilt frame",
        "repair": "how to mend it",
        "building": "the rooms",
    }
    assert re.search(RETIRED[what], planted[what])


if __name__ == "__main__":
    for what, words in RETIRED.items():
        print(f"== {what}", *found(words), sep="\n")
    print("== fragments", *fragments(), sep="\n")
