"""The laboratory: experiments on attention, each a function that returns its numbers."""
