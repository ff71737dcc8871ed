"""The laboratory: claims about attention and 1/√d_k, tested on the kernels of this library.

Each experiment is a function that returns its numbers.  `python -m sdpa lab` runs all experiments and writes a page
with figures.  `heatmap` draws any attention weights.  Figures need matplotlib: pip install matplotlib."""

from . import (
    _additive,
    _cosine,
    _gaps,
    _gradients,
    _heads,
    _overflow,
    _saturation,
    _sentence,
    _steps,
    _training,
    _variance,
)
from ._additive import additive
from ._cosine import cosine
from ._gaps import gaps
from ._gradients import gradients
from ._heads import heads
from ._heatmap import heatmap
from ._overflow import overflow
from ._saturation import saturation
from ._sentence import sentence
from ._steps import steps
from ._training import training
from ._variance import variance

# In the order of the page.
EXPERIMENTS = tuple(
    module.EXPERIMENT
    for module in (
        _steps,
        _variance,
        _gaps,
        _saturation,
        _gradients,
        _training,
        _heads,
        _overflow,
        _additive,
        _cosine,
        _sentence,
    )
)

__all__ = [
    "EXPERIMENTS",
    "additive",
    "cosine",
    "gaps",
    "gradients",
    "heads",
    "heatmap",
    "overflow",
    "saturation",
    "sentence",
    "steps",
    "training",
    "variance",
]
