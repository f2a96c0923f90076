"""Model and task of the demo, which trains with GRPO on a machine without GPU and network.

The model is a byte-level transformer with about 70,000 random weights, in Hugging Face format. It only prefers digits. The
task is to increment each digit of a short string. Each right digit is rewarded, so the reward rises gradually. Training rows and
held-out rows share no prompt.
"""

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DIGITS = "0123456789"

CONTEXT = 512
"""Maximum tokens of prompt plus completion."""
SPECIAL_TOKENS = ("<pad>", "<eos>", "<system>", "<user>", "<assistant>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message.role + '>' + message.content }}{% if message.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


ROPE_THETA, INITIALIZER_RANGE = 100.0, 0.05
"""A small RoPE base, which separates neighbouring positions, and large initial weights: a small model learns faster with them."""
DIGIT_PRIOR = 2.0
"""Strength of the preference for digits and <eos>."""


def make_demo_model(path: str | Path, *, seed: int, layers: int = 1, hidden: int = 64, heads: int = 4) -> None:
    """Write a random Qwen3 and its byte-level tokenizer into a folder.

    Digits and <eos> are more likely than other tokens for every prompt, as a stand-in for pretraining. Channel 0 of every
    embedding holds the same value, which the output rows of those tokens read. Without it the model spends most of its steps
    on finding the tokens of completions among 261.

    Args:
        seed: of the weights.
        layers, hidden, heads: size of the model; `hidden` is a multiple of `heads`, and `heads` of 2.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    tokenizer = _byte_tokenizer()
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4 * INITIALIZER_RANGE
        model.lm_head.weight[[*DIGITS.encode(), tokenizer.eos_token_id], 0] += DIGIT_PRIOR
    logging.disable_progress_bar()
    model.save_pretrained(path)


TEACHER_UPDATES, TEACHER_BATCH, TEACHER_LR = 200, 50, 1e-2


def make_demo_teacher(path: str | Path, *, seed: int) -> None:
    """Write a model that solves the task into a folder: a larger one, trained on the answers of all prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other at this size
    make_demo_model(path, seed=seed, layers=2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), _byte_tokenizer()
    turns = [
        [{"role": "user", "content": digits}, {"role": "assistant", "content": incremented(digits)}]
        for digits in (f"{number:03}" for number in range(1000))
    ]
    tokens = torch.tensor(tokenizer.apply_chat_template(turns, return_dict=False))
    drawn = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TEACHER_LR)
    for update in range(TEACHER_UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = TEACHER_LR * min(1.0, 2 - 2 * update / TEACHER_UPDATES)
        batch = tokens[torch.randint(len(tokens), (TEACHER_BATCH,), generator=drawn)]
        labels = torch.where(torch.arange(batch.shape[1]) < 5, -100, batch)  # not the prompt
        model(input_ids=batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    model.save_pretrained(path)


def _byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer whose token ids are byte values, followed by the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = Tokenizer(models.BPE(vocab={token: byte for byte, token in bytes_to_unicode().items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_demo_task(
    path_train: str | Path, path_eval: str | Path, *, seed: int, rows: int = 800, eval_rows: int = 100
) -> None:
    """Write the training and the held-out file, as JSON Lines of `{prompt, ground_truth, data_source}`.

    A prompt has three digits. Each digit of its answer is one larger, 9 becomes 0.

    Args:
        seed: of the assignment of strings to files.
        rows, eval_rows: rows of the two files, 1000 together at most; all prompts differ.
    """
    prompts = [f"{number:03}" for number in random.Random(seed).sample(range(1000), rows + eval_rows)]
    for path, part in ((path_train, prompts[:rows]), (path_eval, prompts[rows:])):
        lines = (
            json.dumps({"prompt": prompt, "ground_truth": incremented(prompt), "data_source": "demo_increment"})
            for prompt in part
        )
        Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def incremented(digits: str) -> str:
    """Return the answer to a prompt."""
    return digits.translate(str.maketrans(DIGITS, DIGITS[1:] + "0"))
