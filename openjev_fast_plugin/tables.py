"""Files of choices that the tuner made: which device and library they are for, their form, and safe writing.

A file is `{"format": 1, "tables": [...]}`; a table has the facts it was measured under, and either `products`, choices
for matmuls, or `attention`, tile sizes for heads. One such file is part of the package (`matmuls.json`, which may hold
tables of either kind), the others are kept per user, one for each set of facts. A choice made under other facts is
never read: an algorithm of cuBLASLt means something to its own version only, and what is fastest changes with the
device, its driver and our kernels. Imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

from openjev_fast_plugin import build
from openjev_fast_plugin.ops._choices import OPS, Choice, Heads, Product

FORMAT = 1
# The table that comes with the package.
SHIPPED = Path(__file__).with_name("matmuls.json")
# Sources that decide what a choice for a matmul means and how long it takes.
_KERNEL_SOURCES = (
    "add_rms_norm.cu",
    "add_rms_norm.cuh",
    "common.cuh",
    "cublaslt_binding.cpp",
    "linear_sm90.cu",
    "linear_sm90.cuh",
    "product.cpp",
    "product.h",
    "residual.cuh",
    "silu_mul.cu",
    "silu_mul.cuh",
    "tensor_map.h",
    "wgmma.cuh",
)
# Sources that decide how long attention takes.
_ATTENTION_SOURCES = (
    "attention_rows.cuh",
    "common.cuh",
    "mma.cuh",
    "tensor_map.h",
    "tree_attention.cu",
    "tree_attention.cuh",
    "tree_attention_sm90.cu",
    "tree_attention_sm90.cuh",
    "wgmma.cuh",
)

_log = logging.getLogger("openjev_fast")


class Facts(NamedTuple):
    """What a choice for a matmul depends on, each as text.

    device: the GPU's name. driver: NVIDIA's driver. cublas: version of cuBLASLt. kernels: digest of our own sources.
    """

    device: str
    driver: str
    cublas: str
    kernels: str

    @property
    def file_name(self) -> str:
        """The name of this set's file."""
        return f"{_slug(self.device)}-{build.digest_of(self)}.json"

    def __str__(self) -> str:
        return f"{self.device}, driver {self.driver}, cuBLAS {self.cublas}, kernels {self.kernels}"


class AttentionFacts(NamedTuple):
    """What the tile size of attention depends on, each as text.

    device: the GPU's name. driver: NVIDIA's driver. kernels: digest of attention's sources.
    """

    device: str
    driver: str
    kernels: str

    @property
    def file_name(self) -> str:
        """The name of this set's file."""
        return f"attention-{_slug(self.device)}-{build.digest_of(self)}.json"


@dataclass(frozen=True)
class Entry:
    """What was measured of a product, together with the op that reads it.

    us, default_us: median microseconds of the way chosen, and of the way without a choice. rel_l2, pytorch_rel_l2:
    relative L2 error of the way chosen, and of `F.linear`, against a float32 product.
    """

    choice: Choice
    us: float
    default_us: float
    rel_l2: float
    pytorch_rel_l2: float


class Sample(NamedTuple):
    """Attention of so many queries over one form of forest: median microseconds in small and in large tiles."""

    form: str
    queries: int
    small_us: float
    large_us: float


@dataclass(frozen=True)
class TileEntry:
    """What was measured of attention with some heads.

    few_queries: the most queries that are planned in small tiles. default: as many where nothing is measured.
    """

    few_queries: int
    default: int
    samples: tuple[Sample, ...]


AnyFacts = Facts | AttentionFacts
# Products and their entries under Facts, heads and theirs under AttentionFacts.
Entries = Mapping[Any, Any]
FactsT = TypeVar("FactsT", Facts, AttentionFacts)
KeyT = TypeVar("KeyT")
EntryT = TypeVar("EntryT")


def kernels_digest() -> str:
    """Digest of the sources that decide what a choice for a matmul means and how long it takes."""
    return _digest(_KERNEL_SOURCES)


def attention_digest() -> str:
    """Digest of the sources that decide how long attention takes."""
    return _digest(_ATTENTION_SOURCES)


def read(path: Path) -> dict[AnyFacts, dict[Any, Any]]:
    """Every table of a file. OSError where it cannot be read, ValueError, naming the file, where it is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {FORMAT}")
        return dict(map(_table, content["tables"]))
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is no table of choices: {reason}") from error


def merge(path: Path, facts: AnyFacts, entries: Entries) -> None:
    """Add entries to a file's table of these facts, in place of what it had of them; other processes may do the same.

    Whoever reads sees the file before or after. OSError where it cannot be written. A file that cannot be read as such
    is replaced, with a warning.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            tables = read(path)
        except FileNotFoundError:
            tables = {}
        except ValueError as error:
            _log.warning("openjev-fast: %s; it is replaced", error)
            tables = {}
        tables[facts] = {**tables.get(facts, {}), **entries}
        _replace(path, _text(tables))


def shipped(facts: AnyFacts, path: Path | None = None) -> dict[Any, Any]:
    """What the package's own file has for these facts; the driver may be another. path: SHIPPED where not given."""
    found: dict[Any, Any] = {}
    for known, entries in read(path or SHIPPED).items():
        if known._replace(driver=facts.driver) == facts:
            found.update(entries)
    return found


