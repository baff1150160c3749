"""A sequence that creates its items on access."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


class IndexedSequence(Sequence[T_co]):
    """Sequence whose subclasses implement only `item`, for a non-negative index; indices and slices use `item`."""

    @abstractmethod
    def item(self, index: int) -> T_co:
        """Return the item at an index from 0 to the length of the sequence minus 1."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        if isinstance(index, slice):
            return [self.item(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.item(index % len(self))
