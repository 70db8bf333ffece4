"""OpenAI's Realtime API for transcription, over a WebSocket."""
