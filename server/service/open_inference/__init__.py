"""The service `inference.GRPCInferenceService`, for clients of Triton and KServe."""
