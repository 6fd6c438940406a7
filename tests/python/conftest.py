# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: the numpy oracle and the fixture F of the field's cases."""

from __future__ import annotations

import numpy as np
import pytest

from oracle import fixture_f


@pytest.fixture
def field_fixture() -> np.ndarray:
    """Fixture F: blocks-first NHD, (5, 2, 4, 3, 8), int32, F[i] = 1 + flat index."""
    return fixture_f()
