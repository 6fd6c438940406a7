# SPDX-License-Identifier: Apache-2.0
"""Engines of the remote tier: opening the one that a URL names, and writing another in Python (docs/remote.md)."""

from .engine import Answer, Engine, open_engine

__all__ = ["Answer", "Engine", "open_engine"]
