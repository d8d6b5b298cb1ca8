from collections.abc import Sequence

from torch import Tensor

def kernel_template(xs: Sequence[Tensor], ys: Sequence[Tensor], /) -> list[Tensor]: ...
