"""The parts of `scripts/fuzz.py`: `models` makes what is spoilt, `spoil` spoils it, `rounds` says what is done then."""
