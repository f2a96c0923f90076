"""Prompts of large sources, whose rows are tokenised when they are due: a run starts without waiting for all of them.

Every row has its place in the order of prompts. Whether it is too long is known when it is due; it has no token ids then, and
the buffer drops it for good.
"""

import bisect
import itertools
from typing import TYPE_CHECKING

import msgspec

from asyncgrpo.config.schema import DataConfig
from asyncgrpo.data.prompts import open_source, token_ids_of
from asyncgrpo.data.sources import digest_of
from asyncgrpo.data.table import About, Fingerprint, Prepared, prompt_of
from asyncgrpo.errors import DataError
from asyncgrpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = 64
"""Rows whose tokens are in the fingerprint, at equal distances, beside the bytes of the sources."""


class LazyPrompts(Prepared):
    """The rows of `data.train`, each tokenised whenever it is asked for."""

    def __init__(self, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", about: About) -> None:
        """
        Args:
            about: what a check of every row found; its fingerprint does not count.
        """
        self._config, self._tokenizer = config, tokenizer
        self._sources = [(source, *open_source(source, config)) for source in config.sources]
        if tuple(len(rows) for _, _, rows in self._sources) != about.sizes:
            raise DataError("data.train was changed while the run started; start it again")
        self._ends = list(itertools.accumulate(len(rows) for _, _, rows in self._sources))
        digest = Fingerprint()
        for source in config.sources:
            digest.add(digest_of(source), ())
        count = min(PROBES, len(self))
        for prompt in (self[probe * len(self) // count] for probe in range(count)):
            digest.add(prompt.prompt_id, prompt.token_ids)
        self.about = msgspec.structs.replace(about, fingerprint=digest.hexdigest())

    def __len__(self) -> int:
        return self._ends[-1]

    def _prompt(self, at: int) -> Prompt:
        place = bisect.bisect_right(self._ends, at)
        source, schema, rows = self._sources[place]
        row = at - (self._ends[place] - len(rows))
        record = schema.to_record(rows[row], row)
        token_ids = token_ids_of(source, row, record, self._tokenizer, self._config)
        if len(token_ids) > self._config.max_prompt_tokens:
            token_ids = ()
        return prompt_of(f"train/{at}", token_ids, record.prompt, record.answer, record.source, record.info)
