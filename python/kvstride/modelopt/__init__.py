from ._sparsity import sparsity
