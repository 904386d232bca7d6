"""Training text made by the target itself, through the engine: prompts it writes, and answers it gives."""
