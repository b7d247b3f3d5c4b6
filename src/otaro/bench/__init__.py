"""How fast a packed model runs: `measure` takes the figures, `llama_cpp` is the peer, `command` is ``otaro bench``."""
