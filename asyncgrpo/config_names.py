"""Names that people write for our knobs: typing slips, verl's keys, and ours of yesterday.

`suggest` turns a key that we do not have into the one that was probably meant, or into a sentence saying why there is
none. What verl's keys are here is in `config_verl.py`.
"""

import difflib
from collections.abc import Collection

from asyncgrpo.config_verl import bare, ending_in, misspelt, pattern_of, verl_keys

# Keys that were ours, and what says it now.
_RENAMED: dict[str, str] = {
    "algorithm.clip_low": "algorithm.loss_args.low, an argument of algorithm.loss",
    "algorithm.clip_high": "algorithm.loss_args.high, an argument of algorithm.loss",
    "algorithm.importance_cap": "the `high` of an entry of algorithm.corrections, as algorithm.corrections=[{high: 2.0}]",
}


# How alike two names must be, from 0 to 1, to be the same with a slip: `grp_size` and `group_size` are 0.89,
# `max_steps` and `max_attempts` 0.76. Higher where the section differs too.
_ALIKE, _ALIKE_ELSEWHERE = 0.8, 0.85


def suggest(key: str, known: Collection[str]) -> str:
    """A hint of one clause for a key that is not in `known`; empty when nothing comes near.

    Looked for in this order: our old name, verl's name (or the end of it: `rollout.n`), a slip within the section, our
    key in another section or without one (`lr`), a slip elsewhere, a slip in verl's name.
    """
    key = bare(key)
    renamed = _RENAMED.get(key) or _RENAMED.get(f"algorithm.{key}")
    if renamed is not None:
        return f"it is now {renamed}"
    if key in known:
        return f"write it as `{key}`"
    verls = verls_name(key, known)
    if verls is not None:
        return _from_verl(verls)
    if meant := _slip(key, known):
        return f"did you mean `{meant}`?"
    return f"did you mean verl's `{theirs}`?" if (theirs := misspelt(key)) else ""


def verls_name(key: str, known: Collection[str] = ()) -> str | None:
    """verl's full name, if `key` is one or the end of one, without a slip, and not the end of one in `known`."""
    key = bare(key)
    if key in verl_keys():
        return key
    if any(other.endswith(f".{key}") for other in known):
        return None
    return ending_in(key) or (key if pattern_of(key) and not misspelt(key) else None)


def _slip(key: str, known: Collection[str]) -> str | None:
    """The one of `known` that was meant."""
    section, _, last = key.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    for end in difflib.get_close_matches(last, beside, n=1, cutoff=_ALIKE):
        return beside[end]
    namesakes = [other for other in known if other.rpartition(".")[2] == last]
    if namesakes:
        return max(namesakes, key=lambda other: difflib.SequenceMatcher(None, other, key).ratio())
    ends = {other.rpartition(".")[2]: other for other in known}
    return next((ends[end] for end in difflib.get_close_matches(last, ends, n=1, cutoff=_ALIKE_ELSEWHERE)), None)


def near(name: str, known: Collection[str]) -> str:
    """`did you mean ...?` of the one of `known` that looks most like `name`; empty when none does."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else ""


def _from_verl(key: str) -> str:
    pattern = pattern_of(key)
    assert pattern is not None
    entry = verl_keys()[pattern]
    if entry.ours:
        return f"that is verl's name for `{entry.ours}`"
    return (
        f"that is verl's: {entry.by_hand}"
        if entry.by_hand
        else f"that is verl's, and has no counterpart: {entry.absent}"
    )
