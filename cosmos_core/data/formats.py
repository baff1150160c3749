"""Readers of file formats: JSON Lines, JSON, CSV and TSV, compressed or not, parquet and Arrow.

JSON and CSV are parsed here, so that the location of a row has its line number. Only one block of a file is in memory
at a time; Arrow files are memory-mapped. `rows.py` chooses the files.
"""

import bz2
import csv
import gzip
import json
import lzma
import re
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from itertools import chain, count, islice, repeat
from json.decoder import WHITESPACE  # type: ignore[attr-defined]  # typeshed leaves it out
from pathlib import Path
from typing import Any, TextIO, cast

import pyarrow as pa
import pyarrow.parquet

from cosmos_core.config.schema.dataset import data_suffix
from cosmos_core.data.messages import Row
from cosmos_core.data.tool_calls import remove_nulls
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import DataError, first_line
from cosmos_core.transient import is_machine_error

_CHARACTERS_PER_READ = 1 << 20  # number of characters per read from a file
_ROWS_PER_BATCH = 1024
_JSON_DECODER = json.JSONDecoder(parse_constant=lambda name: None if name == "NaN" else float(name))
"""Decoder that reads NaN as null, because Python writes missing values of pandas as NaN."""
_MEDIA_FEATURE_REGEX = re.compile(r"\b(Audio|Image|Mesh|Nifti|Pdf|Video)\(")
"""Pattern of the types of columns that `datasets` decodes on access."""
_CSV_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_TOOL_COLUMNS_AND_KEYS = {"tools", "functions", "tool_calls", "function_call"}
_FILE_OPENER_BY_SUFFIX: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

LocatedRow = tuple[str, Row]
"""Location and row of a data set. The location names a row in messages: `train.jsonl:12` in formats with lines,
otherwise `train.parquet row 11`."""


@dataclass(frozen=True)
class RowReader:
    """Reader of the rows of one file or one split; each call of `read` iterates from the beginning."""

    name: str
    num_rows: int
    read: Callable[[], Iterator[LocatedRow]]

    def select(self, start: int, end: int) -> "RowReader":
        """Return a reader of the rows from number `start` up to number `end`, which is excluded."""
        return RowReader(self.name, end - start, lambda: islice(self.read(), start, end))


@contextmanager
def _open_text(path: Path, newline_mode: str) -> Iterator[TextIO]:
    """Open a text file and skip its byte order marks; raise DataError if it cannot be read, or is not UTF-8."""
    with ExitStack() as exit_stack:
        with convert_reader_errors(f"{path.name} cannot be read"):
            text_file = exit_stack.enter_context(_FILE_OPENER_BY_SUFFIX.get(path.suffix.lower(), open)(path, "rb"))
            # Let bz2 and lzma report damage after the first compressed stream, which they ignore by default.
            if isinstance(text_file, bz2.BZ2File | lzma.LZMAFile):
                cast(Any, text_file)._buffer.raw._trailing_error = ()
            num_bom_bytes = 0  # bytes to skip; some programs add a byte order mark with each save
            while text_file.read(len(BOM_UTF8)) == BOM_UTF8:
                num_bom_bytes += len(BOM_UTF8)
            text_file.seek(num_bom_bytes)
        try:
            yield TextIOWrapper(text_file, encoding="utf-8", newline=newline_mode)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if is_machine_error(error):  # raise disk errors unchanged; bz2 raises OSError also for damaged data
                raise
            raise DataError(f"{path.name} is damaged: {first_line(error)}; compress it again") from error
        except UnicodeDecodeError:
            text_file.seek(0)
            file_bytes = text_file.read()
            try:
                file_bytes.decode()
            except UnicodeDecodeError as error:
                line_number = file_bytes.count(b"\n", 0, error.start) + 1
                problem = f"{path.name}:{line_number}: byte {error.start} is not UTF-8; save the file as UTF-8"
                likely_encoding = "utf-16" if file_bytes.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "cp1252"
                raise DataError(f"{problem}, for example with iconv -f {likely_encoding} -t utf-8 OLD > NEW") from None
            raise


def _read_json_lines(path: Path) -> Iterator[LocatedRow]:
    with _open_text(path, "\n") as file:
        for line_number, line in enumerate(file, start=1):
            if line.strip():
                location = f"{path.name}:{line_number}"
                yield location, _parse_object(line, location)


def _parse_object(json_text: str, location: str) -> Row:
    try:
        # Reuse one decoder, which is fast; only `json.loads` reports a byte order mark in its error message.
        json_value = json.loads(json_text) if json_text.startswith("\ufeff") else _JSON_DECODER.decode(json_text)
    except json.JSONDecodeError as error:
        problem = f"malformed JSON, {error.msg} at column {error.colno}"
        if re.fullmatch(r"\s*\{(.*[\[{,])?\s*", json_text) and error.pos >= len(json_text.rstrip()):
            remedy = "write an array of objects, or an object on each line (JSON Lines)"
            problem = f"the JSON object does not end on its line; {remedy}"
        raise DataError(f"{location}: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: malformed JSON, {first_line(error)}") from None
    if not isinstance(json_value, dict):
        expected_line_text = 'a line must be a JSON object such as {"prompt": "..."}'
        raise DataError(f"{location}: {expected_line_text}, not {json_text.strip()[:40]!r}")
    return json_value


