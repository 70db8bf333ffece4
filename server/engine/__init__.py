"""The engine decides, runs and records: pure Python over small records. It knows numbers, no text."""
