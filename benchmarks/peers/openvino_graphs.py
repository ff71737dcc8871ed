"""Formulas as models of OpenVINO, whose compiler fuses what it knows."""

import itertools

import numpy as np

from benchmarks.peers.openvino import compiled_request, element_type, output_of, tensor_of
from benchmarks.workloads.formulas import Pieces

TOKENS = 32  # that follow each other, before the state is what it was; the run after that takes longer, and counts not


class OpenvinoGraph(Pieces):
    """Variables are nodes."""

    def __init__(self):
        from openvino import opset13

        self.ops, self.parameters, self.inputs = opset13, [], []
        self.sinks, self.order = [], None  # of states

    def variable(self, name, array):
        self.inputs.append(array)
        self.parameters.append(self.ops.parameter(array.shape, element_type(array)))
        return self.parameters[-1]

    def weight(self, array):
        import openvino

        return openvino.op.Constant(tensor_of(array, element_type(array)))

    def linear(self, x, weight, bias=None, activation=None):
        y = self.ops.matmul(x, weight, False, True)
        y = y if bias is None else self.ops.add(y, bias)
        if activation == "gelu":
            return self.ops.gelu(y, "erf")
        return y if activation is None else self.ops.swish(y, self.number(1, y))

    def add(self, x, y):
        return self.ops.add(x, y)

    def multiply(self, x, y):
        return self.ops.multiply(x, y)

    def layer_norm(self, x, weight, bias, eps):
        normed = self.ops.mvn(x, np.array([-1]), True, eps, "inside_sqrt")
        return self.ops.add(self.ops.multiply(normed, weight), bias)

    def rms_norm(self, x, weight, eps):
        two, last = self.number(2, x), np.array([-1])
        mean = self.ops.reduce_mean(self.ops.power(x, two), last, True)
        root = self.ops.sqrt(self.ops.add(mean, self.number(eps, x)))
        return self.ops.multiply(weight, self.ops.multiply(x, self.ops.divide(self.number(1, x), root)))

    def rows(self, table, ids):
        return self.ops.gather(table, ids, np.int64(0))

    def last(self, x):
        return self.ops.gather(x, np.array([-1]), np.int64(1))

    def split(self, x, heads):
        B, S, width = x.shape
        apart = self.ops.reshape(x, np.array([B, S, heads, width // heads]), False)
        return self.ops.transpose(apart, np.array([0, 2, 1, 3]))

    def merged(self, x):
        B, H, S, D = x.shape
        return self.ops.reshape(self.ops.transpose(x, np.array([0, 2, 1, 3])), np.array([B, S, H * D]), False)

    def turned(self, x, cos, sin):
        """As transformers does, which the compiler knows."""
        cos, sin = (self.number(np.concatenate([table, table], axis=-1)[None, None], x) for table in (cos, sin))
        first, second = self.ops.split(x, np.int64(3), 2).outputs()
        half = self.ops.concat([self.ops.multiply(second, self.number(-1, x)), first], 3)
        return self.ops.add(self.ops.multiply(x, cos), self.ops.multiply(half, sin))

    def joined(self, past, new):
        """A state, which begins as `past`, and grows with each run: the compiler has a node for it and attention."""
        import openvino

        B, G, _, D = past.shape
        if self.order is None:
            self.order = self.variable("order", np.arange(B, dtype=np.int32))  # of the beams, as the node wants it
        name, shape = f"state_{len(self.sinks)}", openvino.PartialShape([B, G, -1, D])
        state = self.ops.read_value(past, name, past.get_element_type(), shape)
        both = self.ops.concat([self.ops.gather(state, self.order, np.int64(0)), new], 2)
        self.sinks.append(self.ops.assign(both, name))
        return both

    def repeated(self, x, heads):
        """Keys or values of fewer heads, in a form in which the compiler does not repeat them."""
        B, G, _, D = x.get_output_partial_shape(0)
        if heads == G.get_length():
            return x
        ones = self.number(np.ones((1, 1, heads // G.get_length(), 1, 1)), x)
        groups = self.ops.multiply(self.ops.unsqueeze(x, np.int64(2)), ones)
        return self.ops.reshape(groups, np.array([B.get_length(), heads, -1, D.get_length()]), False)

    def attention(self, query, key, value, causal, lengths):
        heads, rows = query.shape[1:3]
        mask = () if lengths is None else (self.mask(lengths, rows),)
        key, value = (self.repeated(each, heads) for each in (key, value))
        return self.ops.scaled_dot_product_attention(query, key, value, *mask, causal=causal and rows > 1)

    def mask(self, lengths, count):
        """(B, 1, 1, count)"""
        places = self.ops.constant(np.arange(count)[None, None, None])
        return self.ops.less(places, self.ops.unsqueeze(lengths, np.array([1, 2, 3])))

    def number(self, value, like):
        return self.ops.constant(value, like.get_element_type())


def openvino_graph_peer(workload):
    element_type(workload)  # there must be one
    graph = OpenvinoGraph()
    outputs = workload.outputs(graph)
    request = compiled_request(workload, list(outputs), graph.parameters, graph.inputs, graph.sinks)
    calls = itertools.count()

    def call():
        if graph.sinks and next(calls) % TOKENS == 0:
            request.reset_state()
        request.infer(share_outputs=True)

    def result(_):
        if graph.sinks:  # of the first token
            request.reset_state()
            request.infer()
        return workload.comparable(*(output_of(request, index, workload) for index in range(len(outputs))))

    return call, result
