"""All errors that a user can see, and the exit codes with which they end a process.

A message is one line: what is wrong with which value, the rule, the remedy. To add a class, give it the exit code that
says whether trying again can help, and keep it picklable: positional string arguments only.
"""

EXIT_OK = 0
EXIT_CRASH = 1
EXIT_USAGE = 64  # sysexits.h EX_USAGE: a retry cannot help
EXIT_REFUSED = 65  # a gate refused the model: a retry cannot help
EXIT_PREEMPTED = 75  # sysexits.h EX_TEMPFAIL: a retry continues the work


class CosmosError(Exception):
    """Base class of all errors that are shown to a user as one line."""

    exit_code = EXIT_CRASH


class ConfigError(CosmosError, ValueError):
    """Error for a configuration that is invalid or requires something impossible."""

    exit_code = EXIT_USAGE


class DataError(CosmosError, ValueError):
    """Error for a data file that is missing, malformed or without rows to train on."""

    exit_code = EXIT_USAGE


class MissingColumn(DataError):
    """Error for a row without any of the columns that can contain a required value, such as a prompt."""


class ModelError(CosmosError, ValueError):
    """Error for a model, tokenizer or checkpoint that cannot be loaded or is not of the declared kind."""

    exit_code = EXIT_USAGE


class RewardError(CosmosError, ValueError):
    """Error for a reward that does not exist or cannot be called."""

    exit_code = EXIT_USAGE


class Preempted(CosmosError):
    """Error for a process that was asked to stop and may have saved a checkpoint first; the run can be resumed."""

    exit_code = EXIT_PREEMPTED


class Cancelled(Preempted):
    """Error for a run that a person cancelled."""


class OverBudget(Preempted):
    """Error for a run whose GPUs have cost its whole budget; with a larger budget the run can continue."""


class StageFailed(CosmosError, RuntimeError):
    """Error for a stage that ended without a result although its configuration was accepted."""


class ProgramError(StageFailed):
    """Error for a stage whose program raised an error that is not transient; if a retry fails with the same error at
    the same step, there is no further retry."""


class GateFailed(StageFailed):
    """Error for a model whose metrics do not satisfy the conditions of a gate stage; a retry cannot help."""

    exit_code = EXIT_REFUSED


class DiskFull(StageFailed):
    """Error for a disk that is full or read-only; finished stages remain valid."""


class UploadError(CosmosError, RuntimeError):
    """Error for a publication target or store that refused, lost or altered the files that were sent."""


class DamagedRecord(UploadError):
    """Error for a record of published versions that cannot be read; the next publication writes a new record."""


ERRORS_BY_NAME: dict[str, type[CosmosError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError, DataError, ModelError, RewardError, Preempted, Cancelled, OverBudget, StageFailed, ProgramError,
        GateFailed, DiskFull, UploadError, DamagedRecord,
    )
}  # fmt: skip
"""Error classes by name, with which the launcher recreates the error that a worker has written to a file."""


def serialise_error(error: Exception) -> tuple[str, str]:
    """Return an error as plain data: the name of its nearest class in `ERRORS_BY_NAME`, and its message.

    An exception that is no CosmosError is returned as `StageFailed`, with the name of its class in the message.
    """
    if isinstance(error, CosmosError):
        return next(cls.__name__ for cls in type(error).mro() if cls.__name__ in ERRORS_BY_NAME), str(error)
    return StageFailed.__name__, f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
