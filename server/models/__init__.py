"""The models that are served: bundles on disk, their versions, how they are loaded."""
