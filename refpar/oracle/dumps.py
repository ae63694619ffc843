"""Dumps: somebody's numbers in files, read without trusting them.

A dump is one ``.safetensors`` or ``.npz`` file, several (one a rank), or a folder of them. Nothing is ever unpickled.
What a file claims is checked before memory is taken: shapes and types against what is expected, sizes against the
length of the file. Whatever is wrong with it ends in one :class:`BadDump`, with one line of text.

How the files of several ranks make a whole is said by a small JSON::

    {"version": 1,
     "rules": [{"names": "*/gradient/*.mlp.up.weight", "axis": 1, "groups": [[0, 1], [2, 3]]},
               {"names": "*/state/*", "flat": true}]}

Files are ranks, in the order given. The first rule whose pattern fits a name says how its pieces are put together: one
after another along ``axis``, or ``flat``, as pieces of the flattened whole (zero-length pieces are fine). Each of the
``groups`` makes one whole; without groups, all ranks that have the name do. What no rule names is whole wherever it
is. Several wholes of one name are *replicas*, and must be equal bit for bit.

A file may say itself where its pieces belong, as those written by ``refpar.adapters.torch`` do: in the metadata entry
``refpar`` of a safetensors file, as JSON, ``{"version": 1, "pieces": {NAME: {"shape": [...], "start": [...]}}}``, with
``start`` the index of the piece's first element, or ``"flat"``, its position in the flattened whole.
"""

from __future__ import annotations

import fnmatch
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from refpar.checks import short

HostArray = npt.NDArray[Any]
Shape = tuple[int, ...]

MOST_JSON = 64 << 20
"""Bytes of JSON that are read at most: as a header, as metadata, or as a file."""
REPLICAS = "replicas differ"
"""How a report of copies that should be equal begins."""
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64",
}  # fmt: skip


INSTEAD = {
    b"\x93NUM": "one array, without a name: write all of them by numpy.savez(PATH, **arrays)",
    b"\x80": "a pickle, and nothing is unpickled: write it by numpy.savez or safetensors",
}
"""What a file that is no dump is, by how it begins, and what to do about it."""


class BadDump(Exception):
    """A file that cannot be used; the text is one line."""


