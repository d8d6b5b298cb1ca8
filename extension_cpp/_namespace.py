"""Defines the namespace of the operators, torch.ops.<NAMESPACE>. The C++ code has it as TORCH_EXTENSION_NAME.

All other Python code imports the name from here. A copy of this package with another library and another name can
therefore be loaded in the same process.
"""

NAMESPACE = "extension_cpp"