@dataclass(frozen=True)
class Store(Generic[FactsT, KeyT, EntryT]):
    """The user's own table of one set of facts, in a folder of such files."""

    facts: FactsT
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / self.facts.file_name

    def known(self) -> dict[KeyT, EntryT]:
        """What the package's file has, and in its place what the user's own has."""
        return {**shipped(self.facts), **self.read()}

    def read(self) -> dict[KeyT, EntryT]:
        """The user's own entries; none, with a warning, where the file cannot be read."""
        try:
            return read(self.path).get(self.facts, {})
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _log.warning("openjev-fast: what was tuned is left out: %s", error)
            return {}

    def add(self, entries: Mapping[KeyT, EntryT]) -> None:
        """Keep entries. OSError where the file cannot be written."""
        merge(self.path, self.facts, entries)


def stored_in() -> Path:
    """The folder of the user's own tables."""
    return build.cache_root() / "matmuls"


def _digest(names: Iterable[str]) -> str:
    folder = build.source_folder()
    return build.digest_of(part for name in names for part in (name, (folder / name).read_text()))


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _table(content: Mapping[str, Any]) -> tuple[AnyFacts, dict[Any, Any]]:
    kind = AttentionFacts if "attention" in content else Facts
    facts = kind(*(content[name] for name in kind._fields))
    if not all(isinstance(fact, str) for fact in facts):
        raise ValueError(f"facts must be text, found {facts!r}")
    if isinstance(facts, AttentionFacts):
        return facts, dict(map(_tiles, content["attention"]))
    return facts, dict(map(_product, content["products"]))


def _tiles(content: Mapping[str, Any]) -> tuple[Heads, TileEntry]:
    heads = Heads(*(content[name] for name in Heads._fields))
    few, default = content["few_queries"], content["default"]
    samples = tuple(Sample(*(sample[name] for name in Sample._fields)) for sample in content["samples"])
    if not all(type(size) is int and size > 0 for size in heads):
        raise ValueError(f"no attention has {heads!r}")
    whole = (few, default, *(sample.queries for sample in samples))
    figures = [us for sample in samples for us in (sample.small_us, sample.large_us)]
    if (
        not all(type(count) is int and count >= 0 for count in whole)
        or not all(isinstance(us, (int, float)) and us > 0 for us in figures)
        or not all(isinstance(sample.form, str) for sample in samples)
    ):
        raise ValueError(f"no tile sizes are {dict(content)!r}")
    return heads, TileEntry(few, default, samples)


def _product(content: Mapping[str, Any]) -> tuple[Product, Entry]:
    op, sizes = content["op"], [content[name] for name in ("rows", "features", "columns")]
    if op not in OPS or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"no product has op {op!r} and sizes {sizes}")
    measured = {name: content[name] for name in ("us", "default_us", "rel_l2", "pytorch_rel_l2")}
    if not all(isinstance(value, (int, float)) and value >= 0 for value in measured.values()):
        raise ValueError(f"figures must be numbers, found {measured}")
    return Product(op, *sizes), Entry(_choice(content["choice"]), **measured)


def _choice(content: Mapping[str, Any]) -> Choice:
    """A choice of what the file has of it; everything else is the default."""
    known = {field.name for field in fields(Choice)}
    if not set(content) <= known:
        raise ValueError(f"a choice has no {sorted(set(content) - known)}")
    values = {**content, "algorithm": tuple(content.get("algorithm", ()))}
    choice = Choice(**values)
    sizes = (choice.band, choice.tile, choice.parts, choice.form, choice.partials, choice.workspace)
    numbers = (*sizes, *choice.algorithm)
    if choice.way not in get_args(get_type_hints(Choice)["way"]) or not all(type(n) is int for n in numbers):
        raise ValueError(f"no choice is {dict(content)!r}")
    if choice.band and (choice.way != "pytorch" or choice.band < 0):
        raise ValueError(f"no choice is {dict(content)!r}")
    # An algorithm may compute what bands leave.
    words = {"cublaslt": (8,), "pytorch": (0, 8) if choice.band else (0,)}.get(choice.way, (0,))
    if type(choice.fused) is not bool or len(choice.algorithm) not in words:
        raise ValueError(f"no choice is {dict(content)!r}")
    return choice


def _text(tables: Mapping[AnyFacts, Entries]) -> str:
    """The file: a line for each entry, in a fixed order."""
    blocks = []
    for facts, entries in sorted(tables.items()):
        name, content = (
            ("attention", tiles_content)
            if isinstance(facts, AttentionFacts)
            else ("products", _product_content)
        )
        lines = [json.dumps(content(key, entry)) for key, entry in sorted(entries.items())]
        head = ", ".join(f'"{fact}": {json.dumps(value)}' for fact, value in facts._asdict().items())
        blocks.append("{" + head + f', "{name}": [\n' + ",\n".join(lines) + "\n]}")
    return f'{{"format": {FORMAT}, "tables": [' + ",\n".join(blocks) + "]}\n"


def _product_content(product: Product, entry: Entry) -> dict[str, Any]:
    default = asdict(Choice("pytorch"))
    chosen = {name: value for name, value in asdict(entry.choice).items() if value != default[name]}
    return {**product._asdict(), **asdict(entry), "choice": {"way": entry.choice.way, **chosen}}


def tiles_content(heads: Heads, entry: TileEntry) -> dict[str, Any]:
    """Heads and their entry as JSON has them."""
    samples = [sample._asdict() for sample in entry.samples]
    return {**heads._asdict(), "few_queries": entry.few_queries, "default": entry.default, "samples": samples}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which goes with the process that holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Put a file in place whole."""
    descriptor, scratch = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".writing", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
