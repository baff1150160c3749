"""All errors that a user can see, and the exit codes with which they end a process.

    CosmosError
    ├── ConfigError      the TOML, the command line or a graph of stages is wrong   exit 64
    ├── DataError        a data file or a row in it is wrong                         exit 64
    ├── ModelError       a model folder, tokenizer or checkpoint is wrong            exit 64
    ├── RewardError      a reward function does not exist or cannot be used          exit 64
    ├── Preempted        asked to stop; a checkpoint was saved                       exit 75
    │   ├── Cancelled    stopped by a person, so not restarted automatically         exit 75
    │   └── OverBudget   the budget of the run is spent                              exit 75
    ├── StageFailed      a worker ended otherwise, or the machine failed it          exit 1
    │   ├── ProgramError  its program raised an error that is not transient           exit 1
    │   ├── GateFailed   a condition of a gate does not hold                          exit 65
    │   └── DiskFull     there is no room to write                                    exit 1
    └── UploadError      a target refused or lost what was sent                      exit 1
        └── DamagedRecord  the record of published versions cannot be read          exit 1

A message is one line: what is wrong with which value, the rule, the remedy. To add a class, give it the exit code that
says whether trying again can help, and keep it picklable: positional string arguments only.
"""

EXIT_OK = 0
EXIT_CRASH = 1
EXIT_USAGE = 64  # sysexits.h EX_USAGE: a retry cannot help
EXIT_REFUSED = 65  # no error, but the model is not good enough: a retry cannot help either
EXIT_PREEMPTED = 75  # sysexits.h EX_TEMPFAIL: a retry continues the work


class CosmosError(Exception):
    """Base class of all errors that are shown to a user as one line."""

    exit_code = EXIT_CRASH


class ConfigError(CosmosError, ValueError):
    """Error for a configuration that has no valid meaning or requires something impossible."""

    exit_code = EXIT_USAGE


class DataError(CosmosError, ValueError):
    """A data file is missing, malformed or contains no rows to train on."""

    exit_code = EXIT_USAGE


class ModelError(CosmosError, ValueError):
    """A model, tokenizer or checkpoint cannot be loaded, or is not of the declared kind."""

    exit_code = EXIT_USAGE


class RewardError(CosmosError, ValueError):
    """A reward does not exist or cannot be called."""

    exit_code = EXIT_USAGE


class Preempted(CosmosError):
    """Error for a process that was requested to stop and saved a checkpoint first."""

    exit_code = EXIT_PREEMPTED


class Cancelled(Preempted):
    """A person cancelled the run."""


class OverBudget(Preempted):
    """The GPUs that a run has held cost its budget; with a larger budget the run continues."""


class StageFailed(CosmosError, RuntimeError):
    """A stage ended without a result although its configuration was accepted."""


class ProgramError(StageFailed):
    """The program of a stage raised an error that neither the machine nor the network causes; if a retry fails with the
    same error at the same step, there is no further retry."""


class GateFailed(StageFailed):
    """The model does not pass a gate; a retry cannot help."""

    exit_code = EXIT_REFUSED


class DiskFull(StageFailed):
    """A disk is full or read-only; finished stages remain valid."""


class UploadError(CosmosError, RuntimeError):
    """An upload target refused, lost or altered the files that were sent."""


class DamagedRecord(UploadError):
    """The record of versions at a target cannot be read; the next publication writes a new record."""


BY_NAME: dict[str, type[CosmosError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        DataError,
        ModelError,
        RewardError,
        Preempted,
        Cancelled,
        OverBudget,
        StageFailed,
        ProgramError,
        GateFailed,
        DiskFull,
        UploadError,
        DamagedRecord,
    )
}
"""Error classes by name, with which the launcher recreates the error that a worker has written to a file."""


def by_name(error: Exception) -> tuple[str, str]:
    """Return an error as plain data, for another process: the name of its nearest class in `BY_NAME`, and its message.

    Any other exception becomes a `StageFailed` there, with the name of the exception in its message.
    """
    if isinstance(error, CosmosError):
        return next(cls.__name__ for cls in type(error).mro() if cls.__name__ in BY_NAME), str(error)
    return StageFailed.__name__, f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
