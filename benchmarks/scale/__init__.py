"""A model of many servers: how many a load needs, and how to spread it over them."""
