"""The C++ kernels and how they are built and bound."""
