# SPDX-License-Identifier: Apache-2.0
"""`kvstride doctor`: an installation and a configuration of offloading, checked before vLLM serves with it.

`config` reads what users have, `installation`, `memory`, `directory`, `stored` and `speed` are the checks, `__main__`
runs them and prints. A check is a function of a `Setup` and gives a `Finding`, or None where it does not apply. Checks
change nothing that lasts, and may run beside engines that use the same directory.
"""

from __future__ import annotations

__all__: list[str] = []
