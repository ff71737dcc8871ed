"""What every workload offers, whatever it computes: sizes, the work in it, its arrays, and what they must give."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import ml_dtypes
import numpy as np

DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
SHRUNK_LENGTH = 67  # a prime, and more than four vectors of 16


@dataclass(frozen=True)
class Workload(ABC):
    """One case in one dtype.  Those who measure, check and report know no more of it than this class has.

    kind : the field of `peers.Peer` that holds the adapters for it.
    """

    kind: ClassVar[str]
    scores: ClassVar[float] = 0  # of attention, that must be computed
    limited_by_memory: ClassVar[bool] = False  # there is too little arithmetic for what is read
    case: str
    dtype_name: str = field(default="fp32", kw_only=True)

    @property
    def name(self):
        return f"{self.case}-{self.dtype_name}"

    @property
    def dtype(self):
        return DTYPES[self.dtype_name]

    @property
    @abstractmethod
    def flops(self):
        """Of the products, two for a multiply-add."""

    @property
    @abstractmethod
    def bytes(self):
        """What must be read or written at least once."""

    @property
    @abstractmethod
    def result_bytes(self):
        """Of what a call returns."""

    @property
    @abstractmethod
    def read_bytes(self):
        """Of what `reading.py` moves, for a bound that is the time for it."""

    @abstractmethod
    def to_read(self):
        """The arrays of so many bytes."""

    @abstractmethod
    def draw(self):
        """The arrays of a call, as adapters of this kind take them: the same each time."""

    @abstractmethod
    def expected(self):
        """What the result must be: a list of `oracle.Expected`, one for each array of it."""

    @abstractmethod
    def shrunk(self):
        """The same kind of work on little."""

    @abstractmethod
    def shortened(self, length):
        """The same with so many rows, queries and keys at most."""

    def bound(self, machine, read_seconds=None):
        """Seconds below which no implementation can be expected on this machine."""
        return machine.bound(self.flops, self.scores, self.bytes, self.dtype, read_seconds)

    def as_json(self):
        """What `workloads.restored` makes the same workload of."""
        return {"kind": self.kind, **asdict(self)}
