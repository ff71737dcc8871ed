"""Attention on arrays: results, weights, gradients, packed sequences, additive scores, and explanations of calls.
Begin with `attention` in forward.py.
"""
