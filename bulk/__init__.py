"""Translates files of any size without a server: shards in, shards out, each exactly once."""
