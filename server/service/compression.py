"""Compressed bodies over HTTP (RFC 9110, section 8.4.1): of requests as they come, and of answers."""

from __future__ import annotations

import re
import zlib

from seq2seq_serve.server.errors import InvalidRequest

GZIP, DEFLATE = "gzip", "deflate"

_PLAIN = ("", "identity")
_WINDOW_BITS = {GZIP: 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, DEFLATE: zlib.MAX_WBITS}
_STEP_BYTES = 2**16
_FASTEST = 1  # numbers and texts get little smaller at higher levels
_LEAST_BYTES = 1024  # an answer below it fits into a packet anyway
_REFUSED = re.compile(r";\s*q=0(\.0*)?\s*$")


class Decompressor:
    """Decompresses the body of a request, whose parts come one after the other.

    Owned by the reader of the body. Invariant: at most `_STEP_BYTES` are decompressed at once, however many
    bytes a part stands for; no others wait in here.

    Args:
        encoding: The header `Content-Encoding`.

    Raises:
        InvalidRequest: The encoding is unknown.
    """

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower()
        self._inflating = None
        self._rest, self._has_more = b"", False
        if name in _PLAIN:
            return
        if name not in _WINDOW_BITS:
            raise InvalidRequest(
                f"the body is compressed by {encoding[:100]}: send it in {GZIP} or {DEFLATE}, or without "
                "compression",
                field="",
            )
        self._inflating = zlib.decompressobj(_WINDOW_BITS[name])

    @property
    def is_waiting(self) -> bool:
        """Whether it has nothing left to decompress before the next part."""
        return not (self._rest or self._has_more)

    def add(self, part: bytes) -> None:
        """Takes a part; `is_waiting` was true before."""
        self._rest = part

    def next_bytes(self) -> bytes:
        """Returns the next bytes of the body; none if they need more of it.

        Raises:
            InvalidRequest: The body is not what its encoding says, or goes on after its end.
        """
        rest, self._rest = self._rest, b""
        if self._inflating is None:
            return rest
        try:
            octets = self._inflating.decompress(rest, _STEP_BYTES)
        except zlib.error as error:
            raise InvalidRequest(f"the compressed body is damaged: {error}", field="") from None
        self._rest, self._has_more = self._inflating.unconsumed_tail, len(octets) == _STEP_BYTES
        if self._inflating.unused_data:
            raise InvalidRequest("the compressed body goes on after its end: send one stream", field="")
        return octets

    def end(self) -> None:
        """Checks that the body is whole, after its last part; raises InvalidRequest."""
        if self._inflating is not None and not self._inflating.eof:
            raise InvalidRequest("the compressed body ends too early", field="")


def compressed(content: bytes, accepted: str) -> tuple[bytes, dict[str, str]]:
    """Returns the body of an answer with its headers, compressed if its caller accepts that.

    Args:
        content: The body.
        accepted: The header `Accept-Encoding`, of whose encodings the first known one is used.
    """
    offers = [offer.strip().lower() for offer in accepted.split(",") if not _REFUSED.search(offer)]
    name = next((one for one in (offer.partition(";")[0] for offer in offers) if one in (GZIP, DEFLATE)), "")
    if not name or len(content) < _LEAST_BYTES:
        return content, {}
    deflating = zlib.compressobj(_FASTEST, wbits=_WINDOW_BITS[name])
    return deflating.compress(content) + deflating.flush(), {"Content-Encoding": name}
