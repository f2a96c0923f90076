"""How our sampling is said in SGLang's words, and SGLang's output in ours. Needs no SGLang."""

from typing import Any

import numpy as np

from asyncgrpo.errors import EngineError
from asyncgrpo.types import Completion, Sampling, VersionSpan, WeightVersion

LOG_OF_ZERO = -1e30
"""SGLang writes the smallest float where a log-prob is minus infinity; anything below this is one."""


def sampling_params(sampling: Sampling, *, room: int) -> dict[str, Any]:
    """SGLang's parameters of a request; `room` is what the context leaves for an answer, tokens."""
    return {
        "temperature": sampling.temperature,  # at 0 SGLang takes the likeliest token
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": min(sampling.max_tokens, room),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def completion_of(output: dict[str, Any], index: int) -> Completion:
    """What SGLang returned for one answer. A stop token is its last token. Raises EngineError if a number is broken."""
    meta = output["meta_info"]
    token_ids = np.array(output["output_ids"], dtype=np.int32)
    # An answer that was aborted before its first token may have the log-prob of a token that was not kept.
    logprobs = np.array([entry[0] for entry in meta["output_token_logprobs"][: len(token_ids)]], dtype=np.float32)
    if len(logprobs) != len(token_ids):
        raise EngineError(f"SGLang returned {len(token_ids)} tokens with {len(logprobs)} log-probs")
    reason = meta["finish_reason"]
    is_finite = np.isfinite(logprobs) & (logprobs > LOG_OF_ZERO)
    if not is_finite.all() or reason.get("matched") == "NaN happened":
        raise EngineError(f"a log-prob is not finite under weights {meta['weight_version']}, which are probably broken")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(token_ids)}]
    return Completion(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=tuple(
            VersionSpan(WeightVersion.parse(span["version"]), span["start"], span["end"])
            for span in spans
            if span["start"] < span["end"]
        ),
        finish_reason=reason["type"],
    )
