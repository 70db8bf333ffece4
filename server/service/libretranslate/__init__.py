"""LibreTranslate's pages over HTTP."""
