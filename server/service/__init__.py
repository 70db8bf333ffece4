"""Everything gRPC: the services, and how their answers and errors look on the wire. Knows no tensors."""
