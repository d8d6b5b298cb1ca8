from .functional import kernel_template as kernel_template_functions
from .functional.kernel_template import kernel_template
from .registration.entries import NONE, WRITES, register

__all__ = ["kernel_template"]

# ---- kernel_template ----

register(
    "kernel_template",
    fake=kernel_template_functions.kernel_template_fake,
    backward=WRITES,
    nested=NONE,
    sharding=NONE,
)
register(
    "kernel_template.out",
    fake=kernel_template_functions.kernel_template_out_fake,
    backward=WRITES,
    sharding=NONE,
)