@dataclass(frozen=True)
class Entry:
    """What a file claims of one array, checked against the file's length.

    Attributes
    ----------
    shape : its shape
    dtype : name of its type
    """

    shape: Shape
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Opened:
    """One file, of which so far only the table of contents has been read.

    Attributes
    ----------
    entries : what it holds, by name
    metadata : what it says of itself, for ``.safetensors``
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, str] = {}
        try:
            with open(path, "rb") as file:
                beginning = file.read(4)
            zipped = beginning.startswith(b"PK")
            self.entries = self._contents_npz() if zipped else self._contents_safetensors(beginning)
        except OSError as error:
            raise BadDump(f"{path}: {error.strerror or error}") from None
        self.zipped = zipped

    def read(self, name: str) -> HostArray:
        """Return one array."""
        entry = self.entries[name]
        try:
            data = self._bytes_npz(name, entry) if self.zipped else self._bytes_safetensors(name, entry)
        except Exception as error:  # whatever a broken stream raises: zlib's, lzma's, zipfile's own
            raise BadDump(f"{self.path}: {name}: {_line(error)}") from None
        return data

    def _contents_safetensors(self, beginning: bytes) -> dict[str, Entry]:
        try:
            with safe_open(self.path, "np") as file:
                self.metadata = file.metadata() or {}
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                return {
                    name: Entry(tuple(s.get_shape()), DTYPES.get(s.get_dtype(), s.get_dtype()))
                    for name, s in slices.items()
                }
        except SafetensorError as error:
            for start, what in INSTEAD.items():
                if beginning.startswith(start):
                    raise BadDump(f"{self.path}: this is {what}") from None
            raise BadDump(f"{self.path}: neither a safetensors nor an npz file, or cut off: {_line(error)}") from None

    def _bytes_safetensors(self, name: str, entry: Entry) -> HostArray:
        if entry.dtype not in DTYPES.values():
            raise ValueError(f"arrays of type {entry.dtype} are not read: write them in a wider one, such as float32")
        with safe_open(self.path, "np") as file:
            return np.asarray(file.get_tensor(name))

    # -- npz: a zip of npy files

    def _contents_npz(self) -> dict[str, Entry]:
        entries = {}
        try:
            with zipfile.ZipFile(self.path) as archive:
                if any(name.endswith("data.pkl") for name in archive.namelist()):
                    raise BadDump(
                        f"{self.path}: this is what torch.save writes, and nothing is unpickled: write it by "
                        "safetensors.torch.save_file"
                    )
                for info in archive.infolist():
                    name = info.filename.removesuffix(".npy")
                    where = f"{self.path}: {short(name)}"
                    if info.file_size > 1032 * info.compress_size + 4096:  # deflate cannot do better
                        raise BadDump(f"{where}: {info.compress_size} bytes cannot hold {info.file_size}")
                    if info.flag_bits & 1:
                        raise BadDump(f"{where}: it is encrypted")
                    with archive.open(info) as file:
                        shape, _, dtype = _npy_header(file)
                    if dtype.hasobject or dtype.kind not in "biuf" or dtype.itemsize > 8:
                        raise BadDump(f"{where}: arrays of type {short(dtype)} are not read")
                    if not _naturals(list(shape)) or math.prod(shape) * dtype.itemsize > info.file_size:
                        raise BadDump(f"{where}: {info.file_size} bytes are no {dtype} of shape {short(shape)}")
                    entries[name] = Entry(tuple(shape), dtype.name)
        except BadDump:
            raise
        except Exception as error:
            raise BadDump(f"{self.path}: no npz file that can be read: {_line(error)}") from None
        return entries

    def _bytes_npz(self, name: str, entry: Entry) -> HostArray:
        with zipfile.ZipFile(self.path) as archive:
            member = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
            with archive.open(member) as file:
                shape, fortran, dtype = _npy_header(file)
                if (tuple(shape), dtype.name) != (entry.shape, entry.dtype):
                    raise ValueError("two arrays have this name")
                raw = file.read(entry.size * dtype.itemsize)
                if len(raw) != entry.size * dtype.itemsize:
                    raise ValueError("its data is cut off")
                file.read()  # to the end, where the checksum is compared
        return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C")


def _npy_header(file: Any) -> tuple[Shape, bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


# ------------------------------------------------------------------------------------------ many files as one


@dataclass(frozen=True)
class Piece:
    """Part of a whole: which rank has it, and where it belongs.

    Attributes
    ----------
    rank : number of the file
    start : index of its first element in the whole; or None
    flat : position in the flattened whole; or None
    """

    rank: int
    shape: Shape
    start: Shape | None
    flat: int | None = None

    def place(self, whole: HostArray) -> HostArray:
        """Return the part of ``whole`` that this piece is, as a view."""
        if self.start is None:
            assert self.flat is not None
            return whole.reshape(-1)[self.flat : self.flat + math.prod(self.shape)]
        return whole[tuple(slice(s, s + n) for s, n in zip(self.start, self.shape, strict=True))]


@dataclass(frozen=True)
class Value:
    """A whole value of a dump.

    Attributes
    ----------
    shape, dtype : of the whole
    copies : the pieces of each whole; several where ranks hold replicas
    """

    shape: Shape
    dtype: str
    copies: tuple[tuple[Piece, ...], ...]

    def rank_of(self, index: tuple[int, ...], copy: int = 0) -> int:
        """Return the rank that holds an element, in one of the copies."""
        pieces = self.copies[copy]
        for piece in pieces if len(pieces) > 1 else ():
            mark = np.zeros(self.shape, bool)
            piece.place(mark)[...] = True
            if mark[index]:
                return piece.rank
        return pieces[0].rank


@dataclass
class Dump:
    """All values of a dump, by name; nothing is read before it is asked for.

    Attributes
    ----------
    files : by rank
    values : by name
    order : names in the order in which they were computed, where the files say so
    """

    files: list[Opened]
    values: dict[str, Value]
    order: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Number of ranks it comes from."""
        return len(self.files)

    def read(self, name: str) -> tuple[HostArray, str]:
        """Return a whole value, and what is wrong with its replicas: empty where they are equal bit for bit."""
        value = self.values[name]
        whole, wrong = self._assemble(name, value, value.copies[0]), ""
        for number, copy in enumerate(value.copies[1:], 1):
            other = self._assemble(name, value, copy)
            differ = other.view(_bits(other)) != whole.view(_bits(whole)) if other.size else np.zeros(0, bool)
            if differ.any():
                at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), whole.shape)) if whole.ndim else ()
                place = f"element [{', '.join(map(str, at))}] " if at else ""
                one, two = value.rank_of(at), value.rank_of(at, number)
                wrong = f"{place}is {whole[at]} on rank {one} and {other[at]} on rank {two}"
                break
        return whole, wrong

    def _assemble(self, name: str, value: Value, pieces: Sequence[Piece]) -> HostArray:
        if len(pieces) == 1 and pieces[0].shape == value.shape:
            return np.ascontiguousarray(self.files[pieces[0].rank].read(name)).reshape(value.shape)
        whole = np.empty(value.shape, value.dtype)
        for piece in pieces:
            place = piece.place(whole)
            place[...] = self.files[piece.rank].read(name).reshape(place.shape)
        return whole


