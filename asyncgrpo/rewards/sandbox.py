"""Runs a program that nobody has read, and says how it ended: in bubblewrap here (`isolation.py`), or elsewhere (`fusion.py`).

The kernel kills programs first when memory runs out (`worker._be_expendable`).
"""

import itertools
import signal
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple, Protocol

from asyncgrpo import isolation
from asyncgrpo.errors import RewardError
from asyncgrpo.isolation import Ended, last_line, memory_file, run_isolated, run_to_end

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
    """How a program ended."""

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
    """Why programs cannot be isolated on this machine, in one sentence; None: they can be. Runs one to find out."""
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
    """The system and this Python."""
    prefixes = [path for path in dict.fromkeys((sys.base_prefix, sys.prefix)) if not Path(path).is_relative_to("/usr")]
    return ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", *prefixes]


def _problem(code: int, stderr: str) -> str:
    """What is said of an exit code. Of a program killed by signal n it is -n, or 128 + n from bubblewrap."""
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}: {last_line(stderr)}" if code else ""
