def sparsity(counters):
    import numpy as np
    c=np.asarray(list(counters),dtype=np.int64).reshape(-1,2).sum(0) if len(counters) else (0,0)
    return float(c[1])/float(c[0]) if c[0] else 0.0