def open_dump(paths: Sequence[Path], sharding: Path | None = None) -> Dump:
    """Open a dump.

    Parameters
    ----------
    paths : files, one a rank; or one folder, whose files are taken in the order of the numbers in their names
    sharding : the JSON that says how ranks' pieces make a whole; ``shards.json`` in the folder by default

    Raises
    ------
    BadDump
        Where a file cannot be read, or pieces do not fit together.
    """
    if len(paths) == 1 and paths[0].is_dir():
        folder = paths[0]
        if (folder / "SHA256SUMS").exists():
            raise BadDump(f"{folder}: this is a golden, which comes first; its answer is {folder}/expected.safetensors")
        paths = sorted((p for p in folder.iterdir() if p.suffix in (".safetensors", ".npz")), key=_by_number)
        if not paths:
            raise BadDump(f"{folder}: no .safetensors or .npz file in it")
        if sharding is None and (folder / "shards.json").exists():
            sharding = folder / "shards.json"
    files = [Opened(path) for path in paths]
    rules = read_rules(sharding, len(files)) if sharding else []
    told = [read_told(file) for file in files]
    values: dict[str, Value] = {}
    holders: dict[str, list[int]] = {}
    for rank, file in enumerate(files):
        for name in file.entries:
            holders.setdefault(name, []).append(rank)
    for name, ranks in holders.items():
        values[name] = whole_of(name, ranks, files, rules, told)
    order = max((list(t.get("order", ())) for t in told), key=len, default=[])
    return Dump(files, values, [name for name in order if name in values])


