"""Speech while it comes, and sounds of any length, for the command `transcribe`."""
