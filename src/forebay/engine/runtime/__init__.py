"""Worker process, model runner, attention, sampling, tensor parallelism, native kernels."""
