"""Agents as users write them: good ones, and ways in which one goes wrong."""

import asyncio
import os
import time
from pathlib import Path

from openai import OpenAI


async def run(base_url, api_key, model, prompt, ground_truth, **row):
    """Returns what it was given."""
    assert set(row) == {"messages", "answer", "data_source", "info", "extra_info", "seed"}, row
    await asyncio.sleep(0)
    return {"score": 1.0, "knows": float((base_url, api_key, model, prompt, ground_truth) == ("u", "k", "m", "go", 7))}


def asks(base_url, messages):
    """With OpenAI's client, not async."""
    client = OpenAI(base_url=base_url, api_key="any")
    reply = client.chat.completions.create(model="any", messages=messages)
    return len(reply.choices[0].message.content)


async def does(base_url, info):
    match info["do"]:
        case "nothing":
            return None
        case "raise":
            raise ValueError("no such tool")
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(1000)


async def waits(base_url, info):
    file = Path(info["file"])
    file.write_text("waits")
    try:
        await asyncio.sleep(1000)
    finally:
        file.write_text("cancelled")


def alone(prompt):
    return 1.0


def odd(base_url, weather):
    return 1.0
