"""Formulas as models of OpenVINO, whose compiler fuses what it knows."""

import numpy as np

from benchmarks.peers.openvino import compiled_model, element_type, tensor_of
from benchmarks.workloads.formulas import Pieces


class OpenvinoGraph(Pieces):
    """Variables are nodes."""

    def __init__(self):
        from openvino import opset13

        self.ops, self.parameters, self.inputs = opset13, [], []

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

    def number(self, value, like):
        return self.ops.constant(value, like.get_element_type())


def openvino_graph_peer(workload):
    element_type(workload)  # there must be one
    graph = OpenvinoGraph()
    outputs = workload.outputs(graph)
    call, results = compiled_model(workload, list(outputs), graph.parameters, graph.inputs)
    return call, lambda _: workload.comparable(*results())
