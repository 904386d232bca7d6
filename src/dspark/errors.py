"""Errors a user can act on: one line that names what is wrong and the remedy, shown without a traceback."""


class DsparkError(Exception):
    """Base of every error that dspark raises for a user.

    `str()` is always one line: line breaks and runs of blanks inside the message become single blanks.
    The command line prints it and leaves with `exit_code`.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(DsparkError):
    """A setting is unknown, missing or outside its range."""


class CheckpointError(DsparkError):
    """A model or drafter file is missing, damaged, of an unsupported kind, or made for another target."""


class DataError(DsparkError):
    """A data file cannot be read, or one of its lines is malformed."""


class CacheError(DsparkError):
    """A target cache is missing, damaged, or was built from other inputs."""


class OverloadError(DsparkError):
    """As many requests wait for a place as may (`max_waiting`): the same request may be served later."""


class RequestError(DsparkError):
    """A generation request cannot be served: an empty prompt, one too long, or parameters out of range."""
