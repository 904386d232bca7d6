"""The server: OpenAI's API over one engine."""
