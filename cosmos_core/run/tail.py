"""Incremental reader of a growing text file such as a log; it returns each complete character exactly once."""

import codecs
import os
from pathlib import Path

from cosmos_core.run.files import read_again_if_stale


class FileTail:
    """Reader of the text that was appended to a file since the last read; a missing file counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.was_replaced = False
        """True if the last call read from the start of the file because the file was replaced or truncated."""
        self._file_inode: int | None = None
        self._read_offset = 0
        self._incomplete_line = ""
        self._decoder = _create_decoder()

    def read_text(self, *, is_last_read: bool = False) -> str:
        """Return the new text; an incomplete character at its end is kept for the next call unless `is_last_read`."""
        try:
            new_bytes = read_again_if_stale(self._read_new_bytes)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return ""
        return self._decoder.decode(new_bytes, final=is_last_read)

    def _read_new_bytes(self) -> bytes:
        with open(self.path, "rb") as file:
            file_stat = os.fstat(file.fileno())
            was_replaced = self._file_inode not in {None, file_stat.st_ino} or file_stat.st_size < self._read_offset
            file.seek(0 if was_replaced else self._read_offset)
            new_bytes = file.read()
        if was_replaced:
            self._read_offset, self._incomplete_line, self._decoder = 0, "", _create_decoder()
        self.was_replaced, self._file_inode = was_replaced, file_stat.st_ino
        self._read_offset += len(new_bytes)
        return new_bytes

    def read_lines(self, *, is_last_read: bool = False) -> list[str]:
        """Return the complete lines since the last call; with `is_last_read`, also a last line without a line break."""
        new_text = self.read_text(is_last_read=is_last_read)
        *complete_lines, self._incomplete_line = (self._incomplete_line + new_text).split("\n")
        if is_last_read and self._incomplete_line:
            complete_lines.append(self._incomplete_line)
            self._incomplete_line = ""
        return complete_lines


def _create_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
