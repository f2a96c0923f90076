"""Sandbox Fusion: a service that runs programs in many languages, `POST {url}/run_code`.

See https://github.com/bytedance/SandboxFusion; verl's `sandbox_fusion/utils.py` speaks the same. A reply about a program is
final.
"""

import math

import msgspec

from asyncgrpo.isolation import MAX_OUTPUT
from asyncgrpo.rewards.http import Service, ServiceError
from asyncgrpo.rewards.sandbox import TIMEOUT, Program, Ran, RunnerError

TRIES = 3
"""Requests for one run of a program."""
QUEUE_S = 10.0
"""How long a program may wait in the service, beside the time that compiling and running may take."""


class _Result(msgspec.Struct):
    status: str
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Reply(msgspec.Struct):
    status: str
    message: str | None = None
    compile_result: _Result | None = None
    run_result: _Result | None = None


class FusionRunner:
    """Runs programs in the service at `url`. Use it from one event loop."""

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
            tries=TRIES,
            max_reply=4 * MAX_OUTPUT,
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
        reply = msgspec.json.decode(body, type=_Reply)
    except msgspec.MsgspecError as error:
        raise RunnerError("sandbox", f"what came is no reply of Sandbox Fusion: {error}") from error
    compiled, run = reply.compile_result, reply.run_result
    if reply.status not in ("Success", "Failed"):
        raise RunnerError("sandbox", f"Sandbox Fusion says {reply.status}: {(reply.message or '')[:200]}")
    if compiled is not None and (problem := _problem(compiled)):
        return Ran(problem=problem if problem == TIMEOUT else f"it does not compile: {problem}")
    if run is None:
        raise RunnerError("sandbox", f"Sandbox Fusion says {reply.status} and no run_result")
    return Ran(run.stdout or "", _problem(run) or ("" if reply.status == "Success" else "failed"))


def _problem(result: _Result) -> str:
    if result.status == "TimeLimitExceeded":
        return TIMEOUT
    last_line = ((result.stderr or "").strip().splitlines() or [""])[-1][:200]
    if result.status != "Finished":
        return f"{result.status}: {last_line}"
    return f"exit code {result.return_code}: {last_line}" if result.return_code else ""
