"""Load on an OpenAI-compatible server: requests at a rate or at a concurrency, what users see of it, and its price."""
