"""KVCaches in folders: one .npy file for each array, and cache.json with everything else."""

import contextlib
import json
import os
import re
import stat
from pathlib import Path

import numpy as np

from .. import _core
from .._checks import FLOATS, choice, whole_number, whole_numbers
from .folders import (
    FILES,
    SAY_NOTHING,
    hidden_folder,
    open_all,
    put_in_place,
    remove_leftovers,
    wait_for_disk,
    wait_for_names,
)  # fmt: skip
from .store import UNBOUNDED, Memory, new_array, without_padding

FORMAT = {"format": "sdpa.KVCache", "version": 1}
SIZES = ("batch", "kv_heads", "head_dim", "value_dim", "capacity", "window", "keep", "group")
LONGEST = 2**40  # tokens
# The header that numpy.save writes for four axes in C order.  No other header is accepted.
NPY = re.compile(
    rb"\x93NUMPY\x01\0(..)\{'descr': '([<>|][a-z]\d)', 'fortran_order': False, "
    rb"'shape': \((\d{1,19}), (\d{1,19}), (\d{1,19}), (\d{1,19})\), \} *\n",
    re.DOTALL,
)
NPY_BYTES = 1024  # no such header is longer


def save(store, path, **others):
    """See KVCache.save.  `others` go into cache.json, too: `part`, if this is a part of a larger cache."""
    path = Path(path)
    if os.path.lexists(path):
        _check_replaceable(path)
    remove_leftovers(path)
    lengths, floors = store.state()
    now = store._now
    rows = min(len(store), store.bound())
    header = FORMAT | {name: getattr(store, name) for name in SIZES} | {
        "dtype": store.dtype.name, "rows": rows, "ring": None if store.window is None else now.ring,
        "lengths": lengths.tolist(), "floors": floors.tolist(),
    } | others  # fmt: skip
    with hidden_folder(path) as temporary:
        for name, array in now.memory.arrays.items():
            array = array[:, :, :rows]
            if now.length < 0:  # zeros in place of whatever is in memory
                array = without_padding(array, np.minimum(lengths, rows))
            write_npy(temporary / f"{name}.npy", _plain_bits(array))
        (temporary / "cache.json").write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        wait_for_disk(temporary)
        put_in_place(temporary, path)
        wait_for_names(path.parent)  # before the old save, which has the hidden name now, is removed


def write_npy(path, array):
    """As numpy.save, which says nothing where the disk is full and the last bytes do not fit."""
    with open(path, "wb") as file:
        header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for batch in array:
            for head in batch:  # whose tokens lie one after the other
                file.write(np.ascontiguousarray(head))


def load(kind, path, mmap, take_part=None):
    """See KVCache.load.  Where the tokens are part of a larger cache, take_part checks the header's `part`."""
    path = Path(path)
    with contextlib.ExitStack() as stack:
        files = open_all(path, stack)
        header = _read_header(path, files)
        if "part" in header and take_part is None:
            raise ValueError(
                f"path is {str(path)!r}: it holds what one rank has of an sdpa.distributed.KVCache, whose method load "
                "must be used"
            )
        try:
            _check_names(header)
            cache = kind(
                *(header[name] for name in SIZES[:3]), dtype=header["dtype"],
                **{name: header[name] for name in SIZES[3:]},
            )  # fmt: skip
            rows, *numbers = _numbers(cache, header)
            if take_part is not None:
                take_part(header.get("part"), cache, *numbers[:2])
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path}: cache.json is damaged: {error}") from error
        # All files are checked before memory is taken for any of them.
        store = cache._store
        new = store._now.memory.arrays
        found = {name: _NpyFile(path, f"{name}.npy", files) for name in new}
        for name, like in new.items():
            found[name].check((*like.shape[:2], rows, like.shape[3]), _plain_bits(like).dtype)
        arrays = {name: (file.mapped() if mmap else file.read()).view(new[name].dtype) for name, file in found.items()}
    keys = _core.Operand(arrays["keys"], arrays.get("key_scales"), cache.group)
    values = _core.Operand(arrays["values"], arrays.get("value_scales"), cache.group)
    store.commit(store.state_of(Memory(keys, values, store, frozen=bool(mmap)), *numbers))
    return cache


def _check_names(header):
    missing = [name for name in (*SIZES, "dtype", "rows", "ring", "lengths", "floors") if name not in header]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    if header["dtype"] not in ("int8", *FLOATS):
        raise ValueError(f"dtype is {header['dtype']!r}: it must be {choice(('int8', *FLOATS))}")


