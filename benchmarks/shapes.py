"""Random Qwen3 models of published shapes, and the operations that a step of each needs.

The count has only what the mathematics needs: no padding, no recomputed activations, and no head where nothing is read. Other
work of a learner lowers its share of the card's peak.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig, Qwen3Config

    from asyncgrpo.learner.packing import PackedBatch


class Shape(NamedTuple):
    """The shape of a Qwen3 model with random weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    is_tied: bool
    """Whether the head is the embedding."""

    @property
    def body(self) -> int:
        """Weights that every token is multiplied with once: those of the layers' matrices."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.hidden * self.vocabulary


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 16, 128, 512, True),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, True),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151_936, True),
    "8b": Shape(4096, 36, 32, 8, 128, 12_288, 151_936, False),
}
"""Three published shapes, and one that a test can train."""


def qwen3(shape: Shape, **settings: Any) -> "Qwen3Config":
    """Return the configuration of a model of `shape`."""
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=40_960,
        **settings,
    )


def write_model(folder: Path, config: "PretrainedConfig", *, device: str, seed: int) -> Path:
    """Write a random bfloat16 model into `folder`, and return it. It is drawn on `device`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


class Work(NamedTuple):
    """What a step has to compute."""

    tokens: int
    """Tokens that go through the layers."""
    scored: int
    """Positions that the head reads."""
    pairs: int
    """Pairs of a query and a key that it sees, in each head of each layer."""

    @classmethod
    def of_sequences(cls, prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> "Work":
        """The work where every completion has a prompt of its own. Its last token is not run, because nothing follows it."""
        lengths = [p + length - 1 for p, group in zip(prompts, completions, strict=True) for length in group]
        scored = sum(map(sum, completions))
        return cls(sum(lengths), scored, sum(length * (length + 1) // 2 for length in lengths))

    @classmethod
    def of_rows(cls, rows: Iterable["PackedBatch"]) -> "Work":
        """The work of these rows, where a shared prompt counts once."""
        tokens = scored = pairs = 0
        for row in rows:
            queries, keys = (x.diff().long() for x in (row.segments.queries, row.segments.keys))
            tokens += len(row.token_ids)
            scored += len(row.targets)
            pairs += int((queries * (keys - queries) + queries * (queries + 1) // 2).sum())
        return cls(tokens, scored, pairs)


def train_flops(shape: Shape, work: Work, *, trains_weights: bool = True) -> float:
    """Operations of one step, `3 (2 body tokens + 2 head scored + 4 layers heads head_dim pairs)`.

    Backward is twice a forward: gradients by activations and by weights.

    Args:
        trains_weights: false where they are frozen below adapters: gradients by them are not needed, and adapters are
            too small to count.
    """
    matrices = 2 * shape.body * work.tokens + 2 * shape.head * work.scored
    attention = 4 * shape.layers * shape.heads * shape.head_dim * work.pairs
    return float((3 if trains_weights else 2) * matrices + 3 * attention)
