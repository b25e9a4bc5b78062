"""Pure tensor functions: tensors in, tensors out, inputs never modified."""
