# SPDX-License-Identifier: Apache-2.0
"""What a sparse-attention plug-in such as NVIDIA ModelOpt's needs of a paged KV cache (docs/modelopt.md).

The split of one layer's tensor into keys and values in every layout, the builder of such tensors for tests,
skip-softmax calibration, ModelOpt's checkpoint block, and a patch that makes ModelOpt 0.47's vLLM plug-in right on vLLM
0.29 to 0.32. Importing this package needs neither torch, vLLM nor ModelOpt.
"""

from __future__ import annotations

from ._build import make_kv_cache
from ._calibration import THRESHOLD_TRIALS, Fit, fit, skip_lambda, sparsity
from ._config import Group, LayerSparsity, for_layer, read_config
from ._patch import Patch, patch
from ._views import SplitCache, split_kv_cache

__all__ = [
    "THRESHOLD_TRIALS",
    "Fit",
    "Group",
    "LayerSparsity",
    "Patch",
    "SplitCache",
    "fit",
    "for_layer",
    "make_kv_cache",
    "patch",
    "read_config",
    "skip_lambda",
    "sparsity",
    "split_kv_cache",
]
