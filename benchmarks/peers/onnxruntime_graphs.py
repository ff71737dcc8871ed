"""Formulas as graphs of onnxruntime, of its own fused operators where it has them."""

import numpy as np

from benchmarks.measure.adapting import require
from benchmarks.peers.onnxruntime import bound_call, ort_model
from benchmarks.workloads.formulas import Pieces

MICROSOFT = "com.microsoft"


class OrtGraph(Pieces):
    """Variables are names; weights are arrays, which become constants of the graph."""

    def __init__(self):
        self.nodes, self.inputs, self.constants, self.tables = [], {}, {}, {}
        self.in_place = {}  # outputs that are written to the memory of inputs

    def variable(self, name, array):
        self.inputs[name] = array
        return name

    def node(self, operator, inputs, outputs=1, domain="", **attributes):
        """The name of its output, or the names of several; inputs are variables, arrays, and None for what is left
        out."""
        from onnx import helper

        names = [self.named(given) for given in inputs]
        made = [f"{operator}_{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(operator, names, made, domain=domain, **attributes))
        return made[0] if outputs == 1 else made

    def named(self, given):
        """Of a variable, or of a constant."""
        if given is None:
            return ""
        if isinstance(given, str):
            return given
        key = given.__array_interface__["data"][0], given.shape, given.strides
        return self.constants.setdefault(key, (f"constant_{len(self.constants)}", given))[0]

    def linear(self, x, weight, bias=None, activation=None):
        y = self.node("MatMul", [x, weight.T])
        if activation == "gelu" and bias is not None:
            return self.node("BiasGelu", [y, bias], domain=MICROSOFT)
        if bias is not None:
            y = self.node("Add", [y, bias])
        if activation == "silu":
            return self.node("QuickGelu", [y], domain=MICROSOFT, alpha=1.0)
        return y if activation is None else self.node("Gelu", [y], domain=MICROSOFT)

    def add(self, x, y):
        return self.node("Add", [x, y])

    def multiply(self, x, y):
        return self.node("Mul", [x, y])

    def layer_norm(self, x, weight, bias, eps):
        return self.node("LayerNormalization", [x, weight, bias], epsilon=eps)

    def rms_norm(self, x, weight, eps):
        return self.node("SimplifiedLayerNormalization", [x, weight], epsilon=eps)

    def added_norm(self, x, residual, weight, bias, eps):
        kind = "SkipSimplifiedLayerNormalization" if bias is None else "SkipLayerNormalization"
        inputs = [x, residual, weight] if bias is None else [x, residual, weight, bias]
        normed, _, _, total = self.node(kind, inputs, outputs=4, domain=MICROSOFT, epsilon=eps)
        return normed, total

    def rows(self, table, ids):
        return self.node("Gather", [table, ids])

    def last(self, x):
        return self.node("Gather", [x, np.array([-1])], axis=1)

    def self_attention(self, x, projections, heads, kv_heads, causal=False, lengths=None, rotary=None, past=None):
        weights, biases = zip(*projections, strict=True)
        weight = np.concatenate(weights)
        if rotary is None:
            inputs = [x, weight.T, np.concatenate(biases), lengths and self.cast(lengths, np.int32)]
            return self.node("Attention", inputs, domain=MICROSOFT, num_heads=heads, unidirectional=int(causal))
        cos, sin, begin = rotary
        past = [None, None] if past is None else [self.extended(name, len(cos) - begin) for name in past]
        length = np.array([len(cos)], np.int32)
        B = self.inputs["ids"].shape[0]
        out, *present = self.node(
            "GroupQueryAttention",
            [self.linear(x, weight), None, None, *past, np.repeat(length - 1, B), length, *map(self.table, (cos, sin))],
            outputs=3, domain=MICROSOFT, num_heads=heads, kv_num_heads=kv_heads, do_rotary=1,
        )  # fmt: skip
        self.in_place |= {new: old for new, old in zip(present, past, strict=True) if old is not None}
        return out

    def extended(self, name, count):
        """An input of keys or values, with places for those of new tokens, which are written there."""
        array = self.inputs[name]
        self.inputs[name] = np.pad(array, [(0, 0), (0, 0), (0, count), (0, 0)])
        return name

    def cast(self, x, dtype):
        from onnx import helper

        return self.node("Cast", [x], to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def table(self, array):
        """One constant for all layers."""
        return self.tables.setdefault(id(array), array.astype(np.float32))

    def model(self, outputs, dtype):
        """The bytes of the graph that ends in these variables."""
        from onnx import numpy_helper

        constants = [numpy_helper.from_array(np.ascontiguousarray(a), name) for name, a in self.constants.values()]
        results = dict.fromkeys([*outputs, *self.in_place], (dtype, None))
        return ort_model(self.nodes, self.inputs, results, opset=21, constants=constants)


def ort_graph_peer(workload):
    import onnxruntime

    require(workload.dtype.name == "float32", "its operators for CPUs take float32, and few of them float16")
    graph = OrtGraph()
    outputs = workload.outputs(graph)
    model = graph.model(outputs, workload.dtype)
    given = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in graph.inputs.items()}
    made = {name: given[past] for name, past in graph.in_place.items()}
    call = bound_call(model, given, dict.fromkeys(outputs) | made)
    return call, lambda found: workload.comparable(*(found[name].numpy() for name in outputs))
