"""The op table of the CPU: Numba where a loop reads memory at full speed, MKL through torch where arithmetic rules."""
