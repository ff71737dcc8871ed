"""Attention on arrays: the result, weights, gradients, packed sequences, additive scores, and what is done for a call.
Begin with `attention` in forward.py.
"""
