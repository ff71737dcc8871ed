"""Warnings of other libraries about themselves, which are not errors of ours."""

import pytest

WARNINGS_OF_OTHERS = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "UserWarning", "FutureWarning")
]
