"""Code rewards: the share of its tests that the code of a completion passes, in bubblewrap here or in Sandbox Fusion.

The code is the last fenced block in a language that is known, else the last fenced block, else the whole text. Tests are
the ground truth of the row: programs read an input and print an output, functions return a value, or `assert` statements
hold. Code that fails, crashes or is late fails its test; only a runner that fails makes the score a named failure.

Each test is a run of its own. A mark that differs each time is printed behind an `assert` and before a returned value, so
that a program that ends early passes nothing. Code that reads its own source can still print the mark.

`isolation.py` describes what a program in bubblewrap can reach. The kernel kills programs first when memory runs out
(`guests.Host`).
"""

import ast
import asyncio
import contextlib
import itertools
import json
import logging
import math
import re
import secrets
import signal
import sys
import sysconfig
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncgrpo import isolation
from asyncgrpo.config.reach import check_service
from asyncgrpo.config.schema import RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.isolation import last_line, memory_file, run_isolated, run_to_end
from asyncgrpo.rewards.base import MAX_DETAIL, Reward, Sampled, describe, each_in_turn, failed
from asyncgrpo.rewards.http import Service, ServiceError
from asyncgrpo.rewards.pool import PoolReward, Scorer
from asyncgrpo.types import Prompt, Score

log = logging.getLogger(__name__)

MAX_CODE = 1 << 20
"""Most bytes of a program."""
_HINT = "install the package bubblewrap, set reward.code.url to a Sandbox Fusion service, or give --unsafe-rewards"
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}

# -- what runners have in common ---------------------------------------------------------------------------------------

TIMEOUT = "timeout"


class Program(NamedTuple):
    """A program and its input."""

    code: str
    language: str = "python"
    """As Sandbox Fusion calls it."""
    stdin: str = ""


class Ran(NamedTuple):
    """End of a program."""

    stdout: str = ""
    problem: str = ""
    """Empty: it ended by itself with exit code 0. `TIMEOUT`: it was late. Else a text for people."""


Runner = Callable[[Program], Awaitable[Ran]]
"""Runs a program to its end or to its deadline. Raises ServiceError: the runner failed, and not the program."""


# -- bubblewrap --------------------------------------------------------------------------------------------------------


class LocalRunner:
    """Runs Python programs on this machine, one at a time. It blocks: it belongs into a process of its own."""

    def __init__(self, *, timeout_s: float, memory_mb: int, unsafe: bool = False) -> None:
        """
        Args:
            timeout_s: deadline of a program.
            memory_mb: address space of each process of a program, MiB.
            unsafe: where bubblewrap cannot run, run programs as processes like any other, with limits.
        Raises:
            RewardError: bubblewrap cannot run, and `unsafe` is false.
        """
        self._timeout_s, self._memory_mb, self._numbers = timeout_s, memory_mb, itertools.count()
        why = why_not_isolated()
        if why is not None and not unsafe:
            raise RewardError(why)
        self._is_isolated = why is None

    async def run(self, program: Program) -> Ran:
        if program.language != "python":
            return Ran(problem=f"{program.language} runs only in Sandbox Fusion (reward.code.url)")
        if self._is_isolated:
            ended = run_isolated(
                [*_PYTHON, _MAIN],
                visible=_visible(),
                files={_MAIN: program.code},
                environment=_ENVIRONMENT,
                timeout_s=self._timeout_s,
                memory_mb=self._memory_mb,
                stdin=program.stdin,
                number=next(self._numbers),
            )
        else:
            limits = isolation.limits(self._timeout_s, self._memory_mb, is_isolated=False)
            with memory_file(program.code) as code:
                ended = run_to_end(
                    [*limits, *_PYTHON, f"/proc/self/fd/{code.fileno()}"],
                    stdin=program.stdin,
                    environment=_ENVIRONMENT,
                    timeout_s=self._timeout_s,
                    descriptors=[code.fileno()],
                )
        if not ended.is_started:
            raise ServiceError(f"bwrap could not start a program: {last_line(ended.stderr)}")
        return Ran(ended.stdout, TIMEOUT if ended.is_late else _problem(ended.code, ended.stderr))


def why_not_isolated() -> str | None:
    """Return the reason why programs cannot be isolated on this machine, or None. Runs one to find out."""
    why = isolation.why_not_isolated([*_PYTHON, _MAIN], visible=_visible(), files={_MAIN: ""})
    return f"code is run in a sandbox to score it, and {why}: {_HINT}" if why else None


