"""Saved caches: one save at a time, whatever other processes do; and files that are not what was saved."""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.accuracy import assert_same_bits
from support.draw import float32, float64, rng

import sdpa
from sdpa import KVCache
from sdpa._cache import files, folders, store

PACKAGE = Path(sdpa.__file__).parent  # which the children import, too


def numbered(number):
    """A cache that holds its number only."""
    cache = KVCache(1, 1, 64)
    cache.append(*np.full((2, 1, 1, 1 + number % 40, 64), number, np.float32))
    return cache


def number_of(cache):
    (number,) = set(cache.keys.ravel().tolist()) | set(cache.values.ravel().tolist())
    assert len(cache) == 1 + number % 40 and cache.keys.shape == cache.values.shape
    return number


PRELUDE = f"""
import sys
sys.path.insert(0, {str(PACKAGE.parent)!r})
import numpy as np
from sdpa import KVCache
from sdpa._cache import files, folders
path = sys.argv[1]
{inspect.getsource(numbered)}
"""
WITHOUT_EXCHANGE = "folders._exchange = lambda new, path: False\n"


def start(code, *arguments):
    command = [sys.executable, "-c", PRELUDE + code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return out


SAVE_AGAIN = "for i in range(80): numbered(int(sys.argv[2]) + i).save(path)\n"
of_systems = pytest.mark.parametrize("prelude", ["", WITHOUT_EXCHANGE], ids=["exchanged", "renamed twice"])


@of_systems
@pytest.mark.parametrize("writers", [1, 3])
def test_a_load_sees_one_save(tmp_path, prelude, writers):
    """And there always is one, whoever replaces it, and however often."""
    path = tmp_path / "cache"
    numbered(0).save(path)
    processes = [start(prelude + SAVE_AGAIN, path, 1000 * i) for i in range(writers)]
    loads, seen = 0, set()
    while loads < 20 or any(process.poll() is None for process in processes):
        seen.add(number_of(KVCache.load(path, mmap=loads % 2 == 1)))
        loads += 1
    for process in processes:
        finish(process)
    assert seen <= {1000 * i + j for i in range(writers) for j in range(80)}
    assert number_of(KVCache.load(path)) % 1000 == 79
    assert [place.name for place in tmp_path.iterdir()] == ["cache"]


HALF_WAY = """
save = files.write_npy
def slow(file, array):
    print(file, flush=True)
    sys.stdin.readline()
    save(file, array)
files.write_npy = slow
numbered(7).save(path)
"""


@pytest.mark.skipif(os.name != "posix", reason="there are no locks elsewhere")
def test_a_killed_save_leaves_the_old_one(tmp_path):
    """What it wrote is removed by the next save; what others are writing is not."""
    path = tmp_path / "cache"
    numbered(3).save(path)
    killed, alive = start(HALF_WAY, path), start(HALF_WAY, path)
    folders = [Path(process.stdout.readline()).parent for process in (killed, alive)]
    killed.kill()
    killed.communicate()
    assert number_of(KVCache.load(path)) == 3 and all(folder.exists() for folder in folders)
    numbered(4).save(path)
    assert number_of(KVCache.load(path)) == 4
    assert not folders[0].exists() and folders[1].exists()
    alive.communicate("\n\n", timeout=60)
    assert alive.returncode == 0 and number_of(KVCache.load(path)) == 7
    assert [place.name for place in tmp_path.iterdir()] == ["cache"]


def test_killed_between_two_renames(tmp_path, monkeypatch):
    """Where the system cannot exchange folders: the old save counts, until the next one has taken its place."""
    monkeypatch.setattr(folders, "_exchange", lambda new, path: False)
    path = tmp_path / "cache"
    numbered(3).save(path)
    path.rename(tmp_path / f".cache.{'0' * 16}.tmp.old")
    assert number_of(KVCache.load(path)) == 3
    assert number_of(KVCache.load(path)) == 3
    numbered(4).save(path)
    assert number_of(KVCache.load(path)) == 4
    numbered(5).save(path)
    assert [place.name for place in tmp_path.iterdir()] == ["cache"]


def test_two_saves_remove_the_same_folder(tmp_path, monkeypatch):
    """What one of them finds gone does not keep it from the rest."""
    path = tmp_path / "cache"
    numbered(3).save(tmp_path / f".cache.{'0' * 16}.tmp")
    unlink = os.unlink

    def unlink_as_second(*arguments, **options):
        unlink(*arguments, **options)  # the other was faster
        unlink(*arguments, **options)

    monkeypatch.setattr(os, "unlink", unlink_as_second)
    numbered(4).save(path)
    assert [place.name for place in tmp_path.iterdir()] == ["cache"]


def test_a_save_puts_its_folder_back_where_another_has_just_come(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_exchange", lambda new, path: False)
    path, other = tmp_path / "cache", tmp_path / "other"
    numbered(3).save(path)
    numbered(5).save(other)
    lexists, removed = os.path.lexists, []

    def lexists_before_the_other(name):
        """The other takes away what has just got its place, and puts its own there after the answer."""
        if any(tmp_path.glob("*.old")) and name == path and not removed:
            shutil.rmtree(path)
            removed.append(path)
            answer = lexists(name)
            other.rename(path)
            return answer
        return lexists(name)

    monkeypatch.setattr(os.path, "lexists", lexists_before_the_other)
    numbered(4).save(path)
    assert removed and number_of(KVCache.load(path)) == 5
    assert [place.name for place in tmp_path.iterdir()] == ["cache"]


@of_systems
def test_signals_while_saving(tmp_path, prelude):
    """Killed at any time: one save or the other, and nothing that a third does not clear away."""
    path = tmp_path / "cache"
    for i in range(3):
        numbered(1).save(path)
        process = start(prelude + "print(flush=True)\nwhile True:\n for i in range(1, 9): numbered(i).save(path)", path)
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01 * i)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert 1 <= number_of(KVCache.load(path)) <= 8
    numbered(2).save(path)
    numbered(2).save(path)
    assert [place.name for place in tmp_path.iterdir()] == ["cache"]


STEPS = """
import os
EVENTS = ("open", "os.", "shutil.", "ctypes.", "fcntl.", "tempfile.", "file written")

def die_at(number):
    count = 0
    def step(event, arguments):
        nonlocal count
        if event.startswith(EVENTS):
            if count == number:
                os._exit(9)
            count += 1
    sys.addaudithook(step)
    save = files.write_npy
    def half_of(file, array):  # what a file holds while it is written
        save(file, array)
        size = os.path.getsize(file)
        os.truncate(file, size // 2)
        step("file written", ())
        save(file, array)
    files.write_npy = half_of

def number_at(path):
    cache = KVCache.load(path)
    (number,) = {*cache.keys.ravel().tolist(), *cache.values.ravel().tolist()}
    return int(number)

old, new = numbered(3), numbered(4)
there = sys.argv[2] == "over an old one"
code, number, seen = 9, 0, set()
while code == 9:
    if there:
        old.save(path)
    child = os.fork()
    if child == 0:
        die_at(number)
        new.save(path)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        seen.add(number_at(path))
    except FileNotFoundError:
        assert not there, number
        seen.add(0)
    else:
        if not there:
            new.save(path)  # which clears away what was left
            import shutil
            assert os.listdir(os.path.dirname(path)) == ["cache"], number
            shutil.rmtree(path)
    number += 1
if there:
    new.save(path)
    assert os.listdir(os.path.dirname(path)) == ["cache"]
print(code, number, sorted(seen))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside threads
@of_systems
@pytest.mark.parametrize("place", ["over an old one", "where nothing is"])
def test_killed_at_every_step(tmp_path, prelude, place):
    """At each call of the system, and while each file is written: the old save, or the new one, or nothing if there was
    nothing; and the next save clears away what is left."""
    code, number, seen = finish(start(prelude + STEPS, tmp_path / "cache", place)).split(maxsplit=2)
    assert code == "0" and int(number) > 12
    assert seen.strip() == ("[3, 4]" if place == "over an old one" else "[0, 4]")


@pytest.mark.skipif(sys.platform != "linux", reason="the names of descriptors are known on Linux alone")
@of_systems
def test_on_the_disk_before_it_has_its_place(tmp_path, prelude, monkeypatch):
    """All files and their names; then their new place, and only then the old save goes."""
    path, said = tmp_path / "cache", []
    numbered(3).save(path)
    fsync, unlink, rename, exchange = os.fsync, os.unlink, os.rename, folders._exchange

    def say(what, function, name_of):
        def call(*arguments, **options):
            said.append((what, name_of(*arguments, **options)))
            return function(*arguments, **options)

        return call

    if prelude:
        monkeypatch.setattr(folders, "_exchange", lambda new, path: False)
        monkeypatch.setattr(os, "rename", say("put", rename, lambda old, new: new.name))
    else:
        monkeypatch.setattr(folders, "_exchange", say("put", exchange, lambda new, path: path.name))
    monkeypatch.setattr(
        os, "fsync", say("wait", fsync, lambda number: Path(os.readlink(f"/proc/self/fd/{number}")).name)
    )
    monkeypatch.setattr(os, "unlink", say("remove", unlink, lambda name, **_: name))
    numbered(4).save(path)
    at = said.index(("put", "cache"))
    waited = [name for what, name in said[:at] if what == "wait"]
    assert {*waited[:-1]} == {"cache.json", "keys.npy", "values.npy"} and waited[-1].startswith(".cache.")
    after = [step for step in said[at + 1 :] if step[0] != "put"]
    first = after.index(("wait", tmp_path.name))
    removed = [name for what, name in said if what == "remove"]
    assert {*removed} == {"cache.json", "keys.npy", "values.npy"}
    assert prelude or not any(what == "remove" for what, _ in after[:first])


@pytest.mark.skipif(os.name != "posix", reason="there are no such limits elsewhere")
@pytest.mark.parametrize("limit", ["a full disk", "too few files"])
@pytest.mark.parametrize("there", [True, False])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, limit, there):
    """An error of the system, and nothing that is half written; what has its hidden name goes with the next save."""
    path = tmp_path / "cache"
    if there:
        numbered(3).save(path)
    code = """
import resource
cache = numbered(39)
kind, most = {
    "a full disk": (resource.RLIMIT_FSIZE, [0, 1, 100, 128, 9000, 10300]),
    "too few files": (resource.RLIMIT_NOFILE, range(3, 5)),
}[sys.argv[2]]
_, hard = resource.getrlimit(kind)
for number in most:
    resource.setrlimit(kind, (number, hard))
    try:
        cache.save(path)
        print("saved", number)
    except OSError as error:
        print(type(error).__name__)
    resource.setrlimit(kind, (hard, hard))
"""
    said = finish(start(code, path, limit)).split()
    assert said.count("OSError") == len(said) >= 2, said
    assert path.exists() == there and (not there or number_of(KVCache.load(path)) == 3)
    numbered(4).save(path)
    assert number_of(KVCache.load(path)) == 4 and [place.name for place in tmp_path.iterdir()] == ["cache"]


def test_what_is_no_save_is_not_replaced(tmp_path):
    target = tmp_path / "elsewhere"
    numbered(1).save(target)
    for name, there in ("link", target), ("dangling", tmp_path / "nothing"):
        (tmp_path / name).symlink_to(there)
        with pytest.raises(ValueError, match="is not a saved cache, and is not overwritten"):
            numbered(2).save(tmp_path / name)
        assert (tmp_path / name).is_symlink()
    assert number_of(KVCache.load(tmp_path / "link")) == 1


# Any history: what is loaded is what was saved.


def asked(cache, query):
    try:
        return cache.attend(query, q_offset=cache.lengths - 1)
    except ValueError as error:
        return str(error)


def tokens_of(cache):
    """What it shows; with a window that is not by position, and zeros past the end."""
    arrays = [cache.lengths]
    for array in cache.keys, cache.values, cache.key_scales, cache.value_scales:
        for b, length in enumerate(cache.lengths if array is not None else ()):
            arrays.append(array[b, :, : None if cache.window else length])
    return arrays


def same(one, other, step):
    """Their tokens, what they answer, and what they refuse."""
    for x, y in zip(tokens_of(one), tokens_of(other)):
        np.testing.assert_array_equal(x, y)
    rows = 1 + step % 3
    answers = [asked(cache, rng(step).standard_normal((one.batch, 2, rows, 4))) for cache in (one, other)]
    np.testing.assert_array_equal(*answers)


HISTORIES = [
    dict(), dict(window=2, keep=4), dict(window=1), dict(window=1, keep=3), dict(window=5), dict(window=5, keep=2),
    dict(window=20, keep=1), dict(capacity=60), dict(window=3, keep=3, capacity=70),
]  # fmt: skip


@pytest.mark.parametrize("options", HISTORIES, ids=str)
@pytest.mark.parametrize("dtype", [float32, np.int8])
def test_saved_after_any_history(tmp_path, options, dtype):
    for batch, seed in (1, 0), (1, 1), (3, 3):
        draw = rng(seed)
        cache = KVCache(batch, 1, 4, dtype=dtype, **options)
        for step in range(16):
            count = int(draw.choice([0, 1, 1, 1, 2, 5, 18]))
            if draw.random() < 0.6:
                lengths = draw.integers(0, count + 1, batch) if draw.random() < 0.4 else None
                try:
                    cache.append(*draw.standard_normal((2, batch, 1, count, 4)), lengths)
                except ValueError as error:
                    assert "capacity" in str(error)
                    cache.truncate(0)
            else:
                numbers = cache.lengths if draw.random() < 0.5 else draw.integers(0, cache.lengths + 1)
                try:
                    cache.truncate(np.maximum(numbers - draw.integers(0, 3), 0))
                except ValueError as error:
                    assert "has dropped" in str(error)
            cache.save(tmp_path / "cache")
            again = KVCache.load(tmp_path / "cache", mmap=bool(step % 2))
            same(cache, again, step)
            if draw.random() < 0.3:
                cache = again


def test_a_window_smaller_than_what_is_kept(tmp_path):
    cache = KVCache(1, 1, 4, window=2, keep=4)
    for i in range(5):
        cache.append(*np.full((2, 1, 1, 1, 4), i, float32))
    cache.truncate(4)
    cache.save(tmp_path / "cache")
    assert_same_bits(KVCache.load(tmp_path / "cache").keys, cache.keys)


@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_the_format(tmp_path, dtype):
    """What numpy.load and json read; and what is written by hand is loaded."""
    key, value = rng(0).standard_normal((2, 2, 1, 5, 4)).astype(dtype)
    folder = tmp_path / "cache"
    folder.mkdir()
    bits = [x.view(np.uint16) if dtype == bfloat16 else x for x in (key, value)]
    np.save(folder / "keys.npy", bits[0])
    np.save(folder / "values.npy", bits[1])
    header = {
        "format": "sdpa.KVCache", "version": 1, "batch": 2, "kv_heads": 1, "head_dim": 4, "value_dim": 4,
        "capacity": None, "window": None, "keep": 0, "group": 32, "dtype": np.dtype(dtype).name, "rows": 5,
        "ring": None, "lengths": [5, 5], "floors": [0, 0],
    }  # fmt: skip
    (folder / "cache.json").write_text(json.dumps(header))
    cache = KVCache.load(folder)
    assert_same_bits(cache.keys, key)
    cache.save(tmp_path / "again")
    assert json.loads((tmp_path / "again/cache.json").read_text()) == header
    for name, expected in zip(("keys", "values"), bits):
        np.testing.assert_array_equal(np.load(tmp_path / f"again/{name}.npy"), expected)


# Files that somebody has changed.


def hostile(tmp_path, **options):
    cache = KVCache(2, 1, 4, **options)
    cache.append(*rng(0).standard_normal((2, 2, 1, 7, 4)), [7, 6])
    cache.save(tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    return tmp_path / "bad", json.loads((tmp_path / "bad/cache.json").read_text())


def works(cache):
    """It can be asked, appended to and asked again."""
    query = np.ones((cache.batch, cache.kv_heads, 1, cache.head_dim), float64)
    if cache.window is None:  # else what the query would see may have been dropped before a truncate
        cache.attend(query)
    for _ in range(2):
        if cache.capacity is None or len(cache) < cache.capacity:
            shape = (cache.batch, cache.kv_heads, 1)
            cache.append(np.ones((*shape, cache.head_dim)), np.ones((*shape, cache.value_dim)))
            cache.attend(query)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what a file holds may be NaN
@pytest.mark.parametrize("options", [dict(), dict(window=3, keep=1), dict(dtype=np.int8)], ids=str)
def test_any_bit_that_is_flipped(tmp_path, options, monkeypatch):
    bad, _ = hostile(tmp_path, **options)
    taken = []
    new_array = store.new_array

    def counted(shape, dtype):
        taken.append(np.prod(shape, dtype=object) * dtype.itemsize)
        return new_array(shape, dtype)

    monkeypatch.setattr(files, "new_array", counted)
    outcomes, size = {"refused": 0, "loaded": 0}, sum(place.stat().st_size for place in bad.iterdir())
    for file in sorted(bad.iterdir()):
        good = file.read_bytes()
        for at in range(0, min(len(good), 400), 1 if file.suffix == ".json" else 3):
            damaged = bytearray(good)
            damaged[at] ^= 1 << (5 * at + at // 8) % 8
            file.write_bytes(damaged)
            taken.clear()
            try:
                cache = KVCache.load(bad, mmap=at % 2 == 1)
            except ValueError as error:
                assert str(bad) in str(error).replace("\\\\", "\\")
                outcomes["refused"] += 1
            else:
                works(cache)
                outcomes["loaded"] += 1
            assert sum(taken) <= size
        file.write_bytes(good)
    assert min(outcomes.values()) > 50
    works(KVCache.load(bad))


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(batch=2**31, lengths=[3]), "lengths must be a list of 2147483648 numbers"),
        (dict(batch=2**31, lengths=3, floors=0), "lengths must be a list"),
        (dict(rows=2**39, lengths=[2**39, 2**39]), r"keys.npy: it holds \(2, 1, 7, 4\) float32, not"),
        (dict(head_dim=2**39), "keys.npy: it holds"),
        (dict(kv_heads=2**39, head_dim=2**39, value_dim=2**39), "it holds|damaged"),
        (dict(floors=[8, 8]), "damaged: .*do not fit"),
        (dict(floors=[1, 0]), "damaged: .*do not fit"),
        (dict(lengths=[7, 8]), "damaged: .*do not fit"),
        (dict(lengths=[[7, 6]]), "lengths must be a list of 2 numbers"),
        (dict(lengths=[7, "6"]), "damaged: "),
        (dict(lengths=[7, None]), "damaged: "),
        (dict(rows=7.0), "damaged: rows is 7.0"),
        (dict(dtype=["f4", "f8"]), r"damaged: dtype is \['f4', 'f8'\]"),
        (dict(dtype="f4,(2,)f4"), "damaged: dtype is"),
        (dict(dtype=None), "damaged: dtype is None"),
        (dict(capacity=3), "damaged: .*do not fit"),
        (dict(group=2**41), "damaged: group"),
        (dict(window=2, keep=1, ring=2), "damaged: .*do not fit"),
        (dict(window=2, keep=1, ring=2**60), "damaged: ring"),
    ],
    ids=str,
)
def test_headers_that_promise_too_much(tmp_path, changes, reason):
    """Refused by what they say: in no more memory than the files have."""
    bad, header = hostile(tmp_path)
    (bad / "cache.json").write_text(json.dumps(header | changes))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=reason) as error:
            KVCache.load(bad)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
    assert str(bad) in str(error.value).replace("\\\\", "\\")


def npy(shape="(2, 1, 7, 4)", descr="'<f4'", order="False", version=b"\1\0", size=None, more=""):
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {more}}}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY" + version + (len(text) if size is None else size).to_bytes(2, "little") + text.encode()


DATA = np.zeros((2, 1, 7, 4), float32).tobytes()
DAMAGED = {
    "an object": npy(descr="'|O'") + DATA,
    "a structure": npy(descr="[('a', '<f4')]") + DATA,
    "other byte order": npy(descr="'>f4'") + DATA,
    "Fortran order": npy(order="True") + DATA,
    "another version": npy(version=b"\2\0") + DATA,
    "more names": npy(more="'x': 1") + DATA,
    "deep": npy(shape="(" * 90) + DATA,
    "a header that is too short": npy(size=50) + DATA,
    "a header that is too long": npy(size=60_000) + DATA,
    "large": npy(shape="(2, 1, 7, 4000000000)") + DATA,
    "below 0": npy(shape="(2, 1, -7, -4)") + DATA,
    "an overflow": npy(shape="(4294967296, 1, 4294967296, 4294967296)") + DATA,
    "three axes": npy(shape="(2, 7, 4)") + DATA,
    "bytes missing": npy() + DATA[:-1],
    "bytes too many": npy() + DATA + b"\0",
    "a zip": b"PK\3\4" + bytes(100),
    "an empty zip": b"PK\5\6" + bytes(18),
    "a pickle": b"\x80\4K\1.",
    "empty": b"",
}


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_arrays_that_are_damaged(tmp_path, content, mmap):
    bad, _ = hostile(tmp_path)
    (bad / "values.npy").write_bytes(npy() + DATA)
    works(KVCache.load(bad, mmap))
    (bad / "values.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"values\.npy: (not a whole \.npy file: |it holds )") as error:
        KVCache.load(bad, mmap)
    assert str(bad) in str(error.value).replace("\\\\", "\\")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "NaN", "\ud800", "1e999", ""])
def test_texts_that_are_no_header(tmp_path, text):
    bad, _ = hostile(tmp_path)
    (bad / "cache.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match="it holds no saved cache"):
        KVCache.load(bad)


@pytest.mark.parametrize("name", ["format", "version", "batch", "window", "rows", "ring", "lengths", "floors"])
def test_a_header_that_lacks_something(tmp_path, name):
    bad, header = hostile(tmp_path)
    del header[name]
    (bad / "cache.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"no saved cache|has version None|cache\.json is damaged: it has no"):
        KVCache.load(bad)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
@pytest.mark.parametrize("name", ["cache.json", "keys.npy"])
def test_pipes_and_folders_in_place_of_files(tmp_path, name):
    for make in os.mkfifo, os.mkdir:
        bad, _ = hostile(tmp_path)
        (bad / name).unlink()
        make(bad / name)
        with pytest.raises(ValueError, match=r"no regular file|holds no saved cache|not a whole \.npy file"):
            KVCache.load(bad)
        shutil.rmtree(bad)
        shutil.rmtree(tmp_path / "good")


def test_a_subclass_is_loaded_as_one(tmp_path):
    class Named(KVCache):
        pass

    numbered(3).save(tmp_path / "cache")
    assert type(Named.load(tmp_path / "cache")) is Named
    assert sdpa.KVCache is KVCache


# Files of earlier versions.

SAVED = Path(__file__).parent / "saved"


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("folder", sorted(SAVED.glob("*/*")), ids=lambda folder: "/".join(folder.parts[-2:]))
def test_caches_of_earlier_versions_load(folder, mmap):
    """saved/make.py says what they hold."""
    sys.path.insert(0, str(SAVED))
    try:
        from make import CACHES, made
    finally:
        sys.path.remove(str(SAVED))
    expected, cache = made(folder.name), KVCache.load(folder, mmap=mmap)
    assert folder.name in CACHES and repr(cache).split(", room")[0] == repr(expected).split(", room")[0]
    assert cache.lengths.tolist() == expected.lengths.tolist()
    same(cache, expected, 2)
    works(cache)


def test_there_are_caches_of_each_kind_and_of_each_version():
    versions = {
        version.name: {folder.name for folder in version.iterdir()} for version in SAVED.iterdir() if version.is_dir()
    }
    assert {"float32", "bfloat16", "int8", "window", "ragged"} == versions["0.1"]