def whole_of(
    name: str, ranks: list[int], files: Sequence[Opened], rules: Sequence[Mapping[str, Any]], told: Sequence[Any]
) -> Value:
    """Return how the pieces of one name fit together."""
    entries = {rank: files[rank].entries[name] for rank in ranks}
    types = sorted({entry.dtype for entry in entries.values()})
    if len(types) > 1:
        raise BadDump(f"{name} is {' and '.join(types)} on different ranks: it must be of one type")
    rule = next((rule for rule in rules if fnmatch.fnmatchcase(name, rule["names"])), None)
    if rule is None and any(name in t.get("pieces", {}) for t in told):
        return told_whole(name, entries, told, types[0])
    groups = [[rank] for rank in ranks]
    if rule is not None:
        groups = [[rank for rank in group if rank in entries] for group in rule.get("groups", [ranks])]
        groups = [group for group in groups if group]
    copies = []
    for group in groups:
        parts = [entries[rank] for rank in group]
        copies.append(joined(name, group, [part.shape for part in parts], rule or {}))
    shapes = sorted({shape for shape, _ in copies})
    if rule is not None and rule.get("flat") and "shape" in rule:
        shapes = [tuple(rule["shape"])]
    if len(shapes) != 1:
        raise BadDump(f"{name} has shapes {' and '.join(map(str, shapes))} on different ranks: say how it is sharded")
    return Value(shapes[0], types[0], tuple(pieces for _, pieces in copies))


def joined(name: str, group: Sequence[int], shapes: Sequence[Shape], rule: Mapping[str, Any]) -> tuple[Shape, Any]:
    """Return the whole shape and the pieces of one group."""
    starts, axis = [], rule.get("axis", 0)
    if rule.get("flat"):
        sizes = [math.prod(shape) for shape in shapes]
        flat = tuple(Piece(r, s, None, sum(sizes[:i])) for i, (r, s) in enumerate(zip(group, shapes, strict=True)))
        return (sum(sizes),), flat
    if len(group) == 1:
        return shapes[0], (Piece(group[0], shapes[0], (0,) * len(shapes[0])),)
    if not all(len(shape) == len(shapes[0]) and -len(shape) <= axis < len(shape) for shape in shapes):
        raise BadDump(f"{name}: pieces of shapes {', '.join(map(str, shapes))} cannot be joined along axis {axis}")
    axis %= len(shapes[0])
    if len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
        raise BadDump(f"{name}: pieces of shapes {', '.join(map(str, shapes))} cannot be joined along axis {axis}")
    for i in range(len(shapes)):
        starts.append(tuple(sum(s[axis] for s in shapes[:i]) if a == axis else 0 for a in range(len(shapes[0]))))
    length = sum(shape[axis] for shape in shapes)
    whole = (*shapes[0][:axis], length, *shapes[0][axis + 1 :])
    return whole, tuple(Piece(r, s, b) for r, s, b in zip(group, shapes, starts, strict=True))


def told_whole(name: str, entries: Mapping[int, Entry], told: Sequence[Any], dtype: str) -> Value:
    """Return how pieces fit together whose files say where they belong. Pieces of one place are replicas."""
    places: dict[Any, list[Piece]] = {}
    shapes = set()
    for rank, entry in entries.items():
        claim = told[rank].get("pieces", {}).get(name, {"shape": list(entry.shape), "start": [0] * len(entry.shape)})
        shape, start, flat = claim.get("shape"), claim.get("start"), claim.get("flat")
        if not _naturals(shape) or not (_naturals(start) or (_naturals([flat]) and start is None)):
            raise BadDump(f"{name} on rank {rank}: its piece needs a shape, and a start or a flat position")
        size = math.prod(shape)
        inside = flat + entry.size <= size if start is None else len(start) == len(entry.shape) == len(shape) and all(
            s + n <= whole for s, n, whole in zip(start, entry.shape, shape, strict=True)
        )  # fmt: skip
        if not inside:
            raise BadDump(f"{name} on rank {rank}: its piece reaches beyond the shape {short(shape)}")
        shapes.add(tuple(shape))
        piece = Piece(rank, entry.shape, None if start is None else tuple(start), flat)
        if entry.size or not size:
            places.setdefault((entry.shape, piece.start, flat), []).append(piece)
    if len(shapes) > 1:
        raise BadDump(f"{name} has shapes {' and '.join(map(str, sorted(shapes)))} on different ranks")
    (shape,) = shapes
    covered = sum(math.prod(pieces[0].shape) for pieces in places.values())
    if covered != math.prod(shape):
        raise BadDump(f"{name}: its pieces have {covered} elements, not the {math.prod(shape)} of shape {shape}")
    written = np.zeros(shape, bool)
    for pieces in places.values():
        pieces[0].place(written)[...] = True
    if not written.all():
        raise BadDump(f"{name}: its pieces overlap, and leave {np.count_nonzero(~written)} elements out")
    number = max((len(pieces) for pieces in places.values()), default=0)
    copies = [tuple(pieces[i] if i < len(pieces) else pieces[0] for pieces in places.values()) for i in range(number)]
    return Value(shape, dtype, tuple(copies))


