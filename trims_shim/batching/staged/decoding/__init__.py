"""Text generation as a staged model: prompts, keys and values, and the loop of decoder steps."""
