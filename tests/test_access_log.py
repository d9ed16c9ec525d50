"""The access log: a line for every request, without its text, never in a request's way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from openjev_fast_plugin import access_log
from openjev_fast_plugin.access_log import AccessLog
from openjev_fast_plugin.exchange import Exchange


def exchange(**values: object) -> Exchange:
    about = Exchange(None, "127.0.0.1", None)
    for name, value in values.items():
        setattr(about, name, value)
    return about


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_what_was_asked_and_what_became_of_it(tmp_path):
    log = AccessLog(tmp_path / "log")
    about = exchange(method="POST", path="/v1/systemone", status=200, request_bytes=40, response_bytes=210)
    about.started, about.seconds = 1_700_000_000.1239, 0.0123456789
    log(about)
    log.close()
    assert lines(tmp_path / "log") == [
        {
            "time": "2023-11-14T22:13:20.123Z",
            "client": "127.0.0.1",
            "method": "POST",
            "path": "/v1/systemone",
            "status": 200,
            "seconds": 0.012346,
            "request_bytes": 40,
            "response_bytes": 210,
        }
    ]


def test_a_line_is_a_line_whatever_the_client_sent(tmp_path):
    log = AccessLog(tmp_path / "log")
    log(exchange(method='A"\n', path="/\x00\n\x85\u2028\xff" + "p" * 70_000))
    log.close()
    (line,) = (tmp_path / "log").read_bytes().splitlines()
    assert line.isascii() and json.loads(line)["method"] == 'A"\n' and len(line) < 2000


def test_lines_of_many_threads_are_all_there(tmp_path):
    log = AccessLog(tmp_path / "log")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: log(exchange(status=number)), range(2000)))
    log.close()
    assert sorted(line["status"] for line in lines(tmp_path / "log")) == list(range(2000))


def test_lines_appear_without_a_close_and_after_what_was_there(tmp_path):
    (tmp_path / "log").write_text('{"status": 1}\n')
    log = AccessLog(tmp_path / "log")
    log(exchange(status=2))
    end = time.monotonic() + 20
    while len(lines(tmp_path / "log")) < 2:
        assert time.monotonic() < end
        time.sleep(0.005)
    # Moved away, as log rotation does it.
    (tmp_path / "log").rename(tmp_path / "old")
    log(exchange(status=3))
    log.close()
    assert [line["status"] for line in lines(tmp_path / "old")] == [1, 2]
    assert [line["status"] for line in lines(tmp_path / "log")] == [3]


def test_a_file_that_stands_still_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(access_log, "_WAITING", 5)
    log = AccessLog(tmp_path / "log")
    still, writing = threading.Event(), threading.Event()
    emit = log._file.emit

    def slow(record):
        writing.set()
        assert still.wait(20)
        emit(record)

    log._file.emit = slow
    log(exchange(status=0))
    assert writing.wait(20)
    start = time.monotonic()
    for status in range(1, 9):
        log(exchange(status=status))
    assert time.monotonic() - start < 5
    still.set()
    log.close()
    *kept, dropped = lines(tmp_path / "log")
    assert [line["status"] for line in kept] == [0, 1, 2, 3, 4, 5] and dropped == {"dropped": 3}


def test_what_waits_is_written_at_exit(tmp_path):
    code = (
        "import sys; from openjev_fast_plugin.access_log import AccessLog; "
        "from openjev_fast_plugin.exchange import Exchange; log = AccessLog(sys.argv[1]); "
        "[log(Exchange(None, 'c', None)) for _ in range(100)]"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "log"], check=True, timeout=60)
    assert len(lines(tmp_path / "log")) == 100


def test_a_full_disk_is_reported(capfd):
    log = AccessLog("/dev/full")
    for _ in range(2):
        log(exchange())
    with pytest.raises(OSError, match="No space left"):
        log.close()
    assert re.search("OSError.*No space left", capfd.readouterr().err)


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(OSError, match="no_folder"):
        AccessLog(tmp_path / "no_folder" / "log")
