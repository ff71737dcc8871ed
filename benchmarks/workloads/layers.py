"""The parts of a model around attention: projections, feed-forward networks and norms."""

from dataclasses import dataclass, replace

from benchmarks.workloads.formulas import Formula, drawn, drawn_weight
from benchmarks.workloads.workload import SHRUNK_LENGTH

FEW_ROWS = 16  # for which reading the weights takes longer than multiplying by them


@dataclass(frozen=True)
class Rows(Formula):
    """Work on x (rows, width)."""

    rows: int
    width: int

    @property
    def bytes(self):
        return self.read_bytes + self.rows * self.width * self.dtype.itemsize + self.result_bytes

    @property
    def limited_by_memory(self):
        return self.rows <= FEW_ROWS

    def shortened(self, length):
        return replace(self, rows=min(self.rows, length))

    def draw(self):
        rng = self.rng
        return self.draw_inputs(rng), self.draw_weights(rng)

    def draw_inputs(self, rng):
        return {"x": drawn(rng, (self.rows, self.width), self.dtype)}


@dataclass(frozen=True)
class Linear(Rows):
    """activation(x W^T + bias); or `count` such projections, each of what the last one gave, so that the weights fit in
    no cache."""

    kind = "linear"
    outs: int
    activation: str | None = None
    count: int = 1

    @property
    def flops(self):
        return 2 * self.rows * self.width * self.outs * self.count

    @property
    def weight_count(self):
        return (self.width * self.outs + self.outs) * self.count

    @property
    def result_bytes(self):
        return self.rows * self.outs * self.dtype.itemsize

    def shrunk(self):
        return replace(self.shortened(SHRUNK_LENGTH), width=80, outs=80 if self.width == self.outs else 96)

    def draw_weights(self, rng):
        weights = {}
        for number in range(self.count):
            weights[f"weight_{number}"] = drawn_weight(rng, self.outs, self.width, self.dtype)
            weights[f"bias_{number}"] = drawn(rng, self.outs, self.dtype)
        return weights

    def formula(self, pieces, inputs, weights):
        x = inputs["x"]
        for number in range(self.count):
            x = pieces.linear(x, weights[f"weight_{number}"], weights[f"bias_{number}"], self.activation)
        return (x,)


@dataclass(frozen=True)
class FeedForward(Rows):
    """down(gelu(up x)) with biases; or, gated, down(silu(gate x) * up x) without."""

    kind = "feed_forward"
    inner: int
    gated: bool = False

    @property
    def activation(self):
        return "silu" if self.gated else "gelu"

    @property
    def flops(self):
        return 2 * self.rows * self.width * self.inner * (3 if self.gated else 2)

    @property
    def weight_count(self):
        return 3 * self.width * self.inner if self.gated else 2 * self.width * self.inner + self.width + self.inner

    @property
    def result_bytes(self):
        return self.rows * self.width * self.dtype.itemsize

    def shrunk(self):
        return replace(self.shortened(SHRUNK_LENGTH), width=80, inner=96)

    def draw_weights(self, rng):
        sizes = {"up": (self.inner, self.width), "down": (self.width, self.inner)}
        if self.gated:
            sizes["gate"] = sizes["up"]
        weights = {f"{part}_weight": drawn_weight(rng, *shape, self.dtype) for part, shape in sizes.items()}
        if not self.gated:
            weights |= {f"{part}_bias": drawn(rng, shape[0], self.dtype) for part, shape in sizes.items()}
        return weights

    def formula(self, pieces, inputs, weights):
        parts = {
            part: (weights[f"{part}_weight"], weights.get(f"{part}_bias"))
            for part in ("up", "down", "gate") if f"{part}_weight" in weights
        }  # fmt: skip
        return (pieces.feed_forward(inputs["x"], **parts, activation=self.activation),)


@dataclass(frozen=True)
class Norm(Rows):
    """(the norm of x + residual, x + residual): the layer norm of BERT, or the RMS norm of Llama.

    The bound is the time of a copy of x and residual to two other places.
    """

    kind = "norm"
    limited_by_memory = True
    centred: bool = True
    eps = 1e-6

    @property
    def flops(self):
        return 0

    @property
    def weight_count(self):
        return 0

    @property
    def read_bytes(self):
        return 2 * self.result_bytes

    @property
    def result_bytes(self):
        return 2 * self.rows * self.width * self.dtype.itemsize

    @property
    def bytes(self):
        return self.read_bytes

    def to_read(self):
        return list(self.draw()[0].values())

    def shrunk(self):
        return replace(self.shortened(SHRUNK_LENGTH), width=96)

    def draw_inputs(self, rng):
        return {name: drawn(rng, (self.rows, self.width), self.dtype) for name in ("x", "residual")}

    def draw_weights(self, rng):
        weights = {"weight": drawn(rng, self.width, self.dtype, 0.1, mean=1.0)}
        return weights | ({"bias": drawn(rng, self.width, self.dtype)} if self.centred else {})

    def formula(self, pieces, inputs, weights):
        return pieces.added_norm(inputs["x"], inputs["residual"], weights["weight"], weights.get("bias"), self.eps)
