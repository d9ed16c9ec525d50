"""Request bodies: where they end, and what they decode to, within bounds."""

from __future__ import annotations

import gzip
import io
import random
import tracemalloc
from email.message import Message
from itertools import islice

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from openjev_fast_plugin.exchange import Refused
from openjev_fast_plugin.message_body import PIECE, CutShort, content_codings, decoded, pieces

ENCODERS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "zstd": zstandard.compress}


def fields(**values: object) -> Message:
    message = Message()
    for name, value in values.items():
        for each in value if isinstance(value, tuple) else (value,):
            message[name.replace("_", "-")] = str(each)
    return message


def read(content: bytes, **values: object) -> tuple[bytes, bytes]:
    """The body, and what is left behind it."""
    stream = io.BufferedReader(io.BytesIO(content))
    return b"".join(pieces(stream, fields(**values))), stream.read()


# Where a body ends


def test_a_length_is_read_exactly():
    assert read(b"abcdef", Content_Length=4) == (b"abcd", b"ef")
    assert read(b"abcdef", Content_Length=(4, " 4 ")) == (b"abcd", b"ef")
    assert read(b"abcdef", Content_Length=0) == (b"", b"abcdef")
    assert read(b"abcdef") == (b"", b"abcdef")
    long = bytes(range(256)) * 1000
    assert read(long + b"x", Content_Length=len(long)) == (long, b"x")


@given(st.lists(st.binary(min_size=1, max_size=300)), st.booleans(), st.integers(0, 3))
def test_chunks_are_joined(parts, upper, trailers):
    framed = b"".join(
        (b"%X\r\n" if upper else b"00%x ;a=b\r\n") % len(part) + part + b"\r\n" for part in parts
    )
    framed += b"0\r\n" + b"X-Trailer: 1\r\n" * trailers + b"\r\n"
    assert read(framed + b"next", Transfer_Encoding="Chunked") == (b"".join(parts), b"next")


def test_pieces_are_small():
    assert (
        max(map(len, pieces(io.BufferedReader(io.BytesIO(b"x" * 10**6)), fields(Content_Length=10**6))))
        <= PIECE
    )
    framed = io.BufferedReader(io.BytesIO(b"F4240\r\n" + b"x" * 10**6 + b"\r\n0\r\n\r\n"))
    assert max(map(len, pieces(framed, fields(Transfer_Encoding="chunked")))) <= PIECE


@pytest.mark.parametrize("length", ["+4", "-4", "0x4", "4.0", "1_0", "four", "4,4", "", "١", "9" * 19])
def test_a_length_that_is_no_number_is_left_to_the_handler(length):
    assert pieces(io.BufferedReader(io.BytesIO(b"abcd")), fields(Content_Length=length)) is None


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"Content_Length": (4, 5)}, 400),
        ({"Content_Length": 4, "Transfer_Encoding": "chunked"}, 400),
        ({"Transfer_Encoding": "gzip"}, 501),
        ({"Transfer_Encoding": ("chunked", "chunked")}, 501),
        ({"Transfer_Encoding": "chunked, gzip"}, 501),
    ],
)
def test_contradictions_are_refused(values, status):
    with pytest.raises(Refused) as caught:
        pieces(io.BufferedReader(io.BytesIO(b"abcd")), fields(**values))
    assert caught.value.status == status


@pytest.mark.parametrize(
    "content",
    [
        b"x\r\n",
        b"\r\n",
        b"-1\r\nabc",
        b"+1\r\na\r\n0\r\n\r\n",
        b"0x1\r\na\r\n0\r\n\r\n",
        b"1_0\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"3\r\nabc0\r\n\r\n",
        b"1" * 16 + b"\r\n",
        b"3;" + b"x" * 2000 + b"\r\nabc\r\n0\r\n\r\n",
        b"0\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
        b"0\r\n" + b"A" * 2000 + b"\r\n\r\n",
    ],
)
def test_malformed_chunks_are_refused(content):
    with pytest.raises(Refused) as caught:
        read(content, Transfer_Encoding="chunked")
    assert caught.value.status == 400


def test_a_body_that_ends_early_is_cut_short():
    framed = b"3\r\nabc\r\n0\r\nA: b\r\n\r\n"
    for length in range(len(framed)):
        with pytest.raises(CutShort):
            read(framed[:length], Transfer_Encoding="chunked")
    with pytest.raises(CutShort):
        read(b"abc", Content_Length=4)


# What a body decodes to


def test_codings_are_listed():
    assert content_codings(fields()) == content_codings(fields(Content_Encoding="identity")) == []
    assert content_codings(fields(Content_Encoding=("GZIP", "zstd, identity"))) == ["gzip", "zstd"]


@pytest.mark.parametrize("coding", ENCODERS)
@given(content=st.binary(max_size=2000), times=st.sampled_from([1, 200]))
def test_bodies_are_decoded(coding, content, times):
    found = list(decoded(ENCODERS[coding](content * times), [coding]))
    assert b"".join(found) == content * times


@pytest.mark.parametrize("coding", ENCODERS)
def test_a_bomb_is_handed_out_piece_by_piece(coding):
    bomb = ENCODERS[coding](bytes(200_000_000))
    assert len(bomb) < 300_000
    parts = decoded(bomb, [coding])
    tracemalloc.start()
    try:
        assert 0 < max(map(len, islice(parts, 50))) <= 2 * 1024 * 1024
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codings", [["br"], ["deflate"], ["gzip", "zstd"], ["gzip", "gzip"]])
def test_other_codings_are_refused_by_name(codings):
    with pytest.raises(Refused) as caught:
        list(decoded(b"abc", codings))
    assert caught.value.status == 415 and caught.value.headers == {"Accept-Encoding": "gzip, zstd"}
    assert caught.value.error == "Content-Encoding must be one of gzip, zstd"


@pytest.mark.parametrize("coding", ENCODERS)
def test_what_is_not_coded_as_it_says_is_refused(coding):
    whole = ENCODERS[coding](b"abc" * 100_000)
    bad = [b"", b"abc", whole[:-1], whole[: len(whole) // 2], whole + b"x", whole + whole]
    bad.append(bytes([whole[0] ^ 1]) + whole[1:])
    for body in bad:
        with pytest.raises(Refused) as caught:
            list(decoded(body, [coding]))
        assert caught.value.status == 422 and coding in caught.value.error


def test_what_follows_a_frame_is_noticed_wherever_it_ends():
    for length in range(130):
        # Incompressible: frames of every length.
        frame = zstandard.compress(random.Random(length).randbytes(length))
        assert len(b"".join(decoded(frame, ["zstd"]))) == length
        with pytest.raises(Refused, match="bytes follow"):
            list(decoded(frame + b"x", ["zstd"]))


def test_a_zstd_body_may_not_ask_for_more_than_the_window_of_the_standard():
    content = bytes(100)
    for log, accepted in ((23, True), (24, False)):
        parameters = zstandard.ZstdCompressionParameters(window_log=log)
        # Without a known size, which would make the window smaller.
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        body = compressor.compress(content) + compressor.flush()
        if accepted:
            assert b"".join(decoded(body, ["zstd"])) == content
        else:
            with pytest.raises(Refused, match="not zstd") as caught:
                list(decoded(body, ["zstd"]))
            assert caught.value.status == 422
