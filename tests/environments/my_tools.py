"""Tools as users write them."""

import functools
import threading

_all_there = threading.Barrier(8)


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


def wait(function: str) -> str:
    """Wait until eight calls run at once.

    Args:
        function: what to say then
    """
    _all_there.wait(10.0)
    return function


def bare(word):
    return word


twice = functools.partial(lookup, times=2)