_BOOT = f"""
def boot():
    import builtins, sys
    builtins.exit = builtins.quit = sys.exit
    sys.path += {list(dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))))}
    del sys.modules["__main__"].boot
    return compile(open(sys.argv[1]).read(), sys.argv.pop(1), "exec")
exec(boot())
"""
"""Runs a file as `python FILE` would, with this Python's packages but without their start-up code (`site`, `.pth` files): that
takes longer than most programs."""
_PYTHON = [sys.executable, "-I", "-S", "-B", "-c", _BOOT]
_MAIN = "/main.py"


def _visible() -> list[str]:
    """Return the paths of the system and of this Python."""
    prefixes = [path for path in dict.fromkeys((sys.base_prefix, sys.prefix)) if not Path(path).is_relative_to("/usr")]
    return ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", *prefixes]


def _problem(code: int, stderr: str) -> str:
    """Describe an exit code. Signal n gives -n, or 128 + n from bubblewrap."""
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}: {last_line(stderr)}" if code else ""


# -- Sandbox Fusion ----------------------------------------------------------------------------------------------------

QUEUE_S = 10.0
"""Longest wait of a program in the service, beside the time that compiling and running may take."""


class _FusionResult(msgspec.Struct):
    status: str
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _FusionReply(msgspec.Struct):
    status: str
    message: str | None = None
    compile_result: _FusionResult | None = None
    run_result: _FusionResult | None = None


class FusionRunner:
    """Runs programs in many languages in a Sandbox Fusion service, `POST {url}/run_code`. Use it from one event loop.

    A reply about a program is final. Source: https://github.com/bytedance/SandboxFusion; verl's `sandbox_fusion/utils.py`.
    """

    def __init__(self, url: str, *, timeout_s: float, memory_mb: int) -> None:
        """
        Args:
            url: with or without `/run_code` at its end.
            timeout_s: of compiling and of running, each.
        """
        self._limits = {"compile_timeout": timeout_s, "run_timeout": timeout_s, "memory_limit_MB": memory_mb}
        self._service = Service(
            url.rstrip("/").removesuffix("/run_code") + "/run_code", deadline_s=math.ceil(2 * timeout_s + QUEUE_S)
        )
        self.close = self._service.close

    async def run(self, program: Program) -> Ran:
        body = {"code": program.code, "language": program.language, "stdin": program.stdin} | self._limits
        reply = await self._service.ask_for(_FusionReply, body, otherwise="the reply is not one of Sandbox Fusion")
        compiled, run = reply.compile_result, reply.run_result
        if reply.status not in ("Success", "Failed"):
            raise ServiceError(f"Sandbox Fusion replied {reply.status}: {(reply.message or '')[:200]}")
        if compiled is not None and (problem := _problem_of(compiled)):
            return Ran(problem=problem if problem == TIMEOUT else f"it does not compile: {problem}")
        if run is None:
            raise ServiceError(f"Sandbox Fusion replied {reply.status} and no run_result")
        return Ran(run.stdout or "", _problem_of(run) or ("" if reply.status == "Success" else "failed"))


def _problem_of(result: _FusionResult) -> str:
    if result.status == "TimeLimitExceeded":
        return TIMEOUT
    error = last_line(result.stderr or "")
    if result.status != "Finished":
        return f"{result.status}: {error}"
    return f"exit code {result.return_code}: {error}" if result.return_code else ""


# -- which code --------------------------------------------------------------------------------------------------------

