"""Files of choices: what is read back, for which device and versions, and what two processes leave behind."""

from __future__ import annotations

import json
import logging
import multiprocessing
import re

import pytest

from openjev_fast_plugin import build, tables
from openjev_fast_plugin.ops._choices import PYTORCH, Choice, Heads, Product
from openjev_fast_plugin.tables import AttentionFacts, Entry, Facts, Sample, Store, TileEntry

FACTS = Facts("NVIDIA H200", "580.159.04", "130100", "0123")
PRODUCT = Product("linear_update", 280, 5120, 17408)
ALGORITHM = Choice("cublaslt", form=1, partials=2, workspace=4096, algorithm=(66, -1, 2**62, 0, 0, 0, 0, 7))
KERNEL = Choice("kernel", tile=64, parts=2)
FUSED = Choice("kernel", tile=96, fused=True)
REST = Choice("pytorch", band=16896, form=1, workspace=512, algorithm=(66, 0, 0, 0, 0, 0, 0, -7))


def entry(choice: Choice, us: float = 66.5) -> Entry:
    return Entry(choice, us, 80.25, 0.0016, 0.0017)


ENTRIES = {
    PRODUCT: entry(ALGORITHM),
    Product("linear", 72, 16480, 5120): entry(KERNEL),
    Product("linear_silu_mul", 72, 34816, 5120): entry(FUSED),
    Product("linear", 8, 16480, 5120): entry(PYTORCH),
    Product("linear", 280, 16480, 5120): entry(Choice("pytorch", band=12672)),
    Product("linear_silu_mul", 280, 34816, 5120): entry(REST),
}


def test_what_is_kept_is_read_back(tmp_path):
    store = Store(FACTS, tmp_path / "new" / "matmuls")
    assert store.read() == {}
    store.add(ENTRIES)
    assert store.read() == Store(FACTS, store.folder).read() == ENTRIES
    # One line a product, for people who compare two files.
    assert len(store.path.read_text().splitlines()) == len(ENTRIES) + 2
    # A later measurement stands in place of an earlier one.
    store.add({PRODUCT: entry(PYTORCH, 60.0)})
    assert store.read() == {**ENTRIES, PRODUCT: entry(PYTORCH, 60.0)}
    assert [path.name for path in store.folder.iterdir()] == [store.path.name]


@pytest.mark.parametrize("fact", Facts._fields)
def test_choices_of_other_facts_are_not_read(tmp_path, fact):
    other = FACTS._replace(**{fact: "other"})
    Store(FACTS, tmp_path).add(ENTRIES)
    assert Store(other, tmp_path).read() == {}
    assert Store(other, tmp_path).path != Store(FACTS, tmp_path).path
    # Whatever the file is called.
    tables.merge(Store(other, tmp_path / "more").path, FACTS, ENTRIES)
    assert Store(other, tmp_path / "more").read() == {}
    # In one file too, and the shipped table leaves the driver out.
    assert tables.shipped(FACTS, Store(FACTS, tmp_path).path) == ENTRIES
    assert tables.shipped(other, Store(FACTS, tmp_path).path) == (ENTRIES if fact == "driver" else {})


ATTENTION = AttentionFacts("NVIDIA H200", "580.159.04", "4567")
TILES = {
    Heads(24, 4, 256): TileEntry(330, 330, (Sample("root", 64, 8.5, 9.75), Sample("root", 512, 40.0, 30))),
    Heads(8, 2, 128): TileEntry(0, 660, ()),
}


