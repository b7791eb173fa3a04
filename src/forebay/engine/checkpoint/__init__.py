"""Reading a checkpoint: tensors, a rank's slices of them, quantized layouts."""
