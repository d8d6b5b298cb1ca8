import extension_cpp
from tests.specs.softmax import spec

SPEC = spec("log_softmax", extension_cpp.log_softmax, extension_cpp.reference.log_softmax, (5, 4))
