"""Folders that are exchanged as a whole.

A save writes a new folder beside its place, under a hidden name, waits until it is on the disk, and then exchanges the
names of the new and the old folder in one step of the operating system; nothing changes in a folder that has its place.
A load opens the folder once, and its files relative to the open folder, so that all files are of one save.  A process
that saves has a lock on its hidden folder, which ends with the process.  A hidden folder without a lock was left by a
process that was killed, and the next save removes it.
"""

import contextlib
import errno
import functools
import os
import re
import shutil
import sys

try:
    import fcntl
except ImportError:  # Windows: no locks, so leftovers stay
    fcntl = None  # type: ignore[assignment]

FILES = ("cache.json", "keys.npy", "values.npy", "key_scales.npy", "value_scales.npy")
OTHER_WAS_FASTER = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)  # what a rename says where another save came between
SAY_NOTHING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of a folder: the process has too little of something
GAP_TRIES = 5  # how often a load looks for a folder whose name is changing


@contextlib.contextmanager
def hidden_folder(path):
    """A new folder beside `path`, locked.  In the end, whatever has its name, maybe an old save, is removed."""
    while True:
        folder = _hidden_name(path)
        folder.mkdir()
        lock = _lock(folder)
        if lock is not None and os.path.lexists(folder):
            break
        _unlock(lock)  # in between, another save took the folder for a leftover
    try:
        yield folder
    finally:
        _remove(folder)
        _unlock(lock)


def _remove(folder):
    """Remove a folder.  Another save may be removing it, too: each goes on to the end, whatever the other was first at,
    so that the one who renamed it last finds it empty."""
    shutil.rmtree(folder, ignore_errors=True)


def _lock(folder):
    """A descriptor with the lock on the folder, if the system has locks; None if another process has the lock."""
    if fcntl is None:
        return -1
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        _unlock(descriptor)
        return None
    except OSError:  # a file system without locks
        _unlock(descriptor)
        return -1
    return descriptor


def _unlock(descriptor):
    if descriptor is not None and descriptor >= 0:
        os.close(descriptor)


def _hidden_name(path):
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")


def _hidden_names(path):
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp(\.old)?")
    with contextlib.suppress(OSError):
        return [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]
    return []


def remove_leftovers(path):
    """Remove the folders of saves that were killed, on which nobody has a lock.  If nothing has its place at `path`, an
    .old folder stays, as it may be the only save."""
    for folder in _hidden_names(path):
        if folder.suffix == ".old" and not path.exists():
            continue
        lock = _lock(folder)
        if lock is not None and lock >= 0:
            with contextlib.suppress(OSError):
                _remove(folder.rename(_hidden_name(path)))  # an .old folder always is a whole save
            _unlock(lock)


def wait_for_disk(folder):
    """Wait until the files in a folder, and their names, are on the disk: else a loss of power may leave the name of a
    file without its contents.  Measured: 1 to 3 ms for a small save, half of the time more for one of 168 MB."""
    for entry in os.scandir(folder):
        _wait_for(entry.path, os.O_RDWR)  # Windows asks for the right to write
    wait_for_names(folder)


def wait_for_names(folder):
    """The same for the names in a folder alone, where the system opens folders and waits for them."""
    with contextlib.suppress(OSError):
        _wait_for(folder, os.O_RDONLY)


def _wait_for(path, flags):
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(new, path):
    """Rename the folder `new` to `path`.  A saved cache at `path` gets the name of `new`."""
    while True:
        try:
            if not os.path.lexists(path):
                new.rename(path)
            elif not _exchange(new, path):
                _rename_both(new, path)
            return
        except OSError as error:
            if error.errno not in OTHER_WAS_FASTER or not new.exists():
                raise


def _rename_both(new, path):
    """Rename both, one after the other.  Between the two a load takes the .old folder, which always is a whole save."""
    old = new.with_name(new.name + ".old")
    try:
        path.rename(old)
        new.rename(path)
    finally:
        while os.path.lexists(old):  # another save may have taken it away
            try:
                if os.path.lexists(path):
                    _remove(old.rename(_hidden_name(path)))
                else:
                    old.rename(path)
            except OSError as error:
                if error.errno not in OTHER_WAS_FASTER:
                    raise


def _exchange(new, path):
    """Exchange the names of two folders in one step; False if the system cannot."""
    import ctypes  # only here: it takes some ms

    names = os.fsencode(new), os.fsencode(path)
    if sys.platform == "linux":
        call, arguments = "renameat2", (-100, names[0], -100, names[1], 2)  # AT_FDCWD, RENAME_EXCHANGE
    elif sys.platform == "darwin":
        call, arguments = "renamex_np", (*names, 2)  # RENAME_SWAP
    else:
        return False
    function = getattr(ctypes.CDLL(None, use_errno=True), call, None)
    if function is None:
        return False
    if function(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):  # the kernel or the file system lacks the call
        return False
    raise OSError(code, os.strerror(code), str(path))


def open_all(path, stack, everything=False):
    """The files of one save by their names, open until `stack` is closed; with `everything`, None for foreign ones."""
    for place in _places(path):
        found = None
        try:
            while found is None:
                found = _open_folder(place, everything)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in SAY_NOTHING:
                raise
            raise ValueError(f"path is {str(path)!r}: it holds no saved cache: {error}") from None
        stack.push(found[0])
        return found[1]
    raise FileNotFoundError(f"path is {str(path)!r}: there is no such folder")


def _places(path):
    """Where a save may be.  On a system that cannot exchange folders, it has another name for a moment."""
    for _ in range(GAP_TRIES):
        yield path
        yield from (name for name in _hidden_names(path) if name.suffix == ".old")


def _open_folder(path, everything):
    """What closes the files, and the files; None if the folder lost its place meanwhile."""
    with contextlib.ExitStack() as stack:
        folder, place = None, path
        if os.open in os.supports_dir_fd and os.listdir in os.supports_fd:
            folder = place = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
        before = os.stat(place)
        found = {}
        for name in os.listdir(place):
            if name in FILES:
                opener = functools.partial(_open_in, folder)
                with contextlib.suppress(FileNotFoundError):
                    found[name] = stack.enter_context(open(path / name, "rb", buffering=0, opener=opener))
            elif everything:
                found[name] = None
        return (stack.pop_all(), found) if os.path.samestat(before, os.stat(path)) else None


def _open_in(folder, path, _):
    """Open a file relative to the folder, if the system can do that.  A pipe is not waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path if folder is None else os.path.basename(path), flags, dir_fd=folder)
