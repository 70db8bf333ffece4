"""The models as torch modules: one file per family, and the registry that names them."""
