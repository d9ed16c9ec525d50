"""The body of an HTTP/1.1 request: where it ends (RFC 9112) and what it decodes to. Imports no torch.

Everything is handed out in pieces, so that who collects them decides how much is too much.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Generator, Iterator
from email.message import Message
from typing import Any

import zstandard

from .exchange import Refused

PIECE = 64 * 1024
# A chunk's size line or a trailer field, and how many trailer fields are read.
_LINE, _TRAILERS = 1024, 32
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
# RFC 9659: the window a zstd body may ask its receiver to keep is 8 MiB.
_WINDOW = 8 * 1024 * 1024
# Bytes of zstd decoded at a time: at most 16 blocks, of at most 128 KiB each when decoded.
_SLICE = 64


class CutShort(Exception):
    """The connection ended inside the body."""


def pieces(stream: io.BufferedReader[Any], headers: Message) -> Iterator[bytes] | None:
    """The body that follows these header fields, piece by piece as it arrives.

    None where `Content-Length` is no number or has 19 digits and more: where the body ends is not known then.

    Raises Refused where the fields contradict each other or name a transfer coding other than chunked; the iterator
    raises CutShort, and Refused where the chunks are malformed.
    """
    codings = _items(headers, "Transfer-Encoding")
    lengths = {value.strip() for value in headers.get_all("Content-Length", [])}
    if codings and lengths or len(lengths) > 1:
        # Whoever stands before this server may have believed the other one.
        raise Refused(400, "the length of the body is given in two ways")
    if codings:
        if codings != ["chunked"]:
            raise Refused(501, "Transfer-Encoding must be chunked")
        return _chunks(stream)
    length = lengths.pop() if lengths else "0"
    if not (length.isascii() and length.isdigit() and len(length) < 19):
        return None
    return _counted(stream, int(length))


def _items(headers: Message, name: str) -> list[str]:
    values = ",".join(headers.get_all(name, [])).split(",")
    return [value.strip().lower() for value in values if value.strip()]


def _counted(stream: io.BufferedReader[Any], length: int) -> Iterator[bytes]:
    while length:
        piece = stream.read1(min(length, PIECE))
        if not piece:
            raise CutShort
        length -= len(piece)
        yield piece


def _chunks(stream: io.BufferedReader[Any]) -> Iterator[bytes]:
    while True:
        found = _CHUNK_SIZE.fullmatch(_line(stream))
        if found is None:
            raise Refused(400, "a chunk of the body does not start with its size")
        size = int(found[1], 16)
        if not size:
            break
        yield from _counted(stream, size)
        if _line(stream) not in (b"\r\n", b"\n"):
            raise Refused(400, "a chunk of the body is longer than its size")
    for _ in range(_TRAILERS + 1):
        if _line(stream) in (b"\r\n", b"\n"):
            return
    raise Refused(400, "the body has too many trailer fields")


def _line(stream: io.BufferedReader[Any]) -> bytes:
    line = stream.readline(_LINE)
    if line.endswith(b"\n"):
        return line
    if len(line) < _LINE:
        raise CutShort
    raise Refused(400, "a line between the chunks of the body is too long")


def content_codings(headers: Message) -> list[str]:
    """The codings of `Content-Encoding` that change the body, in the order they were applied."""
    return [coding for coding in _items(headers, "Content-Encoding") if coding != "identity"]


def decoded(body: bytes, codings: list[str]) -> Iterator[bytes]:
    """What a body decodes to, in pieces of at most 2 MiB.

    One coding, and one gzip member or zstd frame: what clients send.

    Raises Refused: 415 where the codings are others than that, 422 where the body is not what they say.
    """
    if len(codings) != 1 or codings[0] not in _DECODERS:
        raise Refused(415, f"Content-Encoding must be one of {ACCEPTED}", {"Accept-Encoding": ACCEPTED})
    (coding,) = codings
    try:
        unused = yield from _DECODERS[coding](body)
    except (zlib.error, zstandard.ZstdError) as error:
        raise Refused(422, f"the body is not {coding}: {error}") from None
    except CutShort:
        raise Refused(422, f"the {coding} body ends too early") from None
    if unused:
        raise Refused(422, f"bytes follow the end of the {coding} body")


def _gunzipped(body: bytes) -> Generator[bytes, None, bool]:
    """Returns whether something follows the first member."""
    decoder = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    data = body
    while not decoder.eof:
        piece = decoder.decompress(data, PIECE)
        if not piece and not decoder.eof:
            raise CutShort
        yield piece
        data = decoder.unconsumed_tail
    return bool(decoder.unused_data)


def _unzstd(body: bytes) -> Generator[bytes, None, bool]:
    """Returns whether something follows the first frame."""
    # This library, since where Python's own (or its backport) is installed, typesafe-sdk compresses what it sends to
    # any server.
    decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
    for end in range(_SLICE, len(body) + _SLICE, _SLICE):
        yield decoder.decompress(body[end - _SLICE : end])
        if decoder.eof:
            return bool(decoder.unused_data) or end < len(body)
    raise CutShort


_DECODERS = {"gzip": _gunzipped, "x-gzip": _gunzipped, "zstd": _unzstd}
ACCEPTED = "gzip, zstd"
