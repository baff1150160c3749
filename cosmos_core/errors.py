"""Every error that a user can meet, and the exit code that it ends a process with.

    CosmosError
    ├── ConfigError      the TOML, the command line or a graph of stages is wrong   exit 64
    ├── DataError        a data file or a row in it is wrong                         exit 64
    ├── ModelError       a model folder, tokenizer or checkpoint is wrong            exit 64
    ├── RewardError      a reward function does not exist or cannot be used          exit 64
    ├── Preempted        asked to stop; a checkpoint was saved                       exit 75
    │   └── Cancelled    by a person, so nothing starts it again but one             exit 75
    ├── StageFailed      a worker ended otherwise, or the machine failed it          exit 1
    │   ├── ProgramError  its program raised an error that may not pass by itself     exit 1
    │   ├── GateFailed   a condition of a gate does not hold                          exit 65
    │   └── DiskFull     there is no room to write                                    exit 1
    └── UploadError      a target refused or lost what was sent                      exit 1
        └── DamagedRecord  what says which version is published cannot be read      exit 1

A message is one line: what is wrong with which value, the rule, the remedy. To add a class, give it the
exit code that says whether trying again can help, and keep it picklable: positional string arguments only.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_CRASH = 1
EXIT_USAGE = 64  # sysexits.h EX_USAGE: nobody should retry this
EXIT_REFUSED = 65  # nothing is wrong, the model is not good enough: nobody should retry this either
EXIT_PREEMPTED = 75  # sysexits.h EX_TEMPFAIL: run it again and it continues


class CosmosError(Exception):
    """Base of all errors that are shown to a user as one line."""

    exit_code = EXIT_CRASH


class ConfigError(CosmosError, ValueError):
    """The configuration cannot mean anything, or means something impossible."""

    exit_code = EXIT_USAGE


class DataError(CosmosError, ValueError):
    """A data file is missing, malformed or holds nothing that can be trained on."""

    exit_code = EXIT_USAGE


class ModelError(CosmosError, ValueError):
    """A model, tokenizer or checkpoint cannot be loaded or is not what it says."""

    exit_code = EXIT_USAGE


class RewardError(CosmosError, ValueError):
    """A reward does not exist or cannot be called."""

    exit_code = EXIT_USAGE


class Preempted(CosmosError):
    """The work was asked to stop and saved a checkpoint first."""

    exit_code = EXIT_PREEMPTED


class Cancelled(Preempted):
    """A person cancelled it."""


class StageFailed(CosmosError, RuntimeError):
    """A stage ended without a result although its configuration was accepted."""


class ProgramError(StageFailed):
    """The program of a stage raised an error that is not of machine or network: the same one at the same step again
    would come a third time."""


class GateFailed(StageFailed):
    """The model is not good enough; trying again cannot help."""

    exit_code = EXIT_REFUSED


class DiskFull(StageFailed):
    """A disk is full or read-only; what is finished stays finished."""


class UploadError(CosmosError, RuntimeError):
    """An upload target refused, lost or altered what was sent."""


class DamagedRecord(UploadError):
    """What a target says of its versions cannot be read; publishing again writes it anew."""


BY_NAME: dict[str, type[CosmosError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        DataError,
        ModelError,
        RewardError,
        Preempted,
        Cancelled,
        StageFailed,
        ProgramError,
        GateFailed,
        DiskFull,
        UploadError,
        DamagedRecord,
    )
}
"""How a worker's error, written to a file by name, becomes the same error in the launcher."""


def by_name(error: Exception) -> tuple[str, str]:
    """Return an error as plain data, for another process: its nearest class of `BY_NAME`, and its message.

    An error that is none of ours is a `StageFailed` there, whose message says what it was.
    """
    if isinstance(error, CosmosError):
        return next(cls.__name__ for cls in type(error).mro() if cls.__name__ in BY_NAME), str(error)
    return StageFailed.__name__, f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