def _read_json(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a JSON array of objects, alone or as in `{"data": [...]}`; read other files as JSON Lines."""
    with _open_text(path, "\n") as file:
        first_text_block = file.read(_CHARACTERS_PER_READ)
        if not first_text_block.lstrip().startswith("["):
            first_row_values = [list(row.values()) for _, row in islice(_read_json_lines(path), 2)]
            single_cell = first_row_values[0][0] if [len(values) for values in first_row_values] == [1] else None
            is_object_list = isinstance(single_cell, list) and all(isinstance(element, dict) for element in single_cell)
            # A single object with a list of turns, as in `{"messages": [{"role": ...}]}`, is one row, not several.
            if single_cell and is_object_list and not {"role", "from"} & single_cell[0].keys():
                yield from ((f"{path.name} row {row_index}", element) for row_index, element in enumerate(single_cell))
            else:
                yield from _read_json_lines(path)
            return
        try:
            for row_index, json_value in enumerate(_iterate_json_array(file, first_text_block)):
                location = f"{path.name} row {row_index}"
                if not isinstance(json_value, dict):
                    raise DataError(f"{location}: a row must be a JSON object, not {str(json_value)[:40]!r}")
                yield location, json_value
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError | UnicodeDecodeError):
                raise
            _explain_json_error(path)


def _iterate_json_array(file: TextIO, buffer: str) -> Iterator[Any]:
    """Yield each element of a JSON array that begins with `buffer` and continues in `file`, with at most one block and
    one element in memory; raise ValueError if the text is not an array, or ends too early."""
    parse_position = buffer.index("[") + 1
    next_character, num_characters = ",", _CHARACTERS_PER_READ
    while next_character == ",":
        try:
            json_element, element_end = _JSON_DECODER.raw_decode(buffer, WHITESPACE.match(buffer, parse_position).end())
            element_end = WHITESPACE.match(buffer, element_end).end()
            next_character = buffer[element_end]
        except (ValueError, IndexError):
            text_block = file.read(num_characters)
            if not text_block:
                raise ValueError("the array does not end") from None
            buffer, parse_position, num_characters = buffer[parse_position:] + text_block, 0, 2 * num_characters
            continue
        if next_character not in ",]":
            raise ValueError(f"{next_character!r} between two elements")
        yield json_element
        parse_position, num_characters = element_end + 1, _CHARACTERS_PER_READ
    if buffer[parse_position:].strip() or file.read().strip():
        raise ValueError("text behind the array")


def _explain_json_error(path: Path) -> None:
    """Parse the whole file with `json`, to raise a DataError with the line of the mistake; accept an empty array."""
    try:
        with _open_text(path, "\n") as file:
            json_value = json.loads(file.read())
    except json.JSONDecodeError as error:
        raise DataError(f"{path.name}:{error.lineno}: malformed JSON, {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path.name}: malformed JSON, {first_line(error)}") from None
    if json_value:
        raise DataError(f"{path.name}: the array cannot be read; save it as JSON Lines")


def _read_csv(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of CSV or TSV with a header; values stay strings, so that the text `007` does not become 7. Fields
    can also be separated by semicolons, as spreadsheets write where the comma is the decimal separator."""
    csv.field_size_limit(2**31 - 1)  # raise the limit of 128 KiB, which conversations can exceed
    with _open_text(path, "") as file:
        header_line = file.readline()
        separator = _detect_separator(path, header_line)
        csv_reader = csv.reader(chain([header_line], file), strict=True, delimiter=separator)
        csv_rows = filter(any, csv_reader)  # skip rows without values: spreadsheets write separators for cleared rows
        try:
            csv_header = next(csv_rows, [])
            if repeated_names := [name for name in csv_header if name and csv_header.count(name) > 1]:
                raise DataError(f"{path.name}: the header names {repeated_names[0]!r} twice")
            for fields in csv_rows:
                location = f"{path.name}:{csv_reader.line_num}"
                if len(fields) != len(csv_header):
                    problem = f"the line does not have the {len(csv_header)} fields of the header"
                    raise DataError(f"{location}: {problem}; quote fields that contain {_CSV_SEPARATORS[separator]}")
                yield location, dict(zip(csv_header, fields, strict=True))
        except csv.Error as error:
            raise DataError(f"{path.name}:{csv_reader.line_num}: malformed CSV, {error}") from None


def _detect_separator(path: Path, header_line: str) -> str:
    """Return a tab for TSV, otherwise the first of `_CSV_SEPARATORS` that the header contains outside of quotes."""
    if data_suffix(path.name).startswith(".tsv"):
        return "\t"
    unquoted_header = re.sub(r'"[^"]*"', "", header_line)
    return next((separator for separator in _CSV_SEPARATORS if separator in unquoted_header), ",")


def _make_text_reader(read_rows: Callable[[Path], Iterator[LocatedRow]], path: Path) -> RowReader:
    """Return the reader of a text file. The file is read once here, so that a damaged file raises an error at once."""
    return RowReader(path.name, sum(1 for _ in read_rows(path)), lambda: read_rows(path))


def _open_parquet(path: Path) -> RowReader:
    error_description = f"{path.name} is not a readable parquet file"
    with convert_reader_errors(error_description):
        num_rows = pa.parquet.read_metadata(path).num_rows

    def iterate_rows() -> Iterator[Row]:
        record_batches = pa.parquet.ParquetFile(path).iter_batches(_ROWS_PER_BATCH)
        while True:
            with convert_reader_errors(error_description):
                record_batch = next(record_batches, None)
                if record_batch is None:
                    return
                record_batch.validate(full=True)
                if "map<" in str(record_batch.schema.types):  # bypass `datasets`, which cannot read map columns
                    rows_of_batch = record_batch.to_pylist(maps_as_pydicts="strict")
                else:
                    rows_of_batch = _read_undecoded_rows(_make_dataset(pa.Table.from_batches([record_batch])))
            yield from rows_of_batch

    return RowReader(path.name, num_rows, lambda: _add_locations(path.name, iterate_rows()))


def _open_arrow(path: Path) -> RowReader:
    with convert_reader_errors(f"{path.name} is not a readable Arrow file"):
        mapped_file = pa.memory_map(str(path))
        try:
            arrow_table = pa.ipc.open_file(mapped_file).read_all()
        except pa.ArrowInvalid:
            mapped_file.seek(0)
            arrow_table = pa.ipc.open_stream(mapped_file).read_all()
        arrow_table.validate(full=True)
        return make_dataset_reader(_make_dataset(arrow_table), path.name)


def _make_dataset(table: pa.Table) -> Any:
    import datasets  # import only if needed: importing `datasets` takes seconds

    return datasets.Dataset(table)


def make_dataset_reader(dataset: Any, name: str) -> RowReader:
    """Return the reader of a data set object of the library `datasets`."""
    dataset = dataset.with_format(None)  # reset a saved format, which may select columns or make tensors
    return RowReader(name, len(dataset), lambda: _add_locations(name, _read_undecoded_rows(dataset)))


def _read_undecoded_rows(dataset: Any) -> Iterator[Row]:
    """Yield rows with media as stored (path and bytes): decoding is slow, and needs packages for audio and videos."""
    media_columns = [name for name, feature in dataset.features.items() if _MEDIA_FEATURE_REGEX.search(str(feature))]
    if not media_columns:
        yield from dataset
        return
    media_tables = dataset.select_columns(media_columns).with_format("arrow").iter(_ROWS_PER_BATCH)
    media_rows = chain.from_iterable(media_table.to_pylist() for media_table in media_tables)
    non_media_rows = chain(dataset.remove_columns(media_columns), repeat({}))
    for media_row, non_media_row in zip(media_rows, non_media_rows, strict=False):
        row = media_row | non_media_row
        yield {name: row[name] for name in dataset.column_names}


def _add_locations(reader_name: str, rows: Iterable[Row]) -> Iterator[LocatedRow]:
    """Yield each row of a columnar format with its location, `NAME row N`, counted from 0. The error for a row that
    cannot be read names the row."""
    row_iterator = iter(rows)
    for row_index in count():
        location = f"{reader_name} row {row_index}"
        with convert_reader_errors(f"{location} cannot be read"):
            row = next(row_iterator, None)
        if row is None:
            return
        yield location, _remove_null_arguments(row)


def _remove_null_arguments(row_value: Any) -> Any:
    """Return a value of a row without the nulls that Arrow adds to tools and tool calls: a model would learn to write
    them."""
    if isinstance(row_value, dict):
        return {
            name: remove_nulls(element) if name in _TOOL_COLUMNS_AND_KEYS else _remove_null_arguments(element)
            for name, element in row_value.items()
        }
    is_list_of_turns = isinstance(row_value, list) and row_value and isinstance(row_value[0], dict)
    return [_remove_null_arguments(turn) for turn in row_value] if is_list_of_turns else row_value


def convert_reader_errors(error_description: str) -> AbstractContextManager[None]:
    """Return a context manager that converts exceptions of a reader to a `DataError` of one line, which begins with
    `error_description`; failures of disk or network are not converted."""

    def convert_error(error: Exception) -> Exception:
        return error if is_machine_error(error) else DataError(f"{error_description}: {first_line(error)}")

    return convert_errors(convert_error, DataError)


_READER_OPENER_BY_SUFFIX: dict[str, Callable[[Path], RowReader]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), partial(_make_text_reader, _read_json_lines)),
    ".json": partial(_make_text_reader, _read_json),
    ".parquet": _open_parquet, ".arrow": _open_arrow,
    ".csv": partial(_make_text_reader, _read_csv), ".tsv": partial(_make_text_reader, _read_csv),
}  # fmt: skip


def open_row_file(path: Path) -> RowReader:
    """Return the reader of a file whose name ends with one of `DATA_SUFFIXES`; raise DataError if it is malformed."""
    return _READER_OPENER_BY_SUFFIX["." + data_suffix(path.name).split(".")[1]](path)
