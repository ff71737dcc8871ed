"""KVCaches in folders: one .npy file for each array, and cache.json with everything else."""

import json
import os
import secrets
import shutil
from pathlib import Path

import numpy as np

from ._cache_store import UNBOUNDED, Memory, new_array, whole_number, without_padding
from ._problem import _whole_numbers

FORMAT = {"format": "sdpa.KVCache", "version": 1}
ARRAYS = ("keys", "values", "key_scales", "value_scales")
SIZES = ("batch", "kv_heads", "head_dim", "value_dim", "capacity", "window", "keep", "group")


def save(cache, path):
    """See KVCache.save."""
    path = Path(path)
    if os.path.lexists(path):
        _check_replaceable(path)
    lengths, floors = cache.state()
    rows = min(len(cache), cache.bound())
    header = FORMAT | {name: getattr(cache, name) for name in SIZES} | {
        "dtype": cache.dtype.name, "rows": rows, "ring": None if cache.window is None else cache._now.ring,
        "lengths": lengths.tolist(), "floors": floors.tolist(),
    }  # fmt: skip
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    temporary.mkdir()
    try:
        for name, array in zip(ARRAYS, cache._now.arrays):
            array = array[:, :, :rows]
            if cache._now.length < 0:  # in place of what happens to be in memory
                array = without_padding(array, np.minimum(lengths, rows))
            np.save(temporary / f"{name}.npy", _plain_bits(array), allow_pickle=False)
        (temporary / "cache.json").write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        _put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(kind, path, mmap):
    """See KVCache.load."""
    path = Path(path)
    header = _read_header(path)
    try:
        cache = kind(
            *(header[name] for name in SIZES[:3]), dtype=header["dtype"],
            **{name: header[name] for name in SIZES[3:]},
        )  # fmt: skip
        numbers = _numbers(cache, header)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise ValueError(f"{path}: cache.json is damaged: {error}") from error
    arrays = [
        _read_array(path / f"{name}.npy", like, header["rows"], mmap)
        for name, like in zip(ARRAYS, cache._now.arrays)
    ]
    cache.commit(cache.state_of(Memory(arrays, cache, frozen=bool(mmap)), *numbers))
    return cache


def _numbers(cache, header):
    """Lengths, floors, ring, extra and idle of a saved cache, if they can be."""
    lengths, floors = (_whole_numbers(name, header[name], (cache.batch,)) for name in ("lengths", "floors"))
    rows = whole_number("rows", header["rows"], least=0)
    ring, extra = UNBOUNDED, 1
    if cache.window is not None:
        ring = whole_number("ring", header["ring"], least=cache.window)
        extra = ring - cache.window + 1
    most = UNBOUNDED if cache.capacity is None else cache.capacity
    fits = [
        (lengths >= 0).all() and lengths.max() <= most and rows == min(lengths.max(), cache.bound(ring)),
        (floors >= np.maximum(lengths - ring, 0)).all() and (cache.window is not None or not floors.any()),
    ]
    if not all(fits):
        raise ValueError(f"lengths {header['lengths']}, floors {header['floors']} and {rows} rows do not fit")
    return lengths, floors, ring, extra, 0


def _plain_bits(array):
    """What .npy files have no name for, as whole numbers."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _check_replaceable(path):
    """Raises where `path` is anything but a saved cache, with nothing beside it."""
    foreign = True
    if path.is_dir() and not path.is_symlink():
        names = {entry.name for entry in path.iterdir()}
        foreign = "cache.json" not in names or not names <= {"cache.json", *(f"{name}.npy" for name in ARRAYS)}
        if not foreign:
            try:
                _read_header(path)
            except ValueError:
                foreign = True
    if foreign:
        raise ValueError(f"path is {str(path)!r}: what is there is not a saved cache, and is not overwritten")


def _put_in_place(new, path):
    """Rename the folder `new` to `path`, where a saved cache may be."""
    if not os.path.lexists(path):
        new.rename(path)
        return
    old = new.with_name(new.name + ".old")
    path.rename(old)
    try:
        new.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _read_header(path):
    if not path.exists():
        raise FileNotFoundError(f"path is {str(path)!r}: there is nothing")
    try:
        header = json.loads((path / "cache.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: neither UTF-8 nor JSON
        raise ValueError(f"path is {str(path)!r}: it holds no saved cache: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT["format"]:
        raise ValueError(f"path is {str(path)!r}: it holds no saved cache")
    if header.get("version") != FORMAT["version"]:
        raise ValueError(f"path is {str(path)!r}: it has version {header.get('version')!r}, not {FORMAT['version']}")
    return header


def _read_array(path, like, rows, mmap):
    """The array in the file `path`, which must be as `like` but with `rows` rows."""
    shape = (*like.shape[:2], rows, like.shape[3])
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # also to read: it looks at the length of the file
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise ValueError(f"{path}: not a whole .npy file: {error}") from None
    wanted = _plain_bits(like).dtype
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != wanted:
        found = f"{array.shape} {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{path}: it holds {found}, not {shape} {wanted}")
    if mmap:
        return np.asarray(np.ascontiguousarray(array)).view(like.dtype)
    copy = new_array(shape, like.dtype)
    copy.view(wanted)[...] = array
    return copy
