"""Runs a program of the model and reports how it ended: with bubblewrap here, or in a Sandbox Fusion service.

`isolation.py` describes what a program in bubblewrap can reach. The kernel kills programs first when memory runs out
(`guests.Host`).
"""

import itertools
import math
import signal
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from asyncgrpo import isolation
from asyncgrpo.errors import RewardError
from asyncgrpo.isolation import Ended, last_line, memory_file, run_isolated, run_to_end
from asyncgrpo.rewards.http import Service, ServiceError

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


class RunnerError(RewardError):
    """The runner failed, and not the program."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        """Of the `Score`."""


class Runner(Protocol):
    """Runs programs."""

    async def run(self, program: Program) -> Ran:
        """Run a program to its end or to its deadline. Raises RunnerError."""


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
        """Run a program. See `Runner`."""
        if program.language != "python":
            return Ran(problem=f"{program.language} runs only in Sandbox Fusion (reward.code.url)")
        ended = self._run_to_end(program)
        if not ended.is_started:
            raise RunnerError("sandbox", f"bwrap could not start a program: {last_line(ended.stderr)}")
        return Ran(ended.stdout, TIMEOUT if ended.is_late else _problem(ended.code, ended.stderr))

    def _run_to_end(self, program: Program) -> Ended:
        if self._is_isolated:
            return run_isolated(
                [*_PYTHON, _MAIN],
                visible=_visible(),
                files={_MAIN: program.code},
                environment=_ENVIRONMENT,
                timeout_s=self._timeout_s,
                memory_mb=self._memory_mb,
                stdin=program.stdin,
                number=next(self._numbers),
            )
        limits = isolation.limits(self._timeout_s, self._memory_mb, is_isolated=False)
        with memory_file(program.code) as code:
            return run_to_end(
                [*limits, *_PYTHON, f"/proc/self/fd/{code.fileno()}"],
                stdin=program.stdin,
                environment=_ENVIRONMENT,
                timeout_s=self._timeout_s,
                descriptors=[code.fileno()],
            )


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
            url.rstrip("/").removesuffix("/run_code") + "/run_code",
            deadline_s=math.ceil(2 * timeout_s + QUEUE_S),
        )

    async def run(self, program: Program) -> Ran:
        """Run a program. See `Runner`."""
        body = {"code": program.code, "language": program.language, "stdin": program.stdin} | self._limits
        try:
            return _ran(await self._service.post(msgspec.json.encode(body)))
        except ServiceError as error:
            raise RunnerError("timeout" if error.is_late else "sandbox", str(error)) from error

    async def close(self) -> None:
        """Close the connections; requests that run fail."""
        await self._service.close()


def _ran(body: bytes) -> Ran:
    try:
        reply = msgspec.json.decode(body, type=_FusionReply)
    except msgspec.MsgspecError as error:
        raise RunnerError("sandbox", f"the reply is not one of Sandbox Fusion: {error}") from error
    compiled, run = reply.compile_result, reply.run_result
    if reply.status not in ("Success", "Failed"):
        raise RunnerError("sandbox", f"Sandbox Fusion replied {reply.status}: {(reply.message or '')[:200]}")
    if compiled is not None and (problem := _problem_of(compiled)):
        return Ran(problem=problem if problem == TIMEOUT else f"it does not compile: {problem}")
    if run is None:
        raise RunnerError("sandbox", f"Sandbox Fusion replied {reply.status} and no run_result")
    return Ran(run.stdout or "", _problem_of(run) or ("" if reply.status == "Success" else "failed"))


def _problem_of(result: _FusionResult) -> str:
    if result.status == "TimeLimitExceeded":
        return TIMEOUT
    error = last_line(result.stderr or "")
    if result.status != "Finished":
        return f"{result.status}: {error}"
    return f"exit code {result.return_code}: {error}" if result.return_code else ""
