"""Rows of a file in each format that is read: JSON Lines, JSON, CSV, parquet and Arrow.

JSON and CSV are parsed here so that a row's location is a line, and one row at a time, so that a file needs no more
memory than the location of its rows; what is columnar on disk stays so. Which files are read is `rows.py`.
"""

from __future__ import annotations

import csv
import json
import os
import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import pyarrow as pa
import pyarrow.parquet

from cosmos_core.data.messages import Row
from cosmos_core.errors import DataError

_BLOCK = 1 << 20  # characters
_BATCH_ROWS = 1024
_BLANKS = re.compile(r"[ \t\n\r]*")


class Values(Protocol):
    """Rows by number; asking for them in order is cheapest."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


@dataclass(frozen=True)
class Part:
    """Rows of one file or one split."""

    values: Values
    name: str
    lines: Sequence[int] | None = None
    """Line of each row, for formats that have lines."""

    def location(self, index: int) -> str:
        """Return what an error about row `index` says."""
        return f"{self.name} row {index}" if self.lines is None else f"{self.name}:{self.lines[index]}"


class _TextRows:
    """Rows of a text file that are parsed when they are asked for; held is only where each of them stands."""

    def __init__(self, path: Path, parse: Callable[[str, int], Row]) -> None:
        """`parse` makes a row of its text and the number of its line."""
        self.lines = array("q")
        self._bounds = array("q")  # first and last byte of each row, one behind the other
        self._parse = parse
        self._file = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def add(self, start: int, end: int, line: int) -> None:
        """Note a row behind those so far."""
        self._bounds.extend((start, end))
        self.lines.append(line)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Row:
        start, end = self._bounds[2 * index : 2 * index + 2]
        return self._parse(os.pread(self._file, end - start, start).decode(), self.lines[index])


@contextmanager
def _opened(path: Path, newline: str) -> Iterator[tuple[TextIO, int]]:
    """Open a text file behind its byte order marks, and say how many bytes these are.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    with ExitStack() as stack:
        with refused(f"{path.name} cannot be read"):
            file = stack.enter_context(open(path, "rb"))
            marks = 0  # some programs write one each time that they save
            while file.read(len(BOM_UTF8)) == BOM_UTF8:
                marks += len(BOM_UTF8)
            file.seek(marks)
        try:
            yield TextIOWrapper(file, encoding="utf-8", newline=newline), marks
        except UnicodeDecodeError:
            content = path.read_bytes()
            try:
                content.decode()
            except UnicodeDecodeError as error:
                line = content.count(b"\n", 0, error.start) + 1
                raise DataError(
                    f"{path.name}:{line}: byte {error.start} is not UTF-8; save the file as UTF-8"
                ) from None
            raise


def _json_lines(path: Path) -> Part:
    rows = _TextRows(path, lambda text, line: _object(text, f"{path.name}:{line}"))
    with _opened(path, "\n") as (file, position):
        for number, text in enumerate(file, start=1):
            end = position + len(text.encode())
            if text.strip():
                _object(text, f"{path.name}:{number}")  # a damaged file is told before any work is done
                rows.add(position, end, number)
            position = end
    return Part(rows, path.name, rows.lines)


def _object(text: str, where: str) -> Row:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: malformed JSON, {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: malformed JSON, {first_line(error)}") from None
    if not isinstance(value, dict):
        raise DataError(f'{where}: a line must be a JSON object such as {{"prompt": "..."}}, not {text.strip()[:40]!r}')
    return value


def _json(path: Path) -> Part:
    """Read a file that holds one array of objects; anything else as JSON Lines."""
    with _opened(path, "\n") as (file, position):
        beginning = file.read(_BLOCK)
        if not beginning.lstrip().startswith("["):
            return _json_lines(path)
        rows = _TextRows(path, lambda text, line: json.loads(text))
        try:
            for start, end, value in _elements(file, beginning, position):
                if not isinstance(value, dict):
                    raise DataError(
                        f"{path.name} row {len(rows)}: a row must be a JSON object, not {str(value)[:40]!r}"
                    )
                rows.add(start, end, 0)
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError | UnicodeDecodeError):
                raise
            _check_array(path)
    return Part(rows, path.name)


