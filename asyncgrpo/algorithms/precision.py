"""In which floating point the formulas are computed.

A log-prob in bfloat16 has three significant digits, and a log-ratio is a small difference of two of them: so everything
is upcast before the first subtraction.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to ±20 before exp (as in verl), where float32 is still far from its end."""


def upcast(values: Tensor) -> Tensor:
    """float64 as it is, everything else in float32."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)
