"""Kernel back ends: the interface, the native library's binding, and the torch fallback."""