_FENCE = re.compile(r"^([ \t]*)```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_NAMES = "python cpp nodejs go java php csharp bash typescript rust lua perl ruby scala julia swift racket"
_LANGUAGES = {name: name for name in _NAMES.split()} | {
    "py": "python", "python3": "python", "c++": "cpp", "cc": "cpp", "c#": "csharp", "cs": "csharp", "golang": "go",
    "javascript": "nodejs", "js": "nodejs", "ts": "typescript", "rs": "rust", "rb": "ruby", "sh": "bash",
}  # fmt: skip
"""Names in fences, and for them those of Sandbox Fusion."""


def code_of(completion_text: str) -> tuple[str, str]:
    """The code of a completion, and its language. A block that does not end reaches to the end of the text.

    A block that is indented, as in a list, has code that is.
    """
    blocks = [
        (re.sub(f"^{indent}", "", code, flags=re.MULTILINE), _LANGUAGES.get(tag.lower()))
        for indent, tag, code in _FENCE.findall(completion_text)
    ]
    if named := [(code, language) for code, language in blocks if language is not None]:
        return named[-1]
    return (blocks[-1][0] if blocks else completion_text), "python"


# -- which tests -------------------------------------------------------------------------------------------------------


class Test(NamedTuple):
    """One run of the code of a completion."""

    stdin: str
    program: Callable[[str], str]
    """Makes of the code what is run."""
    has_passed: Callable[[str], bool]
    """Takes the stdout of a run that ended well."""
    is_of_any_language: bool = False
    """False: the code must be Python."""


def prints(stdin: str, output: str) -> Test:
    """A program prints this output for this input; blanks at the ends of lines and empty last lines do not count."""
    return Test(stdin, lambda code: code, lambda stdout: _lines(stdout) == _lines(output), is_of_any_language=True)


def asserts(statements: str, stdin: str) -> Test:
    """Python statements raise nothing behind the code."""
    mark = secrets.token_hex(8)
    end = f"{statements}\n\nimport os as _os\n_os.write(1, b'\\n{mark}\\n')\n"
    return Test(stdin, lambda code: f"{code}\n\n{end}", lambda stdout: f"\n{mark}\n" in stdout)


_PRELUDE = """import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""Imports that code written for a judge of functions expects."""
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
"""Imports that stand before all others."""


def returns(function: str, arguments: list[Any], values: list[Any]) -> Test:
    """A Python function, or a method of `class Solution`, returns one of these values for these arguments."""
    mark = secrets.token_hex(8)
    plain = "lambda one: one.tolist() if hasattr(one, 'tolist') else list(one)"  # of numpy; a set
    end = (
        "import json as _json, os as _os\n"
        f"_call = globals().get({function!r}) or getattr(globals()['Solution'](), {function!r})\n"
        f"_value = _call(*_json.loads({json.dumps(arguments)!r}))\n"
        f"_os.write(1, ('\\n{mark}' + _json.dumps(_value, default={plain}) + '\\n').encode())\n"
    )

    def has_passed(stdout: str) -> bool:
        _, found, rest = stdout.rpartition(f"\n{mark}")
        try:
            return bool(found) and json.loads(rest.partition("\n")[0]) in values
        except (ValueError, RecursionError):  # a program printed it, as deep as it liked
            return False

    def program(code: str) -> str:
        return "".join([*_FUTURE.findall(code), _PRELUDE, "\n", _FUTURE.sub("", code), "\n\n", end])

    return Test("", program, has_passed)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


class _Given(msgspec.Struct):
    """The tests of a row as its file has them."""

    inputs: list[Any] = []
    outputs: list[Any] = []
    fn_name: str | None = None
    assert_case: str | list[str] | None = None


def read_tests(ground_truth: Any) -> list[Test]:
    """The tests of a row. docs/rewards.md has the forms.

    Raises:
        RewardError: it has none, or they cannot be read; the message names what is wrong.
    """
    value = _parsed(ground_truth)
    try:
        given = msgspec.convert({"assert_case": value} if isinstance(value, list) else value, _Given)
    except msgspec.ValidationError as error:
        raise RewardError(f"the ground truth of code is inputs and outputs, or assert statements: {error}") from None
    cases = [given.assert_case] if isinstance(given.assert_case, str) else given.assert_case
    expected = given.outputs if cases is None else cases
    inputs = given.inputs if cases is None else given.inputs or [""] * len(cases)
    if not expected or len(inputs) != len(expected):
        raise RewardError(f"the ground truth has {len(inputs)} inputs for {len(expected)} outputs or assert statements")
    if cases is not None:
        tests = [asserts(text, _joined(stdin)) for text, stdin in zip(cases, inputs, strict=True) if _may_fail(text)]
        if not tests:
            raise RewardError(f"the ground truth of code asserts and calls nothing: {cases[0][:80]!r}")
        return tests
    function = given.fn_name
    if not function:
        return [prints(_joined(stdin), _joined(wanted)) for stdin, wanted in zip(inputs, expected, strict=True)]
    if not function.isidentifier():
        raise RewardError(f"the ground truth's fn_name is not the name of a function: {function[:80]!r}")
    return [returns(function, _arguments(one), _values(wanted)) for one, wanted in zip(inputs, expected, strict=True)]


def _parsed(ground_truth: Any) -> Any:
    """Read the JSON of a text, or its assert statements."""
    if not isinstance(ground_truth, str):
        return ground_truth
    text = ground_truth.strip()
    if text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError as error:
            raise RewardError(f"the ground truth looks like JSON but does not parse: {error}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    return lines if all(line.startswith("assert ") for line in lines) else [text]


def _may_fail(statements: str) -> bool:
    """Return False for Python that asserts, calls and raises nothing when it runs, such as a plain answer."""
    try:
        with warnings.catch_warnings(action="ignore"):
            waiting = list[ast.AST](ast.parse(statements).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assert | ast.Call | ast.Raise):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return False


def _joined(value: Any) -> str:
    """An input or output: a text, or a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value)


def _arguments(given: Any) -> list[Any]:
    """Those of a call: a list, or in verl's form a text with each as JSON on a line of its own."""
    if isinstance(given, list | tuple):
        return list(given)
    try:
        return [json.loads(line) for line in str(given).splitlines() if line.strip()]
    except ValueError as error:
        raise RewardError(f"the ground truth has fn_name, and an input that is not JSON: {error}") from error


def _values(wanted: Any) -> list[Any]:
    """The values that are right: as it stands, as JSON, and, as in APPS and TACO, the only one of a list."""
    values = [wanted]
    if isinstance(wanted, str):
        with contextlib.suppress(ValueError):  # it is a text
            values.append(json.loads(wanted))
    return values + [value[0] for value in values if isinstance(value, list) and len(value) == 1]


# -- the score ---------------------------------------------------------------------------------------------------------


async def score_code(completion_text: str, ground_truth: Any, runner: Runner, config: RewardConfig) -> Score:
    """Run the tests of a row, one after the other, until one is late: those after it count as failed.

    The last test must have been started within `timeout_s` of the configuration.

    Raises:
        RewardError: the row's tests cannot be read.
    """
    tests = read_tests(ground_truth)
    code, language = code_of(completion_text)
    if len(code.encode(errors="replace")) > MAX_CODE:
        return _score(0, tests, f"the code is longer than {MAX_CODE >> 20} MiB", config)
    if language != "python" and not tests[0].is_of_any_language:
        return _score(0, tests, f"tests in Python cannot test {language}", config)
    started, passed, complaint = time.monotonic(), 0, ""
    for number, test in enumerate(tests, 1):
        if time.monotonic() - started > config.timeout_s:
            text = f"{number - 1} of {len(tests)} tests ended within reward.timeout_s, {config.timeout_s:g} s"
            return failed("timeout", text)
        try:
            ran = await runner(Program(test.program(code), language, test.stdin))
        except ServiceError as error:
            return error.score("sandbox")
        if not ran.problem and test.has_passed(ran.stdout):
            passed += 1
            continue
        complaint = complaint or f"test {number}: {ran.problem or 'wrong output'}"
        if ran.problem == TIMEOUT:
            break
    return _score(passed, tests, complaint, config)


def _score(passed: int, tests: Sequence[Test], complaint: str, config: RewardConfig) -> Score:
    share = passed / len(tests)
    return Score(
        value=share if config.code.score == "share" else float(passed == len(tests)),
        parts={"tests_passed": share},
        detail=complaint[:MAX_DETAIL],
    )


def load_code(config: dict[str, Any]) -> Scorer:
    """Load the scorer of a worker, which runs code on this machine. Raises RewardError if it may not.

    Args:
        config: a `RewardConfig` as plain values.
    """
    settings = msgspec.convert(config, RewardConfig)
    code = settings.code
    runner = LocalRunner(timeout_s=code.timeout_s, memory_mb=code.memory_mb, unsafe=code.unsafe)
    return lambda call: score_code(call.completion_text, call.prompt.answer, runner.run, settings)


# -- the reward --------------------------------------------------------------------------------------------------------


class CodeReward(Reward):
    """Scores code: in Sandbox Fusion where the configuration has its URL, else in worker processes on this machine."""

    def __init__(self, config: RewardConfig) -> None:
        self._config, code = config, config.code
        deadline_s = config.timeout_s + code.timeout_s + 1.0
        arguments = {"config": msgspec.to_builtins(config)}
        self._here = PoolReward(f"{__name__}:load_code", arguments, workers=config.num_workers, timeout_s=deadline_s)
        self._turn = asyncio.Semaphore(code.max_concurrent)
        self._service: FusionRunner | None = None
        if code.url is not None:
            self._service = FusionRunner(code.url, timeout_s=code.timeout_s, memory_mb=code.memory_mb)
        self.owns = [self._here] if self._service is None else [self._here, self._service]

    def check_sources(self, sources: set[str]) -> None:
        """Raise RewardError or ConfigError if code cannot be run. Blocks while bubblewrap runs a program to find out."""
        if self._config.code.url is not None:
            return check_service(self._config.code.url, "reward.code.url")
        if (why := why_not_isolated()) is None:
            return
        if not self._config.code.unsafe:
            raise RewardError(why)
        log.warning("reward.code.unsafe: code of the model runs as your user, with your files and your network")

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        if (service := self._service) is None:
            return await self._here.score(prompt, completions)

        async def score_there(completion: Sampled) -> Score:
            try:
                return await score_code(completion.text, prompt.answer, service.run, self._config)
            except Exception as error:  # of the row: what it holds instead of tests
                return failed("exception", describe(error))

        return await each_in_turn(self._turn, score_there, completions)
