"""The page in a browser: a small web server that asks a model server through `AsyncClient`."""