def _numbers(cache, header):
    """rows, lengths, floors, ring, extra and idle of a saved cache (see Store).  Raises if they are impossible."""
    for name in "lengths", "floors":  # before memory is taken for that many batches
        if not isinstance(header[name], list) or len(header[name]) != cache.batch:
            raise ValueError(f"{name} must be a list of {cache.batch} numbers, one for each batch")
    lengths, floors = (whole_numbers(name, header[name], (cache.batch,)) for name in ("lengths", "floors"))
    rows = whole_number("rows", header["rows"], least=0)
    window, ring = 1, UNBOUNDED
    if cache.window is not None:
        window, ring = cache.window, whole_number("ring", header["ring"], least=cache.window)
    most = LONGEST if cache.capacity is None else cache.capacity
    seen = np.maximum(floors, cache.keep)
    fits = [
        (lengths >= 0).all() and lengths.max() <= most and rows == min(lengths.max(), cache.keep + ring),
        (floors >= 0).all() and (floors <= lengths).all() and (cache.window is not None or not floors.any()),
        (seen >= lengths - ring).all() and (seen <= np.maximum(cache.keep, lengths - window + 1)).all(),
    ]
    if not all(fits):
        raise ValueError(f"lengths {header['lengths']}, floors {header['floors']} and {rows} rows do not fit")
    return rows, lengths, floors, ring, 1 if ring == UNBOUNDED else ring - window + 1, 0


def _plain_bits(array):
    """`array`, or its bits as integers if .npy files have no name for its dtype."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _check_replaceable(path):
    """Raises if `path` is anything but a folder with a saved cache and nothing else."""
    with contextlib.ExitStack() as stack:
        foreign = path.is_symlink()
        try:
            if not foreign:
                files = open_all(path, stack, everything=True)
                _read_header(path, files)
                foreign = not files.keys() <= set(FILES)
        except FileNotFoundError:  # the folder has gone meanwhile
            return
        except (ValueError, OSError) as error:
            if getattr(error, "errno", None) in SAY_NOTHING:
                raise
            foreign = True
    if foreign:
        raise ValueError(f"path is {str(path)!r}: what is there is not a saved cache, and is not overwritten")


def _read_header(path, files):
    try:
        if "cache.json" not in files:
            raise ValueError("it has no cache.json")
        if not stat.S_ISREG(os.fstat(files["cache.json"].fileno()).st_mode):
            raise ValueError("cache.json is no regular file")
        header = json.loads(files["cache.json"].read().decode())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither UTF-8 nor JSON
        raise ValueError(f"path is {str(path)!r}: it holds no saved cache: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT["format"]:
        raise ValueError(f"path is {str(path)!r}: it holds no saved cache")
    if header.get("version") != FORMAT["version"]:
        raise ValueError(f"path is {str(path)!r}: it has version {header.get('version')!r}, not {FORMAT['version']}")
    return header


class _NpyFile:
    """An array in a file."""

    def __init__(self, path, name, files):
        self.path, self.file = path / name, files.get(name)
        if self.file is None:
            raise ValueError(f"{self.path}: not a whole .npy file: there is none")
        status = os.fstat(self.file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.path}: not a whole .npy file: it is no regular file")
        match = NPY.match(self.file.read(NPY_BYTES))
        if match is None or match.end() != 10 + int.from_bytes(match[1], "little"):
            raise ValueError(f"{self.path}: not a whole .npy file: its header is not that of an array of four axes")
        self.begin, self.end = match.end(), status.st_size
        self.descr, self.shape = match[2].decode(), tuple(map(int, match.groups()[2:]))

    def check(self, shape, dtype):
        if (self.shape, self.descr) != (shape, dtype.str):
            raise ValueError(f"{self.path}: it holds {self.shape} {self.name()}, not {shape} {dtype}")
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if self.end != self.begin + size:
            raise ValueError(
                f"{self.path}: not a whole .npy file: it has {self.end} bytes, and must have {self.begin + size}"
            )
        self.dtype = dtype

    def name(self):
        try:
            return np.dtype(self.descr).name
        except TypeError:
            return self.descr

    def mapped(self):
        return np.asarray(np.memmap(self.file, self.dtype, "r", self.begin, self.shape))

    def read(self):
        array = new_array(self.shape, self.dtype)
        rest = memoryview(array.reshape(-1).view(np.uint8)).cast("B") if array.size else memoryview(b"")
        self.file.seek(self.begin)
        while rest:
            count = self.file.readinto(rest)
            if not count:
                raise ValueError(f"{self.path}: not a whole .npy file: it ends while it is read")
            rest = rest[count:]
        return array
