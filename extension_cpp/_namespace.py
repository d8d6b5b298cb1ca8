"""Where the operators are registered: torch.ops.<NAMESPACE>, the TORCH_EXTENSION_NAME of the library beside this file.

Everything else in Python takes the name from here, so a copy of this package with another library and another name can
be loaded in the same process.
"""

NAMESPACE = "extension_cpp"
