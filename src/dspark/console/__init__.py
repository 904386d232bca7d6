"""What a person runs at a prompt: one answer, a chat, the demonstration."""
