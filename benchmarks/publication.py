"""One publication of a model with adapters, whole or adapters only: seconds and bytes. One JSON line each.

    python -m benchmarks.publication --layers 6 --hidden 1024 --rank 32

The learner is a real one with random weights, the generator a process of its own that stages, merges and takes a digest
of what it would load. Between them are gloo and loopback: with a real network the bytes count for more.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

TIMES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen3ForCausalLM(shape(arguments.layers, arguments.hidden, arguments.vocab)).to(torch.bfloat16)
        parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(folder)
        del model
        for adapters_only in (False, True):
            line = measure(Path(folder), adapters_only, arguments.rank, arguments.threads)
            about = {"parameters": parameters, "rank": arguments.rank, "threads": arguments.threads}
            about["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
            print(json.dumps(line | about), flush=True)


def shape(layers: int, hidden: int, vocab: int) -> Qwen3Config:
    """A model with the proportions of Qwen3."""
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )


def measure(path: Path, adapters_only: bool, rank: int, threads: int) -> dict[str, Any]:
    """Publish `TIMES` versions after a first one, which includes work that is done once."""
    from asyncgrpo.config.schema import WeightsConfig
    from asyncgrpo.learner.learner import Learner
    from asyncgrpo.types import PolicyVersion
    from asyncgrpo.weights.publisher import Publisher
    from tests.learner.helpers import config
    from tests.weights.publishing import publish

    sections = {
        "model": {"path": str(path), "dtype": "bfloat16", "lora": {"rank": rank}},
        "weights": {"adapters_only": adapters_only},
    }
    learner = Learner(config(path, **sections), rank=0, world=1, device="cpu")
    settings = WeightsConfig(timeout_s=600.0)
    publisher = Publisher(settings, maps=False, backend="gloo", bind="127.0.0.1", host="127.0.0.1", keys=None)
    publisher.start(learner.sent.layout(), learner.sent.base)
    process = multiprocessing.get_context("spawn").Process(
        target=receive, args=(publisher.endpoint, str(path), adapters_only, threads), daemon=True
    )
    process.start()
    try:
        publisher.wait_for(1, 60.0, lambda what, seconds: None)
        seconds = []
        for version in range(TIMES + 1):
            for name, parameter in learner.model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter.to_local(), std=1e-3)
            publication = publish(publisher, PolicyVersion(1, version), learner.sent.weights())
            seconds.append(publication.seconds)
    finally:
        process.terminate()
        process.join()
        publisher.close()
    return {
        "what": "publication of adapters" if adapters_only else "publication of whole weights",
        "seconds_median": round(statistics.median(seconds[1:]), 3),
        "seconds_first": round(seconds[0], 3),
        "seconds_spread": round(max(seconds[1:]) - min(seconds[1:]), 3),
        "bytes": publication.num_bytes,
    }


def receive(endpoint: str, path: str, adapters_only: bool, threads: int) -> None:
    """Receive as a generator, until the process is ended."""
    from asyncgrpo.weights.adapters import AdapterMerger, content_digest
    from asyncgrpo.weights.receiver import Receiver

    torch.set_num_threads(threads)
    receiver = Receiver(
        endpoint,
        generator_id="generator-0",
        incarnation="0",
        host="127.0.0.1",
        apply=lambda tensors, version: content_digest(tensors),
        keys=None,
        merger=AdapterMerger(path, torch.bfloat16) if adapters_only else None,
    )
    receiver.start()
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    main()
