"""What all tests share."""

from __future__ import annotations

import hypothesis

# The same examples in every run: a failure in continuous integration is a failure at the desk.
hypothesis.settings.register_profile("fedstill", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("fedstill")
