"""A teacher behind a URL: it speaks as SGLang or as vLLM, and gives each token a log-prob by the token before it."""

import base64
import itertools
import json

import numpy as np

from tests.rewards.servers import Server

VOCABULARY = 261
_logits = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
LOG_Q = (_logits - np.log(np.exp(_logits).sum(1, keepdims=True))).astype(np.float32)
"""[token before, token]"""


def top_of(before: int, count: int) -> list[int]:
    return np.argsort(-LOG_Q[before])[:count].tolist()


def as_sglang(asked: dict) -> dict:
    ids, start, count = asked["input_ids"], asked.get("logprob_start_len"), asked.get("top_logprobs_num", 0)
    if start is None:
        return {"text": "", "meta_info": {}}
    pairs = list(zip(ids[start:], ids[start + 1 :], strict=False))
    meta = {
        "input_token_logprobs": [
            [None, ids[start], None],
            *([float(LOG_Q[a, b]), b if b < VOCABULARY - 1 else 0, None] for a, b in pairs),
        ]
    }
    if count and "return_flat_raw_top_logprobs" in asked:
        meta |= flat([[(LOG_Q[a, b], b) for b in top_of(a, count)] for a, _ in pairs])
    elif count:
        top = [[[float(LOG_Q[a, b]), b, None] for b in top_of(a, count)] for a, _ in pairs]
        meta["input_top_logprobs"] = [None, *top]
    return {"meta_info": meta}


def flat(top: list[list[tuple[float, int]]]) -> dict:
    """The most likely tokens at each place as SGLang's arrays."""
    values, ids = np.array(top, np.float64).transpose(2, 0, 1)
    found = {"val": values.astype("<f4"), "idx": ids.astype("<i4")}
    return {
        f"input_top_logprobs_{name}_flat_b64": base64.b64encode(a.tobytes()).decode() for name, a in found.items()
    } | {"input_top_logprobs_shape": ids.shape}


def as_older_sglang(asked: dict) -> dict:
    asked.pop("return_flat_raw_top_logprobs", None)
    return as_sglang(asked)


def as_vllm(asked: dict) -> dict:
    ids, found = asked["prompt"], [None]
    for a, b in itertools.pairwise(ids):
        found.append(
            {str(token): {"logprob": float(LOG_Q[a, token])} for token in [b, *top_of(a, asked["prompt_logprobs"])]}
        )
    return {"choices": [{"text": "", "prompt_logprobs": found}]}


class TeacherServer(Server):
    """Args:
    kind: `sglang`, `older_sglang` or `vllm`.
    path: of the served model.
    context: its longest sequence.
    """

    def __init__(self, path, kind: str = "sglang", context: int = 512, port: int = 0) -> None:
        reply = {"sglang": as_sglang, "older_sglang": as_older_sglang, "vllm": as_vllm}[kind]
        super().__init__(lambda asked: (200, json.dumps(reply(asked))), port)
        self.card = {
            "data": [
                {"id": str(path), "owned_by": kind.removeprefix("older_"), "root": str(path), "max_model_len": context}
            ]
        }
