"""The decode curve of an engine, measured: what a token takes at 1, 2, 4, ... completions that run at once."""

import asyncio
import itertools
import time
from collections.abc import Iterator

from asyncgrpo.config.schema import Config
from asyncgrpo.data.prompts import load_prompts
from asyncgrpo.data.tokenizer import load_tokenizer
from asyncgrpo.engines.base import Engine
from asyncgrpo.engines.build import build_engine
from asyncgrpo.types import PolicyVersion, Sampling

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT = 8
"""Tokens of the first of two measurements: their difference has neither prefill nor start in it."""
ENOUGH_S = 1.0
"""Seconds that the difference should last, where completions may be as long as that."""
SLOWER = 50.0
"""A load at which a token takes so many times what it takes one completion is the last one."""

Point = tuple[float, float]


def decode_sweep(config: Config) -> Iterator[Point]:
    """(completions that run, seconds of a token) for each load, on prompts of the training file."""
    tokenizer = load_tokenizer(config.model.path)
    prompts = [prompt.token_ids for prompt in load_prompts(config.data.sources, "train", tokenizer, config.data)]
    engine = build_engine(config, seed=config.run.seed)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(engine.start(PolicyVersion(0, 0)))
        measure = Measure(engine, prompts, config)
        loop.run_until_complete(measure.seconds(1, SHORT))  # the first request is slow
        first_s = None
        for load in LOADS:
            token_s = loop.run_until_complete(measure.token_seconds(load))
            yield float(load), token_s
            first_s = first_s or token_s
            if token_s > SLOWER * first_s:
                return
    finally:
        loop.run_until_complete(engine.close())
        loop.close()


class Measure:
    """Samples completions of one length, and takes the time."""

    def __init__(self, engine: Engine, prompts: list[tuple[int, ...]], config: Config) -> None:
        self._engine, self._prompts = engine, itertools.cycle(prompts)
        self._temperature, self._longest = config.sampling.temperature, config.sampling.max_tokens
        self._requests = itertools.count()

    async def token_seconds(self, load: int) -> float:
        """Seconds of a token of each of `load` completions: of the tokens by which a long one is longer than a short one."""
        short = min(SHORT, self._longest)
        # The first of a load is often slower than those after it, which would make the difference too small.
        short_s = min([await self.seconds(load, short) for _ in range(2)])
        guess_s = short_s / short
        long = min(self._longest, short + max(SHORT, round(ENOUGH_S / guess_s)))
        if long < 2 * short:
            return guess_s  # completions are too short to leave the start out
        return max(await self.seconds(load, long) - short_s, 0.1 * guess_s * (long - short)) / (long - short)

    async def seconds(self, load: int, tokens: int) -> float:
        """How long it takes until the last of `load` completions of so many tokens."""
        started = time.perf_counter()
        await asyncio.gather(*(self._sample(tokens) for _ in range(load)))
        return time.perf_counter() - started

    async def _sample(self, tokens: int) -> None:
        sampling = Sampling(temperature=self._temperature, max_tokens=tokens)  # nothing stops it before
        number = next(self._requests)
        async for _ in self._engine.generate(f"sweep-{number}", next(self._prompts), 1, sampling, number):
            pass
