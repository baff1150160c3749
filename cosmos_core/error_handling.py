"""Handling of exceptions of any class, which users' code, parsers of damaged files and callbacks can raise."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from cosmos_core.errors import CosmosError


@contextmanager
def convert_errors(
    convert_error: Callable[[Exception], Exception],
    exempt_types: type[Exception] | tuple[type[Exception], ...] = CosmosError,
) -> Iterator[None]:
    """Convert an exception of the `with` block: raise the exception that `convert_error` returns for it. Exceptions of
    the classes `exempt_types`, and those that `convert_error` returns unchanged, are raised again."""
    try:
        yield
    except exempt_types:
        raise
    except Exception as error:
        if (converted_error := convert_error(error)) is error:
            raise
        raise converted_error from error


@contextmanager
def cleanup_on_error(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` if the `with` block raises an exception of any class, then raise the exception again."""
    try:
        yield
    except BaseException:
        clean_up()
        raise


@contextmanager
def log_errors(log_error: Callable[[Exception], object]) -> Iterator[None]:
    """Pass an exception of the `with` block to `log_error` instead of raising it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the block must not fail its caller
        log_error(error)


def complete_future(future: Future[Any], compute_result: Callable[[], Any]) -> None:
    """Store the result of `compute_result`, or the exception that it raises, in a future."""
    try:
        future.set_result(compute_result())
    except BaseException as error:  # noqa: BLE001 - raised again by `future.result()`
        future.set_exception(error)