def test_matmuls_and_attention_do_not_invalidate_each_other(tmp_path):
    # Beside each other in a folder, and as sections of one file, as the shipped one may have them.
    matmuls, attention = Store(FACTS, tmp_path), Store(ATTENTION, tmp_path)
    matmuls.add(ENTRIES)
    attention.add(TILES)
    assert matmuls.path != attention.path and (matmuls.read(), attention.read()) == (ENTRIES, TILES)
    shipped = tmp_path / "shipped.json"
    tables.merge(shipped, FACTS, ENTRIES)
    tables.merge(shipped, ATTENTION, TILES)
    assert tables.read(shipped) == {FACTS: ENTRIES, ATTENTION: TILES}
    assert tables.shipped(FACTS._replace(driver="other"), shipped) == ENTRIES
    assert tables.shipped(ATTENTION._replace(driver="other"), shipped) == TILES
    # Another cuBLAS, another matmul kernel, another attention kernel.
    for other in (FACTS._replace(cublas="2"), FACTS._replace(kernels="other")):
        assert tables.shipped(other, shipped) == {} == Store(other, tmp_path).read()
    for other in (ATTENTION._replace(kernels="other"), ATTENTION._replace(device="NVIDIA B200")):
        assert tables.shipped(other, shipped) == {} == Store(other, tmp_path).read()
    assert Store(ATTENTION._replace(driver="other"), tmp_path).read() == {}


def test_the_users_own_goes_before_the_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped.json")
    tables.merge(tables.SHIPPED, ATTENTION, TILES)
    store = Store(ATTENTION, tmp_path)
    own = {Heads(24, 4, 256): TileEntry(96, 330, ())}
    store.add(own)
    assert store.known() == {**TILES, **own}


def broken_tiles(**values):
    def change(content):
        content["attention"][0].update(values)

    return change


@pytest.mark.parametrize(
    "change",
    [
        broken_tiles(few_queries=-1),
        broken_tiles(few_queries=1.5),
        broken_tiles(few_queries=True),
        broken_tiles(default="330"),
        broken_tiles(kv_heads=0),
        broken_tiles(samples=[{"form": "root", "queries": 64, "small_us": "fast", "large_us": 1.0}]),
        broken_tiles(samples=[{"form": "root", "queries": 64, "small_us": 0, "large_us": 1.0}]),
        broken_tiles(samples=[{"form": 1, "queries": 64, "small_us": 1.0, "large_us": 1.0}]),
        broken_tiles(samples=[{"form": "root"}]),
        lambda content: content["attention"][0].pop("few_queries"),
        lambda content: content.pop("kernels"),
    ],
)
def test_tile_sizes_of_another_form_are_named_and_left_out(tmp_path, change, caplog):
    store = Store(ATTENTION, tmp_path)
    store.add(TILES)
    content = json.loads(store.path.read_text())
    change(content["tables"][0])
    store.path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is no table of choices: ."):
        tables.read(store.path)
    assert store.read() == {} and str(store.path) in caplog.text


def test_a_file_holds_tables_of_several_devices(tmp_path):
    path, other = tmp_path / "matmuls.json", FACTS._replace(device="NVIDIA B200")
    tables.merge(path, FACTS, ENTRIES)
    tables.merge(path, other, {PRODUCT: entry(PYTORCH)})
    assert tables.read(path) == {FACTS: ENTRIES, other: {PRODUCT: entry(PYTORCH)}}
    before = path.read_bytes()
    tables.merge(path, FACTS, ENTRIES)
    assert path.read_bytes() == before


def test_the_shipped_table_is_one_and_of_these_sources():
    for facts in tables.read(tables.SHIPPED):
        if isinstance(facts, AttentionFacts):
            assert facts.kernels == tables.attention_digest(), (
                "attention's kernels have changed since the shipped tile sizes were measured: measure them again"
            )
            continue
        assert facts.kernels == tables.kernels_digest(), (
            "kernels have changed since the shipped table was measured: measure it again, with "
            "python bench/gemm_bench.py --write-table"
        )


@pytest.mark.parametrize(
    "digest, names",
    [
        (tables.kernels_digest, tables._KERNEL_SOURCES),
        (tables.attention_digest, tables._ATTENTION_SOURCES),
    ],
    ids=["matmuls", "attention"],
)
def test_the_digest_is_of_sources_that_exist_and_changes_with_them(tmp_path, monkeypatch, digest, names):
    folder = build.source_folder()
    # No other file counts.
    for name in names:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    before = digest()
    for name in names:
        (tmp_path / name).write_text((tmp_path / name).read_text() + "// more\n")
        assert digest() != before, name
        before = digest()


