"""Environments as users write them: good ones, and every way in which one goes wrong."""

import asyncio
import os
import time


class Environment:
    """Counts down from `extra_info.turns`; each turn earns a quarter."""

    def reset(self, prompt, ground_truth, extra_info):
        self.left = extra_info.get("turns", 2)
        return f"{prompt} {ground_truth}?"

    def step(self, text):
        self.left -= 1
        return f"heard {text}", 0.25, self.left == 0


class Async:
    async def reset(self, **row):
        await asyncio.sleep(0)
        return [{"role": "tool", "content": row["messages"][0]["content"]}], {}

    async def step(self, text):
        await asyncio.sleep(0.01)
        return text.upper(), 1, True, {"a": "dict"}


class Gymnasium:
    def reset(self, seed, unknown=3):
        return str(seed), {"info": unknown}

    def step(self, text):
        return "", 1.5, False, text == "end", {}


class Naughty:
    """Does what it is told to do."""

    scores = False

    def step(self, text):
        match text:
            case "raise":
                raise ValueError("no such place")
            case "next":
                return next(iter([]))
            case "long":
                raise ValueError("x" * (1 << 24))
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(1000)
            case "nan":
                return "", float("nan"), False
            case "done":
                return "", 0, "False"
            case "text":
                return "", "0.5", False
            case "string":
                return "only a text"
            case "huge":
                return "x" * (1 << 21), 0, False
            case "deep":
                return ["nothing", "a reader knows"], 0, False
            case "name":
                return "no \udcff.txt", 0, False
            case "print":
                print("to stdout, which is no pipe of ours")
        return "fine", 0, False


class SlowToMake:
    """Takes half a second to make, and says how many there are."""

    there = 0

    def __init__(self):
        SlowToMake.there += 1
        time.sleep(0.5)

    def close(self):
        SlowToMake.there -= 1

    def step(self, text):
        return str(SlowToMake.there), 0, False


class NoStep:
    def reset(self):
        return ""


class OddReset:
    def reset(self, weather):
        return weather

    def step(self, text):
        return None


class Bound:
    made = 0

    @classmethod
    def reset(cls, answer):
        cls.made += 1
        return f"{answer} {cls.made}"

    @staticmethod
    def step(text):
        return None


class OddStatic:
    @staticmethod
    def step(self, text):
        return None


class OddStep:
    def step(self):
        return None
