"""Prints the coefficients of log_float in csrc/common/cpu/math.h, from degree 3 up, and the largest error.

log(x) = e ln 2 + log(1 + r), sqrt(1/2) <= 1 + r < sqrt(2); log(1 + r) = r - r^2 / 2 + r^3 P(r). P is fitted by least
squares whose weights grow where the error is large (Lawson), which converges to the smallest maximum.
"""

import numpy as np

DEGREE = 7
low, high = np.sqrt(0.5) - 1, np.sqrt(2.0) - 1
nodes = np.cos(np.pi * (np.arange(20001) + 0.5) / 20001)
r = ((low + high) / 2 + (high - low) / 2 * nodes).astype(np.longdouble)
r = r[np.abs(r) > 1e-6]
exact = np.log1p(r)
target, relative = (exact - r + r * r / 2) / r**3, np.abs(r**3 / exact)
powers, weights = np.stack([r**k for k in range(DEGREE + 1)], 1), np.ones_like(r)
for _ in range(200):
    scale = relative * np.sqrt(weights)
    system, right = (powers * scale[:, None]).astype(np.float64), (target * scale).astype(np.float64)
    coefficients = np.linalg.lstsq(system, right, rcond=None)[0]
    error = np.abs((powers @ coefficients - target) * relative)
    weights *= error / error.max() + 1e-9
    weights /= weights.sum()
rounded = coefficients.astype(np.float32)
error = np.abs((powers @ rounded.astype(np.longdouble) - target) * relative)
print(*(float(c).hex() for c in rounded), sep="\n")
print(f"relative error: 2^{np.log2(float(error.max())):.1f}")
