"""Built-in environments: a calculator, and a game of guessing a number. They are quick, and run in the generator.

Each is a class like those that users write: `reset` with what it wants to know of the row, and `step` with the text of a
turn. `scores` says whether its rewards are the score.
"""

import ast
import operator
import random
from collections.abc import Callable
from typing import Any

from asyncgrpo.environments.base import (
    Environment,
    EnvironmentFailed,
    Episode,
    Reply,
    Task,
    reply_of_reset,
    reply_of_step,
)

_LARGEST = 10**60
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression of numbers, `+ - * / // %` and brackets; `error` and why, if it has none."""
    if len(expression) > 200:
        return "error: too long"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        return "error: division by zero" if isinstance(error, ZeroDivisionError) else "error: no arithmetic expression"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            found: Any = value
        case ast.BinOp(left=left, op=op, right=right):
            found = _OPERATORS[type(op)](_value(left), _value(right)) if type(op) in _OPERATORS else None
        case ast.UnaryOp(op=op, operand=operand):
            found = _OPERATORS[type(op)](_value(operand)) if type(op) in _OPERATORS else None
        case _:
            found = None
    if found is None or not abs(found) < _LARGEST:
        raise ValueError("not arithmetic, or too large")
    return found


class Calculator:
    """A turn whose last line ends with `=` is calculated; any other turn is the answer. A reward scores the answer."""

    scores = False

    def step(self, text: str) -> tuple[str, None, bool]:
        line = text.rstrip().rpartition("\n")[2]
        if not line.endswith("="):
            return "", None, True
        return calculate(line[:-1]), None, False


class Guess:
    """A number from 0 to `largest` is to be found: each guess is answered with `<` or `>`, meaning that the number is
    smaller or larger. The reward is 1 for the number, less a tenth for each guess before; a turn that is no number loses.

    The number is `ground_truth`; without one the row's seed decides. `extra_info.largest` is 9 by default.
    """

    scores = True

    def reset(self, answer: Any, info: dict[str, Any], seed: int) -> None:
        self._largest = int(info.get("largest", 9))
        self._number = random.Random(seed).randint(0, self._largest) if answer in (None, "") else int(answer)
        self._guesses = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        guess = text.strip()
        if not (guess.isascii() and guess.isdigit() and len(guess) <= len(str(self._largest))):
            return "", 0.0, True
        if int(guess) == self._number:
            return "", max(1.0 - 0.1 * self._guesses, 0.1), True
        self._guesses += 1
        return ("<" if self._number < int(guess) else ">"), 0.0, False


BUILTIN: dict[str, type] = {"calculator": Calculator, "guess": Guess}


class Local:
    """An environment that runs in this process, made of a built-in class."""

    def __init__(self, name: str) -> None:
        self._class = BUILTIN[name]
        self.scores: bool = self._class.scores  # type: ignore[attr-defined]
        self.about = f"environment {name}"

    def episode(self, task: Task) -> Episode:
        """An episode for one completion."""
        return _LocalEpisode(self._class(), task)

    async def close(self) -> None:
        """Nothing is left to end."""


class _LocalEpisode:
    def __init__(self, game: Any, task: Task) -> None:
        self._game, self._task = game, task

    async def reset(self) -> Reply:
        task = self._task
        if not hasattr(self._game, "reset"):
            return Reply()
        try:
            return reply_of_reset(self._game.reset(answer=task.answer, info=task.info, seed=task.seed))
        except (TypeError, ValueError) as error:
            raise EnvironmentFailed(f"the row does not fit: {error}") from error

    async def step(self, text: str) -> Reply:
        return reply_of_step(self._game.step(text))

    async def close(self) -> None:
        pass


_: type[Environment] = Local
