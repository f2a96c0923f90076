"""Tools as users write them."""

import functools


def lookup(word: str, times: int = 1) -> dict:
    """Look a word up.

    Args:
        word: what to look up
        times: how often
    """
    if word == "nothing":
        raise KeyError("no such word")
    return {"word": word * times} if word != "pair" else {(1, 2): word}


async def later(word: str) -> str:
    """Say a word later.

    Args:
        word: what to say
    """
    return word + "!"


def bare(word):
    return word


twice = functools.partial(lookup, times=2)
