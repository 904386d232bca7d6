"""Triton kernels behind functions of `spec`, used on CUDA devices."""
