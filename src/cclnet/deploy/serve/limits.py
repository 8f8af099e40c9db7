"""What a request may cost, and how one that asks for more is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cclnet.errors import InputError


@dataclass(frozen=True)
class Limits:
    """Limits on what is sent.

    Attributes:
        upload_bytes: of the image file.
        pixels: of the image, by its header, before a byte is decoded.
        seconds: for the upload to arrive, for the image to be decoded, and for the network to answer, each.
        in_memory: uploads held at once; those that come later wait outside, unread.
        waiting: requests in the house; beyond, they are sent away.
    """

    upload_bytes: int = 20 * 2**20
    pixels: int = 50_000_000
    seconds: float = 30.0
    in_memory: int = 64
    waiting: int = 256

    def __post_init__(self) -> None:
        least = {"upload_bytes": 1, "pixels": 1, "in_memory": 1, "waiting": 1}
        wrong = [f"{name} at least {low}, got {getattr(self, name)}" for name, low in least.items()
                 if getattr(self, name) < low]  # fmt: skip
        wrong += [f"seconds above 0, got {self.seconds:g}"] if not self.seconds > 0 else []
        if wrong:
            raise InputError(f"limits must let something through: {'; '.join(wrong)}.")

    @property
    def megabytes(self) -> str:
        """
        >>> Limits().megabytes
        '20 MB'
        """
        return f"{self.upload_bytes / 2**20:.3g} MB"

    @property
    def megapixels(self) -> str:
        return f"{self.pixels / 1e6:.3g} megapixels"


class Refused(Exception):
    """A request that gets no answer: a status of HTTP, and the reason in words for the person who sent it."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, reason)
        self.status, self.reason, self.headers = status, reason, dict(headers or {})


def busy(reason: str) -> Refused:
    """For what may work in a moment."""
    return Refused(503, f"{reason} Try again in a moment.", {"Retry-After": "1"})
