"""The kernels on NVIDIA GPUs, compiled from csrc/ by NVRTC."""
