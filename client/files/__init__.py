"""Files in, files out, for the client and for bulk work: readers, writers, and work that can be resumed."""
