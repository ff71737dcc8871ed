"""The files that Hugging Face writes: config.json, weights in one file or several, and a tokenizer."""

import json
import math
from pathlib import Path

import numpy as np

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # as NumPy maps them
SIZES = dict(F64=8, F32=4, F16=2, BF16=2, I64=8, U64=8, I32=4, U32=4, I16=2, U16=2, I8=1, U8=1, BOOL=1, C64=8)
SIZES |= dict(F8_E4M3=1, F8_E5M2=1, F8_E8M0=1)  # bytes of a number
LONGEST_HEADER = 100_000_000  # of the format


class Folder:
    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} is no folder: it must be one with config.json and {ONE}")
        self.config = self.json("config.json")

    def json(self, name, default=None):
        """The contents of a JSON file.  The file may be missing if there is a default."""
        path = self.path / name
        if default is not None and not path.exists():
            return default
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: it must be there, as Hugging Face writes it")
        kind = dict if default is None else type(default)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: it must be JSON: {error}") from None
        if not isinstance(found, kind):
            raise ValueError(f"{path}: it must hold a {kind.__name__}, and holds {found!r:.40}")
        return found

    def tensors(self):
        """The file of each tensor, by the tensor's name.  If there are several files, an index names them."""
        if (self.path / ONE).exists():
            file = Safetensors(self.path / ONE)
            return dict.fromkeys(file.header, file)
        if not (self.path / INDEX).exists():
            there = ", ".join(sorted(path.name for path in self.path.iterdir()))
            raise FileNotFoundError(
                f"{self.path / ONE} is missing, and {INDEX}: one must be there, and there is {there}"
            )
        where = self.json(INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(n, str) and n == Path(n).name for n in where.values()):
            raise ValueError(f"{self.path / INDEX}: weight_map must say for each tensor the name of a file beside it")
        files = {}
        for tensor, name in where.items():
            if name not in files:
                if not (self.path / name).is_file():
                    raise FileNotFoundError(f"{self.path / name} is missing: {INDEX} says that it has {tensor!r}")
                files[name] = Safetensors(self.path / name)
            if tensor not in files[name].header:
                raise ValueError(f"{self.path / name} has no tensor {tensor!r}: {INDEX} says that it must be there")
        return {tensor: files[name] for tensor, name in where.items()}

    def tokenizer(self):
        """The tokenizers.Tokenizer of the folder, which neither pads nor truncates."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: without it token ids must be given instead of text")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            message = "text needs the package tokenizers (pip install tokenizers): without it, give token ids"
            raise ImportError(message) from None
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # that package has no class of its own for what is wrong
            raise ValueError(f"{path}: it must be a tokenizer that the package tokenizers reads: {error}") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer


class Safetensors:
    """A *.safetensors file: 8 bytes with the length of the header, the header in JSON, and then the numbers of all
    tensors, one tensor after the other.  The numbers are mapped into memory."""

    def __init__(self, path):
        self.path, size = path, path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(size - 8, LONGEST_HEADER):
                raise ValueError(
                    f"{path} has {size} bytes, and must have 8 and a header of {length} at least: it is truncated, or "
                    "no safetensors file"
                )
            text = file.read(length)
        try:
            self.header = json.loads(text)
            self.header.pop("__metadata__", None)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: its header of {length} bytes must be an object of JSON: {error}") from None
        self._check(size - 8 - length)
        self._data = np.memmap(path, np.uint8, "r").view(np.ndarray)[8 + length :]

    def _check(self, size):
        """Check that the tensors fill the `size` bytes of the data, one after the other."""
        places = []
        for name, about in self.header.items():
            about = about if isinstance(about, dict) else {}
            dtype, shape, place = (about.get(key) for key in ("dtype", "shape", "data_offsets"))
            if not isinstance(dtype, str) or dtype not in SIZES:
                raise self.error(name, f"has dtype {dtype!r:.60}: it must be one of {', '.join(SIZES)}")
            if not _whole(shape):
                raise self.error(name, f"has shape {shape!r:.60}: it must be a list of whole numbers")
            wanted = math.prod(shape) * SIZES[dtype]
            if not _whole(place) or len(place) != 2 or place[1] - place[0] != wanted:
                raise self.error(
                    name, f"has data_offsets {place!r:.60}: for {dtype} {shape} they must be {wanted} apart"
                )
            places.append((*place, name))
        end = 0
        for begin, until, name in sorted(places):
            if begin != end:
                raise self.error(
                    name, f"begins at byte {begin} of the data: it must begin at {end}, where the one before ends"
                )
            end = until
            if end > size:
                raise self.error(name, f"ends at byte {end} of the data, of which there are {size}: it is truncated")
        if end < size:
            raise ValueError(f"{self.path} has {size} bytes of data: the tensors must fill all of them, and fill {end}")

    def error(self, name, what):
        return ValueError(f"{self.path}: tensor {name!r} {what}")

    def checked(self, name, shape):
        """The tensor of that name, checked: a read-only view into the file, or a copy if the file is not aligned."""
        about = self.header[name]
        if tuple(about["shape"]) != shape:
            raise self.error(name, f"has shape {tuple(about['shape'])}: by config.json it must be {shape}")
        if about["dtype"] not in WEIGHTS:
            raise self.error(name, f"has dtype {about['dtype']}: it must be one of {', '.join(WEIGHTS)}")
        array = self._data[slice(*about["data_offsets"])].view(WEIGHTS[about["dtype"]]).reshape(shape)
        array = array if array.flags.aligned else array.copy()
        return _bfloat16_of(array) if about["dtype"] == "BF16" else array


def _bfloat16_of(bits):
    """bfloat16 numbers from their bits.  Without ml_dtypes they are float32, which has the same numbers."""
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(bfloat16)


def _whole(numbers):
    """Whether it is a list of them.  NumPy has 64 axes at most; and the product of a few is computed at once."""
    if not isinstance(numbers, list) or len(numbers) > 64:
        return False
    return all(type(number) is int and 0 <= number < 2**63 for number in numbers)
