"""Ways to damage a message: in its bytes, which the digest tells, and in what it says, under a digest that is right."""

import os
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import xxhash

from asyncgrpo.types import PolicyVersion, Score, VersionSpan
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import Deliver

Frames = list[bytes]


class _Canary:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self._path}",)


def sealed(header: bytes, payload: bytes = b"") -> Frames:
    hasher = xxhash.xxh3_64(header)
    hasher.update(payload)
    return [hasher.digest() + header, payload]


class Mutator:
    def __init__(self, seed: int, canary: str) -> None:
        self.rng = random.Random(seed)
        self._pickle = pickle.dumps(_Canary(canary))
        self._before: Frames = [b"12345678x", b""]
        self._of_bytes = [
            self._flip, self._cut, self._splice, self._wrong_number, self._swap, self._noise, self._bytes_of_a_pickle,
        ]  # fmt: skip
        self._of_headers = [
            self._bomb, self._nest, self._wrong_type, self._pickled_completion, self._too_long, self._left,
        ]  # fmt: skip

    def of_bytes(self, message: Message, payload: bytes) -> Frames:
        frames = [bytes(frame) for frame in encode(message, payload)]
        malformed = frames
        while malformed in (frames, self._before):
            malformed = self.rng.choice(self._of_bytes)(frames)
        self._before = frames
        return malformed

    def sealed(self, message: Message, payload: bytes) -> Frames:
        frames = [bytes(frame) for frame in encode(message, payload)]
        if self.rng.random() < 0.4:
            malformed = self.rng.choice(self._of_bytes)(frames)
            if len(malformed) == 2:
                malformed = sealed(malformed[0][8:], malformed[1])
        else:
            malformed = sealed(*self.rng.choice(self._of_headers)(frames[0][8:], frames[1]))
        self._before = frames
        return malformed

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _flip(self, frames: Frames) -> Frames:
        which = self.rng.choice([i for i, frame in enumerate(frames) if frame])
        altered = bytearray(frames[which])
        for _ in range(self.rng.choice((1, 1, 1, 2, 8))):
            altered[self.rng.randrange(len(altered))] ^= 1 << self.rng.randrange(8)
        return [*frames[:which], bytes(altered), *frames[which + 1 :]]

    def _cut(self, frames: Frames) -> Frames:
        which = self.rng.randrange(2)
        end = self.rng.randrange(len(frames[which]) + 1)
        return [*frames[:which], frames[which][:end], *frames[which + 1 :]]

    def _splice(self, frames: Frames) -> Frames:
        a, b = frames[0], self._before[0]
        return [
            a[: self.rng.randrange(len(a))] + b[self.rng.randrange(len(b)) :],
            self.rng.choice((frames, self._before))[1],
        ]

    def _wrong_number(self, frames: Frames) -> Frames:
        return self.rng.choice(([], frames[:1], [*frames, b""], [b"", b""], [b""] * 300, [*frames, *self._before]))

    def _swap(self, frames: Frames) -> Frames:
        return self.rng.choice((frames[::-1], [frames[0], self._before[1]], [self._before[0], frames[1]]))

    def _noise(self, frames: Frames) -> Frames:
        return [self.rng.randbytes(self.rng.choice((1, 9, 40, 400))), self.rng.randbytes(self.rng.choice((0, 16, 100)))]

    def _bytes_of_a_pickle(self, frames: Frames) -> Frames:
        return self.rng.choice(
            ([self._pickle, frames[1]], [frames[0], self._pickle], [frames[0][:8] + self._pickle, b""])
        )

    # -- headers -------------------------------------------------------------------------------------------------------

    def _bomb(self, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """A length that is not there: array, map, string or bytes of 2^32 - 1, somewhere behind the tag."""
        at = self.rng.randrange(6, len(header))
        size = struct.pack(">I", self.rng.choice((2**32 - 1, 2**31, 2**24)))
        tag = self.rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"))
        return header[:at] + tag + size + header[at:], payload

    def _nest(self, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """A completion, or any field, of arrays or maps in each other."""
        depth = self.rng.choice((100, 1_000, 60_000))
        value = self.rng.choice((b"\x91" * depth + b"\xc0", b"\x81\xa1x" * (depth // 3) + b"\xc0"))
        at = header.find(b"\xa6answer")
        at = at + 7 if at >= 0 and self.rng.random() < 0.7 else self.rng.randrange(6, len(header))
        return header[:at] + value + header[at + 1 :], payload

    def _wrong_type(self, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        fields = msgspec.msgpack.decode(header)
        values = (None, -1, 2**63, 2**64 - 1, 1.5, float("nan"), "x" * 300, [], {}, True, [None], [[]], b"x", {"a": {}})
        name = self.rng.choice([n for n in fields if n != "kind"] or ["more"])
        inner = fields.get(name)
        if isinstance(inner, list) and inner and self.rng.random() < 0.7:
            place = self.rng.randrange(len(inner))
            if isinstance(inner[place], dict):
                inner[place][self.rng.choice(list(inner[place]))] = self.rng.choice(values)
            else:
                inner[place] = self.rng.choice(values)
        elif isinstance(inner, dict) and inner and self.rng.random() < 0.7:
            inner[self.rng.choice(list(inner))] = self.rng.choice(values)
        else:
            fields[name] = self.rng.choice(values)
        if self.rng.random() < 0.1:
            fields["more"] = 1
        return msgspec.msgpack.encode(fields), payload

    def _pickled_completion(self, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        fields = msgspec.msgpack.decode(header)
        for holder in (fields, fields.get("prompt", {})):
            name = self.rng.choice(list(holder) or ["x"])
            if name != "kind":
                holder[name] = self.rng.choice((self._pickle, msgspec.msgpack.Ext(1, self._pickle)))
        return msgspec.msgpack.encode(fields), payload

    def _too_long(self, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        """Valid, and longer than such a message may be; or with a payload that does not belong to it."""
        if self.rng.random() < 0.5:
            return header, payload + bytes(self.rng.choice((1, 8, 70_000)))
        fields = msgspec.msgpack.decode(header)
        name = self.rng.choice([n for n in fields if n != "kind"] or ["more"])
        fields[name] = "x" * self.rng.choice((257, 2**16, 2**17))
        return msgspec.msgpack.encode(fields), payload

    def _left(self, header: bytes, payload: bytes) -> tuple[bytes, bytes]:
        return header + self.rng.randbytes(self.rng.randrange(1, 20)), payload

    # -- groups that lie -----------------------------------------------------------------------------------------------

    def lie(self, message: Deliver, payload: bytes) -> tuple[Deliver, bytes]:
        return self.rng.choice((self._lie_about_completion, self._lie_about_group, self._lie_in_numbers))(
            message, payload
        )

    def _lie_about_completion(self, message: Deliver, payload: bytes) -> tuple[Deliver, bytes]:
        place = self.rng.randrange(len(message.rollouts))
        rollout = message.rollouts[place]
        num_tokens, version = rollout.num_tokens, rollout.spans[0].version
        changes: list[dict[str, Any]] = [
            *({"num_tokens": n} for n in (0, 1, num_tokens + 1, 2**31, 2**53)),
            *({"index": i} for i in (place + 1, 2**53)),
            {"spans": ()},
            {"spans": (VersionSpan(version, 0, num_tokens + 1),)},
            {"spans": (VersionSpan(version, 0, 1), VersionSpan(version, 0, num_tokens))},
            {"spans": tuple(VersionSpan(version, i, i + 1) for i in range(num_tokens - 1, -1, -1))},
            *(
                {"spans": (VersionSpan(PolicyVersion(lineage, number), 0, num_tokens),)}
                for lineage, number in ((1, version.number + 2), (1, 2**53), (0, 0), (2, 0), (2**53, 1))
            ),
            *({"score": Score(value=x)} for x in (float("nan"), float("inf"), float("-inf"), None)),
            {"score": Score(value=1.0, failure="crash")},
        ]  # fmt: skip
        lied = msgspec.structs.replace(rollout, **self.rng.choice(changes))
        return replaced(message, rollouts=(*message.rollouts[:place], lied, *message.rollouts[place + 1 :])), payload

    def _lie_about_group(self, message: Deliver, payload: bytes) -> tuple[Deliver, bytes]:
        prompt = message.prompt
        changes: list[dict[str, Any]] = [
            {"rollouts": ()},
            {"rollouts": message.rollouts[:-1]},
            {"rollouts": message.rollouts * 2},
            {"rollouts": message.rollouts[::-1]},
            *({"prompt_index": n} for n in (message.prompt_index + 1, 2**53)),
            *({"attempt": n} for n in (message.attempt + 1, 2**53)),
            {"purpose": "eval"},
            {"group_id": "1.999999"},
            {"group_id": ""},
            {"lease_id": "1.999999.0"},
            {"lease_id": "eval.0.0.0"},
            {"lease_id": "x" * 256},
            {"prompt": msgspec.structs.replace(prompt, token_ids=(*prompt.token_ids, 1))},
            {"prompt": msgspec.structs.replace(prompt, prompt_id="train/x")},
            {"timings": {"x" * 1000: float("nan")}},
        ]
        return replaced(message, **self.rng.choice(changes)), payload

    def _lie_in_numbers(self, message: Deliver, payload: bytes) -> tuple[Deliver, bytes]:
        words = np.frombuffer(payload, "<u4").copy()
        place = self.rng.randrange(len(words))
        words[place] = self.rng.choice((0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x3F800000, 2**32 - 1, 151_936))
        return message, words.tobytes()


def replaced(message: Deliver, **fields: Any) -> Deliver:
    return msgspec.structs.replace(message, **fields)
