"""How good a model is at each width, and how that is shown."""