def _elements(file: TextIO, text: str, position: int) -> Iterator[tuple[int, int, Any]]:
    """Yield the first and last byte and the value of each element of a JSON array.

    The text is read block by block: no more of it is held than a block and an element.

    Args:
        file: behind `text`.
        text: how the array begins.
        position: bytes of the file before `text`.

    Raises:
        ValueError: it is no array, or ends too early.
    """
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    position += len(text[:at].encode())
    is_open, size = True, _BLOCK
    while is_open:
        try:
            start = _blanks(text, at)
            value, end = decoder.raw_decode(text, start)
            behind = _blanks(text, end)
            separator = text[behind]
        except (ValueError, IndexError):
            more = file.read(size)
            if not more:
                raise ValueError("the array does not end") from None
            text, at, size = text[at:] + more, 0, 2 * size
            continue
        if separator not in ",]":
            raise ValueError(f"{separator!r} between two elements")
        first = position + len(text[at:start].encode())
        last = first + len(text[start:end].encode())
        yield first, last, value
        position, at = last + len(text[end : behind + 1].encode()), behind + 1
        is_open, size = separator == ",", _BLOCK
    if text[at:].strip() or file.read().strip():
        raise ValueError("text behind the array")


def _blanks(text: str, at: int) -> int:
    """Return where the blanks of JSON that begin here end."""
    match = _BLANKS.match(text, at)
    assert match
    return match.end()


def _check_array(path: Path) -> None:
    """Say as `json` does what is wrong with an array; an empty one is right.

    Raises:
        DataError: it is malformed.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path.name}:{error.lineno}: malformed JSON, {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path.name}: malformed JSON, {first_line(error)}") from None
    if found:
        raise DataError(f"{path.name}: the array cannot be read; save it as JSON Lines")


def _csv(path: Path) -> Part:
    """Read CSV with a header; every value stays a string, so that the text `007` is not 7."""
    csv.field_size_limit(2**31 - 1)  # by default 128 KiB, which a conversation may exceed
    with _opened(path, "") as (file, position):

        def lines() -> Iterator[str]:
            nonlocal position
            for text in file:
                position += len(text.encode())
                yield text

        reader = csv.reader(lines(), strict=True)
        header: list[str] = []
        rows = _TextRows(path, lambda text, line: dict(zip(header, next(csv.reader([text])), strict=True)))
        start = position
        try:
            for fields in reader:
                if fields and not header:
                    header += fields
                elif fields and len(fields) != len(header):
                    raise DataError(
                        f"{path.name}:{reader.line_num}: the line does not have the {len(header)} fields of the "
                        "header; quote fields that contain commas"
                    )
                elif fields:
                    rows.add(start, position, reader.line_num)
                start = position
        except csv.Error as error:
            raise DataError(f"{path.name}:{reader.line_num}: malformed CSV, {error}") from None
    return Part(rows, path.name, rows.lines)


class _ParquetRows:
    """Rows of a parquet file, of which one batch at a time is in memory; read them in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = pa.parquet.ParquetFile(path)
        self._open()

    def _open(self) -> None:
        self._batches = self._file.iter_batches(_BATCH_ROWS)
        self._rows: Values = ()
        self._start = self._end = 0
        self._advance()

    def _advance(self) -> None:
        with refused(f"{self._path.name} is not a readable parquet file"):
            batch = next(self._batches, None)
            if batch is None:
                return
            batch.validate(full=True)
            self._rows = _columns(pa.Table.from_batches([batch]))
        self._start, self._end = self._end, self._end + len(self._rows)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __getitem__(self, index: int) -> Row:
        if index < self._start:
            self._open()
        while index >= self._end:
            self._advance()
        return self._rows[index - self._start]


def _parquet(path: Path) -> Part:
    with refused(f"{path.name} is not a readable parquet file"):
        return Part(_ParquetRows(path), path.name)


def _arrow(path: Path) -> Part:
    """An Arrow file, or the Arrow stream that `datasets` writes."""
    with refused(f"{path.name} is not a readable Arrow file"):
        source = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            table = pa.ipc.open_stream(source).read_all()
        table.validate(full=True)
        return Part(_columns(table), path.name)


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Return one line for whatever a reader raises over a file that anybody may have written."""
    try:
        yield
    except (MemoryError, DataError):
        raise  # not the file's doing, or told already
    except Exception as error:
        raise DataError(f"{what}: {first_line(error)}") from error


def _columns(table: pa.Table) -> Values:
    import datasets  # seconds to import, and JSON Lines do without

    return undecoded(datasets.Dataset(table))


class _Undecoded:
    """Rows with images as they are stored, path and bytes: not every row that is looked at needs its pixels."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        found: list[Row] = self._dataset[index].to_pylist()
        return found[0]


def undecoded(dataset: Any) -> Values:
    """Return the rows of a data set without decoding their images."""
    has_images = "Image(" in str(dataset.features)
    return _Undecoded(dataset) if has_images else cast(Values, dataset)


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


READERS: dict[str, Callable[[Path], Part]] = {
    ".jsonl": _json_lines, ".json": _json, ".parquet": _parquet, ".arrow": _arrow, ".csv": _csv,
}  # fmt: skip
