"""DSpark speculative decoding: train a drafter for a target model, then decode faster with the same text."""

__version__ = "0.1.0"
