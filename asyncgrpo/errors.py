"""What can go wrong at the doors, as one small hierarchy. Every message names the file, the key and the value.

`AsyncGRPOError` and its children mean that someone outside got it wrong, and the command line prints their message as
one sentence and exits with 1. A broken promise inside the project is an `assert`. All of them pickle, because Ray
carries them between processes.
"""


class AsyncGRPOError(Exception):
    """Base of every error that a user can mend."""


class ConfigError(AsyncGRPOError):
    """A configuration file, a `key=value` or a flag cannot be used as it is."""


class DataError(AsyncGRPOError):
    """A data file cannot be read, or its rows fit no known schema."""


class RewardError(AsyncGRPOError):
    """A reward function cannot be loaded. (A call that fails is data: see `types.Score.failure`.)"""


class WireError(AsyncGRPOError):
    """A message cannot be decoded, or a peer did not answer in time."""


class RefusedError(WireError):
    """A message that is not read, or not believed. `reason` is one of the few by which refusals are counted."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


class WeightsError(AsyncGRPOError):
    """A weight version did not arrive whole on every generator."""


class GeneratorsGone(WeightsError):
    """Nobody is left to send weights to. Others may come."""


class EngineError(AsyncGRPOError):
    """An inference engine cannot start or refused a call."""


class RequestError(EngineError):
    """One request cannot be answered, or failed by itself. The engine goes on with the others."""


class CheckpointError(AsyncGRPOError):
    """A checkpoint cannot be written or read."""


class JournalError(AsyncGRPOError):
    """The journal of groups cannot be read, or does not agree with the rest of the run."""


class StalledError(AsyncGRPOError):
    """Something awaited did not come before its deadline. The message names what was awaited and for how long."""


class ProcessLost(AsyncGRPOError):
    """A process of the run ended, or was ended, and another may take its place."""

    is_error = False
    """It was not killed: it raised what is the cause of this."""


class TrainingError(AsyncGRPOError):
    """Training cannot go on: too many updates in a row were not worth making."""
