"""Rows of tensors on a device, and the graphs over them: the only room that knows ONNX Runtime."""
