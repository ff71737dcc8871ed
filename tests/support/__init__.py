"""What several tests share.  Begin with draw.py for the arrays, and accuracy.py for how results are judged."""

import pkgutil

import pytest

# Asserts in these modules say what they compared, as those of the tests do.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
