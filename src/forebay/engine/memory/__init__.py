"""Memory of the executor: huge pages, the device pool, scratch tensors."""
