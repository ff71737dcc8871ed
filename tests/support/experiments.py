"""Experiments of the laboratory: what they find, and numbers that are changed so that they find something else."""


def verdicts(module, numbers):
    return [finding.verdict for finding in module.EXPERIMENT.findings(numbers)]


def scaled(array, index, factor):
    """A copy in which array[index] is multiplied."""
    array = array.astype(float)
    array[index] *= factor
    return array
