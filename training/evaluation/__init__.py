"""Search without a cache, and scores of translations."""
