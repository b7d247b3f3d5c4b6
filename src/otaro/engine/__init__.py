"""Running packed models natively on a CPU: tokens in, tokens out, at a precision that may change between tokens.

`native` holds what the C++ engine runs, `architecture` decides which models it can, `sampling` picks tokens, and
`engine` puts them together.
"""
