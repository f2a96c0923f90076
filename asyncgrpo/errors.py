"""The errors of asyncgrpo, as one small hierarchy. Every message names the file, the key and the value.

An `AsyncGRPOError` has its cause outside the code; the command line prints its message as one sentence and exits with 1.
A broken invariant inside the code is an `assert`. All errors can be pickled, because Ray sends them between processes.
"""


class AsyncGRPOError(Exception):
    """Base of every error that a user can fix."""


class ConfigError(AsyncGRPOError):
    """A configuration file, a `key=value` or a flag is invalid."""


class DataError(AsyncGRPOError):
    """A data file cannot be read, or its rows match no known schema."""


class RewardError(AsyncGRPOError):
    """A reward function cannot be loaded. (A call that fails is data: see `types.Score.failure`.)"""


class WireError(AsyncGRPOError):
    """A message cannot be decoded, or a peer did not reply in time."""


class RefusedError(WireError):
    """A message was refused. `reason` is the label under which refusals are counted."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


class WeightsError(AsyncGRPOError):
    """A policy version did not arrive completely on every generator."""


class EngineError(AsyncGRPOError):
    """An inference engine cannot start, or refused a call."""


class RequestError(EngineError):
    """One request was refused or failed. The engine continues with the others."""


class CheckpointError(AsyncGRPOError):
    """A checkpoint cannot be written or read."""


class JournalError(AsyncGRPOError):
    """The journal of groups cannot be read, or contradicts the rest of the run."""


class StalledError(AsyncGRPOError):
    """A wait reached its deadline. The message names what was awaited and for how long."""


class ProcessLost(AsyncGRPOError):
    """A process of the run ended or was killed, and may be replaced."""

    is_error = False
    """True if the process raised the cause of this error, False if it was killed."""


class TrainingError(AsyncGRPOError):
    """Training cannot go on: too many updates in a row were skipped."""


class CommandRefused(AsyncGRPOError):
    """A running run cannot carry out a command."""


class RunNotAlive(AsyncGRPOError):
    """The driver of the run does not reply to a request or command."""
