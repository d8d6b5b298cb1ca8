"""Builds index_sum_c beside this file: python setup.py build_ext --inplace"""

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

flags = {"cxx": ["-O2", "-fopenmp"]}
if torch.cuda.is_available():
    flags["cxx"].append("-DWITH_CUDA")
    extension = CUDAExtension("index_sum_c", ["index_sum.cpp", "index_sum_cuda.cu"], extra_compile_args=flags)
else:
    extension = CppExtension("index_sum_c", ["index_sum.cpp"], extra_compile_args=flags)
setup(name="index_sum", py_modules=["index_sum"], ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
