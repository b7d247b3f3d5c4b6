"""The commands ``otaro generate`` and ``otaro chat``: text from a packed model, by the engine or by transformers."""
