"""Once tuning: one run that makes a model hold up at every precision.

`path` chooses the width of each batch (BPS and the baselines), `delay` lets ultra-low widths wait (LAA), `config` holds
the settings and recipes, `trainer` is the loop on transformers' Trainer, `data` reads text and conversations, `command`
is ``otaro tune``.
"""
