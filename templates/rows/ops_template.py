from .functional import kernel_template as kernel_template_functions
from .functional.kernel_template import kernel_template
from .registration.entries import NONE, register

__all__ = ["kernel_template"]

# ---- kernel_template ----

register(
    "kernel_template",
    fake=kernel_template_functions.kernel_template_fake,
    backward=kernel_template_functions.kernel_template_backward,
    plain=kernel_template_functions.kernel_template_plain,
    nested=NONE,
    sharding=NONE,
)
register(
    "kernel_template_backward",
    fake=kernel_template_functions.kernel_template_backward_fake,
    backward=kernel_template_functions.kernel_template_second,
    plain=kernel_template_functions.kernel_template_backward_plain,
    sharding=NONE,
)
