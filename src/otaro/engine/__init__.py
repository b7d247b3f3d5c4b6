"""Running packed models natively on a CPU: tokens in, tokens out, at a precision that may change between tokens.

`native` holds what the C++ engine runs, `architecture` decides which models it can, `session` holds texts and runs
them, `sampling` says how tokens are picked; `engine` continues one text at a time, `scheduler` many at once.
"""
