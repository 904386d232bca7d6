"""One prompt through training, serving and transformers: the first place where they part, and what to change."""
