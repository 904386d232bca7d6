"""Serving: requests in, text out, through one round loop for plain decoding and speculation."""
