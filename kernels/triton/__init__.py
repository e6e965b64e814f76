"""Triton kernels for CUDA: none yet. Until then CUDA runs the plain-torch table of `radixcast.kernels.ops`."""