def test_attentions_digest_has_every_source_that_its_kernels_are_made_of():
    folder, found = build.source_folder(), set()
    waiting = ["tree_attention.cu", "tree_attention_sm90.cu"]
    while waiting:
        name = waiting.pop()
        # launch.h has the arguments of every launcher, and no work.
        if name not in found and name != "launch.h":
            found.add(name)
            waiting += re.findall(r'#include "([^"]+)"', (folder / name).read_text())
    assert found == set(tables._ATTENTION_SOURCES)


def changed(**values):
    """The file's text with values of its one product, or of its choice, replaced; None takes one out."""

    def change(content):
        (product,) = content["tables"][0]["products"]
        for name, value in values.items():
            target = product if name in product else product["choice"]
            target[name] = value
            if value is None:
                del target[name]

    return change


BROKEN = {
    "empty": lambda content: content.clear(),
    "format": lambda content: content.update(format=2),
    "no facts": lambda content: content["tables"][0].pop("cublas"),
    "facts": lambda content: content["tables"][0].update(cublas=130100),
    "op": changed(op="conv"),
    "size": changed(rows=0),
    "size as text": changed(rows="280"),
    "no figure": changed(us=None),
    "figure": changed(us="fast"),
    "way": changed(way="magic"),
    "no way": changed(way=None),
    "algorithm of seven": changed(algorithm=[1] * 7),
    "algorithm of text": changed(algorithm=["1"] * 8),
    "band": changed(way="pytorch", algorithm=None, band=-8),
    "band as text": changed(way="pytorch", algorithm=None, band="8"),
    "bands of an algorithm": changed(band=64),
    "an algorithm without bands": changed(way="pytorch"),
    "an algorithm of a kernel": changed(way="kernel"),
    "bands and an algorithm of seven": changed(way="pytorch", band=64, algorithm=[1] * 7),
    "unknown": lambda content: content["tables"][0]["products"][0]["choice"].update(speed=9),
    "list": lambda content: content.update(tables={"a": 1}),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_file_of_another_form_is_named_and_left_out(tmp_path, change, caplog):
    store = Store(FACTS, tmp_path)
    store.add({PRODUCT: entry(ALGORITHM)})
    content = json.loads(store.path.read_text())
    change(content)
    store.path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is no table of choices: .") as caught:
        tables.read(store.path)
    assert str(store.path) in str(caught.value)
    assert store.read() == {} and str(store.path) in caplog.text
    # What is measured next is kept in its place, and says so.
    caplog.clear()
    store.add(ENTRIES)
    assert store.read() == ENTRIES and "it is replaced" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\x00"])
def test_a_file_that_is_no_json_object_is_named_and_left_out(tmp_path, text, caplog):
    store = Store(FACTS, tmp_path)
    store.path.write_text(text)
    with pytest.raises(ValueError, match="is no table of choices"):
        tables.read(store.path)
    assert store.read() == {} and str(store.path) in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    store = Store(FACTS, tmp_path / "file")
    with pytest.raises(OSError):
        store.add(ENTRIES)


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    store = Store(FACTS, tmp_path)
    store.add(ENTRIES)

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(tables.os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        store.add({PRODUCT: entry(PYTORCH)})
    assert store.read() == ENTRIES and [path.name for path in tmp_path.iterdir()] == [store.path.name]


def _add_many(folder, start: int, count: int) -> None:
    store = Store(FACTS, folder)
    for rows in range(start, start + count):
        store.add({PRODUCT._replace(rows=rows): entry(PYTORCH, rows)})


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path, caplog):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_many, args=(tmp_path, 1 + 20 * i, 20)) for i in range(4)]
    for writer in writers:
        writer.start()
    store = Store(FACTS, tmp_path)
    with caplog.at_level(logging.WARNING):
        seen = 0
        while any(writer.is_alive() for writer in writers):
            # Whoever reads meanwhile sees a whole file.
            found = len(store.read())
            assert found >= seen
            seen = found
    assert all(writer.exitcode == 0 for writer in writers) and not caplog.text
    assert {product.rows for product in store.read()} == set(range(1, 81))
