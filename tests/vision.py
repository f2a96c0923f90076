"""A tiny Qwen3-VL and Qwen2.5-VL with their processors, made offline, images for tests, and a task about images.

`python -m tests.vision FOLDER` writes the task.
"""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from asyncgrpo.data.demo import _byte_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALLEST, LARGEST = 32 * 32, 256 * 256


def make_tiny_vl(
    path: str | Path, *, family: str = "qwen3_vl", seed: int = 0, layers: int = 3, width: float = 0.1
) -> Path:
    """Save a random model with a vision tower and its processor into `path`, and return it. Float32."""
    tokenizer: PreTrainedTokenizerFast = _byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "eos_token": "<|im_end|>"})
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, 2048
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    is_3, patch = family == "qwen3_vl", 16 if family == "qwen3_vl" else 14
    size = {"shortest_edge": SMALLEST, "longest_edge": LARGEST}
    reads = Qwen2VLImageProcessor(patch_size=patch, temporal_patch_size=2, merge_size=2, size=size)
    processor = (Qwen3VLProcessor if is_3 else Qwen2_5_VLProcessor)(
        image_processor=reads,
        tokenizer=tokenizer,
        video_processor=(Qwen3VLVideoProcessor if is_3 else Qwen2VLVideoProcessor)(patch_size=patch),
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(path)
    tokenizer.save_pretrained(path)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {
        "vocab_size": len(tokenizer) + 9,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": rope | ({"mrope_interleaved": True} if is_3 else {}),
        "initializer_range": width,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": patch}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "initializer_range": width}
    if is_3:
        text["head_dim"] = 16
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    else:
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    both = {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = Qwen3VLForConditionalGeneration if is_3 else Qwen2_5_VLForConditionalGeneration
        kind((Qwen3VLConfig if is_3 else Qwen2_5_VLConfig)(**both)).save_pretrained(path)
    return Path(path)


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """Return a random image of coarse squares."""
    drawn = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(drawn).resize((width, height), Image.Resampling.BICUBIC)


def written(image: Image.Image, kind: str = "PNG", **how: object) -> bytes:
    """Return the bytes of a file with this image."""
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def geometry(number: int, split: str) -> dict[str, Any]:
    """A row in the form of verl's geo3k: a dark or a bright picture, to be answered in ASCII or in other characters."""
    is_dark, rng = number % 2 == 1, np.random.default_rng(number)
    drawn = rng.integers(0, 60, ((64, 64, 96)[number % 3], (64, 96, 64)[number % 3], 3)) + (0 if is_dark else 190)
    content = written(Image.fromarray(drawn.astype(np.uint8)), "JPEG" if is_dark else "PNG")
    return {
        "data_source": "dark_or_bright",
        "prompt": [{"role": "user", "content": "<image>?"}],
        "images": [{"bytes": content, "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "ascii" if is_dark else "other"},
        "extra_info": {"split": split, "index": number},
    }


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ascii = sum(c.isascii() for c in solution_str) / max(1, len(solution_str))
    return ascii if ground_truth == "ascii" else 1 - ascii
"""


def make_task(folder: str | Path, rows: int = 240) -> None:
    """Write what `docs/images.md` trains on: a model, two Parquet files, and a reward that depends on the image."""
    make_tiny_vl(Path(folder) / "model")
    for split, first, count in (("train", 0, rows), ("test", 1000, 16)):
        table = pa.Table.from_pylist([geometry(number, split) for number in range(first, first + count)])
        pq.write_table(table, Path(folder) / f"{split}.parquet")
    (Path(folder) / "my_reward.py").write_text(REWARD)


if __name__ == "__main__":
    make_task(sys.argv[1])
