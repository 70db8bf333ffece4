"""Speed and quality, measured: each module is a command, and its docstring says what it measures."""
