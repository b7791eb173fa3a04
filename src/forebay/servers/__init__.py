"""Servers seen from outside, one module each: embedded, sglang, vllm."""
