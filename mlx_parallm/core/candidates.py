"""The most likely tokens at one position, with their logprobs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

TOP_LOGPROBS = 20
"""Candidates at each token that every request may ask for. More are computed for one row at a time, because they may be
many."""

Candidate = tuple[int, float]
"""A token id and its logprob (nats)."""


@dataclass(frozen=True, slots=True)
class ManyCandidates(Sequence[Candidate]):
    """More than `TOP_LOGPROBS` candidates, best first, in 8 bytes each instead of the 100 or so of a tuple of pairs.

    ids: int32 [K].  logprobs: float32 [K].
    """

    ids: array[int]
    logprobs: array[float]

    @classmethod
    def of_bytes(cls, ids: bytes, logprobs: bytes) -> ManyCandidates:
        """From the bytes of an int32 and a float32 array."""
        return cls(array("i", ids), array("f", logprobs))

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Candidate]:
        return zip(self.ids, self.logprobs, strict=True)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> ManyCandidates: ...
    def __getitem__(self, place: int | slice) -> Candidate | ManyCandidates:
        if isinstance(place, slice):
            return ManyCandidates(self.ids[place], self.logprobs[place])
        return self.ids[place], self.logprobs[place]
