import extension_cpp
from tests.specs.softmax import log_softmax_from_saved, log_softmax_terms, spec

SPEC = spec(
    "log_softmax",
    extension_cpp.log_softmax,
    extension_cpp.reference.log_softmax,
    (5, 4),
    log_softmax_terms,
    log_softmax_from_saved,
)