def read_rules(path: Path, ranks: int) -> list[dict[str, Any]]:
    """Read the JSON that says how pieces make a whole."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("version") != 1 or not isinstance(content.get("rules"), list):
        raise BadDump(f'{path}: it must be {{"version": 1, "rules": [...]}}')
    for rule in content["rules"]:
        if not isinstance(rule, dict) or not isinstance(rule.get("names"), str):
            raise BadDump(f"{path}: the rule {short(rule)} does not say which names it is for")
        if unknown := set(rule) - {"names", "axis", "flat", "groups", "shape"}:
            raise BadDump(
                f"{path}: {short(sorted(unknown)[0])} is no part of a rule: names, axis, flat, groups, shape are"
            )
        if ("axis" in rule) == bool(rule.get("flat")):
            raise BadDump(f"{path}: the rule for {short(rule['names'])} needs an axis, or flat: true")
        if "axis" in rule and not (isinstance(rule["axis"], int) and not isinstance(rule["axis"], bool)):
            raise BadDump(f"{path}: the axis {short(rule['axis'])} is no whole number")
        groups = rule.get("groups", [])
        if not isinstance(groups, list) or not all(
            _naturals(group) and max(group, default=0) < ranks for group in groups
        ):
            raise BadDump(f"{path}: groups must be lists of ranks from 0 to {ranks - 1}, not {short(groups)}")
        if "shape" in rule and not _naturals(rule["shape"]):
            raise BadDump(f"{path}: the shape {short(rule['shape'])} is none")
    return list(content["rules"])


def read_told(file: Opened) -> dict[str, Any]:
    """Return what a file says of its own pieces."""
    if "refpar" not in file.metadata:
        return {}
    told = parsed(file.metadata["refpar"].encode(), f"{file.path}: metadata")
    if not isinstance(told, dict) or told.get("version") != 1 or not isinstance(told.get("pieces", {}), dict):
        raise BadDump(f'{file.path}: its metadata entry "refpar" is not of version 1')
    if not all(isinstance(piece, dict) for piece in told.get("pieces", {}).values()):
        raise BadDump(f'{file.path}: its metadata entry "refpar" has a piece that is no object')
    order = told.get("order", [])
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise BadDump(f'{file.path}: its metadata entry "refpar" has an order that is no list of names')
    return told


def read_json(path: Path) -> Any:
    """Read a JSON file of reasonable length."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_JSON + 1)
    except OSError as error:
        raise BadDump(f"{path}: {error.strerror or error}") from None
    if len(data) > MOST_JSON:
        raise BadDump(f"{path}: more than {MOST_JSON >> 20} MiB of JSON are not read")
    return parsed(data, str(path))


def parsed(data: bytes, where: str) -> Any:
    """Parse JSON; numbers too long, nesting too deep and bytes that are no text are refused."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadDump(f"{where}: no JSON that can be read: {_line(error)}") from None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _by_number(path: Path) -> tuple[int, str]:
    digits = "".join(c for c in path.stem if c.isdigit())
    return int(digits[:18] or 0), path.name


def _bits(x: HostArray) -> str:
    return f"u{x.dtype.itemsize}"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
